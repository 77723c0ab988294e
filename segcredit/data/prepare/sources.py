"""Tables beyond those that the loader opens: .csv, .tsv and .arrow."""

import csv
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Any

from segcredit.data.formats import Keys, RowError
from segcredit.data.prepare.rows import Rule, as_it_is, boxed_solution, chosen_text, number
from segcredit.data.readers import SUFFIXES as LOADED
from segcredit.data.readers import Found, Source, no_rows, open_source, table_rows
from segcredit.printable import listed, named, printable, shown

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".tsv")
"""In the order of preference where a folder holds several."""
_ARROW_FILE = b"ARROW1"
_ROWS_AT_ONCE = 64
_LONGEST_CELL = 2**27
"""Characters; a picture as base64 may stand in a cell. Python's own bound is 2**17."""


def open_table(path: Path) -> Source:
    """The rows of a file."""
    suffix = path.suffix.lower()
    if suffix in LOADED or not path.is_file():
        return open_source(path)  # which says what is wrong with it
    if suffix not in SUFFIXES:
        raise ValueError(f"expected a file that ends in {', '.join(SUFFIXES)}; got {named(path)}.")
    if path.stat().st_size == 0:
        raise no_rows(str(path))
    folder = path.absolute().parent
    if suffix == ".arrow":
        return Source(str(path), path.stem, folder, _arrow_columns(path), lambda: _arrow_rows(path))
    return Source(str(path), path.stem, folder, _csv_columns(path), lambda: _csv_rows(path))


def _csv_columns(path: Path) -> list[str]:
    with _csv_reader(path) as reader:
        names: list[str] = next(reader, [])
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"expected a name of its own for each column of {named(path)}; got "
                         f"{printable(', '.join(twice), 120)} twice.")  # fmt: skip
    return names


def _csv_rows(path: Path) -> Iterator[Found]:
    number = 0
    with _csv_reader(path) as reader:
        names: list[str] = next(reader, [])
        for number, cells in enumerate((row for row in reader if row), start=1):
            content: object = dict(zip(names, cells, strict=False))
            if len(cells) != len(names):
                content = RowError(f"expected {len(names)} cells; got {len(cells)}")
            yield Found(f"{path} row {number}", number, content)


@contextmanager
def _csv_reader(path: Path) -> Iterator[Any]:
    """Strict, so that a quote left open does not swallow the rest of the file in silence."""
    limit = csv.field_size_limit(_LONGEST_CELL)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield csv.reader(file, delimiter=delimiter, strict=True)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"expected {named(path)} in UTF-8; got byte 0x{error.object[error.start]:02x}. Save "
            f"it as UTF-8."
        ) from None
    except csv.Error as error:
        raise ValueError(
            f"expected a table of cells; {named(path)} cannot be read: {printable(str(error))}. "
            f"Is a quote left open?"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _arrow_columns(path: Path) -> list[str]:
    with _arrow_reader(path) as (schema, _):
        return list(schema.names)


def _arrow_rows(path: Path) -> Iterator[Found]:
    number = 1
    with _arrow_reader(path) as (_, batches):
        for batch in batches:
            for start in range(0, len(batch), _ROWS_AT_ONCE):
                part = batch.slice(start, _ROWS_AT_ONCE)
                yield from table_rows(str(path), part, number)
                number += len(part)


@contextmanager
def _arrow_reader(path: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The schema and the batches of a stream (as the datasets library saves) or of a file."""
    arrow = import_module("pyarrow")
    try:
        with arrow.memory_map(str(path)) as file:
            magic = file.read(len(_ARROW_FILE))
            file.seek(0)
            if magic == _ARROW_FILE:
                whole = arrow.ipc.open_file(file)
                numbers = range(whole.num_record_batches)
                yield whole.schema, (whole.get_batch(number) for number in numbers)
            else:
                stream = arrow.ipc.open_stream(file)
                yield stream.schema, iter(stream)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(
            f"expected an Arrow file; {named(path)} cannot be read: "
            f"{printable(str(error), 200)}. Was it downloaded whole?"
        ) from None


SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
}
"""What files and folders are called → the split."""
ORDER = ("train", "validation", "test")
_NO_DATA = re.compile(r"(dataset_infos?|dataset_dict|state|config)\.json|cache-.*\.arrow")


def split_of(name: str) -> str | None:
    """``train-00000-of-00002`` → train."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLITS[word] for word in words if word in SPLITS), None)


def data_files(
    folder: Path, config: str | None = None, usual: str | None = None
) -> dict[str, list[Path]]:
    """The files of each split, in a fixed order.

    A data set of several parts (GSM8K: ``main``, ``socratic``) has a folder for each: ``config``
    chooses; without it the files beside them, or ``usual``, or the only part. Files without a
    split in their name are for training.
    """
    files = _chosen(folder, _by_config(folder), config, usual)
    kinds = {file.suffix.lower() for file in files}
    kind = next(suffix for suffix in SUFFIXES if suffix in kinds)
    splits: dict[str, list[Path]] = {}
    for file in files:
        if file.suffix.lower() == kind:
            splits.setdefault(_split_below(folder, file), []).append(file)
    return {split: splits[split] for split in sorted(splits, key=in_order)}


def in_order(split: str) -> tuple[int, str]:
    """A key for sorting: training first, testing last, others behind."""
    return (ORDER.index(split) if split in ORDER else len(ORDER), split)


def _by_config(folder: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for place, inner, names in os.walk(folder):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            file = Path(place) / name
            if file.suffix.lower() not in SUFFIXES or name.startswith("."):
                continue
            if not _NO_DATA.fullmatch(name):
                above = file.relative_to(folder).parent.parts
                parts = [part for part in above if part != "data" and part not in SPLITS]
                found.setdefault("/".join(parts), []).append(file)
    return found


def _chosen(
    folder: Path, found: dict[str, list[Path]], config: str | None, usual: str | None
) -> list[Path]:
    if not found:
        raise ValueError(
            f"expected data ({', '.join(SUFFIXES)}) in the folder {named(folder)}; got none. Was "
            f"it downloaded whole?"
        )
    for name in [config] if config else ["", usual]:
        if name in found:
            return found[name]
    if len(found) == 1 and not config:
        return next(iter(found.values()))
    parts = [name for name in found if name]
    there = f"there are {listed(parts)}" if parts else "it has no parts: leave --config out"
    near = get_close_matches(config or "", parts, n=1) or parts
    raise ValueError(
        f"expected one part of the data set in {named(folder)}; got "
        f"{shown(config) if config else 'none'}, and {there}."
        f"{f' Choose: --config {near[0]}' if near else ''}"
    )


def _split_below(folder: Path, file: Path) -> str:
    """``test.jsonl``, ``test/data-0.arrow``: by the file's name, else by the folder between."""
    between = file.relative_to(folder).parent.name
    return split_of(file.stem) or split_of(between) or "train"


_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_ROWS_AT_ONCE_hub = 64


def is_hub_id(place: str) -> bool:
    """``owner/name``, unless a file or folder of this machine is meant."""
    path = Path(place)
    if not _ID.fullmatch(place) or path.suffix.lower() in SUFFIXES:
        return False
    return not path.exists() and not path.parent.exists()


def from_hub(name: str, config: str | None, usual: str | None) -> list[tuple[str, Source]]:
    """Splits and their rows; ``usual`` is the part that is meant where the user says nothing."""
    try:
        datasets = import_module("datasets")
    except ImportError:
        return _downloaded(name, config, usual)
    try:
        found = datasets.load_dataset(name, config or usual)
    except Exception as error:  # the library's errors share no class
        raise _unreachable(name, error) from None
    sources = [
        (SPLITS.get(split, split), _source(f"{name}:{split}", table))
        for split, table in found.items()
    ]
    return sorted(sources, key=lambda pair: in_order(pair[0]))


def _source(name: str, table: Any) -> Source:
    arrow = table.with_format("arrow")  # pictures stay encoded

    def rows() -> Iterator[Found]:
        number = 1
        for part in arrow.iter(batch_size=_ROWS_AT_ONCE_hub):
            yield from table_rows(name, part, number)
            number += len(part)

    return Source(name, name, Path.cwd(), list(table.column_names), rows)


def _downloaded(name: str, config: str | None, usual: str | None) -> list[tuple[str, Source]]:
    """Its data files, into the Hub's own cache; from there on they are a folder like any other."""
    try:
        fetch = import_module("huggingface_hub").snapshot_download
        folder = fetch(name, repo_type="dataset", allow_patterns=[f"*{end}" for end in SUFFIXES])
    except Exception as error:  # no network, no such name, no right to read it
        raise _unreachable(name, error) from None
    splits = data_files(Path(folder), config, usual)
    return [(split, open_table(file)) for split, files in splits.items() for file in files]


def _unreachable(name: str, error: Exception) -> ValueError:
    folder = name.rpartition("/")[2]
    return ValueError(
        f"expected a file, a folder, or a data set of the Hub that can be reached; {shown(name)} "
        f"cannot be loaded: {printable(str(error), 300)}\nWhere there is a network, type: hf "
        f"download {name} --repo-type dataset --local-dir {folder}; then give that folder here "
        f"(geo3k, gsm8k, math: --from {folder})"
    )


_ASSIGNED = re.compile(r"(?P<split>[A-Za-z]\w*)=(?P<place>.+)", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """Rows of one split that lie together."""

    split: str
    source: Source
    place: str
    """As the user named it."""
    path: Path | None
    """The file, if it is one of this machine's own."""


def find_parts(place: str, config: str | None, usual: str | None) -> list[Part]:
    """The parts of a place; ``test=PLACE`` takes one split, or says which split a file is."""
    wanted, place = _assignment(place)
    path = Path(place)
    if path.is_dir():
        found = [
            Part(split, open_table(file), place, file)
            for split, files in data_files(path, config, usual).items()
            for file in files
        ]
        return _only(found, wanted, place)
    if is_hub_id(place):
        pairs = from_hub(place, config, usual)
        return _only([Part(split, source, place, None) for split, source in pairs], wanted, place)
    return [Part(wanted or split_of(path.stem) or "train", open_table(path), place, path)]


def _assignment(place: str) -> tuple[str | None, str]:
    match = _ASSIGNED.fullmatch(place)
    if match is None or Path(place).exists():
        return None, place
    split = match["split"].lower()
    return SPLITS.get(split, split), match["place"]


def _only(parts: list[Part], wanted: str | None, place: str) -> list[Part]:
    if wanted is None:
        return parts
    chosen = [part for part in parts if part.split == wanted]
    if not chosen:
        there = dict.fromkeys(part.split for part in parts)
        raise ValueError(
            f"expected a split {shown(wanted)} in {named(place)}; it has {listed(there)}."
        )
    return chosen


@dataclass(frozen=True)
class DataSet:
    """What ``segcredit prepare NAME`` knows of a data set."""

    name: str
    hub: str
    """Its id on the Hugging Face Hub."""
    data_sources: tuple[str, ...]
    """Names by which verl chooses the right scorer; the first, unless the place bears another."""
    suffix: str
    """What verl puts behind every question, joined by one space."""
    rule: Rule
    """How the answer is read off a row."""
    reward: str | None
    """The reward of ours that grades it."""
    config: str | None = None
    """The part of it on the Hub."""
    named_rule: Rule = as_it_is
    """The same where the user names the answer's column."""
    keep: tuple[str, ...] = ()
    """Columns that go into extra_info, where a row has them."""

    def data_source(self, place: str) -> str:
        """The name for verl of rows that lie there: ``…/math500`` holds MATH-500."""
        words = {_bare(place), _bare(Path(place).name), _bare(Path(place).parent.name)}
        for name in self.data_sources:
            if words & {_bare(name), _bare(name.rpartition("/")[2])}:
                return name
        return self.data_sources[0]


OWN = DataSet("own", "", ("custom",), "", as_it_is, None)
"""Files of the user's: no suffix, and a name for which verl has no scorer."""

GEO3K = DataSet(
    "geo3k",
    "hiyouga/geometry3k",
    ("hiyouga/geometry3k",),
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final "
    "answer MUST BE put in \\boxed{}.",
    chosen_text,
    "geo3k",
    keep=("id", "choices"),
)
GSM8K = DataSet(
    "gsm8k",
    "openai/gsm8k",
    ("openai/gsm8k",),
    'Let\'s think step by step and output the final answer after "####".',
    number,
    "gsm8k",
    config="main",
    named_rule=number,
    keep=("answer",),
)
MATH = DataSet(
    "math",
    "DigitalLearningGmbH/MATH-lighteval",
    ("DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    "Let's think step by step and output the final answer within \\boxed{}.",
    boxed_solution,
    "math",
    keep=("solution", "level", "type", "subject", "unique_id"),
)
KNOWN = {known.name: known for known in (GEO3K, GSM8K, MATH)}


def choose(what: Sequence[str], places: Sequence[str]) -> tuple[DataSet, list[str]]:
    """The data set that is meant, and where its rows lie."""
    names = [name for name in what if name in KNOWN]
    if names and len(what) > 1:
        others = " ".join(f"--from {name}" for name in what if name not in KNOWN)
        raise ValueError(
            f"expected one data set, or files; got {listed(what)}. For files that are like "
            f"{names[0]}: segcredit prepare {names[0]} {others or '--from FILE'}"
        )
    if names:
        known = KNOWN[names[0]]
        return known, list(places) or [known.hub]
    if places:
        raise ValueError(
            f"--from goes with a data set, {', '.join(KNOWN)}; got {listed(what)}.{_near(what[0])} "
            f"Files of your own stand alone: segcredit prepare {' '.join(places)}"
        )
    if not what:
        raise ValueError(f"expected a data set, {', '.join(KNOWN)}, or files; got nothing.")
    for name in what:
        if re.fullmatch(r"[\w-]+", name) and not Path(name).exists():
            raise ValueError(
                f"expected a data set, {', '.join(KNOWN)}, or a file; got {shown(name)}."
                f"{_near(name)}"
            )
    if len(what) == 1:
        for known in KNOWN.values():
            if what[0] in known.data_sources and not Path(what[0]).exists():
                return known, list(what)
    return OWN, list(what)


def _near(name: str) -> str:
    near = get_close_matches(name.lower(), [*KNOWN, "geometry3k"], n=1, cutoff=0.4)
    return f" Did you mean {near[0].replace('geometry3k', 'geo3k')}?" if near else ""


def _bare(name: str) -> str:
    return re.sub(r"\W|_", "", name).lower()


@dataclass(frozen=True)
class Columns:
    """The columns that the user named; None: the usual names."""

    question: str | None = None
    answer: str | None = None
    image: str | None = None
    keep: tuple[str, ...] = ()

    def keys(self) -> Keys:
        """Where the loader shall look."""
        usual = Keys()
        return Keys(
            question=(self.question,) if self.question else usual.question,
            answer=(self.answer,) if self.answer else usual.answer,
            images=(self.image,) if self.image else usual.images,
        )

    def check(self, file: str, seen: Collection[str]) -> None:
        """Raise ValueError if a column that is needed is in no row of the file."""
        keys = self.keys()
        wanted = [("question", keys.question, self.question), ("answer", keys.answer, self.answer)]
        if self.image:
            wanted.append(("image", keys.images, self.image))
        for option, names, asked in wanted:
            if not any(name in seen or name.partition(".")[0] in seen for name in names):
                raise _missing(file, seen, option, names, asked)
        for name in self.keep:
            if name not in seen:
                raise _missing(file, seen, "keep", (name,), name)


def _missing(
    file: str, seen: Collection[str], option: str, names: tuple[str, ...], asked: str | None
) -> ValueError:
    near = _nearest(asked or option, names, seen)
    if asked:
        advice = f" Did you mean --{option} {near}?" if near else ""
        return ValueError(
            f"expected the column {shown(asked)} (--{option}) in {named(file)}; it has "
            f"{listed(seen, 20)}.{advice}"
        )
    usual = " or ".join(f"'{name}'" for name in names)
    return ValueError(
        f"expected a column with the {option}, {usual}, in {named(file)}; it has "
        f"{listed(seen, 20)}. Name yours: --{option} {near or 'COLUMN'}"
    )


def _nearest(asked: str, names: Iterable[str], seen: Iterable[str]) -> str | None:
    """Of the columns there are, the one most like what was looked for, as it is typed."""
    by_lower = {name.lower(): name for name in seen}
    for wanted in (asked, *names):
        near = get_close_matches(wanted.lower(), by_lower, n=1, cutoff=0.5)
        if near:
            return quote(printable(by_lower[near[0]], 60))
    return None
