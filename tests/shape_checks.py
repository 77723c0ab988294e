"""The runtime checker behind jaxtyping's shapes in tests: beartype, with int accepted for float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
