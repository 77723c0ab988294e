"""Whether a file of rows is one that verl reads: by its first row."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from segcredit.data.readers import rows_at_once

FORMATS = (".parquet", ".json", ".jsonl")
"""File formats that verl reads."""


def is_verls(path: Path) -> bool:
    """Parquet or JSON lines with messages in ``prompt`` and a ground truth."""
    row = _first(path)
    if not isinstance(row, Mapping):
        return False
    graded = row.get("reward_model")
    truth = isinstance(graded, Mapping) and "ground_truth" in graded
    prompt = row.get("prompt")
    return truth and isinstance(prompt, list) and all(isinstance(x, Mapping) for x in prompt)


def _first(path: Path) -> Any:
    if path.suffix == ".parquet":
        parquet = import_module("pyarrow.parquet").ParquetFile(path)
        rows_at_once(parquet.metadata, path)  # refuses a file that would unpack to gigabytes
        batch = next(parquet.iter_batches(1, columns=_known(parquet)), None)
        return None if batch is None else batch.to_pylist()[0]
    if path.suffix not in (".json", ".jsonl"):
        return None
    with path.open() as lines:
        try:
            return json.loads(lines.readline())
        except ValueError:
            return None


def _known(parquet: Any) -> list[str]:
    """Without the pictures, which may be large."""
    return [x for x in ("prompt", "reward_model") if x in parquet.schema_arrow.names]
