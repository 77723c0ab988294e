"""Training in a notebook: one output that is updated in place, a table, a result that shows."""

import re
from typing import Any

import pytest
from tiny_runs import write_recipe

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
    assert [int(x) for x in re.findall(r"step (\d+): held-out", words(bars[0]))] == [3, 5, 7]
    tables = [x for x in shown if "before" in words(x) and "after" in words(x)]
    assert len(tables) == 1
    assert shown.index(tables[0]) > shown.index(bars[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_trainer_and_result_show_themselves(outputs: list[list[dict[str, Any]]]) -> None:
    trainer, result = outputs[0][-1], outputs[2][-1]  # libraries may have warned before
    assert trainer["data"]["text/plain"].startswith("Trainer(model='tiny qwen2', algorithm='sapo'")
    assert "<table>" in result["data"]["text/html"]
    assert "<div>run: <code>" in result["data"]["text/html"]
    assert result["data"]["text/plain"].startswith("Result(folder=")
