"""What the driver sees of an environment with ms-vlmeval: a Python that runs ``vlmeval.run``.

It asks the server every question of the TSV file and writes the files that ms-vlmeval 0.0.20
writes. The variable FAKE chooses what goes wrong.
"""

import csv
import json
import os
import pickle
import sys
import time
import urllib.request
from pathlib import Path

csv.field_size_limit(2**30)


def main() -> None:
    if sys.argv[1] == "-c":
        print(os.environ.get("FAKE_VERSION", "0.0.20"))
        return
    what = os.environ.get("FAKE", "")
    if what == "crash":
        print("RuntimeError: something specific is broken", file=sys.stderr)
        sys.exit(3)
    options = dict(zip(sys.argv[3::1], sys.argv[4::1], strict=False))
    config = json.loads(Path(options["--config"]).read_text())
    ((name, model),) = config["model"].items()
    ((dataset, _),) = config["data"].items()
    folder = Path(options["--work-dir"]) / name
    folder.mkdir(parents=True, exist_ok=True)
    if what == "nothing":
        status = {"datasets": {dataset: {"error_message": "the tsv cannot be downloaded"}}}
        (folder / "status.json").write_text(json.dumps(status))
        return
    if not what and "--reuse" in sys.argv and (folder / f"{name}_{dataset}.tsv").exists():
        return
    if "FAKE_DOWNLOAD" in os.environ:
        here = Path(os.environ["LMUData"]) / f"{dataset}.tsv"  # noqa: SIM112
        here.write_bytes(Path(os.environ["FAKE_DOWNLOAD"]).read_bytes())
    if what == "checkpoint":
        keep_checkpoint(folder / f"{name}_{dataset}_checkpoint.pkl")
    assert os.environ["SPLIT_THINK"] == "True"
    assert os.environ["PRED_FORMAT"] == "tsv"
    assert "PYTHONPATH" not in os.environ
    with (Path(os.environ["LMUData"]) / f"{dataset}.tsv").open(newline="") as file:  # noqa: SIM112
        rows = list(csv.DictReader(file, delimiter="\t"))
    rows = rows[: int(options.get("--limit", len(rows)))]
    for number, row in enumerate(rows):
        del row["image"]
        said = "Failed to obtain answer via API. " if what == "failed" else ask(model, row)
        thinking, _, row["prediction"] = said.rpartition("</think>")
        row["thinking"] = thinking.removeprefix("<think>")
        print(f"{number + 1}/{len(rows)} [00:00<00:00]", flush=True)
    columns = ["index"] if what == "columns" else list(rows[0])
    with (folder / f"{name}_{dataset}.tsv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, delimiter="\t", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    if dataset == "WeMath":
        cell = "no number" if what == "score" else "12.38%"
        text = f"Model,Score (Strict),Score (Loose)\n,{cell},20.00%\n"
        (folder / f"{name}_{dataset}_{options['--judge']}_score.csv").write_text(text)


def keep_checkpoint(file: Path) -> None:
    """Show which checkpoint was found, write one, and leave the driver time to copy it."""
    seen = file.with_suffix(".seen")
    seen.unlink(missing_ok=True)
    if file.exists():
        seen.write_bytes(file.read_bytes())
    file.write_bytes(pickle.dumps({"0": "an answer"}))
    time.sleep(0.6)


def ask(model: dict, row: dict) -> str:
    body = {
        "model": model["model"],
        "messages": [
            {"role": "system", "content": model["system_prompt"]},
            {"role": "user", "content": row["question"]},
        ],
        "temperature": model["temperature"],
        "top_p": model["top_p"],
    }
    request = urllib.request.Request(model["api_base"], json.dumps(body).encode())
    with urllib.request.urlopen(request) as reply:
        return json.loads(reply.read())["choices"][0]["message"]["content"]


main()
