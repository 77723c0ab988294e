"""Parts of a method from a user's file reach workers that cannot import the file."""

import subprocess
import sys
from pathlib import Path

MAKE = """
import sys
from pathlib import Path
import ray
import verl.trainer.ppo.v1.trainer_base  # as verl does, before its plugins' trainers
from segcredit.integrations.verl.settings import parse_settings, published_method
from segcredit.integrations.verl.trainer import _pickle_user_code_by_value

section = {"partition": {"name": sys.argv[1] + ":Pairs", "size": 3}}
method = published_method(parse_settings(section))
_pickle_user_code_by_value()
Path(sys.argv[2]).write_bytes(ray.cloudpickle.dumps(method))
"""
READ = """
import pickle, sys
from pathlib import Path
print(pickle.loads(Path(sys.argv[1]).read_bytes()).credit.over)
"""


def test_a_method_with_an_own_partition_is_pickled_by_value(tmp_path: Path) -> None:
    file, pickled = tmp_path / "own.py", tmp_path / "method.pkl"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from segcredit.partition import FixedLength\n"
        "@dataclass(frozen=True)\n"
        "class Pairs(FixedLength):\n"
        "    size: int = 2\n"
    )
    subprocess.run([sys.executable, "-c", MAKE, str(file), str(pickled)], check=True)
    file.unlink()
    done = subprocess.run(
        [sys.executable, "-c", READ, str(pickled)], check=True, capture_output=True, text=True
    )
    assert "Pairs(size=3)" in done.stdout
