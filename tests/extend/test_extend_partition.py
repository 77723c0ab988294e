"""A user's partition, examples/custom_partition.py, wherever a partition is named."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from forked_cli import run
from tiny_runs import changed

from segcredit.config import load_recipe, load_run_recipe
from segcredit.integrations.verl.settings import parse_settings, published_method
from segcredit.integrations.verl.translate import translate
from segcredit.partition import partition_of, spec_of

FILE = Path(__file__).parents[2] / "examples" / "custom_partition.py"
DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"
SPEC = "custom_partition.py:EntropyAbove"
STAGES = [{"kind": "warm_start", "steps": 1, "batch": 4}, {"kind": "optimize", "steps": 2}]
SAVE = {"every": 1, "rollouts_every": 1, "rollouts": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the user's file, and a run of two steps whose recipe names it."""
    folder = tmp_path_factory.mktemp("mine")
    shutil.copy(FILE, folder)
    section = DOCUMENT.read_text().partition("\n## A partition\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    shown = next(yaml.safe_load(text) for language, text in blocks if language == "yaml")
    settings = changed(stages=STAGES, save=SAVE, reward="exact") | shown
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings))
    done = run(folder, "train", "recipe.yaml", "--folder", "run")
    assert done.code == 0, done.complained
    return folder


def recorded(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def ends(row: dict, nats: float) -> list[int]:
    """The last tokens of the segments, by the definition."""
    last = len(row["entropy"]) - 1
    return [t for t, entropy in enumerate(row["entropy"]) if entropy > nats or t == last]


def test_training_cuts_with_it(folder: Path) -> None:
    config = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    assert config["algorithm"]["partition"] == {"name": SPEC, "nats": 1.5}
    files = sorted((folder / "run" / "rollouts").glob("*.jsonl"))
    assert len(files) == 2
    for row in recorded(files[-1]):
        segment = row["segment"]
        found = [t for t in range(len(segment)) if segment[t : t + 2] != [segment[t]] * 2]
        assert found == ends(row, nats=1.5)


@pytest.mark.parametrize(
    ("strategy", "nats"), [(SPEC, 1.0), (f"{{name: '{SPEC}', nats: 1.5}}", 1.5)]
)
def test_segment_shows_it(folder: Path, strategy: str, nats: float) -> None:
    file = sorted((folder / "run" / "rollouts").glob("*.jsonl"))[-1]
    done = run(folder, "segment", "run", "-s", strategy, "--json")
    assert done.code == 0, done.complained
    cuts = [json.loads(line) for line in done.said.splitlines()]
    assert [cut["strategy"] for cut in cuts] == [strategy] * 3
    for cut, row in zip(cuts, recorded(file), strict=True):
        assert cut["settings"]["nats"] == nats
        assert [x["end"] for x in cut["segments"]] == ends(row, nats)
    listed = run(folder, "segment", "--list", "-s", SPEC, "--width", 160)
    assert f"{SPEC}  Cut after every token with more than ``nats`` of entropy" in listed.said
    assert "EntropyAbove(nats=" in run(folder, "segment", "run", "-s", strategy).said


def test_the_report_runs_it_only_if_the_run_is_trusted(folder: Path, tmp_path: Path) -> None:
    composed = "GAE(over=EntropyAbove(nats=1.5)"
    assert composed in (folder / "run" / "report.html").read_text(), (
        "training has run the code already"
    )
    for flags, known in ([], False), (["--trust-run"], True):
        done = run(tmp_path, "report", folder / "run", "-o", "page.html", *flags)
        assert done.code == 0, done.complained
        text = (tmp_path / "page.html").read_text()
        assert (composed in text) == known
        segments = [json.loads(x) for x in re.findall(r'"segment":(\[[^]]*\])', text)]
        assert any(max(x, default=0) > 0 for x in segments), "the recorded segments are shown"


def test_a_run_resumes_with_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "run", folder / "resumed")
    with pytest.raises(ValueError, match=re.escape(f"algorithm.partition.name: {SPEC}")):
        load_run_recipe(folder / "resumed", ["stages.1.steps=3"])
    more = ("stages.1.steps=3", "--trust-run")
    done = run(tmp_path, "train", "--resume", folder / "resumed", *more)
    assert done.code == 0, done.complained
    assert len(list((folder / "resumed" / "rollouts").glob("*.jsonl"))) == 3


def test_verl_gets_its_path(tmp_path: Path) -> None:
    spec = {"name": f"{FILE}:EntropyAbove", "nats": 2.0}
    method = json.dumps({"name": "sapo", "partition": spec})
    recipe = load_recipe("geo3k/qwen2.5-vl-3b-sapo", [f"algorithm={method}"])
    settings = translate(recipe, tmp_path).settings
    assert {key: settings[f"+segment.partition.{key}"] for key in spec} == spec
    partition = published_method(parse_settings({"partition": spec})).credit.over
    assert partition == recipe.make_algorithm().credit.over  # type: ignore[attr-defined]
    assert spec_of(partition) == spec


def test_mistakes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Cut:\n    pass\n")
    mistakes = {
        f"{FILE}:EntropyAbov": "has no partition 'EntropyAbov'. Did you mean 'EntropyAbove'?",
        f"{tmp_path}/none.py:Cut": "there is no file",
        f"{tmp_path}/mine.py:Cut": "must be a class derived from segcredit.partition.Partition",
    }
    for spec, message in mistakes.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            partition_of(spec)
    with pytest.raises(ValueError, match=r"nats must be a number; got 'x'\."):
        partition_of({"name": f"{FILE}:EntropyAbove", "nats": "x"})
