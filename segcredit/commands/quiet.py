"""Other libraries' progress bars and advice, out of the way of ours."""

import os
import warnings


def quiet_libraries() -> None:
    """Silence transformers' bars and the warnings that concern no user."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
