"""A process that trains one run after another, as it is told; it dies with whoever told it.

Orders come as lines of JSON on stdin, events go as lines of JSON to stdout. When stdin ends, the
one who gave the orders is gone, so the process ends at once, as if killed: what it was doing is
resumed by the next one.
"""

import gc
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from queue import SimpleQueue
from typing import Any

WAIT = 0.5
"""Seconds between two looks at a run that another process is writing."""


class Channel:
    """Events to whoever listens."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # whatever else is printed goes to the log

    def tell(self, event: str, **facts: Any) -> None:
        """One line."""
        self._file.write(json.dumps({"event": event, **facts}) + "\n")
        self._file.flush()


def main() -> None:
    """Until stdin ends."""
    channel = Channel()
    orders: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    channel.tell("ready")
    while True:
        order = orders.get()
        try:
            obey(order, channel)
        except Exception as error:
            traceback.print_exc()
            channel.tell("failed", message=_message(error))
        gc.collect()
        _free_memory()


def obey(order: dict[str, Any], channel: Channel) -> None:
    """Bring one run to its end, from wherever it stands; one that another process has is his."""
    import torch

    from segcredit.runlog.lock import LockedError
    from segcredit.study.store import claim

    torch.set_num_threads(int(order["threads"]))
    own = Path(order["folder"])
    while True:
        try:
            lock = claim(own)
            break
        except LockedError:  # it will be finished there, or left to us
            channel.tell("elsewhere")
            time.sleep(WAIT)
    try:
        _bring_to_its_end(order, channel)
    finally:
        lock.release()


def _bring_to_its_end(order: dict[str, Any], channel: Channel) -> None:
    from segcredit.config import parse_recipe
    from segcredit.study.store import finish, folder_of, is_finished, record_of
    from segcredit.study.telling import Telling
    from segcredit.train.loop import Stopped
    from segcredit.train.trainer import Trainer

    folder = folder_of(Path(order["folder"]))
    if record_of(folder) is None:
        trainer = Trainer.from_recipe(parse_recipe(order["recipe"], folder.name))
        resume = (folder / "config.yaml").is_file()
        try:
            trainer.train(folder, resume=resume, watch=Telling(channel.tell))
        except Stopped:
            channel.tell("stopped")
            return
    if not is_finished(folder):
        finish(folder, order["keep"])
    channel.tell("done")


def _listen(orders: "SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    os._exit(0)


def _message(error: Exception) -> str:
    """What was said; of an error that is not meant for people, its kind as well."""
    said = str(error).strip()
    plain = isinstance(error, ValueError | OSError) or type(error).__name__ == "NotFinite"
    return said if plain and said else f"{type(error).__name__}: {said}"


def _free_memory() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
