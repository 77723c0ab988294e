"""Ask an OpenAI-compatible server to extract answers that the rules did not find."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from segcredit.printable import printable, shown

TIMEOUT = 60.0
"""Seconds per request."""
THREADS = 8
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

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"--judge must be the URL of an OpenAI-compatible server, such as "
                f"http://localhost:8000/v1; got {shown(self.url)}."
            )

    def check(self) -> None:
        """Raise ValueError unless the server can be reached."""
        self._model()

    def ask(self, prompts: Sequence[str]) -> list[str]:
        """Return the reply to each prompt, in order; greedy."""
        if not prompts:
            return []
        model = self._model()
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(lambda prompt: self._ask(model, prompt), prompts))

    def _ask(self, model: str, prompt: str) -> str:
        reply = self._request(
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

    def _model(self) -> str:
        if self.model is not None:
            return self.model
        reply = self._request("models")
        try:
            return str(reply["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise self._problem(f"no list of models: {reply!r:.200}") from None

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                return json.loads(reply.read(MAX_REPLY))
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise self._problem(str(error)) from None

    def _problem(self, what: str) -> ValueError:
        return ValueError(
            f"expected an OpenAI-compatible judge at {self.url}; got {printable(what, 300)}. Start "
            f"the server (vllm serve MODEL), correct --judge URL, or grade by rules alone: leave "
            f"--judge out."
        )
