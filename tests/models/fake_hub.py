"""A hub on this machine: it serves a folder, and refuses in every way the real one does."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread

REFUSED = {
    "gated": (403, "GatedRepo"),
    "gated-unknown": (401, "GatedRepo"),
    "none": (404, "RepoNotFound"),
    "no-config": (404, "EntryNotFound"),
    "busy": (503, ""),
}
"""Owner → status, and the code in its header."""
COMMIT = "0" * 40


@contextmanager
def fake_hub(model: Path) -> Iterator[str]:
    """The address of a hub that has one model, ``good/model``; ``slow/…`` never answers.

    Asked for ``/control/down`` it hangs up on everyone, until ``/control/up``.
    """
    over, down = Event(), Event()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, body: bool) -> None:
            owner, _, rest = self.path.removeprefix("/").partition("/")
            if owner == "control":
                (down.clear if rest == "up" else down.set)()
                self.send(b"", body)
                return
            if down.is_set():
                return
            if owner == "slow":
                over.wait()
                return
            status, code = REFUSED.get(owner, (404, "EntryNotFound"))
            file = model / rest.removeprefix("model/resolve/main/")
            if owner == "good" and "/resolve/" in rest and file.is_file():
                self.send(file.read_bytes(), body)
                return
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", f"{owner} is refused")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def send(self, data: bytes, body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if body:
                self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
