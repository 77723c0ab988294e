"""The ways to cut a response, by name, and what each must know about it."""

from collections.abc import Sequence
from typing import NamedTuple

from segcredit.viewer.errors import InputError, nearest
from segcredit.viewer.rows import Row

ALL = "all"


class Strategy(NamedTuple):
    """A way to cut."""

    about: str
    needs: tuple[str, ...] = ()
    """Fields of a row; any one of them will do."""


STRATEGIES = {
    "entropy": Strategy("after the most uncertain tokens (SAPO)", ("entropy",)),
    "probability": Strategy("before every n-th unlikely token (SPO)", ("prob", "logp")),
    "accumulate": Strategy("after every n-th unlikely token", ("prob", "logp")),
    "newline": Strategy("after each line"),
    "step": Strategy("before each Step 1, Step 2, …"),
    "fixed": Strategy("every so many tokens"),
    "token": Strategy("after each token (PPO)"),
    "response": Strategy("nowhere (GRPO, GSPO)"),
    "peaks": Strategy("after peaks of uncertainty", ("entropy",)),
    "smooth": Strategy("after the most uncertain stretches", ("entropy",)),
    "value": Strategy("where the critic changes its mind", ("value",)),
}


def check_names(asked: Sequence[str]) -> None:
    """Refuse a name that is not a strategy."""
    known = [*STRATEGIES, ALL]
    for name in asked:
        if name not in known:
            raise InputError(
                f"--strategy must be one of {', '.join(known)} (repeat -s for several); "
                f"got {name!r}.{nearest(name, known)}"
            )


def choose(asked: Sequence[str], row: Row) -> list[str]:
    """The strategies to show for a row: those asked for, each once, or the row's natural one."""
    if not asked:
        return ["entropy" if _can(row, "entropy") else "newline"]
    names: dict[str, None] = {}
    for name in asked:
        if name == ALL:
            names.update(dict.fromkeys(name for name in STRATEGIES if _can(row, name)))
        elif _can(row, name):
            names[name] = None
        else:
            raise InputError(_missing(name))
    return list(names)


def _can(row: Row, name: str) -> bool:
    needs = STRATEGIES[name].needs
    return not needs or any(getattr(row, field) is not None for field in needs)


def _missing(name: str) -> str:
    needs = STRATEGIES[name].needs
    example = (Row.model_fields[needs[0]].examples or [""])[0]
    return (
        f"strategy {name!r} needs the field {' or '.join(map(repr, needs))}; this row has none; "
        f"add {example}, or type -s newline"
    )
