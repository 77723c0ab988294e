"""``segcredit benchmark``: fill the tables of the SAPO paper for one or several models."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from segcredit.commands.output import (
    PAPER,
    Engine,
    MaxTokens,
    ModelFamily,
    Seed,
    Template,
    TopP,
    TrustRun,
    exit_codes,
    quiet_libraries,
    say,
)
from segcredit.printable import listed, one_line

if TYPE_CHECKING:
    from rich.console import Console

    from segcredit.benchmarks.overlap import TrainingImages
    from segcredit.benchmarks.run import BenchmarkSettings, Progress, QuestionSet, SetResult
    from segcredit.benchmarks.table import ModelScores, Table

EPILOG = """\
[bold]Examples[/bold]

segcredit benchmark --list  [dim]# sets, sizes, and whether their data was found[/dim]

segcredit benchmark runs/geo3k-sapo --sets table1 --paper --engine vllm

segcredit benchmark Qwen/Qwen2.5-VL-3B-Instruct runs/grpo runs/sapo --sets logicvista,wemath

segcredit benchmark my-model --sets dynamath --data ~/bench --limit 20  [dim]# a quick look[/dim]

segcredit benchmark runs/sapo --sets logicvista,wemath --driver vlmevalkit
"""


class Driver(StrEnum):
    """Another program that asks the questions."""

    vlmevalkit = "vlmevalkit"


def benchmark(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Run directories, Hugging Face folders, or Hub ids.", metavar="MODEL…"),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            help="Sets by name, comma-separated or repeated; or paper (all), table1 … table6, "
            "text; or your own (file.py:Name).",
            show_default="paper",
        ),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="List the sets and whether their data was found.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with the data of the sets.",
            show_default="data/bench, data, and $LMUData of VLMEvalKit",
        ),
    ] = None,
    paper: Annotated[
        bool, typer.Option("--paper", help="Sample as in the paper: --temperature 0.6 --top-p 0.95")
    ] = False,
    samples: Annotated[
        int, typer.Option("--samples", "-k", help="Responses per question, averaged.", min=1)
    ] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sampling temperature; 0: greedy.", min=0, show_default="the run's, or 1.0"
        ),
    ] = None,
    top_p: TopP = None,
    max_tokens: MaxTokens = None,
    instruction: Annotated[
        str | None,
        typer.Option(
            help="Text appended to each question; empty: none.",
            show_default="think first, then \\boxed{}",
        ),
    ] = None,
    template: Template = None,
    engine: Engine = None,
    family: ModelFamily = None,
    limit: Annotated[
        int | None, typer.Option(help="Number of questions per set.", min=1, show_default="all")
    ] = None,
    chunk: Annotated[
        int,
        typer.Option(
            help="Responses sampled together; at most these are lost if the process is killed.",
            min=1,
        ),
    ] = 128,
    judge: Annotated[
        str | None,
        typer.Option(
            help="URL of an OpenAI-compatible server that extracts answers the rules do not find.",
            show_default="only rules",
        ),
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option(help="Model of the judge.", show_default="the server's first")
    ] = None,
    train_data: Annotated[
        list[str] | None,
        typer.Option(
            help="Training data. Questions with an image from it are reported, and scores without "
            "them are added.",
            show_default="the run's",
            metavar="FILE",
        ),
    ] = None,
    driver: Annotated[
        Driver | None,
        typer.Option(
            help="vlmevalkit: evaluate through VLMEvalKit, installed in a separate environment.",
            show_default="segcredit itself",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            help="With --driver: URL of an OpenAI-compatible server that serves the model.",
            show_default="vllm serve is started",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="With --driver: port of vllm serve.", min=1, show_default="a free one"),
    ] = None,
    serve_args: Annotated[
        str, typer.Option(help="With --driver: further arguments of vllm serve.")
    ] = "",
    environment: Annotated[
        Path | None,
        typer.Option(
            help="With --driver: virtual environment of VLMEvalKit; created if missing.",
            show_default="in ~/.cache/segcredit",
        ),
    ] = None,
    seed: Seed = 0,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for answers, tables and report.",
            show_default="runs/benchmark",
        ),
    ] = None,
    trust_run: TrustRun = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the tables as JSON instead.")
    ] = False,
) -> None:
    """Score models on the paper's benchmarks, side by side with the paper's numbers.

    If the command is interrupted, run it again: finished answers are kept.
    """
    from rich.console import Console

    from segcredit.runlog.storage import CheckpointError

    console = Console(stderr=as_json)
    with exit_codes(CheckpointError):
        from segcredit.benchmarks.table import set_names

        names = set_names(sets or ["paper"])
        if show_list:
            _show_sets(console, names, data)
            return
        if not models:
            raise ValueError(
                "expected at least one model; got none. Type: segcredit benchmark MODEL, or "
                "segcredit benchmark --list"
            )
        quiet_libraries()
        from segcredit.benchmarks.run import INSTRUCTION, BenchmarkSettings

        chosen = {"temperature": temperature, "top_p": top_p}
        given = {name: x for name, x in chosen.items() if x is not None}
        settings = BenchmarkSettings(
            samples=samples,
            max_tokens=max_tokens,
            engine=engine,
            family=family,
            template=template,
            instruction=INSTRUCTION if instruction is None else instruction,
            limit=limit,
            seed=seed,
            chunk=chunk,
            judge=judge,
            judge_model=judge_model,
            **(PAPER if paper else {}) | given,
        )
        folder = output or Path("runs") / f"benchmark{'' if limit is None else f'-first-{limit}'}"
        more: list[ModelScores] = []
        serving = _Serving(server, port, serve_args or None, environment)
        if driver is None:
            serving.refuse()
            results = _run(console, models, names, data, folder, settings, trust_run)
        else:
            folder = output or folder.with_name(f"{folder.name}-{driver}")
            results, more = _run_driver(
                console, models, names, data, folder, settings, trust_run, serving
            )
        more += _without_overlap(console, models, results, train_data, folder, trust_run)
        note = "" if limit is None else f"first {limit} questions of each set"
        write_results(console, results, sets or ["paper"], folder, as_json, more, note)


def _run(
    console: "Console",
    models: Sequence[str],
    names: Sequence[str],
    data: Path | None,
    folder: Path,
    settings: "BenchmarkSettings",
    trust_run: bool,
) -> "dict[str, dict[str, SetResult]]":
    """Answer all sets with every model; the models' names in the tables are the keys."""
    from segcredit.benchmarks.run import load_questions

    with console.status("reading questions…"):
        sets = load_questions(names, data, settings.limit, settings.instruction)
    named = dict(zip(_table_names(models), models, strict=True))
    return answer_sets(console, named, sets, folder, settings, trust_run)


def answer_sets(
    console: "Console",
    models: Mapping[str, str],
    sets: "Sequence[QuestionSet]",
    folder: Path,
    settings: "BenchmarkSettings",
    trust_run: bool,
) -> "dict[str, dict[str, SetResult]]":
    """Answer questions with every model, given by its name in the tables, and show progress."""
    from segcredit.benchmarks.run import ANSWERS, SETTINGS, read_object, run_benchmarks

    results = {}
    for name, model in models.items():
        place = folder / _folder_name(model)
        try:
            with _progress(console, name) as progress:
                results[name] = run_benchmarks(model, sets, place, settings, progress, trust_run)
            used = read_object(place / SETTINGS)
            _record(console, used["model"], results[name], used)
        except BaseException:
            if (place / ANSWERS).is_dir():
                say(
                    console,
                    f"The answers so far are kept in {place}. Type the same command to continue.",
                )
            raise
    return results


_SHOWN_SETTINGS = ("temperature", "top_p", "max_tokens", "samples", "limit")
"""Settings that the run's report shows beside the scores."""


def _record(
    console: "Console",
    source: str,
    results: "Mapping[str, SetResult]",
    settings: Mapping[str, Any],
    driver: str | None = None,
) -> None:
    """Record answers of a run's checkpoint in the run, and say how to see them."""
    from segcredit.benchmarks.page import record_in_run

    try:
        shown = {key: settings.get(key) for key in _SHOWN_SETTINGS}
        run = record_in_run(source, results, shown, driver)
    except OSError as error:
        say(console, f"The answers are not in the run's report: {error}.")
        return
    if run is not None:
        say(console, f"Recorded for the run's report. Write it: segcredit report {quote(str(run))}")


@dataclass(frozen=True)
class _Serving:
    """Options of a driver: its server and its environment."""

    server: str | None
    port: int | None
    serve_args: str | None
    environment: Path | None

    def refuse(self) -> None:
        """Raise ValueError if one of these options was given without a driver."""
        for field in fields(self):
            if getattr(self, field.name) is not None:
                option = f"--{field.name.replace('_', '-')}"
                raise ValueError(f"{option} needs --driver vlmevalkit.")


def _run_driver(
    console: "Console",
    models: Sequence[str],
    names: Sequence[str],
    data: Path | None,
    folder: Path,
    settings: "BenchmarkSettings",
    trust_run: bool,
    serving: _Serving,
) -> "tuple[dict[str, dict[str, SetResult]], list[ModelScores]]":
    """Evaluate every model on the sets through VLMEvalKit; also return VLMEvalKit's scores."""
    from segcredit.benchmarks.benchmark import Score
    from segcredit.benchmarks.run import weights_digest
    from segcredit.benchmarks.server import connect, serve
    from segcredit.benchmarks.table import ModelScores
    from segcredit.benchmarks.vlmevalkit import (
        DriverSettings,
        check_sets,
        default_environment,
        evaluate_with_toolkit,
        prepare_environment,
    )
    from segcredit.evaluate.checkpoint import find_policy

    check_sets(names)
    given = ("samples", "engine", "family", "template")
    changed = [name for name in given if getattr(settings, name) != getattr(type(settings), name)]
    if changed:
        raise ValueError(f"--{changed[0]} has no effect with --driver vlmevalkit; leave it out.")
    if serving.server is not None and len(models) > 1:
        raise ValueError("--server has one model; expected one MODEL, got several.")
    chosen = {name: getattr(settings, name) for name in ("temperature", "top_p", "max_tokens")}
    asked = DriverSettings(
        system_prompt=settings.instruction,
        limit=settings.limit,
        judge=settings.judge,
        judge_model=settings.judge_model,
        **{name: x for name, x in chosen.items() if x is not None},
    )
    with console.status("preparing VLMEvalKit…") as status:
        python = prepare_environment(
            serving.environment or default_environment(), lambda text: status.update(f"{text}…")
        )
    results, own = {}, []
    for model, name in zip(models, _table_names(models), strict=True):
        place = folder / _folder_name(model)
        if serving.server is not None:
            started: Any = nullcontext(connect(serving.server))
            served: Sequence[str] = ()
            say(
                console,
                "--server: the weights of the server are unknown, so finished answers in the "
                "output folder are reused even if the model has changed. For a new model, pass "
                "another --output FOLDER.",
            )
        else:
            source = find_policy(model, trust_run, [], "benchmark").source
            log = place / "server.log"
            arguments = serving.serve_args or ""
            started = serve(source, log, serving.port, arguments)
            served = (source, weights_digest(source), arguments)
        with started as server, _progress(console, name) as progress:
            results[name], left = evaluate_with_toolkit(
                python, server, names, place, asked, data, progress, served
            )
        scores = {
            key: {"VLMEvalKit": Score(x.score, math.nan, math.nan, len(x.predictions))}
            for key, x in left.items()
            if x.score is not None
        }
        for key, x in left.items():
            if x.score is None:
                say(console, f"{name} {key}: VLMEvalKit has no score of its own: {x.reason}")
        if serving.server is None:
            _record(console, source, results[name], asdict(asked), driver="vlmevalkit")
        if scores:
            own.append(ModelScores(name, scores, "VLMEvalKit's own scores"))
    return results, own


def _without_overlap(
    console: "Console",
    models: Sequence[str],
    results: "dict[str, dict[str, SetResult]]",
    train_data: Sequence[str] | None,
    folder: Path,
    trust_run: bool,
) -> "list[ModelScores]":
    """Report questions that are in the training data; score the models without them."""
    from segcredit.benchmarks.overlap import find_overlap, overlap_summary, scores_without
    from segcredit.benchmarks.table import ModelScores
    from segcredit.runlog.files import write_json_atomically

    rows = []
    for model, (name, sets) in zip(models, results.items(), strict=True):
        training = _training_images(console, model, train_data, trust_run)
        if training is None:
            continue
        found = {key: find_overlap(x.questions, training) for key, x in sets.items()}
        without = {key: scores_without(sets[key], x) for key, x in found.items()}
        summary = {key: overlap_summary(x, without[key]) for key, x in found.items()}
        write_json_atomically(folder / _folder_name(model) / "overlap.json", summary)
        for key, x in found.items():
            if x.ids:
                say(
                    console,
                    f"{name} {sets[key].benchmark.title}: {len(x.ids)} of "
                    f"{len(sets[key].questions)} questions overlap with the training data: "
                    f"{len(x.same)} with the same image, {len(x.alike)} with one that looks the "
                    f"same, {len(x.source)} from the same dataset",
                )
        if any(x.ids for x in found.values()):
            rows.append(ModelScores(name, {k: x for k, x in without.items() if x}, _WITHOUT))
    return rows


_WITHOUT = "without questions that overlap with training"


def _training_images(
    console: "Console", model: str, given: Sequence[str] | None, trust_run: bool
) -> "TrainingImages | None":
    """Read the images of the given training data, or of the run's; None if there are none."""
    from segcredit.benchmarks.overlap import TrainingImages
    from segcredit.data import load_prompts
    from segcredit.evaluate.checkpoint import find_policy

    files = list(given or ())
    if not files and Path(model).exists():  # a model of the Hub has no training data here
        recipe = find_policy(model, trust_run, ["data.allow_outside"], "benchmark").recipe
        files = [] if recipe is None else recipe.data.train
    if not files:
        return None
    try:
        with console.status("comparing with the training data…"):
            prompts = load_prompts(files, need_answer=False, skip_bad_rows=True).prompts
            return TrainingImages.of(prompts)
    except (ValueError, OSError) as error:
        if given:
            raise
        say(
            console,
            f"{model}: overlaps with the training data are unknown, because it cannot be read: "
            f"{one_line(str(error))}. Pass it: --train-data FILE",
        )
        return None


def _folder_name(model: str) -> str:
    return re.sub(r"[^\w.-]+", "-", model.strip("/.")).strip("-")


def write_results(
    console: "Console",
    results: "dict[str, dict[str, SetResult]]",
    wanted: Sequence[str],
    folder: Path,
    as_json: bool = False,
    more: "Sequence[ModelScores]" = (),
    note: str = "",
) -> None:
    """Write the tables in all formats, and show them.

    Args:
        more: Further rows.
        note: What all rows have in common, added to the models' names.
    """
    from segcredit.benchmarks.page import write_page
    from segcredit.benchmarks.table import FORMATS, ModelScores, make_tables
    from segcredit.runlog.files import write_text_atomically

    scores = [
        ModelScores(model, {name: x.scores for name, x in sets.items()})
        for model, sets in results.items()
    ]
    scores += more
    if note:
        scores = [replace(x, note=f"{x.note}, {note}".removeprefix(", ")) for x in scores]
    numbers = [int(x[5:]) for x in wanted if re.fullmatch(r"table[1-6]", x)]
    tables = make_tables(scores, numbers)
    for suffix, write in FORMATS.items():
        write_text_atomically(folder / f"table.{suffix}", write(tables))
    page = write_page(folder / "report.html", results, tables)
    if as_json:
        typer.echo(FORMATS["json"](tables), nl=False)
    else:
        for table in tables:
            console.print(_drawn(table))
        for line in _details(results):
            say(console, line)
    say(console, f"results  {folder}")
    say(console, f"answers  {page}")


def _table_names(models: Sequence[str]) -> list[str]:
    """Return the last part of each path, or the whole path if two models share it."""
    short = [Path(x).name or x for x in models]
    if twice := [x for x in dict.fromkeys(models) if list(models).count(x) > 1]:
        raise ValueError(f"expected each model once; got {listed(twice)} twice.")
    return [x if short.count(x) == 1 else y for x, y in zip(short, models, strict=True)]


@contextmanager
def _progress(console: "Console", model: str) -> "Iterator[Progress]":
    """Draw one bar per set with the time left; write lines if there is no terminal."""
    from rich.markup import escape
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bars: dict[str, Any] = {}
    drawn = Progress(
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )

    def show(name: str, done: int, total: int) -> None:
        if not console.is_terminal:
            say(console, f"{model} {name}: {done}/{total}")
        elif name not in bars:
            bars[name] = drawn.add_task(escape(f"{model} {name}"), total=total, completed=done)
        else:
            drawn.update(bars[name], completed=done)

    if not console.is_terminal:
        yield show
        return
    with drawn:
        yield show


def _drawn(table: "Table") -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table as Drawing

    from segcredit.benchmarks.table import percent_text

    drawing = Drawing(
        title=table.caption,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=0,
        show_edge=False,  # Table 1 fits into 80 columns
    )
    drawing.add_column("model", no_wrap=True)
    for column in table.columns:
        drawing.add_column(column, justify="right", overflow="fold")
    in_paper = False
    for row in table.rows:
        values = map(percent_text, row.values)
        name = escape(one_line(row.name))
        if row.paper and not in_paper:
            drawing.add_section()
        in_paper = row.paper
        drawing.add_row(f"paper: {name}" if row.paper else name, *values)
    return drawing


def _details(results: "dict[str, dict[str, SetResult]]") -> Iterator[str]:
    """Describe each main score: its interval, and the questions and answers behind it."""
    for model, sets in results.items():
        for result in sets.values():
            metric, score = next(iter(result.scores.items()))
            facts = result.summary()
            asked, complete = len(result.questions), result.benchmark.count
            part = "" if complete in (None, asked) else f" of {complete}"
            known = facts["response_length"] > 0  # VLMEvalKit does not store lengths
            cut = f", truncated {facts['truncated']:.1%}" if known else ""
            yield (
                f"{model} {result.benchmark.title}: {metric} {score.value:.2f} (95 % interval "
                f"{score.low:.1f} – {score.high:.1f}), {asked}{part} questions, no "
                f"answer found in {facts['no_answer']:.1%}{cut}"
            )


def _show_sets(console: "Console", names: Sequence[str], data: Path | None) -> None:
    from rich.table import Table

    from segcredit.benchmarks import find_data, make_benchmark
    from segcredit.benchmarks.readers import data_folders

    folders = data_folders(data)
    table = Table(title="Benchmarks", title_justify="left")
    for column in ("name", "questions", "data", "found"):
        table.add_column(column, justify="right" if column == "questions" else "left")
    for name in names:
        made = make_benchmark(name)
        found = find_data(made.layouts, folders)
        files = "\n".join(f"{x.files} ({x.origin})" for x in made.layouts)
        table.add_row(name, str(made.count or "?"), files, "no" if found is None else str(found))
    console.print(table)
