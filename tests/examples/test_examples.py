"""Every example is short, explains itself, runs as it says, and is what the documents quote."""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from each import each

from segcredit.data.worlds import make_world
from segcredit.models import Policy
from segcredit.runlog import read_run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
TRAINED = ("custom_column", "custom_partition", "custom_reward", "grpo_vlm")
"""Examples with the Trainer, which take --steps and --folder."""
DOCUMENT = EXAMPLES.parent / "docs" / "extending.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def load_example(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import examples/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@each("path", FILES)
def test_it_is_short_and_listed(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < (300 if path.stem == "sapo_loop" else 100)
    listed = (EXAMPLES / "README.md").read_text()
    assert f"[{path.name}]({path.name})" in listed
    assert f"python examples/{path.name}" in text, "the first lines say how it is started"
    for page, anchor in re.findall(r"docs/([\w-]+\.md)(?:#([\w-]+))?", text):
        linked = (DOCUMENT.parent / page).read_text()
        titles = re.findall(r"^#+ (.*)$", linked, re.MULTILINE)
        anchors = [re.sub(r"[^\w -]", "", x.lower()).replace(" ", "-") for x in titles]
        assert not anchor or anchor in anchors, f"{page}#{anchor}"


@each("name", [path.stem for path in FILES])
def test_help(name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        module = load_example(name, patch)
        with pytest.raises(SystemExit) as ended:
            module.main(["--help"])
    assert ended.value.code == 0


def statements(text: str) -> dict[str, str]:
    """The source of every import, function and class, by what it defines."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{x.name}": "imported" for x in node.names}
        elif isinstance(node, ast.Import):
            found |= {x.name: "imported" for x in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
            found[node.name] = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return found


@each(
    ("name", "defines"),
    [
        ("custom_partition", {"EntropyAbove"}),
        ("custom_column", {"GreedyReward", "GreedyBaseline", "remax"}),
        ("custom_reward", {"brief"}),
    ],
)
def test_the_document_quotes_it(name: str, defines: set[str]) -> None:
    blocks = [statements(x) for x in BLOCK.findall(DOCUMENT.read_text())]
    (quoted,) = [x for x in blocks if defines <= x.keys()]
    example = statements((EXAMPLES / f"{name}.py").read_text())
    assert quoted == {key: example.get(key) for key in quoted}


def run_short(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> None:
    """Run the example for one step of reinforcement after one step of imitation."""
    module = load_example(name, monkeypatch)
    trainer = module.Trainer

    def short(stages: list[dict] = (), **settings: object) -> object:
        if stages:
            settings["stages"] = [
                x if x["kind"] == "optimize" else x | {"steps": 1} for x in stages
            ]
            settings["evaluation"] = {"prompts": 4, "every": 0}
        return trainer(**settings)

    monkeypatch.setattr(module, "Trainer", short)
    module.main(["--steps", "1", "--folder", str(folder), *more])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*responses were cut off:UserWarning")
@pytest.mark.parametrize("name", TRAINED)
def test_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_short(name, tmp_path / "run", monkeypatch)
    rows = [x for x in read_run(tmp_path / "run").metrics if x["stage"] == "optimize"]
    assert len(rows) == 1
    assert rows[0]["policy/grad_norm"] >= 0
    printed = capsys.readouterr().out
    assert re.search(r"\d%", printed), "it prints an accuracy"


@pytest.mark.filterwarnings("ignore:.*responses were cut off:UserWarning")
def test_grpo_takes_a_model_and_rows_with_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = make_world("shape_grid", size=2, colors=1, shapes=1, terms=1, twice=False)
    policy = Policy.tiny("qwen2_5_vl", world.tokenizer(), hidden=32, layers=1, heads=2)
    policy.save(tmp_path / "model")
    rows = []
    for number, prompt in enumerate(world.prompts("train", 0, 4)):
        (tmp_path / f"{number}.png").write_bytes(prompt.images[0])
        question = prompt.messages[0]["content"]
        rows.append({"problem": question, "answer": prompt.answer, "images": [f"{number}.png"]})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--model", str(tmp_path / "model"), "--data", str(tmp_path / "train.jsonl"))
    run_short("grpo_vlm", tmp_path / "run", monkeypatch, *given, "--prompts", "2", "--max-tokens=8")
    assert "the trained model is a Hugging Face folder" in capsys.readouterr().out
    (first, *_) = read_run(tmp_path / "run").metrics
    assert first["stage"] == "optimize"


def test_grpo_wants_model_and_data_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        load_example("grpo_vlm", monkeypatch).main(["--model", "nowhere"])
    assert ended.value.code == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_it_learns(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_example(name, monkeypatch).main(["--folder", str(tmp_path / "run")])
    rows = read_run(tmp_path / "run").metrics
    accuracy = [x["accuracy"] for x in rows if x["stage"] == "optimize"]
    assert accuracy[-1] > accuracy[0] + 0.1
    if name == "custom_reward":
        length = [x["response_length"] for x in rows if x["stage"] == "optimize"]
        assert length[-1] < length[0] - 1
