"""The sizes at which a study can run: which recipes, how many seeds, how much tuning."""

from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from segcredit.config import RecipeError

_SMOKE = Path(str(files("segcredit"))) / "study" / "smoke"


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
