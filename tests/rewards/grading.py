"""Responses to grade, and a look at the process table."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from segcredit.types import Prompt, Response

needs_proc = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc, which only Linux has"
)


def response(
    text: str,
    gold: str | None = "12",
    *,
    id: str = "p1",
    num_tokens: int = 10,
    truncated: bool = False,
    **columns: object,
) -> Response:
    prompt = Prompt(id, ({"role": "user", "content": "Why?"},), answer=gold, columns=columns)
    return Response(prompt, text, num_tokens, truncated, 100)


def boxed(answer: str, gold: str = "12") -> Response:
    return response(f"so \\boxed{{{answer}}}.", gold)


def children(parent: int) -> set[int]:
    """Processes whose parent this is, zombies included."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended meanwhile
                continue
            if int(after_name[1]) == parent:
                found.add(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"  # killed; whoever inherited it has not looked yet


def eventually(holds: Callable[[], bool], seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
