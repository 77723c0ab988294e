"""Run one model over benchmarks: sample, grade, and store every answer so that a run can resume.

Questions are answered in chunks of fixed size, each with a random seed of its own. A chunk is
appended to ``answers/SET.jsonl`` and synced before the next one starts. If the run is killed, the
same command drops an incomplete chunk and continues; the result equals that of an uninterrupted
run.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from segcredit.benchmarks.answers import after_thinking
from segcredit.benchmarks.benchmark import (
    Benchmark,
    Grade,
    Score,
    make_benchmark,
    score,
    with_instruction,
)
from segcredit.benchmarks.judge import Judge
from segcredit.benchmarks.readers import data_folders, find_data
from segcredit.data import BadRows
from segcredit.data.prepare import KNOWN
from segcredit.evaluate.checkpoint import (
    PolicySource,
    find_policy,
    load_policy,
    rollout_settings,
    sampling_settings,
)
from segcredit.models.inputs import as_responses, encode_all
from segcredit.printable import named, printable, shown
from segcredit.rewards.verify import Verifier
from segcredit.rollout import make_engine
from segcredit.runlog.files import (
    Lock,
    LockedError,
    sync_folder,
    to_line,
    write_json_atomically,
)
from segcredit.types import Prompt, Response, RolloutEngine, Sampling

INSTRUCTION = KNOWN["geo3k"].suffix
"""Default instruction: the one of verl's Geometry3K data, on which the paper trains."""
SETTINGS = "settings.json"
ANSWERS = "answers"
_DIGESTED = 2**20
"""Bytes at both ends of a weights file that are hashed."""

Progress = Callable[[str, int, int], None]
"""Called with the name of the set, the number of finished answers, and their total."""


@dataclass(frozen=True)
class BenchmarkSettings:
    """Settings of a benchmark run. Answers made with other settings are not mixed with these."""

    samples: int = 1
    """Responses per question; scores are averaged over them (avg@k)."""
    temperature: float | None = None
    """None: the run's own evaluation setting, or 1."""
    top_p: float | None = None
    max_tokens: int | None = None
    """None: the run's limit, or 2048."""
    engine: str | None = None
    family: str | None = None
    template: str | None = None
    instruction: str = INSTRUCTION
    """Text appended to each question of the sets that have no instruction of their own."""
    limit: int | None = None
    """Number of questions of each set; None: all. A group of questions stays complete."""
    seed: int = 0
    chunk: int = 128
    """Responses that are sampled together and lost together if the process is killed."""
    judge: str | None = None
    """URL of an OpenAI-compatible judge for responses in which the rules find no answer."""
    judge_model: str | None = None

    def __post_init__(self) -> None:
        for name in ("samples", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(
                f"limit must be at least 1; got {self.limit}. Leave it out to use all."
            )


@dataclass(frozen=True)
class Answer:
    """A graded response, one line of ``answers/SET.jsonl``."""

    id: str
    """Id of the question."""
    sample: int
    response: str
    num_tokens: int
    truncated: bool
    answer: str | None
    """Answer found in the response."""
    expected: str
    correct: bool
    reason: str
    graded: bool
    judged: bool = False
    """Whether the answer was found by the judge, not by the rules."""

    @classmethod
    def of(
        cls, response: Response, grade: Grade, sample: int = 0, judged: bool = False
    ) -> "Answer":
        """Combine a response and its grade."""
        return cls(
            id=response.prompt.id,
            sample=sample,
            response=response.text,
            num_tokens=response.num_tokens,
            truncated=response.truncated,
            answer=grade.answer,
            expected=response.prompt.answer or "",
            correct=grade.correct,
            reason=grade.reason,
            graded=grade.graded,
            judged=judged,
        )


@dataclass(frozen=True)
class SetResult:
    """Questions, answers and scores of one model on one set."""

    benchmark: Benchmark
    questions: list[Prompt]
    answers: list[Answer]
    """All samples of the first question, then those of the second, and so on."""
    scores: dict[str, Score]
    """The main metric is the first."""

    def summary(self) -> dict[str, Any]:
        """Return the scores and the shares of responses without an answer, for scores.json."""
        count = len(self.answers)
        return {
            "title": self.benchmark.title,
            "questions": len(self.questions),
            "questions_of_complete_set": self.benchmark.count,
            "samples": count // len(self.questions),
            "scores": {name: asdict(x) for name, x in self.scores.items()},
            "no_answer": sum(x.answer is None for x in self.answers) / count,
            "not_graded": sum(not x.graded for x in self.answers) / count,
            "truncated": sum(x.truncated for x in self.answers) / count,
            "judged": sum(x.judged for x in self.answers) / count,
            "response_length": sum(x.num_tokens for x in self.answers) / count,
        }


@dataclass(frozen=True)
class QuestionSet:
    """A benchmark and the questions that are asked."""

    benchmark: Benchmark
    questions: list[Prompt]

    def digest(self) -> str:
        """Hash what determines the questions, their order and their grades."""
        made = hashlib.sha256()
        for x in self.questions:
            images = [_image_digest(image) for image in x.images]
            made.update(json.dumps([x.id, list(x.messages), images, x.answer]).encode())
        return made.hexdigest()[:16]


def load_questions(
    names: Sequence[str],
    data: str | Path | None = None,
    limit: int | None = None,
    instruction: str = INSTRUCTION,
) -> list[QuestionSet]:
    """Read the questions of several sets; all missing files are reported in one error."""
    benchmarks = [make_benchmark(name) for name in names]
    twice = sorted({x.name for x in benchmarks if [y.name for y in benchmarks].count(x.name) > 1})
    if twice:
        raise ValueError(f"expected each set once; got {', '.join(twice)} twice.")
    folders = data_folders(data)
    found = [(x, find_data(x.layouts, folders, hub=True)) for x in benchmarks]
    missing = [x for x, place in found if place is None]
    if missing:
        wanted = "\n".join(f"  {x.name}: {x.needs()}" for x in missing)
        places = ", ".join(named(x) for x in folders)
        raise ValueError(
            f"expected the data of {', '.join(x.title for x in missing)} in {places}; got none.\n"
            f"{wanted}\nPass the folder: --data FOLDER. Or leave these sets out: --sets NAME"
        )
    sets = []
    for benchmark, place in found:
        assert place is not None
        questions = benchmark.first(benchmark.read(place), limit)
        own = benchmark.instruction
        text = instruction if own is None else own
        sets.append(QuestionSet(benchmark, [with_instruction(x, text) for x in questions]))
    return sets


def run_benchmarks(
    model: str,
    sets: Sequence[QuestionSet],
    folder: Path,
    settings: BenchmarkSettings,
    progress: Progress = lambda *_: None,
    trust_run: bool = False,
) -> dict[str, SetResult]:
    """Answer all sets with one model; answers that the folder already has are kept.

    Args:
        model: A run directory, one of its checkpoints, a Hugging Face folder, or a Hub id.
        folder: Folder for the answers of this model.
        trust_run: Run the code that the run's config.yaml names; if False, refuse such a run.
    """
    typed = {"rollout.engine": settings.engine, "model.family": settings.family}
    given = [name for name, x in typed.items() if x is not None]
    given.append("data.allow_outside")  # the run's own data is not read
    found = find_policy(model, trust_run, given, "benchmark")
    sampling = sampling_settings(
        found.recipe, settings.max_tokens, settings.temperature, settings.top_p
    )
    used = _fingerprint(found, settings, sampling)
    judge = None if settings.judge is None else Judge(settings.judge, settings.judge_model)
    with _locked(folder):
        _check_settings(folder, used, sets)
        files = [
            _AnswerFile(folder / ANSWERS / f"{x.benchmark.name}.jsonl", x, settings) for x in sets
        ]
        if any(file.left for file in files):
            if judge is not None:
                judge.check()
            _answer_all(found, files, settings, sampling, judge, progress)
        results = {x.benchmark.name: file.result() for x, file in zip(sets, files, strict=True)}
        summary = {name: x.summary() for name, x in results.items()}
        scores = folder / "scores.json"
        write_json_atomically(scores, {**read_object(scores), **summary})
    return results


def _answer_all(
    found: PolicySource,
    files: "Sequence[_AnswerFile]",
    settings: BenchmarkSettings,
    sampling: Sampling,
    judge: Judge | None,
    progress: Progress,
) -> None:
    """Load the policy and answer every chunk that is missing."""
    recipe = found.recipe
    rollout = rollout_settings(recipe, settings.engine, sampling)
    template = settings.template
    if template is None and recipe is not None:
        template = recipe.data.template
    asked = [
        replace(x, id=f"{file.asked.benchmark.name} {x.id}")
        for file in files
        if file.left
        for x in file.asked.questions
    ]
    try:
        policy, longest = load_policy(
            found.source, recipe, template, settings.family, asked, sampling
        )
    except BadRows as error:
        raise BadRows(error.bad, "Choose another model, or other sets: --sets NAME") from None
    engine = make_engine(rollout.engine, policy, rollout.engine_settings(longest))
    verifier = Verifier()
    try:
        for file in files:
            progress(file.asked.benchmark.name, len(file.answers), file.total)
            for chunk in file.left_chunks():
                responses = _sample(chunk, file, engine, policy, sampling, settings)
                file.append(_graded(chunk, responses, file.asked.benchmark, verifier, judge))
                progress(file.asked.benchmark.name, len(file.answers), file.total)
    finally:
        verifier.close()
        engine.close()


def _sample(
    chunk: "Sequence[tuple[Prompt, int]]",
    file: "_AnswerFile",
    engine: RolloutEngine,
    policy: Any,
    sampling: Sampling,
    settings: BenchmarkSettings,
) -> list[Response]:
    """Sample one response per question and sample number; the seed depends on the chunk alone."""
    name = f"{settings.seed}/{file.asked.benchmark.name}/{chunk[0][0].id}"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    generator = torch.Generator().manual_seed(seed)
    prompts = list({x.id: x for x, _ in chunk}.values())
    encoded = {x.id: y for x, y in zip(prompts, encode_all(policy.encode, prompts), strict=True)}
    rollouts = engine.sample([encoded[x.id] for x, _ in chunk], sampling, generator)
    return as_responses(rollouts, policy.codec.decode, sampling.max_tokens)


def _graded(
    chunk: "Sequence[tuple[Prompt, int]]",
    responses: Sequence[Response],
    benchmark: Benchmark,
    verifier: Verifier,
    judge: Judge | None,
) -> list[Answer]:
    grades = benchmark.grade(responses, verifier)
    judged: dict[int, Grade] = {}
    if judge is not None and benchmark.judged:
        unclear = [
            i
            for i, x in enumerate(grades)
            if x.answer is None and after_thinking(responses[i].text)
        ]
        replies = judge.ask([benchmark.judge_prompt(responses[i]) for i in unclear])
        found = {i: x for i, x in zip(unclear, replies, strict=True) if x.strip(" .\n") != "NONE"}
        again = benchmark.grade(
            [replace(responses[i], text=reply) for i, reply in found.items()], verifier
        )
        judged = {i: x for i, x in zip(found, again, strict=True) if x.answer is not None}
    return [
        Answer.of(response, judged.get(i, grades[i]), sample, i in judged)
        for i, ((_, sample), response) in enumerate(zip(chunk, responses, strict=True))
    ]


class _AnswerFile:
    """The answers of one set: those already saved, and the chunks that remain."""

    def __init__(self, path: Path, asked: QuestionSet, settings: BenchmarkSettings) -> None:
        self.path = path
        self.asked = asked
        self.samples = settings.samples
        self.jobs = [(x, n) for x in asked.questions for n in range(settings.samples)]
        self.step = max(1, settings.chunk // settings.samples) * settings.samples
        self.answers = self._kept()

    @property
    def total(self) -> int:
        return len(self.jobs)

    @property
    def left(self) -> int:
        return self.total - len(self.answers)

    def left_chunks(self) -> Iterator[list[tuple[Prompt, int]]]:
        """Yield the chunks that have no answers yet."""
        for start in range(len(self.answers), self.total, self.step):
            yield self.jobs[start : start + self.step]

    def append(self, answers: list[Answer]) -> None:
        """Append a chunk and sync it to disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(b"".join(to_line(asdict(x)) for x in answers))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.path.parent)
        self.answers += answers

    def result(self) -> SetResult:
        """Compute the scores of all answers."""
        right = [[x.correct for x in self.answers[n :: self.samples]] for n in range(self.samples)]
        scores = score(self.asked.benchmark, self.asked.questions, right)
        return SetResult(self.asked.benchmark, self.asked.questions, self.answers, scores)

    def _kept(self) -> list[Answer]:
        """Read the complete chunks; cut off a torn line and an incomplete chunk."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if len(lines) < self.total:
            lines = lines[: len(lines) // self.step * self.step]
        answers = [self._read(number, line) for number, line in enumerate(lines)]
        with self.path.open("r+b") as file:
            file.truncate(sum(map(len, lines)))
            os.fsync(file.fileno())
        return answers

    def _read(self, number: int, line: bytes) -> Answer:
        try:
            row = json.loads(line)
            answer = Answer(**{x.name: row[x.name] for x in fields(Answer)})
            for x in fields(Answer):
                kind: Any = x.type  # a type or a union of types
                if not isinstance(row[x.name], kind):
                    raise ValueError(f"{x.name} is {shown(row[x.name])}")
            question, sample = self.jobs[number]
            if (answer.id, answer.sample) != (question.id, sample):
                raise ValueError(
                    f"it answers question {shown(answer.id)}, sample {answer.sample}, instead of "
                    f"question {shown(question.id)}, sample {sample}"
                )
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise ValueError(
                f"line {number + 1} of {named(self.path)} is damaged or was changed: "
                f"{printable(str(error), 200)}. Delete the file to answer this set again."
            ) from None
        return answer


def _fingerprint(
    found: PolicySource, settings: BenchmarkSettings, sampling: Sampling
) -> dict[str, Any]:
    """Return all settings on which the answers depend."""
    used = asdict(settings) | sampling.as_dict()
    if used["engine"] is None:
        used["engine"] = "hf" if found.recipe is None else found.recipe.rollout.engine
    return {"model": found.source, "weights": weights_digest(found.source)} | used


def weights_digest(source: str) -> str:
    """Hash the sizes, the beginnings and the ends of the weights files of a local model."""
    made = hashlib.sha256()
    for file in sorted(Path(source).glob("*.safetensors")) if Path(source).is_dir() else ():
        size = file.stat().st_size
        with file.open("rb") as opened:
            made.update(f"{file.name} {size}".encode() + opened.read(_DIGESTED))
            opened.seek(max(0, size - _DIGESTED))
            made.update(opened.read())
    return made.hexdigest()[:16]


def _image_digest(image: bytes | Path) -> str:
    data = image if isinstance(image, bytes) else image.read_bytes()
    return hashlib.sha256(data).hexdigest()[:16]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = Lock(folder / ".lock")
    except LockedError as error:
        who = "another process" if error.holder is None else f"process {error.holder}"
        raise ValueError(
            f"{who} is writing answers to {named(folder)}. Wait for it, or pass another folder: "
            f"--output FOLDER"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _check_settings(folder: Path, used: Mapping[str, Any], sets: Sequence[QuestionSet]) -> None:
    """Write the settings; refuse a folder whose answers were made with other settings."""
    path = folder / SETTINGS
    digests = {x.benchmark.name: x.digest() for x in sets}
    before = read_object(path)
    old_sets = before.pop("sets", {})
    if not isinstance(old_sets, dict):
        raise _other_settings(folder, "its 'sets' are not an object")
    if before:
        changed = [name for name in used if before.get(name) != used[name]]
        if changed:
            listed = "; ".join(
                f"{name} was {shown(before.get(name))}, now {shown(used[name])}" for name in changed
            )
            raise _other_settings(folder, listed)
    for name, digest in digests.items():
        if old_sets.get(name, digest) != digest:
            raise _other_settings(folder, f"the questions of {name} have changed")
    write_json_atomically(path, {**used, "sets": {**old_sets, **digests}})


def _other_settings(folder: Path, changes: str) -> ValueError:
    return ValueError(
        f"expected the settings of the answers in {named(folder)}; {changes}. Start again in "
        f"another folder: --output FOLDER; or continue with the settings in "
        f"{named(folder / SETTINGS)}."
    )


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no such file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{named(path)} must be JSON; reading it failed: {printable(str(error), 200)}. Pass "
            f"another folder: --output FOLDER"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{named(path)} must contain an object; got {shown(content)}.")
    return content
