"""What LoRA's matrices come to: how many numbers, beside which layers."""

from dataclasses import dataclass

from segcredit.config import LoraSettings, Optimize, Recipe, WarmStart
from segcredit.plan.shape import Shape


@dataclass(frozen=True)
class Adapter:
    """One set of them; policy and critic each have one."""

    sizes: tuple[int, ...]
    """Numbers of each matrix."""
    text: int
    """Numbers of those beside text layers."""
    inner: int
    """Per token: numbers between A and B, of all text layers."""
    outputs: int
    """Per token: what those layers say, to which the product is added; of all text layers."""
    vision: bool
    """Whether the vision tower has some."""
    reference: bool = False
    """Whether π_ref is a third set, as after a warm start; else it is the model without any."""

    @property
    def numbers(self) -> int:
        return sum(self.sizes)


def adapter_of(recipe: Recipe, shape: Shape) -> Adapter | None:
    """Of the recipe's settings on this model."""
    settings = recipe.model.lora
    if settings is None:
        return None
    kinds = [type(stage) for stage in recipe.stages]
    before = kinds[: kinds.index(Optimize)] if Optimize in kinds else kinds
    return adapter_on(shape, settings, not recipe.model.freeze_vision, WarmStart in before)


def adapter_on(
    shape: Shape, settings: LoraSettings, vision: bool = True, reference: bool = False
) -> Adapter:
    """Of these settings on this model."""
    from segcredit.models.targets import choose_layers, in_tower

    widths = {name: (wide, out) for name, wide, out in shape.linears}
    chosen = choose_layers(widths, settings.targets, vision)
    text = [name for name in chosen if not in_tower(name)]
    return Adapter(
        sizes=tuple(settings.rank * width for name in chosen for width in widths[name]),
        text=sum(settings.rank * sum(widths[name]) for name in text),
        inner=settings.rank * len(text),
        outputs=sum(widths[name][1] for name in text),
        vision=len(text) < len(chosen),
        reference=reference,
    )
