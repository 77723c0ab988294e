"""Write and read run directories, the interface between training and everything after it."""

from segcredit.runlog.environment import describe_environment
from segcredit.runlog.folder import RunError, RunFolder, new_run_path, resume_command
from segcredit.runlog.reader import Run, read_run
from segcredit.runlog.records import MetricsWriter, write_rollouts
from segcredit.runlog.trackers import Tracker, open_trackers

__all__ = [
    "MetricsWriter",
    "Run",
    "RunError",
    "RunFolder",
    "Tracker",
    "describe_environment",
    "new_run_path",
    "open_trackers",
    "read_run",
    "resume_command",
    "write_rollouts",
]
