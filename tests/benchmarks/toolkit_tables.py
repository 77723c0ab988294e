"""TSV files as VLMEvalKit reads them, made from the git layouts or from a few rows."""

import base64
import csv
import json
from collections.abc import Callable
from pathlib import Path

from bench import DATA
from tables import LETTERS, encoded, write_tsv

from segcredit.benchmarks.sets.wemath import split_options


def rows_of_tsv(path: Path) -> list[dict[str, str]]:
    csv.field_size_limit(2**30)
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def encoded_file(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def logicvista_tsv(
    folder: Path, mark: Callable[[object], str] = lambda _: "", source: Path = DATA
) -> None:
    """All 447 rows; the index is the number in the row's key."""
    found = json.loads((source / "logicvista/data/dataset.json").read_text())
    write_tsv(
        folder / "LogicVista.tsv",
        [
            {
                "index": key.removeprefix("v1_"),
                "image": encoded_file(source / "logicvista/data/images" / row["imagename"]),
                "question": row["question"] + mark(key.removeprefix("v1_")),
                "answer": row["answer"],
                "skill": ",".join(row["skill"]),
            }
            for key, row in found.items()
            if row["question"]
        ],
    )


def wemath_tsv(
    folder: Path, mark: Callable[[object], str] = lambda _: "", source: Path = DATA
) -> None:
    """All 1740 rows, with a column for each option."""
    found = json.loads((source / "wemath/data/testmini.json").read_text())
    rows = []
    for number, row in enumerate(found):
        options = split_options(row["option"])
        rows.append(
            {
                "index": number,
                "image": encoded_file(source / "wemath/data" / row["image_path"]),
                "question": row["question"] + mark(number),
                **{letter: options.get(letter, "") for letter in LETTERS},
                **{name: row[name] for name in ("answer", "ID", "knowledge concept", "key")},
            }
        )
    write_tsv(folder / "WeMath.tsv", rows)


def small_tables(folder: Path) -> None:
    """Four questions of LogicVista and one problem of We-Math."""
    folder.mkdir(parents=True)
    answers = {"0": "C", "1": "A", "2": "C, A", "3": "B"}
    write_tsv(
        folder / "LogicVista.tsv",
        [
            {
                "index": index,
                "image": encoded(),
                "question": f"{index}? Select from A-D",
                "answer": answer,
                "skill": "inductive",
            }
            for index, answer in answers.items()
        ],
    )
    parts = {"2steps_1": "C", "2steps_2": "C", "2steps_multi": "A"}
    options = {letter: f"option {letter}" if letter < "F" else "" for letter in LETTERS}
    write_tsv(
        folder / "WeMath.tsv",
        [
            {
                "index": 7 * number,
                "image": encoded(),
                "question": f"part {key}?",
                **options,
                "answer": answer,
                "ID": "2steps_1",
                "knowledge concept": "",
                "key": key,
            }
            for number, (key, answer) in enumerate(parts.items())
        ],
    )
