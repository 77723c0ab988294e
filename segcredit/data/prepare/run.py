"""The whole of it: find the splits, read and compare every row, write what is good."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from segcredit.data.prepare.columns import Columns
from segcredit.data.prepare.items import OWN_EXTRAS, LeftOut, Making
from segcredit.data.prepare.lengths import USUAL_LIMIT, TextLengths
from segcredit.data.prepare.places import Part, find_parts
from segcredit.data.prepare.report import Report, SplitReport
from segcredit.data.prepare.scan import Scan, Watch, all_rows
from segcredit.data.prepare.schema import row, schema
from segcredit.data.prepare.sets import OWN, DataSet, choose
from segcredit.data.prepare.shared import TRAIN, find_shared, leaking
from segcredit.data.prepare.snapshot import in_order
from segcredit.data.prepare.writing import RowWriter
from segcredit.data.problems import BadRows
from segcredit.printable import listed, named
from segcredit.runlog.atomic import replacing

Splits = dict[str, list[tuple[Part, Making]]]


def prepare(
    what: str | Sequence[str],
    output: str | Path,
    *,
    source: str | Sequence[str] = (),
    config: str | None = None,
    columns: Columns | None = None,
    suffix: str | None = None,
    data_source: str | None = None,
    tokenizer: str | None = None,
    max_prompt_tokens: int | None = None,
    drop_duplicates: bool = False,
    skip_bad_rows: bool = False,
    allow_outside: bool = False,
    force: bool = False,
    watch: Watch = lambda what: None,
) -> Report:
    """Write ``train.parquet``, ``test.parquet`` … in verl's format; say what was in the data.

    Args:
        what: ``"geo3k"``, ``"gsm8k"``, ``"math"``; or files, folders or ids on the Hub of any
            rows that the loader reads. ``"test=FILE"`` says which split a file is.
        output: The folder to write into.
        source: Where the rows of a known data set lie, if not on the Hub: files, folders, ids.
        config: The part of a data set that has several.
        columns: The columns that hold question, answer and picture, if their names are unusual.
        suffix: Put behind every question; None: what verl puts there.
        data_source: The name by which verl chooses a scorer; None: what fits the data.
        tokenizer: Counts the tokens of every prompt's text.
        max_prompt_tokens: Longer texts are counted in the report.
        drop_duplicates: Leave out training rows whose question and picture held-out data has.
        skip_bad_rows: Leave bad rows out instead of raising BadRows.
        allow_outside: Allow rows to name images outside the folder of their file.
        force: Overwrite.
        watch: Is told what is being done.
    """
    folder, columns = Path(output), columns or Columns()
    _check_settings(columns, tokenizer, max_prompt_tokens)
    chosen, places = choose(_as_list(what), _as_list(source))
    splits = _find(chosen, places, config, columns, suffix, data_source, allow_outside)
    _check_output(folder, splits, force)
    scan = Scan(
        columns,
        None if tokenizer is None else TextLengths(tokenizer),
        max_prompt_tokens or USUAL_LIMIT,
    )
    reports = [SplitReport(name, folder / f"{name}.parquet") for name in splits]
    for report in reports:
        scan.read(report, splits[report.name], watch)
    if scan.bad and not skip_bad_rows:
        raise BadRows(scan.bad)
    found = Report(
        list(scan.data_sources),
        chosen.reward,
        reports,
        find_shared(scan.rows),
        scan.bad,
        max_prompt_tokens=scan.max_prompt_tokens if tokenizer is not None else None,
    )
    leaks = leaking(scan.rows)
    found.leaking = len(leaks)
    wanted = _wanted(scan, leaks if drop_duplicates else set())
    for report in reports:
        report.dropped = len(scan.numbers[report.name]) - len(wanted[report.name])
        if not wanted[report.name]:
            raise BadRows(scan.bad, f"No row is left for {report.path.name}.")
    _write(found, splits, wanted, scan, watch)
    return found


def _as_list(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _check_settings(columns: Columns, tokenizer: str | None, limit: int | None) -> None:
    for name in columns.keep:
        if name in OWN_EXTRAS:
            raise ValueError(
                f"--keep: extra_info has {listed(OWN_EXTRAS)} of its own; got '{name}'. Leave it "
                f"out, or rename the column."
            )
    if limit is not None and limit < 1:
        raise ValueError(f"--max-prompt-tokens must be at least 1; got {limit}.")
    if limit is not None and tokenizer is None:
        raise ValueError(
            "--max-prompt-tokens needs a tokenizer to count with: --tokenizer FOLDER, or a "
            "model's id on the Hub."
        )


def _find(
    chosen: DataSet,
    places: list[str],
    config: str | None,
    columns: Columns,
    suffix: str | None,
    data_source: str | None,
    allow_outside: bool,
) -> Splits:
    """The parts of each split, and how their rows become items."""
    splits: Splits = {}
    for place in places:
        for part in find_parts(place, config, chosen.config):
            making = Making(
                keys=columns.keys(),
                rule=chosen.named_rule if columns.answer else chosen.rule,
                suffix=chosen.suffix if suffix is None else suffix,
                data_source=data_source or chosen.data_source(part.place),
                keep_data_source=chosen is OWN and data_source is None,
                keep=(*chosen.keep, *columns.keep),
                allow_outside=allow_outside,
            )
            splits.setdefault(part.split, []).append((part, making))
    paths = [part.path.resolve() for parts in splits.values() for part, _ in parts if part.path]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"expected each file once; got {named(path)} twice.")
    return {split: splits[split] for split in sorted(splits, key=in_order)}


def _check_output(folder: Path, splits: Splits, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output: expected a folder; got the file {named(folder)}.")
    inputs = {part.path.resolve() for parts in splits.values() for part, _ in parts if part.path}
    outputs = [folder / f"{split}.parquet" for split in splits]
    for path in outputs:
        if path.resolve() in inputs:
            raise ValueError(
                f"{named(path)} would be read and written at once. Choose another folder: -o FOLDER"
            )
    there = [path.name for path in outputs if path.exists()]
    if there and not force:
        raise ValueError(
            f"{named(folder)} has {listed(there)} already. Overwrite: --force; or choose another "
            f"folder: -o FOLDER"
        )


def _wanted(scan: Scan, leaks: set[int]) -> dict[str, list[int]]:
    """The numbers of the rows that are written."""
    wanted = dict(scan.numbers)
    if leaks:
        kept = [number for place, number in enumerate(wanted[TRAIN]) if place not in leaks]
        wanted[TRAIN] = kept
    return wanted


def _write(
    found: Report, splits: Splits, wanted: dict[str, list[int]], scan: Scan, watch: Watch
) -> None:
    """All files under other names first: an error in reading or writing leaves none behind."""
    with_pictures = found.with_pictures
    columns = schema(scan.kinds, with_pictures)
    with ExitStack() as files:
        for report in found.splits:
            report.path.parent.mkdir(parents=True, exist_ok=True)
            writer = RowWriter(files.enter_context(replacing(report.path)), columns)
            files.callback(writer.close)
            numbers = set(wanted[report.name])
            for part, making, number, row_found in all_rows(splits[report.name]):
                if number not in numbers:
                    continue
                try:
                    item = making.item(row_found, part.source.folder, number)
                except LeftOut as error:
                    raise _changed(part) from error
                size = sum(len(picture.content) for picture in item.pictures)
                if item.pictures and not with_pictures:
                    raise _changed(part)
                writer.write(row(item, report.name, scan.kinds, with_pictures), size)
                report.written += 1
                if report.written % 100 == 0:
                    watch(f"writing {report.path.name}, row {report.written}")
            if report.written != len(numbers):
                raise _changed(part)
            writer.close()


def _changed(part: Part) -> ValueError:
    return ValueError(
        f"{named(part.source.name)} changed while it was read, so nothing was written. Type the "
        f"command again when nobody writes to it."
    )
