"""Small data sets in the shapes that the Hub and people's folders have, and how they are read."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
"""As the datasets library stores pictures."""


def png(seed: int = 0, **how: Any) -> bytes:
    """A picture of its own for each seed; ``how`` changes the file, not the pixels."""
    image = Image.new("RGB", (9, 7))
    image.putdata([((7 * seed + n) % 256, (n * n) % 256, seed % 256) for n in range(63)])
    written = BytesIO()
    image.save(written, "PNG", **how)
    return written.getvalue()


def jsonl(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def geo3k_rows(folder: Path, numbers: range) -> list[dict[str, Any]]:
    """Rows as in a folder with files of pictures beside."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for n in numbers:
        (folder / f"images/{n}.png").write_bytes(png(n))
        choices = [str(n + more) for more in range(4)]
        rows.append(
            {
                "id": n,
                "problem": f"Find side {n}.",
                "choices": choices,
                "answer": "C",
                "ground_truth": choices[2],
                "image": f"images/{n}.png",
            }
        )
    return rows


def geo3k_folder(folder: Path) -> Path:
    jsonl(folder / "train.jsonl", *geo3k_rows(folder, range(6)))
    jsonl(folder / "val.jsonl", *geo3k_rows(folder, range(6, 8)))
    jsonl(folder / "test.jsonl", *geo3k_rows(folder, range(8, 11)))
    return folder


def gsm8k_row(n: int) -> dict[str, str]:
    return {
        "question": f"Ann has {n} pens and buys 1,000 more. How many?",
        "answer": f"{n} + 1,000 = <<{n}+1000={n + 1000}>>{n + 1000}\n#### {n + 1000:,}",
    }


def hub_geo3k(numbers: range) -> pa.Table:
    """Rows as hiyouga/geometry3k has them."""
    return pa.table(
        {
            "images": pa.array(
                [[{"bytes": png(n), "path": None}] for n in numbers], pa.list_(IMAGE)
            ),
            "problem": pa.array([f"<image>Find $x_{{{n}}}$." for n in numbers]),
            "answer": pa.array([str(n) for n in numbers]),
        }
    )


def write_table(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
