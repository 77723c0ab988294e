"""From run folders to a file that one can open, keep and send."""

from collections.abc import Callable, Sequence
from pathlib import Path

from segcredit.printable import printable
from segcredit.report.build import Limits, gather_images, gather_overview, gather_rows
from segcredit.report.page import Figure, render_page
from segcredit.runlog import Run
from segcredit.runlog.atomic import write_text_atomically


def report_title(runs: Sequence[Run]) -> str:
    """Of the page."""
    first = printable(runs[0].path.name)
    return first if len(runs) == 1 else f"{first} and {len(runs) - 1} more"


def write_report(
    runs: Sequence[Run],
    path: Path,
    limits: Limits,
    figures: Sequence[Figure] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Path:
    """The page, whole or not at all."""
    rows = gather_rows(runs, limits, progress)
    images = gather_images(runs, rows, limits.picture_megabytes)
    page = render_page(report_title(runs), gather_overview(runs, rows), rows, images, figures)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, page)
    return path
