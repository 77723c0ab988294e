"""Definition of a study: arms over a base recipe, a reference arm, and figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import yaml
from pydantic import Field, ValidationError, model_validator

from segcredit.config import RecipeError, merge_settings, read_settings
from segcredit.config.recipe import Number, Settings, Whole
from segcredit.printable import shown
from segcredit.registry import nearest

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
    """One arm of a study: a row of its table, as changes of the base recipe."""

    label: str = ""
    """Label in tables and figures; default: the arm's name."""
    algorithm: str | dict[str, Any] | None = None
    """Method, as in a recipe; ``file.py:name`` works. Inherits kl, clip and gamma of the base's
    method unless set."""
    samples: Whole | None = Field(None, ge=1)
    """Responses per prompt; the number of prompts is reduced to keep the number of rollouts."""
    same_prompts: bool = False
    """With samples: keep the base's number of prompts, so that rollouts are multiplied."""
    share: Number = Field(1.0, gt=0, le=1)
    """Share of the base's prompts, for a method that samples continuations too."""
    rounds: Whole = Field(1, ge=1)
    """Number of the base's steps that are joined to one, for a method that trains in rounds: so
    many times the prompts and mini-batches, and a fraction of the steps."""
    cold: bool = False
    """Omit the base's critic pretraining."""
    recipe: dict[str, Any] = Field(default_factory=dict)
    """Other settings, as in a recipe."""
    paper: str | None = None
    """Recipe that replaces the arm at scale paper."""
    at: Number | None = None
    """Position of the arm on the axis of a sweep."""
    optional: bool = False
    """Run only if selected with --only or --all."""


class PublishedNumbers(Settings):
    """Numbers that the paper reports, in percent."""

    source: str
    columns: dict[str, dict[str, Number]]
    """Column → arm → number."""


class Correction(Settings):
    """Correction of a method after its results were published."""

    name: str
    what: str
    """Description of the change."""
    since: str
    """Commit of the correction."""
    arms: dict[str, list[str]]
    """Arms that the correction changes, by study."""


class Study(Settings):
    """A table or figure, defined by the runs it needs."""

    name: str
    title: str
    asks: str
    """The question, in one sentence."""
    base: str
    """vision or text: the scale's recipe; or for every scale a recipe by name, or by a file path
    relative to the study's file."""
    paper_base: str | None = None
    """Base recipe at scale paper."""
    reference: str
    """Arm that the others are compared with, paired by seed."""
    arms: dict[str, Arm] = Field(min_length=1)
    recipe: dict[str, Any] = Field(default_factory=dict)
    """Settings of all arms, as in a recipe."""
    tune: Literal["each", "reference", "none"] = "reference"
    """Tune the learning rate of each arm, of the reference (then used by all arms), or of none."""
    seeds: dict[str, list[Whole]] = Field(default_factory=dict)
    """Seeds by scale; default: the scale's seeds."""
    figures: tuple[Figure, ...] = ("curves", "differences")
    axis: str = ""
    """Axis label of a sweep."""
    published: PublishedNumbers | None = None
    benchmarks: tuple[str, ...] = ()
    """Sets of ``segcredit benchmark``, such as table1, on which final models are scored at scale
    paper."""
    note: str = ""
    """Note printed below the table."""
    scales: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Changes of the study at a scale, by scale: keys of a study, merged as recipes are."""

    @model_validator(mode="after")
    def _adds_up(self) -> "Study":
        known = ", ".join(self.arms)
        if self.reference not in self.arms:
            raise ValueError(f"reference must be one of the arms {known}; got {self.reference!r}")
        if self.arms[self.reference].optional:
            raise ValueError(f"the reference cannot be optional; got {self.reference!r}")
        for column, numbers in self.paper_columns.items():
            for name in numbers:
                if name not in self.arms:
                    raise ValueError(
                        f"published.columns.{column}: unknown arm {name!r}; the arms are {known}"
                    )
        if "sweep" in self.figures and not any(arm.at is not None for arm in self.arms.values()):
            raise ValueError("figure sweep needs `at` in at least one arm; got none")
        if unknown := [name for name in self.scales if name not in SCALES]:
            raise ValueError(
                f"scales: expected one of {', '.join(SCALES)}; got {unknown[0]!r}."
                f"{nearest(unknown[0], SCALES)}"
            )
        return self

    @property
    def paper_columns(self) -> dict[str, dict[str, float]]:
        """The paper's numbers, by column and arm; empty if it has none."""
        return self.published.columns if self.published else {}

    def at_scale(self, name: str) -> "Study":
        """Return the study as it is at a scale."""
        if name not in self.scales:
            return self
        own = self.model_dump(mode="json", exclude={"scales"})
        return parse_study(
            merge_settings(own, self.scales[name]), f"study {self.name}, scales.{name}"
        )

    def label(self, arm: str) -> str:
        """Label of an arm in tables and figures."""
        return self.arms[arm].label or arm

    def choose(self, only: list[str], optional: bool = False) -> list[str]:
        """Select arms: all, with or without optional ones; or the reference and ``only``."""
        for name in only:
            if name not in self.arms:
                hint = nearest(name, self.arms)
                raise RecipeError(
                    f"{self.name} has no arm {name!r}; it has {', '.join(self.arms)}.{hint}"
                )
        return [
            name
            for name, arm in self.arms.items()
            if (name in {*only, self.reference} if only else optional or not arm.optional)
        ]


def shipped_studies() -> dict[str, Path]:
    """Return the paths of the built-in studies by name, those of the paper first."""
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
    """Return the corrections that change an arm of a study."""
    return tuple(x for x in corrections() if arm in x.arms.get(study, ()))


def load_study(name: str) -> Study:
    """Load a built-in study by name, or one from a YAML file."""
    shipped = shipped_studies()
    path = shipped.get(name, Path(name))
    if name not in shipped and not (path.suffix in (".yaml", ".yml") and path.is_file()):
        hint = nearest(name, shipped)
        raise RecipeError(
            f"no study {shown(name)}: expected a YAML file or one of {', '.join(shipped)}.{hint}"
        )
    found = {"name": path.stem, **read_settings(path)}
    beside = path.parent / str(found.get("base"))
    if beside.suffix in (".yaml", ".yml") and beside.is_file():
        found["base"] = str(beside.absolute())
    return parse_study(found, str(path))


def parse_study(found: dict[str, Any], source: str = "study") -> Study:
    """Parse a study from plain data; raise one message with all mistakes."""
    try:
        return Study.model_validate(found)
    except ValidationError as error:
        lines = [f"  {_explain(problem)}" for problem in error.errors()]
        raise RecipeError("\n".join([f"{source}: the study is not valid", *lines])) from None


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "study"
    if problem["type"] == "extra_forbidden":
        known = sorted(Arm.model_fields if "arms" in problem["loc"] else Study.model_fields)
        hint = nearest(str(problem["loc"][-1]), known) or f" The keys are: {', '.join(known)}."
        return f"{where}: unknown key.{hint}"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"


_SMOKE = Path(str(files("segcredit_lab"))) / "study" / "smoke"
_SMALL = Path(str(files("segcredit_lab"))) / "study" / "small"


@runtime_checkable
class TuningRun(Protocol):
    """Results of a run that a rule chooses learning rates by."""

    @property
    def area(self) -> float:
        """Mean held-out accuracy over the curve."""
        ...

    @property
    def accuracy(self) -> tuple[float, ...]:
        """Held-out accuracy of every evaluation; the first precedes optimization."""
        ...


TuningRuns = Mapping[float, Sequence[TuningRun]]
"""The finished tuning runs of each learning rate."""


@runtime_checkable
class RateRule(Protocol):
    """A rule that chooses a learning rate from tuning runs."""

    @property
    def text(self) -> str:
        """The rule in words, for a study's page; empty: a page need not explain it."""
        ...

    def loses(self, run: TuningRun) -> bool:
        """Whether a run loses accuracy, so that the rule excludes its rate."""
        ...

    def choose(self, runs: TuningRuns) -> float:
        """Return the chosen rate."""
        ...


@dataclass(frozen=True)
class LargestArea:
    """The rate with the largest mean accuracy over the curve; of equal ones the smallest."""

    text: str = ""

    def loses(self, run: TuningRun) -> bool:
        """Exclude no rate."""
        return False

    def choose(self, runs: TuningRuns) -> float:
        return max(
            runs, key=lambda rate: (sum(x.area for x in runs[rate]) / len(runs[rate]), -rate)
        )


@dataclass(frozen=True)
class LargestSafe:
    """The largest rate at which no tuning run loses accuracy; the smallest if all rates do."""

    tolerance: float = 0.01
    """A run loses accuracy if its last evaluation is more than this below its best one. Noise of an
    evaluation must not count: one point is two standard errors of the difference of two
    evaluations with 8 responses to each of 1,000 prompts at 12 % accuracy."""

    @property
    def text(self) -> str:
        """The rule in words, for a study's page."""
        points = f"{100 * self.tolerance:g} point{'s' if self.tolerance != 0.01 else ''}"
        return (
            f"The rule: the largest rate at which no tuning run loses accuracy, that is, ends more "
            f"than {points} below its own best evaluation, the one before optimization included; "
            f"the smallest rate if there is none."
        )

    def loses(self, run: TuningRun) -> bool:
        """Whether a run ends below its best evaluation."""
        return max(run.accuracy) - run.accuracy[-1] > self.tolerance

    def choose(self, runs: TuningRuns) -> float:
        safe = [rate for rate, found in runs.items() if not any(map(self.loses, found))]
        return max(safe) if safe else min(runs)


@dataclass(frozen=True)
class Scale:
    """Base recipes, seeds and tuning of a study's runs."""

    name: str
    bases: dict[str, str]
    """Base recipes: vision, text, text whose answer depends on choices in the response, and text
    with a second model."""
    seeds: tuple[int, ...]
    rates: tuple[float, ...] = ()
    """Learning rates to try, as multiples of the recipe's; empty: no tuning."""
    tuning_seeds: tuple[int, ...] = ()
    """Seeds for tuning; they differ from the seeds that are measured."""
    tuning_share: float = 0.5
    """Share of the optimization steps in a tuning run."""
    rule: RateRule = field(default_factory=LargestArea)
    """Rule that chooses a learning rate."""


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "smoke",
            {
                "vision": str(_SMOKE / "vision.yaml"),
                "text": str(_SMOKE / "text.yaml"),
                "choices": str(_SMOKE / "text.yaml"),
                "second": str(_SMOKE / "text.yaml"),
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
                "second": "mini/text",
            },
            seeds=(0, 1, 2),
            rates=(0.5, 1.0, 2.0),
            tuning_seeds=(
                1000,
                1001,
            ),  # one seed is too noisy; so were two with rates a factor of 3 apart
            tuning_share=1.0,  # a rate that is best after half the steps may collapse later
        ),
        Scale(
            "small",
            {
                "vision": str(_SMALL / "smollm2-135m.yaml"),
                "text": str(_SMALL / "smollm2-135m.yaml"),
                "choices": str(_SMALL / "smollm2-135m.yaml"),
                "second": str(_SMALL / "gemma-3-270m.yaml"),
            },
            seeds=(0, 1, 2),
            rates=(1.0, 2.0, 4.0),  # SAPO, PPO and GRPO each learned at the recipe's rate
            tuning_seeds=(1000, 1001),
            tuning_share=0.5,
            rule=LargestSafe(),
        ),
        Scale(
            "paper",
            {
                "vision": "geo3k/qwen2.5-vl-3b-sapo",
                "text": "gsm8k/rhomath-1.1b-sapo",
                "choices": "gsm8k/rhomath-1.1b-sapo",
                "second": "gsm8k/deepseekmath-7b-sapo",
            },
            seeds=(0, 1, 2),
        ),
    )
}


def scale_of(name: str) -> Scale:
    """Look up a scale by name."""
    if name not in SCALES:
        hint = nearest(name, SCALES)
        raise RecipeError(f"the scales are {', '.join(SCALES)}; got {name!r}.{hint}")
    return SCALES[name]
