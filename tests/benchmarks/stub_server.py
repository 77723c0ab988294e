"""An OpenAI-compatible server that answers by a function of the last message."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from json_server import Asked, serving


def system_prompts(seen: Asked) -> set[str]:
    return {x["messages"][0]["content"] for x in seen.bodies if len(x["messages"]) > 1}


def last_text(body: dict[str, Any]) -> str:
    content = body["messages"][-1]["content"]
    if isinstance(content, str):
        return content
    return "\n".join(x["text"] for x in content if x["type"] == "text")


@contextmanager
def stub_server(answer: Callable[[str], str], port: int = 0) -> Iterator[tuple[str, Asked]]:
    """Serve in a thread; yield the base URL and the requests."""

    def reply(body: dict[str, Any], number: int) -> tuple[int, bytes]:
        message = {"role": "assistant", "content": answer(last_text(body))}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        content = {"model": body["model"], "choices": [choice], "usage": {}}
        return 200, json.dumps(content).encode()

    with serving(reply, port) as found:
        yield found


if __name__ == "__main__":  # as `vllm serve MODEL --port N …`: a constant answer
    with stub_server(
        lambda _: "<think>A?</think>\\boxed{C}", int(sys.argv[sys.argv.index("--port") + 1])
    ):
        threading.Event().wait()
