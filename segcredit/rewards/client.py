"""Concurrent HTTP requests to a server, repeated if a failure may be temporary."""

import http.client
import io
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from segcredit.printable import printable, shown
from segcredit.rewards.checks import RewardError

T = TypeVar("T")

PAUSE, MAX_PAUSE = 0.5, 10.0
"""Seconds before the second attempt; the pause doubles each time, up to the maximum."""
GRACE = 1.0
"""Seconds after the deadline until which requests report why they failed."""
MAX_REPLY = 2**20
"""Maximum number of bytes of a reply."""
MAX_HEADERS = 2**17
"""Maximum number of bytes of a reply's headers."""
_SECRET = re.compile(r"(?i)[?&][^=&]*(key|token|secret|passw(or)?d|sig|signature|auth)=")
"""Names in a URL's query whose values are secret."""
_WHY = 200
"""Maximum number of characters of a server's explanation."""
CONNECT = 10.0
"""Maximum number of seconds to open a connection."""
NOTICE = 3.0
"""Seconds without a usable reply after which a warning says that requests are repeated."""
TRIAL = 5.0
"""Maximum number of seconds to open a connection before training."""
OPENAI_KEY = "OPENAI_API_KEY"
"""Environment variable with the key of an OpenAI-compatible server."""


class NoReplyError(Exception):
    """A request without a usable reply; the message says why."""


class _Outage:
    """Failed attempts since the last reply, over all requests; each outage has one warning."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replied = -inf
        self._began: float | None = None
        self._warned = False

    def end(self) -> None:
        """Note a reply."""
        with self._lock:
            self._replied, self._began, self._warned = time.monotonic(), None, False

    def note(self, address: str, why: str, began: float, until: float) -> None:
        """Note a failed attempt that began at this time; warn if this goes on for long."""
        with self._lock:
            now = time.monotonic()
            if self._began is None:
                self._began = max(began, self._replied)
            if self._warned or now - self._began < NOTICE or now >= until:
                return
            self._warned = True
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - now + self._began))
        warnings.warn(
            f"no usable reply from {printable(address, 200)} since {since}: {why}. Trying again "
            f"for up to {until - now:.0f} s",
            stacklevel=3,
        )


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
    _outage: _Outage = field(default_factory=_Outage, repr=False, compare=False)

    def request(self, path: str, body: Any | None, until: float) -> Any:
        """Send a request, again if the failure may be temporary, and parse the reply.

        Args:
            path: Appended to the URL.
            body: Sent as JSON; None: a GET request.
            until: Deadline by the monotonic clock, over all attempts.

        A warning says so if there has been no usable reply to any request for some seconds.

        Raises:
            NoReplyError: There was no reply, or it is no JSON.
        """
        headers = {"Content-Type": "application/json"}
        if key := _key(self.key):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        address = f"{self.url.rstrip('/')}/{path}" if path else self.url
        attempt, last = 0, "none, since other requests took all the time"
        while (left := until - (began := time.monotonic())) > 0:
            request = urllib.request.Request(address, data, headers)
            try:
                with _OPENER.open(request, timeout=min(self.timeout, left)) as reply:
                    text = _read(reply, min(until, time.monotonic() + self.timeout))
                self._outage.end()
                return json.loads(text)
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                last = self._why(error, key)
                attempt += 1
                if attempt == self.attempts or not _temporary(error):
                    raise NoReplyError(last) from None
                self._outage.note(address, last, began, until)
            pause = min(PAUSE * 2.0 ** min(attempt - 1, 20), MAX_PAUSE)
            time.sleep(max(0.0, min(pause, until - time.monotonic())))
        raise NoReplyError(f"no reply in time; the last attempt: {last}")

    def _why(self, error: Exception, key: str) -> str:
        """Describe a failure on one line, with the server's explanation but without the key."""
        text = str(error) or type(error).__name__
        if isinstance(error, urllib.error.HTTPError):
            if error.code in (401, 403):
                text += f" (the key is read from {self.key})"
            else:
                with suppress(OSError, http.client.HTTPException):
                    # more than is kept, so that no part of a key is left at the end
                    text += f" {error.read(2**12).decode(errors='replace')}"
            error.close()  # it holds the connection
        return printable((text.replace(key, "…") if key else text).strip(), _WHY)

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
    """Raise ValueError unless this is a URL of a server, without a password or key in it."""
    text = url if isinstance(url, str) else ""
    user, _, host = re.sub(r"^\w+://", "", text).partition("/")[0].rpartition("@")
    if user or _SECRET.search(text):  # first, since the other message quotes the URL
        raise ValueError(
            f"{owner}: expected a url without a password, since the url is saved; got one for "
            f"{printable(host.partition('?')[0], 200)}. Pass a key by its environment variable."
        )
    try:
        parts = urllib.parse.urlsplit(text)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or half of an IPv6 address
        usable = False
    if not (usable and text.isascii() and text.isprintable() and " " not in text):
        raise ValueError(
            f"{owner} needs the URL of a server, such as {example}; got {shown(url)}. Correct the "
            f"URL."
        )


def require_reachable(owner: str, url: str) -> None:
    """Raise RewardError unless a connection to the server can be opened within a few seconds.

    Nothing is sent. A server behind a proxy is not tried.
    """
    parts = urllib.parse.urlsplit(url)
    host, until = parts.hostname or "", time.monotonic() + TRIAL
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)

    def connect() -> None:
        while True:
            try:
                left = max(0.01, until - time.monotonic())
                socket.create_connection((host, port), timeout=left).close()
                return
            except OSError as error:
                if time.monotonic() + PAUSE >= until:
                    raise NoReplyError(str(error)) from None
            time.sleep(PAUSE)

    (found,) = ask_all([connect], 1, until)
    if isinstance(found, NoReplyError):
        raise RewardError(
            f"expected {owner} at {printable(url, 200)}; got no connection within {TRIAL:g} s: "
            f"{found}. Start the server or correct its url (reward.url), then start again."
        )


def ask_all(
    calls: Sequence[Callable[[], T]], workers: int, until: float
) -> "list[T | NoReplyError]":
    """Make several calls concurrently; a failed or late call returns a NoReplyError.

    Any other exception ends all calls. Returns soon after the deadline, by the monotonic clock, at
    which requests end by themselves. A thread that does not end, such as one that waits for a name
    server, is abandoned, and does not keep the interpreter from exiting.
    """
    found: list[T | NoReplyError] = [NoReplyError("no reply in time")] * len(calls)
    waiting = deque(enumerate(calls))
    ended: SimpleQueue[BaseException | None] = SimpleQueue()

    def work() -> None:
        problem: BaseException | None = None
        while problem is None:
            try:
                number, call = waiting.popleft()
            except IndexError:
                break
            try:
                found[number] = call()
            except NoReplyError as error:
                found[number] = error
            except BaseException as error:
                problem = error
        ended.put(problem)

    count = min(workers, len(calls))
    for _ in range(count):
        threading.Thread(target=work, name="segcredit request", daemon=True).start()
    try:
        for _ in range(count):
            problem = ended.get(timeout=max(0.0, until - time.monotonic()) + GRACE)
            if problem is not None:
                raise problem
    except Empty:  # late
        pass
    finally:
        waiting.clear()
    return list(found)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: the key and responses go only to the URL that the user named."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class _TimedReader(io.RawIOBase):
    """Reads a reply up to its deadline and maximum size, also its headers.

    The timeout of a socket limits the wait for the next bytes only, so headers that arrive slowly
    and an endless series of ``100 Continue`` would keep a thread forever.
    """

    def __init__(self, raw: io.RawIOBase, connection: socket.socket) -> None:
        self._raw, self._socket, self._size = raw, connection, 0
        timeout = connection.gettimeout()
        self._until = inf if timeout is None else time.monotonic() + timeout

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._until - time.monotonic()
        if left <= 0.0:
            raise TimeoutError("timed out: the reply did not arrive completely in time")
        if left < inf:
            self._socket.settimeout(left)
        count = self._raw.readinto(buffer)
        self._size += count or 0
        if self._size > MAX_REPLY + MAX_HEADERS:
            raise ValueError(f"a reply of more than {MAX_REPLY} bytes")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """A response whose status line and headers have a deadline, too."""

    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self.fp = io.BufferedReader(_TimedReader(self.fp.detach(), sock))


@contextmanager
def _quickly(connection: http.client.HTTPConnection) -> Iterator[None]:
    """Limit the time to connect, since a host that does not exist refuses nothing."""
    timeout = connection.timeout
    connection.timeout = CONNECT if timeout is None else min(timeout, CONNECT)
    yield
    connection.timeout = timeout
    connection.sock.settimeout(timeout)


class _Connection(http.client.HTTPConnection):
    response_class = _TimedResponse

    def connect(self) -> None:
        with _quickly(self):
            super().connect()


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _TimedResponse

    def connect(self) -> None:
        with _quickly(self):
            super().connect()


class _Handler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request)


class _SecureHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, request)


_OPENER = urllib.request.build_opener(_NoRedirects, _Handler, _SecureHandler)


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
    if reply.length:  # read1 returns the end of a lost connection like the end of a reply
        raise http.client.IncompleteRead(b"".join(parts), reply.length)
    return b"".join(parts)


def _key(name: str) -> str:
    """Return the key in an environment variable, without the newline of a file around it.

    http.client quotes a header that it cannot send, so such a key must not reach it.
    """
    key = os.environ.get(name, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise RewardError(
            f"{name}: expected a key of printable ASCII characters; got others (not shown here). "
            f"Set the environment variable again."
        )
    return key


def _temporary(error: Exception) -> bool:
    """Whether another attempt may succeed: a busy server or a lost connection, not a refusal."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 429) or error.code >= 500
    return isinstance(error, OSError | http.client.HTTPException)
