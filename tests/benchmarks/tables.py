"""Small benchmark files in the published formats, with generated images."""

import base64
import csv
import io
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from segcredit.benchmarks import BenchmarkData, Layout, make_benchmark
from segcredit.types import Prompt

LETTERS = "ABCDEFGH"


def image(seed: int = 0) -> bytes:
    """A PNG that differs from seed to seed."""
    made = io.BytesIO()
    Image.frombytes("RGB", (16, 16), random.Random(seed).randbytes(16 * 16 * 3)).save(made, "PNG")
    return made.getvalue()


def encoded(seed: int = 0) -> str:
    return base64.b64encode(image(seed)).decode()


def write_tsv(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, delimiter="\t", restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def read(name: str, file: Path) -> list[Prompt]:
    return make_benchmark(name).read(BenchmarkData(Layout(file.name, "a test"), (file,)))


def choice_row(index: int, question: str, options: Mapping[str, str], answer: str) -> dict:
    """A row of VLMEvalKit's multiple-choice tables."""
    row = {"index": index, "question": question, **options, "answer": answer}
    return row | {"category": "animals", "l2-category": "nature", "image": encoded(index)}


def rotations(index: int, question: str, options: Mapping[str, str], answer: str) -> list[dict]:
    """A question of MMBench with all rotations of its options; copies refer to its image."""
    texts, right = list(options.values()), options[answer]
    rows = []
    for k in range(len(texts)):
        turned = dict(zip(LETTERS, texts[k:] + texts[:k], strict=False))
        letter = next(key for key, text in turned.items() if text == right)
        row = choice_row(index, question, turned, letter)
        rows.append(row | {"index": 1_000_000 * k + index, "image": index if k else row["image"]})
    return rows


def mathvista_row(index: int, **columns: Any) -> dict:
    """A row of MathVista_MINI.tsv: the question is the prompt, and lists are texts."""
    common = {"task": "figure question answering", "skills": "['arithmetic reasoning']"}
    return {"index": index, "image": encoded(index), **common, **columns}


def mathverse_row(index: int, problem: str, kind: str, answer: str) -> dict:
    """A row of the vision-only table: the problem itself is only in ``question_for_eval``."""
    request = "According to the question shown in the image, please first conduct reasoning."
    return {
        "index": index,
        "problem_index": index,
        "problem_version": "Vision Only",
        "question": "According to the question shown in the image, please answer.",
        "query_cot": request,
        "question_for_eval": problem,
        "question_type": kind,
        "answer": answer,
        "metadata": "{'split': 'testmini', 'subject': 'Plane Geometry', 'subfield': 'Angle'}",
        "image": encoded(index),
    }
