from pathlib import Path

import pytest
from train.small import SMALL, warm_start


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory):
    """Kept warm starts, each made on first use."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = warm_start(SMALL[name], tmp_path_factory.mktemp("warm") / name)
        return made[name]

    return get
