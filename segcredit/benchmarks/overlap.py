"""Find benchmark questions whose images are in the training data; compute scores without them."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from segcredit.benchmarks.benchmark import Score, score
from segcredit.benchmarks.run import SetResult
from segcredit.data.overlap import ImageDigests, image_digests, look_alike
from segcredit.models.images import ImageError
from segcredit.types import Prompt

SOURCE = "source"
"""Column of a question that names the dataset from which the benchmark took it."""
_NOT_NAME = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class TrainingImages:
    """The parts of the training data that benchmark questions are compared with."""

    pixels: frozenset[bytes]
    """Digests of the pixels of its images."""
    edges: tuple[bytes, ...]
    """Difference hashes of its images."""
    sources: frozenset[str]
    """Names of its datasets, in lower case without punctuation: ``geometry3k``."""

    @classmethod
    def of(cls, prompts: Iterable[Prompt]) -> "TrainingImages":
        """Read the images of the training prompts; images that cannot be decoded are left out."""
        pictures: set[ImageDigests] = set()
        sources = set()
        for prompt in prompts:
            pictures.update(_pictures(prompt))
            if isinstance(name := prompt.columns.get("data_source"), str):
                sources.add(_bare(name.rpartition("/")[2]))
        edges = sorted({x.edges for x in pictures})
        return cls(frozenset(x.pixels for x in pictures), tuple(edges), frozenset(sources))


@dataclass(frozen=True)
class Overlap:
    """Questions of one set that overlap with the training data."""

    same: frozenset[str]
    """Ids of the questions with an image of the same pixels as a training image."""
    alike: frozenset[str]
    """Ids of those whose image only looks the same: another margin, size or compression."""
    source: frozenset[str]
    """Ids of those that the benchmark took from a dataset of the training data, of any split."""

    @property
    def ids(self) -> frozenset[str]:
        """Ids of all overlapping questions."""
        return self.same | self.alike | self.source


def find_overlap(questions: Sequence[Prompt], training: TrainingImages) -> Overlap:
    """Find questions whose image is in the training data, or which name one of its sources."""
    pictures = [(x.id, picture) for x in questions for picture in _pictures(x)]
    alike = look_alike([picture.edges for _, picture in pictures], training.edges)
    same = {id for id, picture in pictures if picture.pixels in training.pixels}
    similar = {id for (id, _), yes in zip(pictures, alike, strict=True) if yes}
    named = {x.id for x in questions if _bare(str(x.columns.get(SOURCE) or "")) in training.sources}
    return Overlap(frozenset(same), frozenset(similar - same), frozenset(named))


def scores_without(result: SetResult, overlap: Overlap) -> dict[str, Score]:
    """Score a set without the overlapping questions and the rest of their groups.

    Empty if no question is left.
    """
    group = result.benchmark.group
    left_out = {group(x) for x in result.questions if x.id in overlap.ids}
    kept = [place for place, x in enumerate(result.questions) if group(x) not in left_out]
    samples = len(result.answers) // len(result.questions)
    right = [
        [result.answers[place * samples + n].correct for place in kept] for n in range(samples)
    ]
    if not kept:
        return {}
    return score(result.benchmark, [result.questions[place] for place in kept], right)


def overlap_summary(overlap: Overlap, scores: dict[str, Score]) -> dict[str, Any]:
    """Return counts, ids and scores for ``overlap.json``."""
    return {
        "same_pixels": len(overlap.same),
        "look_alike": len(overlap.alike),
        "same_source": len(overlap.source),
        "questions": sorted(overlap.ids),
        "scores_without": {name: asdict(x) for name, x in scores.items()},
    }


def _pictures(prompt: Prompt) -> list[ImageDigests]:
    found = []
    for image in prompt.images:
        try:
            found.append(image_digests(image))
        except ImageError:  # reported where the rows are read
            continue
    return found


def _bare(name: str) -> str:
    return _NOT_NAME.sub("", name).lower()
