"""Serve the report of runs in progress to a browser on this machine.

Every user of the machine can reach the port, so the address contains a random token.
"""

import re
import secrets
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from segcredit.report.benchmarks import gather_benchmarks
from segcredit.report.data import (
    Kind,
    Rows,
    files,
    gather_images,
    read_rows,
    to_json,
)
from segcredit.report.overview import gather_overview
from segcredit.report.page import policy, render_page, report_title
from segcredit.runlog import Run, RunFolder, read_run
from segcredit.runlog.folder import require_run

HOST = "127.0.0.1"
RESPONSES = 64
"""Maximum number of responses shown of each step."""
_ROWS = re.compile(r"/rows/(\d{1,4})-(rollouts|watched)-(\d{1,9})")


class Server(ThreadingHTTPServer):
    """HTTP server that reads the run directories again for every request."""

    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int = 0, trusted: bool = False) -> None:
        self.folders = list(folders)
        self.trusted = trusted
        self.token = secrets.token_urlsafe(16)
        super().__init__((HOST, port), _Handler)

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        return f"http://localhost:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closes the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def runs(self) -> list[Run]:
        """Read the runs in their current state."""
        return [read_run(folder, self.trusted) for folder in self.folders]


def list_rows(runs: Sequence[Run]) -> list[Rows]:
    """List the files with responses, without reading them."""
    kinds: tuple[Kind, ...] = ("rollouts", "watched")
    return [
        Rows(number, kind, step, 0, 0, (), "", ())
        for number, run in enumerate(runs)
        for kind in kinds
        for step in files(run, kind)
    ]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        """Answer with the page, its overview, or responses; everything else is 404."""
        # DNS rebinding: another site can point its own name at this machine
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if host not in ("localhost", HOST):
            self.send_error(403, "only for a browser on this machine")
            return
        token, slash, rest = self.path.removeprefix("/").partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self.send_error(
                403, "use the full address, with its token, that segcredit report --serve printed"
            )
            return
        try:
            self._answer(slash + rest)
        except ConnectionError:  # the browser closed the connection
            raise
        except (OSError, ValueError) as error:  # a run that was moved, or is being written
            self._send(to_json({"error": str(error)}), "application/json", 503)

    def _answer(self, path: str) -> None:
        runs = self.server.runs()
        if path in ("/", "/index.html"):
            overview, found = self._overview(runs), gather_benchmarks(runs)
            page = render_page(report_title(runs), overview, live=True, benchmarks=found)
            self._send(page, "text/html")
        elif path == "/overview.json":
            self._send(to_json({**self._overview(runs), "live": True}), "application/json")
        elif (match := _ROWS.fullmatch(path)) is not None:
            self._send_rows(runs, int(match[1]), match[2], int(match[3]))
        else:
            self.send_error(404)

    def _overview(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Collect the overview of all runs; raise an error if a run was moved meanwhile."""
        found = gather_overview(runs, list_rows(runs))
        for run in runs:
            require_run(RunFolder(run.path))
        return found

    def _send_rows(self, runs: Sequence[Run], number: int, kind: str, step: int) -> None:
        chosen: Kind = "watched" if kind == "watched" else "rollouts"
        if number >= len(runs) or step not in files(runs[number], chosen):
            self.send_error(404)
            return
        rows = read_rows(runs[number], number, chosen, step, RESPONSES)
        images = to_json(gather_images(runs, [rows]))
        listed = to_json(rows.listed())
        self._send(f'{rows.json[:-1]},"images":{images},"listed":{listed}}}', "application/json")

    def _send(self, text: str, kind: str, status: int = 200) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", policy(live=True))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
