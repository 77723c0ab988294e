"""Ask an OpenAI-compatible server to extract answers that the rules did not find."""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from segcredit.printable import printable, shown

TIMEOUT = 60.0
"""Maximum number of seconds for one request."""
ATTEMPTS = 4
"""Attempts per request, while the server is busy, restarts or drops the connection."""
PAUSE = 0.5
"""Seconds before the second attempt; the pause doubles each time."""
THREADS = 8
"""Requests at the same time."""
MAX_REPLY = 2**20
"""Maximum number of bytes of a reply."""
KEY = "OPENAI_API_KEY"


@dataclass(frozen=True)
class Judge:
    """A model behind ``URL/chat/completions``; the key is read from OPENAI_API_KEY."""

    url: str
    """Base URL, such as http://localhost:8000/v1."""
    model: str | None = None
    """None: the first model of the server."""
    seconds: float = 900.0
    """Maximum number of seconds for all prompts of one call."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"--judge must be the URL of an OpenAI-compatible server, such as "
                f"http://localhost:8000/v1; got {shown(self.url)}."
            )

    def check(self) -> None:
        """Raise ValueError unless the server can be reached."""
        self._model(time.monotonic() + self.seconds)

    def ask(self, prompts: Sequence[str]) -> list[str]:
        """Return the greedy reply to each prompt, in order; the first failure ends all requests."""
        if not prompts:
            return []
        until = time.monotonic() + self.seconds
        model = self._model(until)
        pool = ThreadPoolExecutor(THREADS)
        try:
            return list(pool.map(lambda prompt: self._ask(model, prompt, until), prompts))
        finally:
            pool.shutdown(cancel_futures=True)

    def _ask(self, model: str, prompt: str, until: float) -> str:
        reply = self._request(
            until,
            "chat/completions",
            {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0,
                "max_tokens": 128,
            },
        )
        try:
            return str(reply["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            raise self._problem(f"a reply without choices[0].message: {reply!r:.200}") from None

    def _model(self, until: float) -> str:
        if self.model is not None:
            return self.model
        reply = self._request(until, "models")
        try:
            return str(reply["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise self._problem(f"no list of models: {reply!r:.200}") from None

    def _request(self, until: float, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a request, again if the failure may be temporary, and parse the reply."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", data, headers)
        for attempt in range(ATTEMPTS):
            left = until - time.monotonic()
            if left <= 0:
                raise self._problem(f"no reply to all requests within {self.seconds:g} s")
            try:
                with urllib.request.urlopen(request, timeout=min(TIMEOUT, left)) as reply:
                    return json.loads(reply.read(MAX_REPLY))
            except (OSError, http.client.HTTPException, ValueError) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # it holds the connection
                if attempt == ATTEMPTS - 1 or not _temporary(error):
                    raise self._problem(str(error) or type(error).__name__) from None
            time.sleep(min(PAUSE * 2**attempt, max(0.0, until - time.monotonic())))
        raise AssertionError("the last attempt returns or raises")

    def _problem(self, what: str) -> ValueError:
        return ValueError(
            f"expected an OpenAI-compatible judge at {self.url}; got {printable(what, 300)}. Start "
            f"the server (vllm serve MODEL), correct --judge URL, or grade by rules alone: leave "
            f"--judge out."
        )


def _temporary(error: Exception) -> bool:
    """Whether another attempt may succeed: a busy server or a lost connection, not a refusal."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code == 429 or error.code >= 500
    return isinstance(error, OSError | http.client.HTTPException)
