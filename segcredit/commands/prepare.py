"""``segcredit prepare``: convert known datasets or your own files for training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from segcredit.commands.output import AllowOutside, SkipBadRows, exit_codes, quiet_libraries, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from segcredit.data.prepare import Duplicates, Report

EPILOG = """\
[bold]Examples[/bold]

segcredit prepare geo3k  [dim]# download, then write data/geo3k/train.parquet, test.parquet …[/dim]

segcredit prepare gsm8k --from downloads/gsm8k -o rows  [dim]# from a local folder[/dim]

segcredit prepare words --from SVAMP/data/mawps-asdiv-a_svamp/train.csv --from SVAMP/SVAMP.json

segcredit prepare math --from test=HuggingFaceH4/MATH-500 --from train=my-math.jsonl

segcredit prepare mine.csv test=held-out.csv --question Frage --answer Antwort --image Bild

segcredit prepare geo3k --drop-duplicates --tokenizer Qwen/Qwen2.5-VL-3B-Instruct
"""
_BAD_SHOWN = 5


def prepare(
    what: Annotated[
        list[str],
        typer.Argument(
            help="geo3k, gsm8k, math or words; or your own data: .parquet, .jsonl, .json, .csv, "
            ".tsv or .arrow files, folders of them, or a Hub id.",
            metavar="geo3k|gsm8k|math|words|FILE…",
        ),
    ],
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            help="Where to read the dataset: folder, file or Hub id; test=PLACE for one split.",
            metavar="PLACE",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Output folder.", show_default="data/NAME or prepared"),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Configuration (subset) of a Hub dataset.")
    ] = None,
    question: Annotated[
        str | None, typer.Option(help="Column with the question.", metavar="COLUMN")
    ] = None,
    answer: Annotated[
        str | None, typer.Option(help="Column with the answer.", metavar="COLUMN")
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Column with the images.", metavar="COLUMN")
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="Another column to copy into extra_info.", metavar="COLUMN"),
    ] = None,
    suffix: Annotated[
        str | None, typer.Option(help="Text appended to every question.", show_default="verl's")
    ] = None,
    data_source: Annotated[
        str | None, typer.Option(help="Name by which verl selects its scorer.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Count prompt tokens with this tokenizer (folder or Hub id).")
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Report how many prompts are longer; needs --tokenizer.",
            min=1,
            show_default="1024",
        ),
    ] = None,
    drop_duplicates: Annotated[
        bool,
        typer.Option(
            "--drop-duplicates",
            help="Drop training rows that share question and image with a held-out row.",
        ),
    ] = False,
    skip_bad_rows: SkipBadRows = False,
    allow_outside: AllowOutside = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Convert data to parquet files for segcredit and verl.

    Checks every row, embeds the images, and reports test questions that are also in the
    training data.
    """
    from rich.console import Console

    from segcredit.data.prepare import KNOWN, Columns
    from segcredit.data.prepare import prepare as prepare_data

    if tokenizer is not None:
        quiet_libraries()
    folder = output or (Path("data") / what[0] if what[0] in KNOWN else Path("prepared"))
    console = Console()
    with exit_codes(), console.status("searching…") as status:
        report = prepare_data(
            what,
            folder,
            source=source or (),
            config=config,
            columns=Columns(question, answer, image, tuple(keep or ())),
            suffix=suffix,
            data_source=data_source,
            tokenizer=tokenizer,
            max_prompt_tokens=max_prompt_tokens,
            drop_duplicates=drop_duplicates,
            skip_bad_rows=skip_bad_rows,
            allow_outside=allow_outside,
            force=force,
            progress=lambda text: status.update(f"{text}…"),
        )
    _show(console, report, folder)


def _show(console: "Console", report: "Report", folder: Path) -> None:
    console.print(_splits(report, folder))
    if any(shared.question or shared.image for shared in report.shared):
        console.print(_shared(report))
    else:
        console.print("no question and no image occurs twice")
    for note in _notes(report):
        say(console, note, "yellow")
    say(console, _recipe(report))


def _splits(report: "Report", folder: Path) -> "Table":
    from rich.markup import escape
    from rich.table import Table

    from segcredit.printable import printable

    names = [printable(name, 60) for name in report.data_sources[:4]]
    names += ["…"] if len(report.data_sources) > 4 else []
    title = escape(f"{', '.join(names)} → {folder}")
    table = Table(title=title, title_justify="left")
    table.add_column("split")
    names = ["read", "skipped", "dropped", "written", "MB"]
    if report.max_prompt_tokens is not None:
        names += [f"text > {report.max_prompt_tokens}", "longest"]
    for name in names:
        table.add_column(name, justify="right")
    for split in report.splits:
        bad = sum(split.skipped.values())
        size = f"{split.path.stat().st_size / 1e6:.1f}"
        cells = [str(n) for n in (split.read, bad, split.dropped, split.written)] + [size]
        if report.max_prompt_tokens is not None:
            cells += [str(split.too_long), str(split.longest)]
        table.add_row(escape(split.name), *cells)
    return table


def _shared(report: "Report") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Rows that repeat an earlier row or a training row", title_justify="left")
    table.add_column("split")
    table.add_column("rows", justify="right")
    table.add_column("compared with")
    names = ["question"]
    if report.with_images:
        names += ["file", "image", "alike", "both"]
    for name in names:
        table.add_column(name, justify="right")
    for shared in report.shared:
        where = "itself" if shared.within == shared.split else shared.within
        cells = _senses(shared) if report.with_images else [str(shared.question)]
        table.add_row(escape(shared.split), str(shared.rows), escape(where), *cells)
    return table


def _senses(shared: "Duplicates") -> list[str]:
    alike = "" if shared.alike is None else shared.alike
    return [str(n) for n in (shared.question, shared.file, shared.image, alike, shared.both)]


def _notes(report: "Report") -> list[str]:
    from segcredit.data.prepare.sources import OWN, WORDS

    notes = []
    for split in report.splits:
        if split.skipped:
            why = ", ".join(f"{num} {reason}" for reason, num in sorted(split.skipped.items()))
            notes.append(f"skipped in {split.name}: {why}")
    notes += [f"  {bad}" for bad in report.bad[:_BAD_SHOWN]]
    if len(report.bad) > _BAD_SHOWN:
        notes.append(f"  and {len(report.bad) - _BAD_SHOWN} more")
    if report.leaking:
        what = "question and image" if report.with_images else "question"
        dropped = sum(split.dropped for split in report.splits)
        advice = "dropped" if dropped else "drop them with --drop-duplicates"
        notes.append(f"training rows with the {what} of a held-out row: {report.leaking}; {advice}")
    if report.max_prompt_tokens is not None and report.with_images:
        notes.append("token counts include the text only; images need additional tokens")
    for name in (*OWN.data_sources, *WORDS.data_sources):
        if name in report.data_sources:
            notes.append(
                f"verl has no scorer for the data source '{name}': name one with --data-source, "
                f"such as openai/gsm8k, or pass a reward function to verl"
            )
    return notes


def _recipe(report: "Report") -> str:
    """Return the overrides with which ``segcredit train`` uses the files."""
    paths = {split.name: split.path for split in report.splits}
    words = [f"data.{name}=[{paths[name]}]" for name in ("train", "test") if name in paths]
    if report.reward is not None:
        words.append(f"reward={report.reward}")
    return "recipe  " + (" ".join(words) or ", ".join(map(str, paths.values())))
