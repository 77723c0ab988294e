"""Evaluate through VLMEvalKit: its questions, prompts and loop, against a server.

VLMEvalKit runs in a virtual environment of its own, because it pins other versions than a training
machine has. Its predictions are read back and graded by the same rules as everywhere else in
segcredit. VLMEvalKit's own score is also reported if it computes one for the set and the judge.
"""

import csv
import hashlib
import io
import json
import math
import os
import pickletools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from pathlib import Path

from segcredit.benchmarks.benchmark import Benchmark, make_benchmark, score
from segcredit.benchmarks.readers import LMU_DATA, BenchmarkData, Layout, lmu_folder
from segcredit.benchmarks.run import ANSWERS, Answer, Progress, SetResult
from segcredit.benchmarks.server import Program, Server, connect
from segcredit.printable import listed, named, printable, shown
from segcredit.registry import nearest
from segcredit.rewards.client import OPENAI_KEY
from segcredit.rewards.verify import Verifier
from segcredit.runlog.files import to_line, write_bytes_atomically, write_json_atomically
from segcredit.types import Prompt, Response

VERSION = "0.0.20"
PACKAGE = f"ms-vlmeval=={VERSION}"
EXACT = "exact_matching"
"""Name that makes VLMEvalKit use no judge."""
FAILED = "Failed to obtain answer via API"
"""Text that VLMEvalKit stores for a request that failed."""
MAX_PREDICTIONS = 2**30
"""Maximum size of a file with predictions in bytes."""
_NAME = "policy"
"""Name of the model in VLMEvalKit's files."""
_KEEP_EVERY = 2.0
"""Seconds between two copies of the finished answers."""
_POLL = 0.2
"""Seconds between two checks of a process."""
_PROGRESS = re.compile(r"(\d+)/(\d+) \[")


@dataclass(frozen=True)
class ToolkitSet:
    """VLMEvalKit's name and settings of a benchmark."""

    kind: str
    """Class in ``vlmeval.dataset``."""
    dataset: str
    """Name of its TSV file."""
    ending: str
    """Suffix of the name of its file with scores."""
    column: str
    """Column of that file with the score that the paper reports."""
    row: tuple[str, tuple[str, ...]] | None = None
    """A column and the values that select the row, the preferred one first; None: the only row."""
    factor: float = 1.0
    """Factor that converts the score to a percentage."""
    needs_judge: bool = True
    """Whether it computes a score only with a judge model."""


_SPLIT = ("split", ("validation", "dev", "test", "none"))
TOOLKIT: Mapping[str, ToolkitSet] = {
    "logicvista": ToolkitSet(
        "LogicVista", "LogicVista", "_score.csv", "acc", ("Task&Skill", ("Overall",))
    ),
    "mathverse": ToolkitSet(
        "MathVerse",
        "MathVerse_MINI_Vision_Only",
        "_score.csv",
        "Overall",
        ("split", ("Overall", "Vision Only")),
    ),
    "mathvista": ToolkitSet(
        "MathVista", "MathVista_MINI", "_score.csv", "acc", ("Task&Skill", ("Overall",))
    ),
    "wemath": ToolkitSet("WeMath", "WeMath", "_score.csv", "Score (Strict)", needs_judge=False),
    "dynamath": ToolkitSet(
        "Dynamath", "DynaMath", "_score.csv", "Overall", ("Setting", ("Worst Case",)), 100.0
    ),
    "scienceqa": ToolkitSet(
        "ImageMCQDataset", "ScienceQA_TEST", "_acc.csv", "Overall", _SPLIT, 100.0, False
    ),
    "mmmu": ToolkitSet("MMMUDataset", "MMMU_DEV_VAL", "_acc.csv", "Overall", _SPLIT, 100.0, False),
    "mmbench": ToolkitSet(
        "ImageMCQDataset", "MMBench_DEV_EN_V11", "_acc.csv", "Overall", _SPLIT, 100.0, False
    ),
    "mmstar": ToolkitSet("ImageMCQDataset", "MMStar", "_acc.csv", "Overall", _SPLIT, 100.0, False),
}
"""Sets of the paper that VLMEvalKit supports, by our names."""


class DriverError(ValueError):
    """VLMEvalKit cannot be installed, failed, or left no results."""


@dataclass(frozen=True)
class DriverSettings:
    """Settings of an evaluation through VLMEvalKit; the defaults are the paper's."""

    temperature: float = 0.6
    top_p: float = 0.95
    max_tokens: int = 2048
    system_prompt: str = ""
    """System prompt of every request: the instruction of the training data."""
    limit: int | None = None
    """First rows of each file; None: all."""
    concurrency: int = 64
    """Number of requests at a time."""
    judge: str | None = None
    """URL of an OpenAI-compatible judge; None: VLMEvalKit's rules without a judge."""
    judge_model: str | None = None


@dataclass(frozen=True)
class ToolkitResult:
    """Results that VLMEvalKit wrote for one set."""

    predictions: dict[str, str]
    """The whole responses, with their thinking, by the index of the row."""
    score: float | None
    """Its own score in percent; None if it computed none."""
    reason: str = ""
    """Why there is no score."""


def evaluate_with_toolkit(
    python: Path,
    server: Server,
    names: Sequence[str],
    folder: Path,
    settings: DriverSettings,
    data: Path | None = None,
    progress: Progress = lambda *_: None,
    served: Sequence[str] = (),
) -> tuple[dict[str, SetResult], dict[str, ToolkitResult]]:
    """Answer sets with VLMEvalKit and grade its responses by our rules; also keep its own scores.

    Writes ``answers/SET.jsonl`` and ``scores.json`` as :func:`run_benchmarks` does. The arguments
    are those of :func:`run_toolkit`.
    """
    place = folder / "vlmevalkit"
    found = run_toolkit(python, server, names, place, settings, data, progress, served)
    results = {}
    verifier = Verifier()
    try:
        for name, left in found.items():
            results[name] = _graded(make_benchmark(name), TOOLKIT[name], data, left, verifier)
    finally:
        verifier.close()
    for name, result in results.items():
        lines = b"".join(to_line(asdict(x)) for x in result.answers)
        place = folder / ANSWERS / f"{name}.jsonl"
        place.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(place, lines)
    summary = {
        name: {
            **result.summary(),
            "truncated": None,  # VLMEvalKit does not store lengths
            "response_length": None,
            "driver": PACKAGE,
            "vlmevalkit_score": found[name].score,
            "vlmevalkit_reason": found[name].reason,
        }
        for name, result in results.items()
    }
    write_json_atomically(folder / "scores.json", summary)
    return results, found


def _graded(
    benchmark: Benchmark,
    entry: ToolkitSet,
    data: Path | None,
    left: ToolkitResult,
    verifier: Verifier,
) -> SetResult:
    questions, responses = answered_questions(benchmark, entry, data, left.predictions)
    grades = benchmark.grade(responses, verifier)
    answers = [Answer.of(x, grade) for x, grade in zip(responses, grades, strict=True)]
    scores = score(benchmark, questions, [[x.correct for x in answers]])
    return SetResult(benchmark, questions, answers, scores)


def check_sets(names: Sequence[str]) -> None:
    """Raise DriverError if VLMEvalKit does not have one of these sets."""
    absent = [name for name in names if name not in TOOLKIT]
    if absent:
        raise DriverError(
            f"VLMEvalKit has no set for {listed(absent)}.{nearest(absent[0], TOOLKIT)} It has "
            f"{listed(TOOLKIT, 20)}: pass these with --sets, and evaluate the others without "
            f"--driver."
        )


def default_environment() -> Path:
    """Return the folder of VLMEvalKit's environment in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "segcredit" / f"vlmevalkit-{VERSION}"


def prepare_environment(folder: Path, progress: Callable[[str], None] = lambda _: None) -> Path:
    """Return the Python of VLMEvalKit's environment; create the environment if it is missing."""
    python = folder / "bin" / "python"
    if _installed(python) == VERSION:
        return python
    found = _installed(python)
    if folder.exists() and (found is not None or not (folder / "pyvenv.cfg").exists()):
        what = f"ms-vlmeval {found}" if found else "other files"
        raise DriverError(
            f"--environment: expected a virtual environment with {PACKAGE}, or no such folder; "
            f"{named(folder)} has {what}. Leave --environment out to use {default_environment()}."
        )
    log = folder.parent / f"{folder.name}.log"
    progress(f"installing {PACKAGE} in {folder}")
    with as_file(files("segcredit.benchmarks") / "vlmevalkit.txt") as versions:
        install = ["-m", "pip", "install", "--constraint", str(versions), PACKAGE]
        for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], [python, *install]):
            _finish([str(x) for x in command], log)
    return python


def _installed(python: Path) -> str | None:
    """Return the version of ms-vlmeval in an environment; None if it is not installed."""
    ask = "import importlib.metadata as m; print(m.version('ms-vlmeval'))"
    try:
        done = subprocess.run(
            [str(python), "-c", ask], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _finish(command: list[str], log: Path) -> None:
    program = Program(command, log)
    try:
        while program.ended is None:
            time.sleep(_POLL)
    finally:
        program.stop()
    if program.ended != 0:
        raise DriverError(
            f"the environment of VLMEvalKit could not be created.{program.last_lines()}\nWithout a "
            f"network, create it elsewhere: python -m venv FOLDER; FOLDER/bin/pip install "
            f"{PACKAGE}; then pass --environment FOLDER"
        )


def run_toolkit(
    python: Path,
    server: Server,
    names: Sequence[str],
    folder: Path,
    settings: DriverSettings,
    data: Path | None = None,
    progress: Progress = lambda *_: None,
    served: Sequence[str] = (),
) -> dict[str, ToolkitResult]:
    """Run VLMEvalKit on several sets and read its results.

    Args:
        python: Python of VLMEvalKit's environment.
        folder: Folder for its files. Finished answers in it are kept; other settings use another
            folder below it.
        data: Folder with its TSV files, to which it downloads missing ones. None: $LMUData, or
            ~/LMUData.
        served: Other data that the answers depend on: the checkpoint, a digest of its weights, the
            server's arguments. Empty if the server is not ours.
    """
    check_sets(names)
    results = {}
    for name in names:  # one process per set: a crash loses one set, and the log belongs to it
        table = questions_file(TOOLKIT[name], data)
        work = _work_folder(folder, name, [asdict(settings), server.model, *served], table)
        log = work / f"{name}.log"
        command = [str(python), "-m", "vlmeval.run", *_arguments(name, server, work, settings)]
        checkpoint = _Checkpoint(work / _NAME / f"{_NAME}_{TOOLKIT[name].dataset}_checkpoint.pkl")
        checkpoint.restore()
        program = Program(command, log, _environment(data))
        before = ""
        try:
            while program.ended is None:
                server.check()
                checkpoint.keep()
                *_, (done, total) = [("", ""), *_PROGRESS.findall(program.tail())]
                if done not in ("", before):
                    progress(name, int(done), int(total))
                    before = done
                time.sleep(_POLL)
        finally:
            program.stop()
        if program.ended != 0:
            server.check()
            raise DriverError(
                f"VLMEvalKit stopped with exit code {program.ended} on {name}."
                f"{program.last_lines()}\nRun the same command again: finished answers are kept."
            )
        results[name] = read_result(name, work, settings.judge is not None, program.last_lines())
        _keep_digest(work / f"{name}.questions", table)
    return results


class _Checkpoint:
    """VLMEvalKit's file of finished answers, and a copy of its last complete version.

    VLMEvalKit overwrites the file in place after every answer. A kill often leaves a part of it or
    an empty file, which VLMEvalKit then cannot read. The file is never unpickled here.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._copy = path.with_suffix(".complete")
        self._next = time.monotonic()

    def keep(self) -> None:
        """Copy the file every few seconds; wait a moment for a complete version."""
        end = time.monotonic() + _POLL
        while self._next <= time.monotonic() < end and self._path.exists():
            content = self._complete()
            if content is not None:
                write_bytes_atomically(self._copy, content)
                self._next = time.monotonic() + _KEEP_EVERY
            time.sleep(0.001)

    def restore(self) -> None:
        """Replace an incomplete file by its copy; remove it if there is none."""
        if not self._path.exists() or self._complete() is not None:
            return
        if self._copy.exists():
            write_bytes_atomically(self._path, self._copy.read_bytes())
        else:
            self._path.unlink()

    def _complete(self) -> bytes | None:
        """Read the file; None if it does not exist or a part is missing."""
        try:
            content = self._path.read_bytes()
            for _ in pickletools.genops(content):  # parses the instructions, and executes none
                continue
        except (OSError, ValueError, EOFError, IndexError):
            return None
        return content


def _work_folder(folder: Path, name: str, used: Sequence[object], table: Path) -> Path:
    """Return the folder for answers of a set that depend on these settings and this TSV file.

    VLMEvalKit downloads the file during the first run, so its digest is stored with the answers.
    If the file has changed since, the folder is another one.
    """
    work = folder / _digest(used)
    kept = work / f"{name}.questions"
    if table.is_file():
        if kept.is_file() and kept.read_text(encoding="utf-8") != _file_digest(table):
            work = folder / _digest([*used, _file_digest(table)])
        _keep_digest(work / kept.name, table)
    return work


def _keep_digest(place: Path, table: Path) -> None:
    if table.is_file() and not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(place, _file_digest(table).encode())


def _file_digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest(used: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()[:12]


def _arguments(name: str, server: Server, work: Path, settings: DriverSettings) -> list[str]:
    """Write the configuration of one set; return the arguments of ``vlmeval.run``."""
    entry = TOOLKIT[name]
    model = {
        "class": "LMDeployAPI",
        "model": server.model,
        "api_base": f"{server.url}/chat/completions",
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_tokens,
        "timeout": 1800,
        "retry": 3,
        "verbose": False,
    }
    if settings.system_prompt:
        model["system_prompt"] = settings.system_prompt
    data = {entry.dataset: {"class": entry.kind, "dataset": entry.dataset}}
    config = work / f"{name}.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomically(config, {"model": {_NAME: model}, "data": data})
    arguments = ["--config", str(config), "--work-dir", str(work), "--reuse"]
    arguments += ["--api-nproc", str(settings.concurrency)]
    if settings.limit is not None:
        arguments += ["--limit", str(settings.limit)]
    if settings.judge is None:
        return [*arguments, "--judge", EXACT]
    judge = settings.judge_model or connect(settings.judge, "--judge").model
    return [*arguments, "--judge", judge, "--judge-base-url", settings.judge.rstrip("/")]


def _environment(data: Path | None) -> dict[str, str]:
    """Return the environment variables of VLMEvalKit: ours, without those of this program."""
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    env = {name: value for name, value in os.environ.items() if name not in own}
    key = env.get(OPENAI_KEY) or "none"
    env |= {"SPLIT_THINK": "True", "PRED_FORMAT": "tsv", OPENAI_KEY: key, "LMDEPLOY_API_KEY": key}
    if data is not None:
        env[LMU_DATA] = str(data.absolute())
    return env


def read_result(name: str, work: Path, judged: bool, last_lines: str = "") -> ToolkitResult:
    """Read the predictions and the score of a set.

    Args:
        judged: Whether VLMEvalKit had a judge.
        last_lines: End of its log, for messages.
    """
    entry = TOOLKIT[name]
    place = work / _NAME / f"{_NAME}_{entry.dataset}.tsv"
    problem = _problem(work, entry.dataset)
    if not place.is_file():
        raise DriverError(
            f"VLMEvalKit left no predictions for {name}: expected {named(place)}; it reports: "
            f"{problem or 'nothing'}.{last_lines}\nIs its data missing? It downloads "
            f"{entry.dataset}.tsv to $LMUData; without a network, copy the file to a folder and "
            f"pass --data FOLDER."
        )
    predictions = _predictions(place)
    failed = sum(FAILED in text for text in predictions.values())
    if failed:
        raise DriverError(
            f"{failed} of {len(predictions)} requests of {name} failed.{last_lines}\nRun the same "
            f"command again when the server answers: finished answers are kept."
        )
    if entry.needs_judge and not judged:
        reason = "VLMEvalKit scores this set with a judge only (--judge URL)"
        return ToolkitResult(predictions, None, reason)
    tables = [x for x in place.parent.glob(f"{place.stem}*.csv") if x.name.endswith(entry.ending)]
    if not tables:
        return ToolkitResult(predictions, None, problem or "no file with scores")
    newest = max(tables, key=lambda x: x.stat().st_mtime)
    return ToolkitResult(predictions, _score(newest, entry))


def _problem(work: Path, dataset: str) -> str:
    """Return the description of a failure in VLMEvalKit's status file; empty if there is none."""
    try:
        status = json.loads((work / _NAME / "status.json").read_bytes())
        entry = status["datasets"][dataset]
        return printable(str(entry.get("error_message") or entry.get("skip_reason") or ""), 300)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ""


def _predictions(place: Path) -> dict[str, str]:
    """Read the index, the thinking and the answer of every row."""
    size = place.stat().st_size
    if size > MAX_PREDICTIONS:
        raise DriverError(
            f"{named(place)} must have at most {MAX_PREDICTIONS:,} bytes; it has {size:,}."
        )
    rows = _rows(place, "\t")
    missing = {"index", "prediction"} - set(rows[0] if rows else ())
    if missing:
        raise DriverError(
            f"expected the columns index and prediction in {named(place)}; got "
            f"{listed(rows[0] if rows else (), 20)}. Is it a file of ms-vlmeval {VERSION}?"
        )
    return {x["index"] or "": _whole(x) for x in rows}


def _whole(row: Mapping[str, str]) -> str:
    """Join the parts of the response, which SPLIT_THINK has split at the end of the thinking."""
    thinking = (row.get("thinking") or "").removesuffix("</think>")
    answer = row["prediction"] or ""
    return f"<think>{thinking}</think>{answer}" if thinking else answer


def _rows(place: Path, delimiter: str) -> list[dict[str, str]]:
    text = place.read_text(encoding="utf-8", errors="replace")
    limit = csv.field_size_limit(MAX_PREDICTIONS)
    try:
        return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
    except csv.Error as error:
        raise DriverError(f"{named(place)} cannot be read: {printable(str(error), 200)}.") from None
    finally:
        csv.field_size_limit(limit)


def _score(file: Path, entry: ToolkitSet) -> float:
    """Read the score that the paper reports, in percent."""
    rows = _rows(file, ",")
    if entry.row is not None:
        column, values = entry.row
        rows = [x for value in values for x in rows if x.get(column) == value] or rows[:1]
    cell = rows[0].get(entry.column) if rows else None
    try:
        value = float((cell or "").removesuffix("%")) * entry.factor
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise DriverError(
            f"expected a score in the column {entry.column!r} of {named(file)}; got {shown(cell)}."
        )
    return value


def questions_file(entry: ToolkitSet, data: Path | None) -> Path:
    """Return the path of a set's TSV file, which VLMEvalKit downloads if it is missing."""
    return (data or lmu_folder()) / f"{entry.dataset}.tsv"


def answered_questions(
    benchmark: Benchmark, entry: ToolkitSet, data: Path | None, predictions: Mapping[str, str]
) -> tuple[list[Prompt], list[Response]]:
    """Read the TSV file as VLMEvalKit did; return the questions it answered, and the responses.

    Groups of questions that are not complete (because of a limit) are left out.
    """
    file = questions_file(entry, data)
    if not file.is_file():
        raise DriverError(
            f"expected the questions of {benchmark.title} in {named(file)}; got none."
        )
    table = BenchmarkData(Layout(file.name, "VLMEvalKit"), (file,))
    questions = benchmark.read(table)
    found = {}
    for row in table.rows():
        question = benchmark.question(row)
        if question is not None and (index := row.text("index")) in predictions:
            found[question.id] = predictions[index]
    cut = {benchmark.group(x) for x in questions if x.id not in found}
    kept = [x for x in questions if benchmark.group(x) not in cut]
    if not kept:
        raise DriverError(
            f"none of the {len(predictions)} predictions of VLMEvalKit completes a question of "
            f"{benchmark.title} in {named(file)}. With --limit, raise it; else run the command "
            f"again with an empty --output FOLDER."
        )
    return kept, [Response(x, found[x.id], 0, False, 0) for x in kept]
