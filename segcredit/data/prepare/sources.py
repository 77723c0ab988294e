"""Find the data that ``segcredit prepare`` converts: known datasets, files, folders, the Hub."""

import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from shlex import quote

from segcredit.data.formats import Keys, either
from segcredit.data.prepare.rows import (
    Reshape,
    Rule,
    as_it_is,
    boxed_solution,
    chosen_text,
    number,
    unchanged,
    with_solution,
    word_problem,
)
from segcredit.data.readers import SUFFIXES, Source, dataset_source, open_source
from segcredit.printable import listed, named, printable, shown
from segcredit.registry import closest, nearest

SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "val", "valid", "dev"), "validation"),
}
"""Words in names of files and folders, and the split that they mean."""
ORDER = ("train", "validation", "test")
_NO_DATA = re.compile(r"(dataset_infos?|dataset_dict|state|config)\.json|cache-.*\.arrow")


def split_of(name: str, held_out: Collection[str] = ()) -> str | None:
    """Return the split that a file name contains: ``train-00000-of-00002`` → train.

    ``held_out``: further words that mean the test split.
    """
    known = SPLITS | dict.fromkeys(held_out, "test")
    words = re.split(r"[^a-z]+", name.lower())
    return next((known[word] for word in words if word in known), None)


def data_files(
    folder: Path,
    config: str | None = None,
    usual: str | None = None,
    held_out: Collection[str] = (),
) -> dict[str, list[Path]]:
    """Return the files of each split, in a fixed order.

    Args:
        folder: Folder of a dataset. One with several parts (GSM8K: ``main``, ``socratic``) has a
            folder for each part.
        config: Part to read. None: the files in ``folder`` itself, else ``usual``, else the only
            part.
        usual: Default part.
        held_out: Words in file names that mean the test split, besides "test".

    Files without a split in their name belong to the training split.
    """
    files = _chosen(folder, _by_config(folder), config, usual)
    kinds = {file.suffix.lower() for file in files}
    kind = next(suffix for suffix in SUFFIXES if suffix in kinds)
    splits: dict[str, list[Path]] = {}
    for file in files:
        if file.suffix.lower() == kind:
            splits.setdefault(_split_below(folder, file, held_out), []).append(file)
    return {split: splits[split] for split in sorted(splits, key=in_order)}


def in_order(split: str) -> tuple[int, str]:
    """Sort key of splits: train, validation, test, then others."""
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
            f"the download complete?"
        )
    for name in [config] if config else ["", usual]:
        if name in found:
            return found[name]
    if len(found) == 1 and not config:
        return next(iter(found.values()))
    parts = [name for name in found if name]
    there = f"there are {listed(parts)}" if parts else "the dataset has only one: omit --config"
    hint = f" Choose: --config {closest(config or '', parts) or parts[0]}" if parts else ""
    raise ValueError(
        f"expected --config to name one part of the dataset in {named(folder)}; got "
        f"{shown(config) if config else 'none'}, and {there}.{hint}"
    )


def _split_below(folder: Path, file: Path, held_out: Collection[str]) -> str:
    """Return the split of ``test.jsonl`` or ``test/data-0.arrow``: by file name, then folder."""
    between = file.relative_to(folder).parent.name
    return split_of(file.stem, held_out) or split_of(between) or "train"


_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_hub_id(place: str) -> bool:
    """Whether this is ``owner/name`` and not a local path."""
    path = Path(place)
    if not _ID.fullmatch(place) or path.suffix.lower() in SUFFIXES:
        return False
    return not path.exists() and not path.parent.exists()


def from_hub(name: str, config: str | None, usual: str | None) -> list[tuple[str, Source]]:
    """Load the splits of a dataset on the Hub; ``usual`` is the default part."""
    try:
        datasets = import_module("datasets")
    except ImportError:
        return _downloaded(name, config, usual)
    try:
        found = datasets.load_dataset(name, config or usual)
    except Exception as error:  # the library's errors have no common class
        raise _unreachable(name, error) from None
    sources = [
        (SPLITS.get(split, split), dataset_source(f"{name}:{split}", f"{name}:{split}", table))
        for split, table in found.items()
    ]
    return sorted(sources, key=lambda pair: in_order(pair[0]))


def _downloaded(name: str, config: str | None, usual: str | None) -> list[tuple[str, Source]]:
    """Download the data files into the Hub's cache and read them like any folder."""
    try:
        fetch = import_module("huggingface_hub").snapshot_download
        folder = fetch(name, repo_type="dataset", allow_patterns=[f"*{end}" for end in SUFFIXES])
    except Exception as error:  # no network, unknown name, or no permission
        raise _unreachable(name, error) from None
    splits = data_files(Path(folder), config, usual)
    return [(split, open_source(file)) for split, files in splits.items() for file in files]


def _unreachable(name: str, error: Exception) -> ValueError:
    folder = name.rpartition("/")[2]
    return ValueError(
        f"expected a file, a folder, or a dataset on the Hub that can be reached; {shown(name)} "
        f"cannot be loaded: {printable(str(error), 300)}\nOn a machine with a network, type: hf "
        f"download {name} --repo-type dataset --local-dir {folder}; then pass that folder here "
        f"({', '.join(KNOWN)}: --from {folder})"
    )


_ASSIGNED = re.compile(r"(?P<split>[A-Za-z]\w*)=(?P<place>.+)", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """A source of rows that belongs to one split."""

    split: str
    source: Source
    place: str
    """Source as the user named it."""
    path: Path | None
    """The file, if it is a local one."""


def find_parts(
    place: str, config: str | None, usual: str | None, held_out: Collection[str] = ()
) -> list[Part]:
    """Return the sources in a path; ``test=PATH`` selects a split, or sets the split of a file."""
    wanted, place = _assignment(place)
    path = Path(place)
    if path.is_dir():
        found = [
            Part(split, open_source(file), place, file)
            for split, files in data_files(path, config, usual, held_out).items()
            for file in files
        ]
        return _only(found, wanted, place)
    if is_hub_id(place):
        pairs = from_hub(place, config, usual)
        return _only([Part(split, source, place, None) for split, source in pairs], wanted, place)
    split = wanted or split_of(path.stem, held_out) or "train"
    return [Part(split, open_source(path), place, path)]


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
    """Properties of a dataset that ``segcredit prepare NAME`` knows."""

    name: str
    hub: str
    """Id on the Hugging Face Hub; empty: ``--from`` must name the files."""
    data_sources: tuple[str, ...]
    """Names by which verl selects its scorer; the first is the default."""
    suffix: str
    """Text that verl appends to every question, after a space."""
    rule: Rule
    """Rule that extracts the answer from a row."""
    reward: str | None
    """Name of the reward that grades it."""
    config: str | None = None
    """Part of the dataset to use."""
    named_rule: Rule = as_it_is
    """Rule to use if the user names the answer column."""
    keep: tuple[str, ...] = ()
    """Columns to copy into extra_info if a row has them."""
    reshape: Reshape = unchanged
    """Renames or adds columns of a row, before anything else."""
    held_out: tuple[str, ...] = ()
    """Words in file names that mean the test split, besides "test"."""

    def data_source(self, place: str) -> str:
        """Return verl's name for rows from this source: ``…/math500`` is MATH-500."""
        words = {_bare(place), _bare(Path(place).name), _bare(Path(place).parent.name)}
        for name in self.data_sources:
            if words & {_bare(name), _bare(name.rpartition("/")[2])}:
                return name
        return self.data_sources[0]


OWN = DataSet("own", "", ("custom",), "", as_it_is, None)
"""Files of your own: no suffix, and a name for which verl has no scorer."""

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
    keep=("answer", "response"),
    reshape=with_solution,
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
WORDS = DataSet(
    "words",
    "",
    ("arkilpatel/SVAMP",),
    GSM8K.suffix,
    number,
    "gsm8k",
    named_rule=number,
    keep=("response",),
    reshape=word_problem,
    held_out=("svamp",),
)
"""MAWPS and ASDiv-A for training, SVAMP for testing (https://github.com/arkilpatel/SVAMP)."""
KNOWN = {known.name: known for known in (GEO3K, GSM8K, MATH, WORDS)}


def choose(what: Sequence[str], places: Sequence[str]) -> tuple[DataSet, list[str]]:
    """Return the dataset that the user means, and the sources of its rows."""
    names = [name for name in what if name in KNOWN]
    if names and len(what) > 1:
        others = " ".join(f"--from {name}" for name in what if name not in KNOWN)
        raise ValueError(
            f"expected one dataset, or files; got {listed(what)}. For files in the format of "
            f"{names[0]}: segcredit prepare {names[0]} {others or '--from FILE'}"
        )
    if names:
        known = KNOWN[names[0]]
        if not places and not known.hub:
            raise ValueError(
                f"{known.name} has no default place on the Hub: expected --from FILE or FOLDER. "
                f"Type: git clone https://github.com/arkilpatel/SVAMP; then: segcredit "
                f"prepare {known.name} --skip-bad-rows --from SVAMP/SVAMP.json --from "
                f"SVAMP/data/mawps-asdiv-a_svamp/train.csv"
            )
        return known, list(places) or [known.hub]
    if places:
        raise ValueError(
            f"--from needs a dataset ({', '.join(KNOWN)}); got {listed(what)}.{_near(what[0])} "
            f"Pass files of your own without --from: segcredit prepare {' '.join(places)}"
        )
    if not what:
        raise ValueError(f"expected a dataset ({', '.join(KNOWN)}) or files; got nothing.")
    for name in what:
        if re.fullmatch(r"[\w-]+", name) and not Path(name).exists():
            raise ValueError(
                f"expected a dataset ({', '.join(KNOWN)}) or a file; got {shown(name)}."
                f"{_near(name)}"
            )
    if len(what) == 1:
        for known in KNOWN.values():
            if what[0] in known.data_sources and not Path(what[0]).exists():
                return known, list(what)
    return OWN, list(what)


def _near(name: str) -> str:
    return nearest(name, [*KNOWN, "geometry3k"], cutoff=0.4).replace("geometry3k", "geo3k")


def _bare(name: str) -> str:
    return re.sub(r"\W|_", "", name).lower()


@dataclass(frozen=True)
class Columns:
    """Columns that the user named; None selects the default names."""

    question: str | None = None
    answer: str | None = None
    image: str | None = None
    keep: tuple[str, ...] = ()

    def keys(self) -> Keys:
        """Return the keys under which the loader finds the parts of a row."""
        usual = Keys()
        return Keys(
            question=(self.question,) if self.question else usual.question,
            answer=(self.answer,) if self.answer else usual.answer,
            images=(self.image,) if self.image else usual.images,
        )

    def check(self, file: str, seen: Collection[str]) -> None:
        """Raise ValueError if no row of the file has a required column."""
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
            f"expected a column {shown(asked)} (--{option}) in {named(file)}; it has "
            f"{listed(seen, 20)}.{advice}"
        )
    return ValueError(
        f"expected a column with the {option}, {either(names)}, in {named(file)}; it has "
        f"{listed(seen, 20)}. Name yours: --{option} {near or 'COLUMN'}"
    )


def _nearest(asked: str, names: Iterable[str], seen: Iterable[str]) -> str | None:
    """Return the column with the most similar name, quoted for the shell."""
    for wanted in (asked, *names):
        near = closest(wanted, seen, cutoff=0.5)
        if near is not None:
            return quote(printable(near, 60))
    return None
