"""examples/segcredit.ipynb runs from top to bottom, and shows what it promises."""

import re
import time
from pathlib import Path

import pytest
from test_examples import EXAMPLES

nbformat = pytest.importorskip("nbformat", reason="needs nbformat: pip install '.[dev]'")
NOTEBOOK = EXAMPLES / "segcredit.ipynb"


def test_it_is_committed_without_outputs() -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    cells = [x for x in book.cells if x.cell_type == "code"]
    assert all(not x.outputs and x.execution_count is None for x in cells)
    assert f"[{NOTEBOOK.name}]({NOTEBOOK.name})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient", reason="needs nbclient: pip install '.[dev]'")
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    book = nbformat.read(NOTEBOOK, as_version=4)
    began = time.monotonic()
    client.NotebookClient(book, timeout=600, resources={"metadata": {"path": tmp_path}}).execute()
    print(f"{time.monotonic() - began:.0f} s")
    outputs = [x for cell in book.cells if cell.cell_type == "code" for x in cell.outputs]
    printed = "".join(x.text for x in outputs if x.output_type == "stream" and x.name == "stdout")
    found = re.findall(r"^(\w+): (\S+)% before, (\S+)% after$", printed, re.MULTILINE)
    assert [name for name, *_ in found] == ["sapo", "ppo"]
    for _, before, after in found:
        assert float(after) > float(before) + 10
    shown = [x.data for x in outputs if x.output_type == "display_data"]
    assert sum("image/png" in x for x in shown) == 2, "the task's image and the curves"
    (frame,) = [x["text/html"] for x in shown if "srcdoc" in x.get("text/html", "")]
    assert "&quot;optimize&quot;" in frame, "the curves of the runs are in the page"
