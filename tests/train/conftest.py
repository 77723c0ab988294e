from pathlib import Path

import jaxtyping
import pytest
from train.small import SMALL, warm_start


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory):
    """Kept warm starts, each made on first use."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            # hundreds of steps, whose shape checks (done elsewhere) would take a third of the time
            before = jaxtyping.config.jaxtyping_disable
            jaxtyping.config.update("jaxtyping_disable", True)
            try:
                made[name] = warm_start(SMALL[name], tmp_path_factory.mktemp("warm") / name)
            finally:
                jaxtyping.config.update("jaxtyping_disable", before)
        return made[name]

    return get
