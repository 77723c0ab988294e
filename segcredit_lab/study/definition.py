"""What a study is: arms over a base recipe, whom they are compared with, and what is drawn."""

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from segcredit.config import RecipeError, read_settings
from segcredit.config.recipe import Number, Settings, Whole
from segcredit.printable import shown

Figure = Literal[
    "curves",
    "differences",
    "sweep",
    "lift",
    "value_loss",
    "explained_variance",
    "entropy",
    "length",
    "clip_fraction",
]


class Arm(Settings):
    """One row of the table: what it changes of the base recipe."""

    label: str = ""
    """As tables and figures show it; the arm's name if there is none."""
    algorithm: str | dict[str, Any] | None = None
    """As in a recipe. kl, clip and gamma of the base's method hold here too, unless set."""
    samples: Whole | None = Field(None, ge=1)
    """Responses per prompt; of so many fewer prompts, so that the rollouts stay as many."""
    same_prompts: bool = False
    """With samples: as many prompts as the base has, and so many times its rollouts."""
    share: Number = Field(1.0, gt=0, le=1)
    """Of the base's prompts, for a method that draws more than one response from each."""
    cold: bool = False
    """Without the base's pretraining of the critic."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """Any other settings, as in a recipe."""
    paper: str | None = None
    """The recipe that stands for all this at the scale paper."""
    at: Number | None = None
    """Where the arm stands on the axis of a sweep."""
    optional: bool = False
    """Runs only if it is asked for, by name or with --all."""


class Published(Settings):
    """What the paper reports, in per cent."""

    source: str
    columns: dict[str, dict[str, Number]]
    """Of each column, the arms' numbers."""


class Correction(Settings):
    """Correction of a method after its results were published."""

    name: str
    what: str
    """What is different now."""
    since: str
    """Commit that made the correction."""
    arms: dict[str, list[str]]
    """Arms that the correction changes, by study."""


class Study(Settings):
    """A table or figure, as the runs that it takes."""

    name: str
    title: str
    asks: str
    """The question, in a sentence."""
    base: str
    """vision or text: the scale's recipe for it; or a recipe of its own, by name or by file as seen
    from the study's, for every scale."""
    paper_base: str | None = None
    """The recipe that arms change at the scale paper."""
    reference: str
    """The arm that the others are compared with, seed by seed."""
    arms: dict[str, Arm] = Field(min_length=1)
    recipe: dict[str, Any] = Field(default_factory=dict)
    """Settings of all arms, as in a recipe."""
    tune: Literal["each", "reference", "none"] = "reference"
    """Whose learning rate is tuned: every arm's; the reference's, which all then take; nobody's."""
    seeds: dict[str, list[Whole]] = Field(default_factory=dict)
    """By scale, where they are not the scale's own."""
    figures: tuple[Figure, ...] = ("curves", "differences")
    axis: str = ""
    """Of a sweep: what its axis shows."""
    published: Published | None = None
    note: str = ""
    """What a reader of the table must know."""

    @model_validator(mode="after")
    def _adds_up(self) -> "Study":
        known = ", ".join(self.arms)
        if self.reference not in self.arms:
            raise ValueError(f"reference is one of the arms {known}; got {self.reference!r}")
        if self.arms[self.reference].optional:
            raise ValueError(f"the reference cannot be optional; got {self.reference!r}")
        for column, numbers in (self.published.columns if self.published else {}).items():
            for name in numbers:
                if name not in self.arms:
                    raise ValueError(f"published.columns.{column}: no arm {name!r} in {known}")
        if "sweep" in self.figures and not any(arm.at is not None for arm in self.arms.values()):
            raise ValueError("a sweep is drawn against the arms' at; got none")
        return self

    def label(self, arm: str) -> str:
        """What tables and figures call the arm."""
        return self.arms[arm].label or arm

    def choose(self, only: list[str], optional: bool = False) -> list[str]:
        """The arms that run: all but optional ones, or those too; or the reference and ``only``."""
        for name in only:
            if name not in self.arms:
                near = get_close_matches(name, self.arms, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise RecipeError(
                    f"{self.name} has no arm {name!r}; it has {', '.join(self.arms)}.{hint}"
                )
        return [
            name
            for name, arm in self.arms.items()
            if (name in {*only, self.reference} if only else optional or not arm.optional)
        ]


def shipped_studies() -> dict[str, Path]:
    """The studies that come with the package, by name: the paper's first."""
    folder = Path(str(files("segcredit_lab"))) / "study" / "studies"
    found = {path.stem: path for path in folder.glob("*.yaml")}
    order = [x for kind in ("table", "fig", "") for x in sorted(found) if x.startswith(kind)]
    return {name: found[name] for name in dict.fromkeys(order)}


@cache
def corrections() -> tuple[Correction, ...]:
    """Load all corrections since results were first published, from corrections.yaml."""
    text = (Path(str(files("segcredit_lab"))) / "study" / "corrections.yaml").read_text()
    return tuple(Correction.model_validate(x) for x in yaml.safe_load(text))


def corrections_of(study: str, arm: str) -> tuple[Correction, ...]:
    """Corrections that change an arm of a study."""
    return tuple(x for x in corrections() if arm in x.arms.get(study, ()))


def load_study(name: str) -> Study:
    """A study by its name, or from a YAML file of one's own."""
    shipped = shipped_studies()
    path = shipped.get(name, Path(name))
    if name not in shipped and not (path.suffix in (".yaml", ".yml") and path.is_file()):
        near = get_close_matches(name, shipped, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RecipeError(
            f"no study {shown(name)}: neither a YAML file nor one of {', '.join(shipped)}.{hint}"
        )
    found = {"name": path.stem, **read_settings(path)}
    beside = path.parent / str(found.get("base"))
    if beside.suffix in (".yaml", ".yml") and beside.is_file():
        found["base"] = str(beside.absolute())
    return parse_study(found, str(path))


def parse_study(found: dict[str, Any], source: str = "study") -> Study:
    """A study from plain data; every mistake in one message."""
    try:
        return Study.model_validate(found)
    except ValidationError as error:
        lines = [f"  {_explain(problem)}" for problem in error.errors()]
        raise RecipeError("\n".join([f"{source}: the study does not add up", *lines])) from None


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "study"
    if problem["type"] == "extra_forbidden":
        known = sorted(Arm.model_fields if "arms" in problem["loc"] else Study.model_fields)
        near = get_close_matches(str(problem["loc"][-1]), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."
        return f"{where}: unknown key.{hint}"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"


_SMOKE = Path(str(files("segcredit_lab"))) / "study" / "smoke"


@dataclass(frozen=True)
class Scale:
    """What a study's arms change, and how often each runs."""

    name: str
    bases: dict[str, str]
    """The recipes of vision, text, and of text in which the response decides."""
    seeds: tuple[int, ...]
    rates: tuple[float, ...] = ()
    """Learning rates that are tried, as multiples of the recipe's; none: no tuning."""
    tuning_seeds: tuple[int, ...] = ()
    """Others than the study's: what was tuned on is not measured on."""
    tuning_share: float = 0.5
    """Of the steps of optimisation, for a run that tunes."""


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "smoke",
            {
                "vision": str(_SMOKE / "vision.yaml"),
                "text": str(_SMOKE / "text.yaml"),
                "choices": str(_SMOKE / "text.yaml"),
            },
            seeds=(0,),
            rates=(1.0, 3.0),
            tuning_seeds=(1000,),
            tuning_share=0.34,
        ),
        Scale(
            "mini",
            {
                "vision": "mini/vision",
                "text": "mini/text",
                "choices": "mini/text-choices",
            },
            seeds=(0, 1, 2),
            rates=(0.5, 1.0, 2.0),
            tuning_seeds=(1000, 1001),  # one is too few; two were, with rates three times apart
            tuning_share=1.0,  # rates that are best in half the steps may collapse in the rest
        ),
        Scale(
            "paper",
            {
                "vision": "geo3k/qwen2.5-vl-3b-sapo",
                "text": "gsm8k/rhomath-1.1b-sapo",
                "choices": "gsm8k/rhomath-1.1b-sapo",
            },
            seeds=(0, 1, 2),
        ),
    )
}


def scale_of(name: str) -> Scale:
    """The scale of that name."""
    if name not in SCALES:
        near = get_close_matches(name, SCALES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RecipeError(f"the scales are {', '.join(SCALES)}; got {name!r}.{hint}")
    return SCALES[name]
