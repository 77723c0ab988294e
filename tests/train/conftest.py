import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jaxtyping
import pytest
from train.small import SMALL, warm_start


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory):
    """Kept warm starts, each made on first use, by the process that needs it first."""
    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent  # of all of them

    def get(name: str) -> Path:
        made = place / f"warm-{name}"
        with (place / f"warm-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                with without_shape_checks():
                    warm_start(SMALL[name], place / f"warm-{name}.part").rename(made)
        return made

    return get


@contextmanager
def without_shape_checks() -> Iterator[None]:
    """For hundreds of steps, of which checks (done elsewhere) would take a third of the time."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """A test of which steps are many and shapes not the point."""
    with without_shape_checks():
        yield
