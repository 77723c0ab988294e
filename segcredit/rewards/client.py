"""Requests to a server over HTTP: concurrent, tried again while a failure may be temporary."""

import http.client
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from segcredit.printable import printable, shown

T = TypeVar("T")

PAUSE, MAX_PAUSE = 0.5, 10.0
"""Seconds before the second attempt; the pause doubles each time, up to the maximum."""
GRACE = 1.0
"""Seconds after the deadline until which requests report why they failed."""
MAX_REPLY = 2**20
"""Maximum number of bytes of a reply."""
OPENAI_KEY = "OPENAI_API_KEY"
"""Environment variable with the key of an OpenAI-compatible server."""


class NoReplyError(Exception):
    """A request without a usable reply; the message says why."""


@dataclass(frozen=True)
class Client:
    """Sends JSON to a server and reads JSON. Replies are untrusted: limited in time and size."""

    url: str
    key: str = OPENAI_KEY
    """Environment variable whose value is sent as the key, if it is set."""
    timeout: float = 60.0
    """Maximum number of seconds for one attempt."""
    attempts: int | None = None
    """Maximum number of attempts; None: until the deadline of the request."""

    def request(self, path: str, body: Any | None, until: float) -> Any:
        """Send a request, again if the failure may be temporary, and parse the reply.

        Args:
            path: Appended to the URL.
            body: Sent as JSON; None: a GET request.
            until: Deadline by the monotonic clock, over all attempts.

        Raises:
            NoReplyError: There was no reply, or it is no JSON.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.key):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        address = f"{self.url.rstrip('/')}/{path}" if path else self.url
        attempt, last = 0, "none, since other requests took all the time"
        while (left := until - time.monotonic()) > 0:
            request = urllib.request.Request(address, data, headers)
            try:
                with _OPENER.open(request, timeout=min(self.timeout, left)) as reply:
                    return json.loads(_read(reply, min(until, time.monotonic() + self.timeout)))
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # it holds the connection
                last = printable(str(error) or type(error).__name__, 200)
                attempt += 1
                if attempt == self.attempts or not _temporary(error):
                    raise NoReplyError(last) from None
            pause = min(PAUSE * 2.0 ** min(attempt - 1, 20), MAX_PAUSE)
            time.sleep(max(0.0, min(pause, until - time.monotonic())))
        raise NoReplyError(f"no reply in time; the last attempt: {last}")

    def first_model(self, until: float) -> str:
        """Return the first model of an OpenAI-compatible server."""
        reply = self.request("models", None, until)
        try:
            return str(reply["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise NoReplyError(f"no list of models: {printable(repr(reply), 200)}") from None

    def chat(self, model: str, prompt: str, max_tokens: int, until: float) -> str:
        """Return the greedy reply of a model behind an OpenAI-compatible server."""
        reply = self.request(
            "chat/completions",
            {
                "model": model,
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0,
                "max_tokens": max_tokens,
            },
            until,
        )
        try:
            return str(reply["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            raise NoReplyError(
                f"a reply without choices[0].message: {printable(repr(reply), 200)}"
            ) from None


def require_url(owner: str, url: object, example: str) -> None:
    """Raise ValueError unless this is a URL of a server, without a password in it."""
    parts = urllib.parse.urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"{owner} needs the URL of a server, such as {example}; got {shown(url)}. Set url."
        )
    if parts.username is not None or parts.password is not None:
        raise ValueError(
            f"{owner}: expected a url without a password, since config.yaml would hold it; got one "
            f"for {parts.hostname}. Pass a key by its environment variable."
        )


def ask_all(
    calls: Sequence[Callable[[], T]], workers: int, until: float
) -> "list[T | NoReplyError]":
    """Make several calls at the same time; those that fail, or are late, give a NoReplyError.

    Returns soon after the deadline, by the monotonic clock, at which requests end by themselves.
    """
    if not calls:
        return []
    pool = ThreadPoolExecutor(workers)
    try:
        futures = [pool.submit(call) for call in calls]
        wait(futures, timeout=max(0.0, until - time.monotonic()) + GRACE)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    found: list[T | NoReplyError] = []
    for future in futures:
        if not future.done() or future.cancelled():
            found.append(NoReplyError("no reply in time"))
            continue
        try:
            found.append(future.result())
        except NoReplyError as error:
            found.append(error)
    return found


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: a key and responses go to the URL that the user named, only."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _read(reply: Any, until: float) -> bytes:
    """Read a reply up to the maximum size and the deadline, however slowly it arrives."""
    parts, size = [], 0
    while part := reply.read1(2**16):
        parts.append(part)
        size += len(part)
        if size > MAX_REPLY:
            raise ValueError(f"a reply of more than {MAX_REPLY} bytes")
        if time.monotonic() > until:
            raise TimeoutError("the reply did not arrive completely in time")
    return b"".join(parts)


def _temporary(error: Exception) -> bool:
    """Whether another attempt may succeed: a busy server or a lost connection, not a refusal."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 429) or error.code >= 500
    return isinstance(error, OSError | http.client.HTTPException)
