"""One batch through the native trainer's parts and through verl's engines: the same numbers."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from running import environment
from toy import make_model

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def compare(folder: Path, model: Path, workers: int, **case: object) -> dict[str, float]:
    """Run ``equality.py`` on so many workers; the first one writes what differs."""
    port, out = free_port(), folder / "differences.json"
    processes = []
    for rank in range(workers):
        env = environment(
            folder,
            RANK=str(rank),
            WORLD_SIZE=str(workers),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        command = [sys.executable, HERE / "equality.py", model, out, json.dumps(case)]
        processes.append(subprocess.Popen(list(map(str, command)), env=env))
    for process in processes:
        assert process.wait(timeout=240) == 0
    return json.loads(out.read_text())


CASES = {
    "sapo": {"algorithm": "sapo", "mode": "seq-mean-token-mean"},
    "sapo as the authors' code": {"algorithm": "sapo_authors", "mode": "token-mean"},
    "sapo, fixed length": {
        "algorithm": "sapo",
        "mode": "seq-mean-token-mean",
        "partition": {"name": "fixed", "size": 3},
    },
    "sapo, lines": {
        "algorithm": "sapo",
        "mode": "seq-mean-token-mean",
        "partition": {"name": "newline"},
    },
    "sapo, token ratio": {"algorithm": "sapo_token_ratio", "mode": "seq-mean-token-mean"},
    "ppo": {"algorithm": "ppo", "mode": "token-mean"},
    "vc_ppo": {"algorithm": "vc_ppo", "mode": "token-mean"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("workers", [1, 2])
def test_segments_credit_losses_and_gradients_equal_the_native_ones(
    workers: int, model: Path, tmp_path: Path
) -> None:
    found = compare(tmp_path, model, workers, cases=CASES)
    assert set(found) == set(CASES)
    for name, differences in found.items():
        assert differences.pop("segments") == 0, name
        assert differences.pop("num_segments") > 8, name
        assert differences.pop("gradient_norm") > 1e-4, name  # there is something to compare
        for what, difference in differences.items():
            assert difference < 1e-5, f"{name}: {what} differs by {difference}"
