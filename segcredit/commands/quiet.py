"""Other libraries' progress bars and advice, out of the way of ours."""

import os
import threading
import warnings

_show = threading.excepthook


def quiet_libraries() -> None:
    """Silence transformers' bars, the warnings that concern no user, and TensorBoard's thread."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    threading.excepthook = _show_unless_tensorboards


def _show_unless_tensorboards(arguments: threading.ExceptHookArgs) -> None:
    """On a full disk its thread dies with a traceback; the run says itself what is wrong."""
    if not type(arguments.thread).__module__.startswith("tensorboard."):
        _show(arguments)
