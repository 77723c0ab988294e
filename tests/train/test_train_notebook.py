"""Training in a notebook: one output that is updated in place, a table, a result that shows."""

import io
import re
from typing import Any

import pytest
from rich.console import Console
from tiny_runs import RECIPE, write_recipe

from segcredit.config import parse_recipe
from segcredit.evaluate import Evaluation
from segcredit.train.progress import MetricsTable, NotebookProgress
from segcredit.types import Sampling

nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

CELLS = (
    """
from segcredit import Trainer
from segcredit.config import load_recipe
trainer = Trainer.from_recipe(load_recipe("recipe.yaml"))
trainer
""",
    "result = trainer.train('run', report=False)",
    "result",
    "result.metrics",
)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """The outputs of the cells, after all updates."""
    import nbformat

    folder = tmp_path_factory.mktemp("notebook")
    write_recipe(
        folder,
        stages=[
            {"kind": "warm_start", "steps": 3, "batch": 4},
            {"kind": "optimize", "steps": 4},
        ],
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(x) for x in CELLS])
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return [cell["outputs"] for cell in notebook.cells]


def words(output: dict[str, Any]) -> str:
    return re.sub(r"<[^>]*>", "", output["data"]["text/html"])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_progress_is_one_output_and_a_table_follows(
    outputs: list[list[dict[str, Any]]],
) -> None:
    shown = outputs[1]
    assert {x["output_type"] for x in shown} == {"display_data"}, "no line by line output"
    bars = [x for x in shown if "1 imitate" in words(x)]
    assert len(bars) == 1, "it is updated, not repeated"
    assert words(bars[0]).startswith("run "), "what is trained, and where, is above the bars"
    assert re.search(r"1 imitate\s+\S*\s*3/3", words(bars[0]))
    assert re.search(r"2 reinforce\s+\S*\s*4/4", words(bars[0])), "the last step is shown"
    assert [int(x) for x in re.findall(r"step (\d+)/\d+: held-out", words(bars[0]))] == [0, 2, 4]
    tables = [x for x in shown if "before" in words(x) and "after" in words(x)]
    assert len(tables) == 1
    assert shown.index(tables[0]) > shown.index(bars[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_trainer_and_result_show_themselves(outputs: list[list[dict[str, Any]]]) -> None:
    trainer, result, metrics = (outputs[x][-1] for x in (0, 2, 3))  # libraries may have warned
    assert trainer["data"]["text/plain"].startswith("Trainer(model='tiny qwen2', algorithm='sapo'")
    assert "<table>" in result["data"]["text/html"]
    assert "<div>run: <code>" in result["data"]["text/html"]
    assert result["data"]["text/plain"].startswith("Result(folder=")
    assert "<th>step</th>" in metrics["data"]["text/html"]
    assert metrics["data"]["text/html"].count("<td>optimize</td>") == 4


def test_a_long_table_of_metrics_shows_its_newest_lines_as_text() -> None:
    lines = [{"step": n, "reward": n / 7} for n in range(60)] + [{"message": "<b>"}]
    page = MetricsTable(lines)._repr_html_()
    assert "The first 11 lines are not shown." in page
    assert "<td>11</td><td>1.571</td>" in page
    assert "<td>10</td><td>" not in page
    assert "&lt;b&gt;" in page


def test_updates_go_to_one_display_and_only_the_newest_evaluations_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import IPython.display

    shown: list[str] = []

    class Handle:
        def update(self, item: Any) -> None:
            shown.append(re.sub(r"<[^>]*>", "", item._repr_mimebundle_([], [])["text/html"]))

    def display(item: Any, display_id: bool) -> Handle:
        assert display_id
        handle = Handle()
        handle.update(item)
        return handle

    monkeypatch.setattr(IPython.display, "display", display)
    progress = NotebookProgress(Console(file=io.StringIO()))
    progress.begin(parse_recipe(RECIPE), 0, {"run": "runs/mine", "model": "a [tiny] one"})
    assert shown[0].split() == ["run", "runs/mine", "model", "a", "[tiny]", "one"]
    progress.stage(0, "optimize", 40, 0)
    none: dict[str, Any] = dict.fromkeys(
        ("greedy", "greedy_interval", "sampled_interval", "greedy_reward", "answered")
    )
    evaluation = Evaluation(
        **none,
        prompts=8,
        samples=1,
        sampled=0.25,
        pass_at={},
        pass_interval={},
        reward=0.25,
        reward_interval=(0.0, 1.0),
        no_verdict=0.0,
        truncated=0.0,
        response_length=4.0,
        sampling=Sampling(8),
    )
    for step in range(1, 41):
        progress.stepped(step, "optimize", {"reward": step / 100})
        progress.evaluated(step, evaluation)
    progress.note("every [reward] is 0")
    progress.end()
    assert "every [reward] is 0" in shown[-1]
    assert "40/40" in shown[-1]
    assert "reward 0.400" in shown[-1]
    steps = [int(x) for x in re.findall(r"step (\d+)/40: held-out accuracy sampled 25", shown[-1])]
    assert steps == [*range(29, 41)]
