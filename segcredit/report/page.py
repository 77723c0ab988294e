"""The report page: one HTML file without dependencies that runs only its own script."""

import base64
import hashlib
import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from segcredit.printable import printable
from segcredit.report.data import (
    Limits,
    Rows,
    gather_images,
    gather_rows,
    to_json,
)
from segcredit.report.overview import gather_overview
from segcredit.runlog import Run
from segcredit.runlog.files import write_text_atomically

SCRIPTS = (
    *("base", "colors", "charts", "overview", "tokens", "staircase", "panel"),
    *("trajectories", "partitions", "main"),
)
"""In order of dependence."""
_STATIC = files("segcredit.report") / "static"


@dataclass(frozen=True)
class Figure:
    """A figure with its title and explanation."""

    title: str
    note: str
    svg: str


def script() -> str:
    """Join all of the page's JavaScript in one function scope."""
    parts = [(_STATIC / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "\n})();\n"


def policy(live: bool) -> str:
    """Return the content security policy: run this script, show embedded images, nothing else."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def render_page(
    title: str,
    overview: Mapping[str, Any],
    rows: Sequence[Rows] = (),
    images: Mapping[str, str] | None = None,
    figures: Sequence[Figure] = (),
    live: bool = False,
) -> str:
    """Render the HTML; the overview comes first, so it shows before the responses are parsed."""
    frame = (_STATIC / "page.html").read_text(encoding="utf-8")
    parts = {
        "POLICY": html.escape(policy(live)),
        "TITLE": html.escape(title),
        "STYLE": (_STATIC / "page.css").read_text(encoding="utf-8"),
        "FIGURES": "\n".join(_figure(x) for x in figures),
        "OVERVIEW": _data("overview", to_json({**overview, "live": live})),
        "SCRIPT": f"<script>{script()}</script>",
        "ROWS": "\n".join(_data(part.name, part.json) for part in rows),
        "IMAGES": _data("images", to_json(images or {})),
    }
    pieces = frame.split("%%")
    return "".join(parts[x] if number % 2 else x for number, x in enumerate(pieces))


def _data(name: str, content: str) -> str:
    return f'<script type="application/json" id="{html.escape(name)}">{content}</script>'


def _figure(figure: Figure) -> str:
    return (
        f'<figure class="card figure"><figcaption><h3>{html.escape(figure.title)}</h3>'
        f"<p>{html.escape(figure.note)}</p></figcaption>{figure.svg}</figure>"
    )


def report_title(runs: Sequence[Run]) -> str:
    """Return the title of the page."""
    first = printable(runs[0].path.name)
    return first if len(runs) == 1 else f"{first} and {len(runs) - 1} more"


def write_report(
    runs: Sequence[Run],
    path: Path,
    limits: Limits,
    figures: Sequence[Figure] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the page atomically and return its path."""
    rows = gather_rows(runs, limits, progress)
    images = gather_images(runs, rows, limits.picture_megabytes)
    page = render_page(report_title(runs), gather_overview(runs, rows), rows, images, figures)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, page)
    return path
