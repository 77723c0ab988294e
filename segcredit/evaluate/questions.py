"""Which prompts are asked, and how their answers are graded where nobody says."""

from collections.abc import Sequence
from pathlib import Path

from segcredit.config import Recipe
from segcredit.data import load_prompts
from segcredit.data.prepare import KNOWN
from segcredit.data.worlds import make_world
from segcredit.types import Prompt

PROMPTS = 512
"""Of a world, which has no end."""
ALSO = {"math500": "math", "geometry3k": "geo3k"}
"""Other names of data sets."""


def load_questions(
    recipe: Recipe | None,
    data: Sequence[str] | None,
    count: int | None,
    suffix: str | None,
    one_answer: bool = False,
    allow_outside: bool = False,
) -> list[Prompt]:
    """Load the first ``count`` prompts (None: all) of ``data``, or of the run's test data.

    ``one_answer``: treat a row with a list of answers as a bad row.
    """
    if data is not None:
        files = data_files(data)
        return load_prompts(
            files,
            limit=count,
            suffix=suffix,
            one_answer=one_answer,
            allow_outside=allow_outside,
        ).prompts
    if recipe is None:
        raise ValueError("expected a run or data; got neither.")
    settings = recipe.data
    if settings.world is not None:
        world = make_world(settings.world, **settings.settings)
        return world.prompts("test", 0, PROMPTS if count is None else count)
    if not settings.test:
        raise ValueError("the run has no test data: pass --data FILE")
    suffix = settings.suffix if suffix is None else suffix
    return load_prompts(
        list(settings.test),
        limit=count,
        suffix=suffix,
        one_answer=one_answer,
        allow_outside=allow_outside or settings.allow_outside,
    ).prompts


def data_files(names: Sequence[str]) -> list[str]:
    """Files; a data set's name is the held-out file that ``segcredit prepare`` writes."""
    return [_file(name) for name in names]


def _file(name: str) -> str:
    known = ALSO.get(name, name)
    if known not in KNOWN or Path(name).exists():
        return name
    file = Path("data") / known / "test.parquet"
    if not file.is_file():
        raise ValueError(
            f"--data {name} is {file}, which is not here. Type: segcredit prepare {known}; or pass "
            f"a file of yours."
        )
    return str(file)


def usual_reward(prompts: Sequence[Prompt]) -> str | None:
    """The reward of the data set that all rows say they are of."""
    sources = {str(prompt.columns.get("data_source")) for prompt in prompts}
    return next((x.reward for x in KNOWN.values() if sources <= set(x.data_sources)), None)
