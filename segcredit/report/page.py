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
from segcredit.report.benchmarks import Benchmarks, gather_benchmarks
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
    *("base", "colors", "steps", "charts", "overview", "tokens", "staircase", "panel"),
    *("landing", "trajectories", "partitions", "answers", "benchmarks", "main"),
)
"""In order of dependence."""
_STATIC = files("segcredit.report") / "static"


@dataclass(frozen=True)
class Figure:
    """A figure with its title and explanation."""

    title: str
    note: str
    svg: str


@dataclass(frozen=True)
class Figures:
    """The analyses on a page."""

    drawn: tuple[Figure, ...] = ()
    skipped: tuple[str, ...] = ()
    """One line for each analysis without a meaning for a run: what it is, and why."""


def script() -> str:
    """Join all of the page's JavaScript."""
    return in_one_scope([static_text(f"{name}.js") for name in SCRIPTS])


def static_text(name: str) -> str:
    """Read a file of the page."""
    return (_STATIC / name).read_text(encoding="utf-8")


def in_one_scope(parts: Sequence[str]) -> str:
    """Join JavaScript files in one function scope."""
    return '(() => {\n"use strict";\n' + "\n".join(parts) + "\n})();\n"


def policy(live: bool) -> str:
    """Return the content security policy of the page; a live page loads new numbers."""
    return content_policy(script(), "'self'" if live else "'none'")


def content_policy(code: str, connect: str = "'none'") -> str:
    """Return a policy that runs this script, shows embedded images, and allows nothing else."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def render_page(
    title: str,
    overview: Mapping[str, Any],
    rows: Sequence[Rows] = (),
    images: Mapping[str, str] | None = None,
    figures: Figures | None = None,
    live: bool = False,
    benchmarks: Benchmarks | None = None,
) -> str:
    """Render the HTML; the overview comes first, so it shows before the responses are parsed."""
    frame = static_text("page.html")
    benchmarks = benchmarks or Benchmarks()
    parts = {
        "POLICY": html.escape(policy(live)),
        "TITLE": html.escape(title),
        "STYLE": static_text("page.css"),
        "FIGURES": "" if figures is None else _figures(figures),
        "OVERVIEW": data_element("overview", to_json({**overview, "live": live})),
        "BENCHMARKS": data_element("benchmarks", to_json(benchmarks.data)),
        "SCRIPT": f"<script>{script()}</script>",
        "ROWS": "\n".join(data_element(part.name, part.json) for part in rows),
        "IMAGES": data_element("images", to_json(images or {}))
        + data_element("benchmark-images", to_json(benchmarks.images)),
    }
    return fill_frame(frame, parts)


def fill_frame(frame: str, parts: Mapping[str, str]) -> str:
    """Replace every ``%%NAME%%`` of an HTML frame."""
    pieces = frame.split("%%")
    return "".join(parts[x] if number % 2 else x for number, x in enumerate(pieces))


def data_element(name: str, content: str) -> str:
    """Embed JSON in a page, to be read by its script."""
    return f'<script type="application/json" id="{html.escape(name)}">{content}</script>'


def _figures(figures: Figures) -> str:
    parts = [_figure(x) for x in figures.drawn]
    if figures.skipped:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in figures.skipped)
        where = "<p>Options are those of segcredit analyze.</p>"
        parts.append(f'<div class="card skipped"><h3>Not drawn</h3>{where}<ul>{lines}</ul></div>')
    return "\n".join(parts)


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
    figures: Figures | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the page atomically and return its path."""
    rows = gather_rows(runs, limits, progress)
    images = gather_images(runs, rows, limits.picture_megabytes)
    page = render_page(
        report_title(runs),
        gather_overview(runs, rows),
        rows,
        images,
        figures,
        benchmarks=gather_benchmarks(runs),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, page)
    return path
