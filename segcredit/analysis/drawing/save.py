"""An analysis as PNG, as SVG for a page, and as files."""

import io
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from segcredit.analysis.drawing.style import STYLE
from segcredit.analysis.result import Analysis
from segcredit.runlog.atomic import write_bytes_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEAD = re.compile(r"\A.*?(?=<svg\b)", re.DOTALL)
_PARTS = re.compile(r"<metadata>.*?</metadata>\s*|<style\b.*?</style>\s*", re.DOTALL)
_GROUP_IDS = re.compile(r'(<g) id="[^"]*"')
_STROKES = '<svg style="stroke-linejoin: round; stroke-linecap: butt" '
"""What matplotlib says in a style sheet, which inside a page would be the whole page's."""

LETTER = 0.092
"""Inches of a letter of the title: wrapping would read a name's dollar signs as mathematics."""


def svg(analysis: Analysis) -> str:
    """The figure as one <svg> element, to stand in a page: transparent, text as text.

    The same numbers give the same bytes. Ids belong to this figure alone, and everything that is
    not data has the colour ``INK``.
    """
    salt = json.dumps([analysis.name, *analysis.runs])
    with _figure(analysis, title=False, salt=salt) as figure:
        file = io.StringIO()
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = _PARTS.sub("", _HEAD.sub("", file.getvalue()))
    return _GROUP_IDS.sub(r"\1", text).replace("<svg ", _STROKES, 1)


def png(analysis: Analysis) -> bytes:
    """The figure as a picture, with its title."""
    with _figure(analysis, title=True) as figure:
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def write(analysis: Analysis, folder: Path) -> list[Path]:
    """NAME.png, NAME.svg and NAME.json."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "name": analysis.name,
        "title": analysis.title,
        "runs": list(analysis.runs),
        "note": analysis.note,
        "numbers": analysis.numbers,
    }
    contents = {
        "png": png(analysis),
        "svg": ('<?xml version="1.0" encoding="utf-8"?>\n' + svg(analysis)).encode(),
        "json": (json.dumps(record, indent=1, allow_nan=False) + "\n").encode(),
    }
    made = []
    for kind, data in contents.items():
        made.append(folder / f"{analysis.name}.{kind}")
        write_bytes_atomically(made[-1], data)
    return made


@contextmanager
def _figure(analysis: Analysis, title: bool, salt: str = "") -> Iterator["Figure"]:
    """Drawn in our style, whatever style the caller or his matplotlibrc has set."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parameters: Any = matplotlib.rcParams
    with matplotlib.rc_context(), warnings.catch_warnings():
        # a run's name may have letters that the font lacks; they are drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        matplotlib.rcdefaults()
        parameters.update({**STYLE, "svg.hashsalt": salt})
        figure = Figure(figsize=analysis.size, layout="constrained")
        FigureCanvasAgg(figure)
        if title:
            fits = analysis.size[0] / (LETTER * len(analysis.heading))
            figure.suptitle(analysis.heading, fontsize=11 * min(1.0, fits))
        analysis.draw(figure)
        yield figure
