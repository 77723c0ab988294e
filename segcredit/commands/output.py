"""Parts that commands share: options, error messages, streams that survive a closed pipe."""

import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from rich.console import Console

RecipeName = Annotated[str, typer.Argument(help="YAML file, or name of a built-in recipe.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Override settings with key.path=value.", metavar="[KEY=VALUE]…"),
]
TrustRun = Annotated[
    bool,
    typer.Option("--trust-run", help="Run code that the run's config.yaml names; see SECURITY.md."),
]
"""Option of every command that loads a run's model or reward."""
SkipBadRows = Annotated[
    bool, typer.Option("--skip-bad-rows", help="Skip data rows that cannot be used.")
]
AllowOutside = Annotated[
    bool, typer.Option("--allow-outside", help="Allow image paths outside the data folder.")
]
TopP = Annotated[
    float | None,
    typer.Option(help="Top-p sampling.", min=0.01, max=1, show_default="the run's, or 1.0"),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        help="Maximum response length in tokens.", min=1, show_default="the run's, or 2048"
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        help="Prompt for a base model without a chat template, with {question} in it.",
        show_default="the run's",
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        help="hf, vllm, or your own engine (file.py:Name).", show_default="the run's, or hf"
    ),
]
ModelFamily = Annotated[
    str | None,
    typer.Option(
        help="Model family: a built-in name, or your own (file.py:Name).",
        show_default="the run's, or by the model's type",
    ),
]
Seed = Annotated[int, typer.Option(help="Random seed.", min=0)]
PAPER: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95}
"""Sampling as in Table 7 of the SAPO paper, which does not state the number of samples."""


class SafeStream:
    """Standard output or error that survives a closed pipe or a full disk.

    After such a failure all output is discarded and the command continues. One warning on stderr
    reports the loss.
    """

    def __init__(self, stream: IO[str] | None, note: str = "") -> None:
        """Wrap a stream; ``note`` is printed after the reason. Without it, nothing is printed."""
        self._stream = stream
        self._note = note

    def write(self, text: str) -> int:
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def isatty(self) -> bool:
        with suppress(ValueError):  # closed
            return self._stream is not None and self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, name: str, *arguments: str) -> None:
        if self._stream is None:
            return
        try:
            getattr(self._stream, name)(*arguments)
        except (OSError, ValueError) as error:  # ValueError: closed
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Redirect the stream to the null device, so that its buffered text cannot fail again."""
        with suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # type: ignore[union-attr]
            os.close(nowhere)
        self._stream = None
        if self._note:
            reason = getattr(error, "strerror", None) or str(error)
            print(
                f"warning: standard output is lost ({reason}). {self._note}",
                file=cast(IO[str], SafeStream(sys.stderr)),
                flush=True,
            )


def safe_stream(stream: IO[str] | None, note: str = "") -> IO[str]:
    """Wrap a stream so that the command continues if the stream breaks (a closed pipe)."""
    return cast(IO[str], SafeStream(stream, note))


def say(console: "Console", text: str, style: str | None = None) -> None:
    """Print a line as it is, without wrapping, so that paths and commands can be copied."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_error(error: object) -> None:
    """Print an error to stderr."""
    from rich.console import Console

    say(Console(file=safe_stream(sys.stderr)), f"error: {error}", "red")


@contextmanager
def exit_codes(*errors: type[Exception]) -> Iterator[None]:
    """Turn an expected error into a message and exit code 2, and Ctrl-C into exit code 130."""
    expected: tuple[type[Exception], ...] = (ValueError, OSError, *errors)
    try:
        yield
    except expected as error:
        print_error(error)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


_show = threading.excepthook


def quiet_libraries() -> None:
    """Silence progress bars and warnings of libraries, and errors in TensorBoard's thread."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    # Pillow's; segcredit.models.images reports such an image as an error
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")
    threading.excepthook = _show_unless_tensorboard


def _show_unless_tensorboard(arguments: threading.ExceptHookArgs) -> None:
    """Hide tracebacks of TensorBoard's thread on a full disk, which the run itself reports."""
    if not type(arguments.thread).__module__.startswith("tensorboard."):
        _show(arguments)
