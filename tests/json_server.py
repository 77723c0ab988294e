"""A server on this machine that answers JSON requests as a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[Any, int], "tuple[int, bytes] | None"]
"""Makes status and body from a request and its number; None drops the connection."""


class Asked:
    """Requests that the server received."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0


def said(text: str) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}).encode()


@contextmanager
def serving(reply: Reply, port: int = 0) -> Iterator[tuple[str, Asked]]:
    """Run a server; yield its URL and the requests that it received."""
    seen, guard = Asked(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send((200, b'{"data": [{"id": "first"}]}'))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with guard:
                seen.bodies.append(body)
                seen.headers.append(dict(self.headers))
                seen.paths.append(self.path)
                seen.at_once += 1
                seen.most_at_once = max(seen.most_at_once, seen.at_once)
                number = len(seen.bodies)
            made = reply(body, number)
            with guard:
                seen.at_once -= 1
            self._send(made)

        def _send(self, made: tuple[int, bytes] | None) -> None:
            if made is None:
                self.connection.close()
                return
            self.send_response(made[0])
            if 300 <= made[0] < 400:
                self.send_header("Location", made[1].decode())
            self.send_header("Content-Length", str(len(made[1])))
            self.end_headers()
            self.wfile.write(made[1])

        def log_message(self, *_: object) -> None:
            pass

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (OSError, ValueError):  # a connection that was dropped on purpose
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()
