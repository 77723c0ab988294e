"""Several processes that write into one folder: all of it is there, or all of them say it is not.

The first process makes the folder, and gives it its name when everybody is done
(train/checkpoint.py); so a process that is killed leaves a folder without a name.
"""

import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from segcredit.runlog.manifest import CheckpointError
from segcredit.train.parallel import Parallel


class Together:
    """Within it, what must be done by all goes on even after a write has failed.

    On leaving, everybody waits for everybody, and a failure anywhere is raised everywhere.
    """

    def __init__(self, parallel: Parallel, place: Path | None) -> None:
        self.parallel = parallel
        self.place = Path(parallel.share(str(place)))
        """Where to write: the first process's."""
        self._failed: Exception | None = None

    def __enter__(self) -> "Together":
        return self

    def write(self, work: Callable[[], object]) -> None:
        """Do it, unless something failed before."""
        if self._failed is not None:
            return
        try:
            work()
        except Exception as error:
            self._failed = error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:  # no write's: the others cannot be asked any more
            return
        failed = self._failed
        number = failed.errno if isinstance(failed, OSError) else None
        told = None if failed is None else (self.parallel.rank, number, str(failed))
        others = [x for x in self.parallel.gather([told]) if x is not None]
        if failed is not None:
            raise failed
        if others:
            rank, number, text = others[0]
            message = f"process {rank} could not write its part: {text}"
            if number is not None and self.parallel.first:  # the disk's word, with what to type
                raise OSError(number, f"{os.strerror(number)} ({message})")
            raise CheckpointError(message)
