"""How long segments are, where in a response they end, and how many a response has."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from segcredit.analysis.drawing.segments import draw_shapes
from segcredit.analysis.reading import Step
from segcredit.analysis.result import Analysis, CannotAnalyseError, Table, plain

POSITION_BINS = 20
MOST_BARS = 32


def unit_of(owner: Int[np.ndarray, " N"], segment: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Number every (response, segment) of consecutive tokens from 0 on; −1 off segments.

    A segment goes on behind tokens that belong to none.
    """
    inside = np.flatnonzero(segment >= 0)
    found = np.full(len(owner), -1)
    if len(inside):
        who, which = owner[inside], segment[inside]
        begins = np.concatenate([[True], (who[1:] != who[:-1]) | (which[1:] != which[:-1])])
        found[inside] = np.cumsum(begins) - 1
    return found


def unit_lengths(unit: Int[np.ndarray, " N"]) -> Int[np.ndarray, " M"]:
    """Tokens of each."""
    return np.bincount(unit[unit >= 0])


@dataclass(frozen=True)
class Shapes:
    """Of all recorded responses."""

    length: Int[np.ndarray, " M"]
    """Tokens per segment."""
    position: Float[np.ndarray, " K"]
    """(e_m + 1) / T: where segments end, but for the last, which ends at 1."""
    per_response: Int[np.ndarray, " R"]


def shapes_of(owner: Int[np.ndarray, " N"], segment: Int[np.ndarray, " N"]) -> Shapes:
    """Of the responses of one step."""
    inside = segment >= 0
    owner, unit = owner[inside], unit_of(owner[inside], segment[inside])
    responses, which, size = np.unique(owner, return_inverse=True, return_counts=True)
    first = np.concatenate([[0], np.cumsum(size)[:-1]])
    at = np.arange(len(owner)) - first[which]  # position in the response
    ends = np.concatenate([unit[1:] != unit[:-1], [True]]) if len(unit) else np.zeros(0, bool)
    inner = ends & (at + 1 < size[which])
    return Shapes(
        unit_lengths(unit),
        (at[inner] + 1) / size[which][inner],
        np.bincount(which[ends], minlength=len(responses)),
    )


def segment_shapes(name: str, steps: Sequence[Step]) -> Analysis:
    """The analysis of a run's recorded segments."""
    found = [shapes_of(x.owner, x.segment) for x in steps]
    shapes = Shapes(
        np.concatenate([x.length for x in found]),
        np.concatenate([x.position for x in found]),
        np.concatenate([x.per_response for x in found]),
    )
    if not len(shapes.length):
        raise CannotAnalyseError("the rollouts hold no segments: the method has none.")
    lengths, counts = bars(shapes.length), bars(shapes.per_response)
    places, edges = np.histogram(shapes.position, bins=POSITION_BINS, range=(0.0, 1.0))
    numbers = {
        "segments": len(shapes.length),
        "responses": len(shapes.per_response),
        "length": {**_summary(shapes.length), "bars": lengths},
        "segments_per_response": {**_summary(shapes.per_response), "bars": counts},
        "end_position": {"edges": edges, "segments": places},
    }
    return Analysis(
        name="segments",
        title="Segments",
        runs=(name,),
        numbers=plain(numbers),
        table=Table(
            ("", "mean", "median", "5 – 95 %", "largest"),
            (
                _row("tokens per segment", shapes.length),
                _row("segments per response", shapes.per_response),
            ),
        ),
        note=(
            "Of all recorded responses. Every response's last segment ends at its end, which the "
            "positions leave out."
        ),
        draw=partial(draw_shapes, lengths, places, counts),
        size=(10.4, 3.1),
    )


def bars(x: Int[np.ndarray, " N"]) -> dict[str, Any]:
    """A histogram of whole numbers: how many lie in from … from + width − 1."""
    width = -(-(int(x.max()) - int(x.min()) + 1) // MOST_BARS)
    edges = np.arange(int(x.min()), int(x.max()) + width + 1, width)
    counts, _ = np.histogram(x, bins=edges)
    return {"width": width, "from": edges[:-1], "count": counts}


def _summary(x: Int[np.ndarray, " N"]) -> dict[str, float]:
    low, median, high = np.quantile(x, [0.05, 0.5, 0.95])
    return {"mean": float(x.mean()), "p05": low, "median": median, "p95": high, "max": int(x.max())}


def _row(label: str, x: Int[np.ndarray, " N"]) -> tuple[str, ...]:
    found = _summary(x)
    spread = f"{found['p05']:g} – {found['p95']:g}"
    return label, f"{found['mean']:.2f}", f"{found['median']:g}", spread, f"{found['max']}"
