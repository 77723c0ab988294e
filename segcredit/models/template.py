"""Render prompts as text with ``data.template`` (with ``{question}``) or a chat template.

A chat template is a program that comes with the model, so it is checked under limits first.
"""

import os
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import TracebackType
from typing import Any

from segcredit.types import Prompt

Messages = Sequence[Mapping[str, Any]]
SECONDS = 10.0
"""Time limit for rendering one prompt; rendering usually takes about a millisecond."""
CHARACTERS = 10_000_000
"""Maximum number of characters that a chat template may write for one prompt."""
GIBIBYTES = 2
"""Memory limit of a chat template, in addition to the memory of the process."""

QUESTION = "{question}"
"""Placeholder of the question. Other braces have no meaning: questions are untrusted text."""


def check_template(template: str) -> str:
    """Return the template; raise ValueError unless it holds ``{question}`` exactly once."""
    if (count := template.count(QUESTION)) != 1:
        raise ValueError(
            f"a template holds {QUESTION} exactly once, as in 'Problem: {QUESTION} Solution:'; "
            f"got it {count} times in {template!r}."
        )
    return template


def fill_template(template: str, prompt: Prompt) -> str:
    """Put the prompt's question into the template."""
    check_questions([prompt])
    before, after = check_template(template).split(QUESTION)
    return before + prompt.messages[0]["content"] + after


def is_question(prompt: Prompt) -> bool:
    """Whether the prompt fits a template: a single message without images."""
    return not prompt.images and len(prompt.messages) == 1


def check_questions(prompts: Sequence[Prompt]) -> None:
    """Raise one ValueError for all prompts that have images or several messages."""
    more = [prompt for prompt in prompts if not is_question(prompt)]
    if not more:
        return
    first = more[0]
    holds = "images" if first.images else f"{len(first.messages)} messages"
    which = f"{len(more)} of {len(prompts)} prompts hold" if len(prompts) > 1 else "it holds"
    raise ValueError(
        f"a template formats one text message, but {which} more: prompt {first.id!r} has "
        f"{holds}. Remove the template (data.template, --template) to use the model's own chat "
        f"template, or remove such rows."
    )


class BrokenTemplate(ValueError):  # noqa: N818
    """A chat template that cannot be used with any prompt."""


class LimitedChat:
    """Renders chat messages in a child process with limits on time, memory and output.

    A chat template may loop forever or allocate all memory in a single operation, which neither a
    signal handler nor another thread can interrupt. The child process is killed by its own timer.
    """

    def __init__(self, render: Callable[[Messages], str]) -> None:
        self._render = render
        self._child: int | None = None
        self._pipe: Connection | None = None

    def __enter__(self) -> "LimitedChat":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> int:
        """End the child process and return its exit status; 0 if there was no child."""
        child, self._child = self._child, None
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
        if child is None:
            return 0
        os.kill(child, signal.SIGKILL)  # has no effect on the status of a child that already exited
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def __call__(self, messages: Messages) -> str:
        """Render the messages; raise ValueError or BrokenTemplate if that fails."""
        if not hasattr(os, "fork"):
            return self._render(messages)
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(messages)
            kind, text = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            timed_out = self.close() == -signal.SIGALRM
            why = f"did not finish within {SECONDS:g} s" if timed_out else "crashed"
            raise BrokenTemplate(f"the chat template {why}") from None
        if kind == "text":
            return str(text)
        raise (BrokenTemplate if kind == "broken" else ValueError)(text)

    def _start(self) -> None:
        ours, theirs = Pipe()
        with warnings.catch_warnings():
            # safe: the child only renders text and uses no locks of other threads
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            try:
                ours.close()
                _serve(theirs, self._render)
            finally:
                os._exit(0)
        theirs.close()
        self._child, self._pipe = child, ours


def _serve(pipe: Connection, render: Callable[[Messages], str]) -> None:
    """Render messages from the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _limit_memory()
    while True:
        try:
            messages = pipe.recv()
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            text = render(messages)
            reply = ("text", text)
            if len(text) > CHARACTERS:
                reply = ("broken", f"the chat template wrote {len(text):,} characters for a prompt")
        except BrokenTemplate as error:
            reply = ("broken", str(error))
        except ValueError as error:
            reply = ("failed", str(error))
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        pipe.send(reply)


def _limit_memory() -> None:
    import resource

    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + GIBIBYTES * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (OSError, ValueError, IndexError):  # no /proc, or a lower limit already
        return
