"""``segcredit benchmark``: fill the tables of the SAPO paper for one or several models."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from segcredit.commands.output import (
    Engine,
    MaxTokens,
    ModelFamily,
    Seed,
    Template,
    TopP,
    TrustRun,
    exit_codes,
    quiet_libraries,
)

if TYPE_CHECKING:
    from rich.console import Console

    from segcredit.benchmarks.run import Progress, SetResult
    from segcredit.benchmarks.table import Table

EPILOG = """\
[bold]Examples[/bold]

segcredit benchmark --list  [dim]# sets, sizes, and whether their data was found[/dim]

segcredit benchmark runs/geo3k-sapo --sets table1 --paper --engine vllm

segcredit benchmark Qwen/Qwen2.5-VL-3B-Instruct runs/grpo runs/sapo --sets logicvista,wemath

segcredit benchmark my-model --sets dynamath --data ~/bench --limit 20  [dim]# a quick look[/dim]
"""
PAPER: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95}
"""Sampling as in Table 7 of the SAPO paper."""


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
            show_default="rules alone",
        ),
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option(help="Model of the judge.", show_default="the server's first")
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

    Type the same command again after a kill: finished answers are kept.
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
        results = _run(console, models, names, data, folder, settings, trust_run)
        _finish(console, results, sets or ["paper"], folder, as_json)


def _run(
    console: "Console",
    models: Sequence[str],
    names: Sequence[str],
    data: Path | None,
    folder: Path,
    settings: Any,
    trust_run: bool,
) -> "dict[str, dict[str, SetResult]]":
    """Answer all sets with every model; the models' names in the tables are the keys."""
    from segcredit.benchmarks.run import ANSWERS, load_questions, run_benchmarks

    with console.status("reading questions…"):
        sets = load_questions(names, data, settings.limit, settings.instruction)
    results = {}
    for model, name in zip(models, _table_names(models), strict=True):
        place = folder / re.sub(r"[^\w.-]+", "-", model.strip("/.")).strip("-")
        try:
            with _progress(console, name) as progress:
                results[name] = run_benchmarks(model, sets, place, settings, progress, trust_run)
        except BaseException:
            if (place / ANSWERS).is_dir():
                console.print(
                    f"The answers so far are kept in {place}. Type the same command to continue.",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
            raise
    return results


def _finish(
    console: "Console",
    results: "dict[str, dict[str, SetResult]]",
    wanted: Sequence[str],
    folder: Path,
    as_json: bool,
) -> None:
    """Write the tables in all formats, and show them."""
    from segcredit.benchmarks.page import write_page
    from segcredit.benchmarks.table import FORMATS, ModelScores, make_tables
    from segcredit.runlog.files import write_text_atomically

    scores = [
        ModelScores(model, {name: x.scores for name, x in sets.items()})
        for model, sets in results.items()
    ]
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
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in (f"results  {folder}", f"answers  {page}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table_names(models: Sequence[str]) -> list[str]:
    """Return the last part of each path, or the whole path if two models share it."""
    short = [Path(x).name or x for x in models]
    if len(set(models)) < len(models):
        raise ValueError("expected each model once; got one twice.")
    return [x if short.count(x) == 1 else y for x, y in zip(short, models, strict=True)]


@contextmanager
def _progress(console: "Console", model: str) -> "Iterator[Progress]":
    """Draw one bar per set with the time left; write lines if the output is not a terminal."""
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
            console.print(f"{model} {name}: {done}/{total}", markup=False, highlight=False)
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

    from segcredit.printable import one_line

    title = table.title if table.number is None else f"Table {table.number}: {table.title}"
    drawing = Drawing(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    drawing.add_column("model", no_wrap=True)
    for column in table.columns:
        drawing.add_column(column, justify="right")
    in_paper = False
    for row in table.rows:
        values = ["–" if x is None else f"{x:.2f}" for x in row.values]
        name = escape(one_line(row.name))
        if row.paper and not in_paper:
            drawing.add_section()
        in_paper = row.paper
        drawing.add_row(f"paper: {name}" if row.paper else name, *values)
    return drawing


def _details(results: "dict[str, dict[str, SetResult]]") -> Iterator[str]:
    """Describe each main score: its interval, and what it rests on."""
    for model, sets in results.items():
        for result in sets.values():
            metric, score = next(iter(result.scores.items()))
            facts = result.summary()
            part = (
                ""
                if result.benchmark.count in (None, len(result.questions))
                else (f" of {result.benchmark.count}")
            )
            yield (
                f"{model} {result.benchmark.title}: {metric} {score.value:.2f} (95 % interval "
                f"{score.low:.1f} – {score.high:.1f}), {len(result.questions)}{part} questions, no "
                f"answer found in {facts['no_answer']:.1%}, truncated {facts['truncated']:.1%}"
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
