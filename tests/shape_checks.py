"""The runtime checker behind jaxtyping's shapes in tests: beartype, with int accepted for float."""

from collections.abc import Iterable

from beartype import BeartypeConf, beartype
from beartype.claw import beartype_packages

check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_types(modules: Iterable[str]) -> None:
    """The same for modules without shapes, at a tenth of what looking for some would take."""
    conf = BeartypeConf(is_pep484_tower=True, claw_is_pep526=False)
    beartype_packages(sorted(modules), conf=conf)
