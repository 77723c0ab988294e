"""The documents cannot rot: their code runs, their output is real, their links lead somewhere."""

import contextlib
import csv
import io
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import yaml
from each import each

from segcredit.algorithms import ALGORITHMS, PolicyGradient
from segcredit.columns import ENTROPY, LOGP_REF, VALUE
from segcredit.config import load_recipe
from segcredit.config.recipe import algorithm_of
from segcredit.data.worlds import make_world
from segcredit.models import Policy
from segcredit.runlog import read_run
from segcredit.train.trainer import Trainer
from segcredit.types import Rollouts
from segcredit_lab.pages import methods, references
from segcredit_lab.pages import results as results_pages
from segcredit_lab.study import Options, Store, StudyPlan, load_study
from segcredit_lab.study.definition import corrections, scale_of

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
MORE = ("README", "CONTRIBUTING", "SECURITY", "examples/README")
DOCUMENTS = [*PAGES, *(ROOT / f"{name}.md" for name in MORE)]
RUNNABLE = [x for x in DOCUMENTS if x.name not in ("study.md", "CONTRIBUTING.md")]
"""Generated pages of studies have no code."""

FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)[^)]*\)|\b(?:src|srcset|href)=\"([^\"\s]+)")
HEADING = re.compile(r"^#+ +(.*?)[ \t]*$", re.MULTILINE)

each_document = each("path", DOCUMENTS)


class Block(NamedTuple):
    language: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """Fenced blocks, in order, with the line on which their content begins."""
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2))) for m in FENCE.finditer(text)]


def prose(text: str) -> str:
    """The document without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Execute a document's Python blocks in one namespace; compare what they print.

    A ``text`` block right after a ``python`` block is that block's output.
    """
    module = ModuleType(f"document_{path.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    found = blocks(path.read_text())
    for i, block in enumerate(found):
        if block.language != "python":
            continue
        code = compile("\n" * block.line + block.code, str(path), "exec")  # true line numbers
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, module.__dict__)
        for output in found[i + 1 : i + 2]:
            if output.language == "text":
                assert printed.getvalue() == output.code, f"{path.name}:{output.line + 1}"
    return module.__dict__


@pytest.fixture(scope="session")
def models_and_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models under the names that documents use, and rows for them, made once."""
    folder = tmp_path_factory.mktemp("documents")
    write_vision_model(folder)
    write_text_model(folder)
    return folder


@pytest.fixture
def a_users_folder(tmp_path: Path, models_and_rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the documents' code runs: a copy for each, since code may write into it."""
    shutil.copytree(models_and_rows, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def write_vision_model(folder: Path) -> None:
    """Write a tiny vision-language model, and rows with images that its tokenizer knows."""
    world = make_world("shape_grid", size=2, colors=1, shapes=1, terms=1, twice=False)
    policy = Policy.tiny("qwen2_5_vl", world.tokenizer(), hidden=32, layers=1, heads=2)
    policy.save(folder / "Qwen" / "Qwen2.5-VL-3B-Instruct")
    for file, split in (("train", "train"), ("held-out", "test")):
        rows = []
        for number, prompt in enumerate(world.prompts(split, 0, 16)):
            image = f"{file}-{number}.png"
            (folder / image).write_bytes(prompt.images[0])
            question = prompt.messages[0]["content"]
            rows.append({"problem": question, "answer": prompt.answer, "images": [image]})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{file}.jsonl").write_text(lines)


def write_text_model(folder: Path) -> None:
    """Write a tiny text model with a chat template, and questions that its tokenizer knows."""
    world = make_world("derived_variables", given=2, derived=3, needed=[1, 2], modulus=7)
    policy = Policy.tiny("llama", world.tokenizer(), hidden=32, layers=1, heads=4)
    policy.save(folder / "Qwen" / "Qwen2.5-0.5B-Instruct")
    for file, split in (("questions", "train"), ("held-out", "test")):
        rows = [
            {"problem": x.messages[0]["content"], "answer": x.answer}
            for x in world.prompts(split, 0, 16)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{file}.jsonl").write_text(lines)


@pytest.mark.filterwarnings("ignore:.*responses were cut off:UserWarning")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            x,
            id=str(x.relative_to(ROOT)),
            # these train several models each
            marks=[pytest.mark.slow] if x.name in ("python.md", "get-started.md") else [],
        )
        for x in RUNNABLE
    ],
)
def test_code_runs_and_prints_what_it_says(
    path: Path, monkeypatch: pytest.MonkeyPatch, a_users_folder: None
):
    run(path, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
def test_every_metric_and_column_of_a_run_is_documented(tmp_path: Path):
    """docs/metrics.md names each number that a step writes, docs/runs.md what a response has."""
    documented, columns = (
        set(re.findall(r"`([^`\n]+)`", (DOCS / name).read_text()))
        for name in ("metrics.md", "runs.md")
    )
    settings = {"size": 2, "colors": 1, "shapes": 1, "terms": 1, "twice": False}
    for algorithm, samples in [
        ({"name": "sapo", "kl": 0.001}, 1),
        ("grpo", 2),
        ("vapo", 2),
        ({"name": "vineppo", "samples": 2}, 3),
        ({"name": "restem", "threshold": 0.0}, 4),
        ("dpo", 5),
        ({"name": "dvo", "samples": 2}, 6),
        ("spo_tree", 1),
    ]:
        needs_critic = VALUE in algorithm_of(algorithm).needs
        Trainer(
            model={"tiny": "qwen2_5_vl", "hidden": 32, "layers": 1, "heads": 2},
            data={"world": "shape_grid", "settings": settings},
            algorithm=algorithm,
            reward="exact",
            stages=[
                {"kind": "warm_start", "steps": 1, "batch": 4},
                *([{"kind": "pretrain_critic", "steps": 1}] if needs_critic else []),
                {"kind": "optimize", "steps": 1},
            ],
            rollout={
                "prompts": 4,
                "samples": samples,
                "max_tokens": 8,
                "tree": {"branching": [2, 2], "tokens": 2} if algorithm == "spo_tree" else None,
            },
            evaluation={"prompts": 2, "samples": 2},
            save={"rollouts_every": 1},
        ).train(tmp_path / str(samples) / str(needs_critic))
        run = read_run(tmp_path / str(samples) / str(needs_critic))
        for name in {
            name for step in run.rollout_steps for row in run.rollouts(step) for name in row
        }:
            assert name in columns, f"docs/runs.md does not say what {name!r} is"
        for line in run.metrics:
            for name in line.keys() - {"step", "stage"}:
                shown = re.sub(r"^memory/.*", "memory/sample", name)
                shown = re.sub(r"^time/encode", "time/update", shown)
                shown = re.sub(r"^pass@\d+", "pass@k", shown)
                assert shown in documented, f"docs/metrics.md does not say what {name!r} is"


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a document's headings."""
    titles = HEADING.findall(FENCE.sub("", path.read_text()))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_tables_of_results_are_those_of_their_studies():
    pages = results_pages.written_pages()
    assert DOCS / "results.md" in pages
    for page, folder in pages.items():
        text = page.read_text()
        assert results_pages.fill(text, folder) == text, "run python -m segcredit_lab.pages.results"
        assert results_pages.fill(text.replace("| SAPO |", "| nobody |"), folder) == text


def test_the_page_of_results_is_short_and_leads_to_every_study():
    text = (DOCS / "results.md").read_text()
    assert len(text.split()) <= 900
    linked = set(re.findall(r"\]\(results/([\w-]+\.md)", text))
    assert linked == {page.name for page in (DOCS / "results").glob("*.md")}
    shown = "".join(page.read_text() for page in results_pages.written_pages())
    for study in (DOCS / "results").glob("*/study.md"):
        assert f"]({study.parent.name}/study.md)" in shown, study


@each("name", references.PAGES)
def test_reference_pages_are_those_of_the_code(name: str):
    written = (ROOT / "docs" / name).read_text()
    command = "run python -m segcredit_lab.pages.references"
    assert references.PAGES[name]() == written, command


def test_the_settings_page_has_the_papers_numbers():
    recipe = load_recipe(references.PAPER).as_dict()
    values = references.paper_values()
    assert {"stages.N.steps", "rollout.prompts", "optimizer.critic_lr", "algorithm"} <= {*values}
    for name, value in yaml.safe_load(f"{{{values.pop('algorithm')}}}").items():
        assert recipe["algorithm"][name] == value, name
    for path, value in values.items():
        section, _, name = path.rpartition(".")
        found = recipe["stages"][-1] if section == "stages.N" else recipe[section]
        assert found[name] == float(value), path


def test_the_settings_page_has_every_setting_of_a_method_and_its_limits():
    methods_of = methods.settings_of_methods()
    assert methods.MEANINGS.keys() == methods_of.keys()
    outside = {"≥": lambda x: x - 1, ">": lambda x: x, "≤": lambda x: x + 1}
    for name, meaning in methods.MEANINGS.items():
        for limit in meaning.limits:
            sign, number = limit.split()
            for method in methods_of[name]:
                with pytest.raises(ValueError, match="must be"):
                    ALGORITHMS.make(method, {name: outside[sign](int(number))})


def pending(study_csv: Path) -> dict[str, list[str]]:
    """Labels of the arms that were run before a correction, with what was corrected."""
    found: dict[str, list[str]] = {}
    for row in csv.DictReader(study_csv.read_text().splitlines()):
        for x in corrections():
            included = (row.get("corrections") or "").split()
            if row["arm"] in x.arms.get(row["study"], ()) and x.name not in included:
                found.setdefault(row["label"], []).append(x.what)
    return found


def test_contributing_has_the_import_order():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = contracts["contracts"][0]["layers"]
    shown = re.search(r"```text\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    assert shown is not None
    assert [line.strip() for line in shown[1].splitlines() if line.strip()] == layers


RESULTS = sorted((DOCS / "results").glob("*/study.csv"))


def test_a_correction_names_arms_that_exist():
    names = [x.name for x in corrections()]
    assert len({*names}) == len(names)
    for correction in corrections():
        assert re.fullmatch(r"[0-9a-f]{7}", correction.since)
        for name, arms in correction.arms.items():
            assert {*arms} <= {*load_study(name).arms}, (name, arms)


@each("path", RESULTS)
def test_rows_of_before_a_correction_are_marked_and_no_others(path: Path):
    old = pending(path)
    labels = [row["label"] for row in csv.DictReader(path.read_text().splitlines())]
    page, tex = (path.with_name(f"study.{x}").read_text() for x in ("md", "tex"))
    for label in labels:
        cell = label.replace("|", "\\|")
        assert (f"| {cell} † |" in page) == (label in old), label
        assert (f"| {cell} |" in page) == (label not in old), label
        assert (f"\n{label}$^\\dagger$ &" in tex) == (label in old), label
    assert ("Run before a [correction]" in page) == bool(old)
    appendix = (DOCS / "results" / results_pages.APPENDIX).read_text()
    for label, whats in old.items():
        for results in map(Path.read_text, results_pages.written_pages()):
            if f"<!-- {path.parent.name} -->" in results:
                assert f"| {label} † |" in results
        for what in whats:
            row = next(line for line in appendix.splitlines() if line.startswith(f"| {what} |"))
            assert f"[{path.parent.name}]({path.parent.name}/study.md): " in row
            assert label in row


def test_rows_that_were_run_again_stand_below_the_marked_ones():
    text = (DOCS / "results" / "table1.md").read_text()
    table = text.partition("<!-- table1 -->")[2].partition("<!-- end -->")[0]
    for row in results_pages.rows_of(DOCS / "results" / "table1-seventh" / "study.csv"):
        (line,) = [
            x for x in table.splitlines() if x.startswith(f"| {row['label']}, seventh round |")
        ]
        assert f"{100 * float(row['area']):.1f} (" in line
    assert "repeated in [table1-seventh](table1-seventh/study.md)" in table
    assert "not repeated" not in table
    choices = (DOCS / "results" / "choices.md").read_text()
    assert "not repeated yet" in choices, "its GRPO was not run again"
    cells = results_pages.rounds("fig4").splitlines()[3].split(" | ")  # GRPO: fourth, seventh, all
    assert [x.endswith("†") for x in cells[1:4]] == [True, False, True]


def test_a_mark_goes_when_the_arm_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = tmp_path / "fig4"
    shutil.copytree(DOCS / "results" / "fig4", place)
    monkeypatch.setattr(results_pages, "RESULTS", tmp_path)
    rows = results_pages.rows_of(place / "study.csv")

    def write(**included: str) -> str:
        with (place / "study.csv").open("w") as file:
            writer = csv.DictWriter(file, dict.fromkeys([*rows[0], "corrections"]))
            writer.writeheader()
            writer.writerows(row | {"corrections": included.get(row["arm"], "")} for row in rows)
        results_pages.mark_pages(place)
        return (place / "study.md").read_text()

    before = write()
    labels = {row["arm"]: row["label"] for row in rows}
    arm = next(x for x in labels if labels[x] in results_pages.pending("fig4"))
    assert f"| {labels[arm]} † |" in before
    every = " ".join(x.name for x in corrections())
    one = write(**{arm: every})
    assert one == before.replace(f"| {labels[arm]} † |", f"| {labels[arm]} |"), "only the mark goes"
    assert "†" not in write(**{row["arm"]: every for row in rows})
    assert write() == before


@pytest.mark.parametrize("name", ["table1", "choices", "fig4", "authors"])
def test_marks_are_the_arms_that_would_run_otherwise_today(name: str, tmp_path: Path):
    """Runs are named after the digest of recipe and method: which of them are another one now?"""
    path = DOCS / "results" / name / "study.csv"
    study = load_study(name)
    plan = StudyPlan(study, scale_of("mini"), Options(optional=True), Store(tmp_path))
    changed = {}
    rows = csv.DictReader(path.with_name("runs.csv").read_text().splitlines())
    for row in {row["arm"]: row for row in rows}.values():  # one seed of each
        today = plan.run(row["arm"], int(row["seed"]), float(row["learning_rate"]))
        changed[row["arm"]] = not row["run"].endswith(f"-{today.digest}")
    if changed[study.reference]:
        pytest.skip("recipes have other settings since, so that digests cannot tell")
    old = pending(path)
    assert {arm for arm, other in changed.items() if other} == {
        arm for arm in changed if study.label(arm) in old
    }


def test_documents_mark_what_was_run_before_a_correction():
    old = {path.parent.name for path in RESULTS if pending(path)}
    index = (DOCS / "paper.md").read_text().splitlines()
    for study in ("table1", "fig4"):
        (line,) = [x for x in index if x.startswith("|") and f"`segcredit study {study} " in x]
        assert ("†" in line) == (study in old), study
    shown = {place.split()[0] for _, _, x in results_pages.COMPARED for place in x if place}
    assert ("†" in (ROOT / "README.md").read_text()) == bool(old & shown)
    summary = results_pages.summary()
    for _, label, places in results_pages.COMPARED:
        (line,) = [x for x in summary.splitlines() if x.startswith(f"| {label} |")]
        marked = [bool(place and results_pages.is_pending(place)) for place in places]
        assert ["†" in cell for cell in line.split("|")[2:-1]] == marked


@each_document
def test_relative_links_lead_somewhere(path: Path):
    for match in LINK.finditer(prose(path.read_text())):
        target = match[1] or match[2]
        if re.match(r"[a-z]+:", target):  # https:, mailto:
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name} links to {target}, which does not exist"
        assert file.is_relative_to(ROOT), f"{path.name} links to {target}, outside the repository"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{path.name} links to {target}: no such heading"


@each_document
def test_equations_are_such_as_github_renders(path: Path):
    text = FENCE.sub("", path.read_text())
    displays = re.findall(r"^\n\$\$\n(.+?)\n\$\$\n$", text, re.MULTILINE | re.DOTALL)
    assert text.count("$$") == 2 * len(displays), "each $$ on its own line, blank lines around"
    for equation in displays:  # Markdown eats a backslash before punctuation, < starts a tag
        assert not re.search(r"\\[^a-zA-Z\s]|<|\\operatorname", equation), equation


# --------------------------------------------------------------------------------------------
# docs/algorithms.md
# --------------------------------------------------------------------------------------------


def table_rows() -> dict[str, str]:
    """Constructor → row, for every row of the table of methods."""
    text = (DOCS / "algorithms.md").read_text()
    rows = re.findall(r"^(\|.*\| \[`(\w+)\(\)`\]\([^)]*\) \|)$", text, re.MULTILINE)
    names = [name for _, name in rows]
    assert len(names) == len(set(names))
    return {name: row for row, name in rows}


def test_the_table_has_a_row_for_every_method():
    assert list(table_rows()) == list(ALGORITHMS)


@each("name", ALGORITHMS)
def test_a_row_names_the_parts_of_its_method(name: str):
    algorithm, row = ALGORITHMS[name](), table_rows()[name]
    if not isinstance(algorithm, PolicyGradient):
        return
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    _, credit_units, credit, ratio, reduction, kl, value_source, _, _ = cells
    parts: list[tuple[object, str]] = [
        (algorithm.credit.over, credit_units),
        (algorithm.credit, credit),
        (algorithm.ratio, ratio),
        (algorithm.reduce, reduction),
    ]
    parts += [(part, credit) for part in (*algorithm.adjust, *algorithm.adjust_minibatch)]
    parts += [(part, kl if "KL" in type(part).__name__ else credit) for part in algorithm.terms]
    parts += [(algorithm.kl, kl)] if algorithm.kl else []
    parts += [(algorithm.only, ratio)] if algorithm.only else []
    for part, cell in parts:
        assert f"`{type(part).__name__}`" in cell, f"{name}: {part} is not in {cell!r}"
    assert ("KL" in kl) == (LOGP_REF in algorithm.needs)
    assert ("critic" in value_source) == (algorithm.critic is not None)


def test_every_method_has_a_section():
    text = (DOCS / "algorithms.md").read_text()
    named = {name for title in HEADING.findall(text) for name in re.findall(r"`(\w+)`", title)}
    assert named == set(ALGORITHMS)


# --------------------------------------------------------------------------------------------
# docs/extending.md
# --------------------------------------------------------------------------------------------


@pytest.fixture
def extending(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    return run(DOCS / "extending.md", monkeypatch)


def hand_case() -> Rollouts:
    """Seven tokens with a hole at 3, and three tokens; 9.9 must not be read."""
    mask = torch.tensor([[1, 1, 1, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]], dtype=torch.bool)
    entropy = torch.tensor(
        [[0.2, 1.5, 1.0, 9.9, 1.1, 0.4, 0.1], [0.3, 0.2, 2.0, 9.9, 9.9, 9.9, 9.9]]
    )
    return Rollouts(
        tokens=torch.zeros(2, 7, dtype=torch.long),
        mask=mask,
        logp_old=torch.full((2, 7), -0.3),
        reward=torch.tensor([1.0, 0.0]),
        group=torch.tensor([0, 1]),
        truncated=torch.tensor([False, True]),
        entropy=entropy,
        value=torch.linspace(0.1, 0.9, 14).view(2, 7),
        logp_ref=torch.full((2, 7), -0.4),
    )


def test_the_partition_cuts_where_it_should(extending: dict[str, object]):
    segments = extending["EntropyAbove"](nats=1.0)(hand_case())
    ends = [row[:num].tolist() for row, num in zip(segments.end, segments.num, strict=True)]
    assert ends == [[1, 4, 6], [2]]  # 1.0 itself is no cut; the last token always is
    assert segments.index[0].tolist() == [0, 0, 1, -1, 1, 2, 2]


def test_sapo_takes_the_partition(extending: dict[str, object]):
    algorithm = extending["algorithm"]
    assert algorithm.needs == {ENTROPY, VALUE, LOGP_REF}
    assert algorithm.credit.over == algorithm.ratio.over == extending["EntropyAbove"](1.0)
    rollouts = hand_case()
    credit = algorithm.prepare(rollouts).credit
    assert credit.advantage.isfinite().all()
    assert (credit.advantage[rollouts.mask] != 0).all()
    assert (credit.advantage[~rollouts.mask] == 0).all()
