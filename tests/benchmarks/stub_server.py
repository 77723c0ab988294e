"""An OpenAI-compatible server that answers by a function of the last message."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Requests:
    """What the server was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def system_prompts(self) -> set[str]:
        return {x["messages"][0]["content"] for x in self.bodies if len(x["messages"]) > 1}


def last_text(body: dict[str, Any]) -> str:
    content = body["messages"][-1]["content"]
    if isinstance(content, str):
        return content
    return "\n".join(x["text"] for x in content if x["type"] == "text")


def make_server(
    answer: Callable[[str], str], port: int = 0
) -> tuple[ThreadingHTTPServer, Requests]:
    seen = Requests()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({"object": "list", "data": [{"id": "stub", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.bodies.append(body)
            message = {"role": "assistant", "content": answer(last_text(body))}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.reply({"model": body["model"], "choices": [choice], "usage": {}})

        def reply(self, content: object) -> None:
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler), seen


@contextmanager
def stub_server(answer: Callable[[str], str]) -> Iterator[tuple[str, Requests]]:
    """Serve in a thread; yield the base URL and the requests."""
    server, seen = make_server(answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":  # as `vllm serve MODEL --port N …`: a constant answer
    port = int(sys.argv[sys.argv.index("--port") + 1])
    make_server(lambda _: "<think>A?</think>\\boxed{C}", port)[0].serve_forever()
