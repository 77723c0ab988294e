"""Ask an OpenAI-compatible server to extract answers that the rules did not find."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from segcredit.printable import printable
from segcredit.rewards.client import Client, NoReplyError, ask_all, require_url

ATTEMPTS = 4
"""Attempts per request, while the server is busy, restarts or drops the connection."""
THREADS = 8
"""Requests at the same time."""
MAX_TOKENS = 128
"""Maximum length of a reply in tokens."""


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
        require_url("--judge", self.url, "http://localhost:8000/v1")

    def check(self) -> None:
        """Raise ValueError unless the model answers."""
        self.ask(["Reply with the word OK."])

    def ask(self, prompts: Sequence[str]) -> list[str]:
        """Return the greedy reply to each prompt, in order; the first failure ends all requests."""
        if not prompts:
            return []
        until = time.monotonic() + self.seconds
        client = Client(self.url, attempts=ATTEMPTS)
        try:
            model = client.first_model(until) if self.model is None else self.model
        except NoReplyError as error:
            raise self._problem(error) from None

        def reply(prompt: str) -> str:
            try:
                return client.chat(model, prompt, MAX_TOKENS, until)
            except NoReplyError as error:
                raise self._problem(error) from None

        replies = ask_all([partial(reply, x) for x in prompts], THREADS, until)
        if late := [x for x in replies if isinstance(x, NoReplyError)]:
            raise self._problem(late[0])
        return [x for x in replies if isinstance(x, str)]

    def _problem(self, what: NoReplyError) -> ValueError:
        return ValueError(
            f"expected an OpenAI-compatible judge at {self.url}; got {printable(str(what), 300)}. "
            f"Start the server (vllm serve MODEL), correct --judge URL, or grade only by rules: "
            f"leave --judge out."
        )
