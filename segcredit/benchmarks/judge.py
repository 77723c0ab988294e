"""Ask an OpenAI-compatible server to extract answers that the rules did not find."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from segcredit.benchmarks.server import check_url
from segcredit.printable import printable
from segcredit.rewards.client import Client, NoReplyError

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
        check_url("--judge", self.url)

    def check(self) -> None:
        """Raise ValueError unless the model answers."""
        self.ask(["Reply with the word OK."])

    def ask(self, prompts: Sequence[str]) -> list[str]:
        """Return the greedy reply to each prompt, in order; the first failure ends all requests."""
        if not prompts:
            return []
        until = time.monotonic() + self.seconds
        client = Client(self.url, attempts=ATTEMPTS)
        pool = ThreadPoolExecutor(THREADS)
        try:
            model = client.first_model(until) if self.model is None else self.model
            return list(pool.map(lambda x: client.chat(model, x, MAX_TOKENS, until), prompts))
        except NoReplyError as error:
            raise ValueError(
                f"expected an OpenAI-compatible judge at {self.url}; got "
                f"{printable(str(error), 300)}. Start the server (vllm serve MODEL), correct "
                f"--judge URL, or grade by rules alone: leave --judge out."
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)
