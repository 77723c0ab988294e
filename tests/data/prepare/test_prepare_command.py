"""``segcredit prepare`` from the outside: the report, the errors, what to type next."""

import json
import re
from pathlib import Path

import pytest
import typer
from miniature import geo3k_folder, gsm8k_row, jsonl, png, rows_of
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from segcredit.commands.prepare import EPILOG, prepare

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command(epilog=EPILOG)(prepare)
NOT_A_TERMINAL = {"FORCE_COLOR": None, "TTY_COMPATIBLE": None, "COLUMNS": "100"}


def call(*arguments: object) -> Result:
    return CliRunner(env=NOT_A_TERMINAL).invoke(app, [str(word) for word in arguments])


def cells(output: str, table: int, first: str) -> list[str]:
    """The cells of the row that begins so, in the table of that number."""
    found = output.split("┏")[1 + table]
    (line,) = [line for line in found.splitlines() if re.match(rf"│ +{first} ", line)]
    return [cell.strip() for cell in line.strip("│").split("│")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return geo3k_folder(tmp_path / "geo")


def test_the_report(folder: Path) -> None:
    twice = {"problem": "Find side 0.", "answer": "2", "image": "images/0.png"}
    with (folder / "test.jsonl").open("a") as file:
        file.write(json.dumps(twice) + "\n")
    done = call("geo3k", "--from", folder)
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    assert "hiyouga/geometry3k → data/geo3k" in done.stdout
    assert cells(done.stdout, 0, "train")[:5] == ["train", "6", "0", "0", "6"]
    assert cells(done.stdout, 0, "test")[:5] == ["test", "4", "0", "0", "4"]
    shared = cells(done.stdout, 1, "test +│ +4 │ train")
    assert shared == ["test", "4", "train", "1", "1", "1", "4", "1"]  # all look alike
    assert "of a held-out row: 1; drop them with --drop-duplicates" in done.stdout
    assert (
        "recipe  data.train=[data/geo3k/train.parquet] data.test=[data/geo3k/test.parquet] "
        "reward=geo3k"
    ) in done.stdout
    done = call("geo3k", "--from", folder, "--drop-duplicates", "--force")
    assert cells(done.stdout, 0, "train")[:5] == ["train", "6", "0", "1", "5"]
    assert "of a held-out row: 1; dropped" in done.stdout
    assert len(rows_of(Path("data/geo3k/train.parquet"))) == 5


def test_a_refusal_is_told_and_ends_with_two(folder: Path) -> None:
    assert call("geo3k", "--from", folder, "-o", "rows").exit_code == 0
    done = call("geo3k", "--from", folder, "-o", "rows")
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: 'rows' has 'train.parquet', 'validation.parquet', 'test")
    assert "--force" in done.stderr


def test_bad_rows(folder: Path) -> None:
    rows = [
        {"q": "1?", "a": "1"},
        *[{"q": "2?"}] * 7,
        {"q": "", "a": "1"},
        {"q": "\x1b[2J", "a": 1},
    ]
    jsonl(Path("rows.jsonl"), *rows)
    options = ("rows.jsonl", "--question", "q", "--answer", "a")
    done = call(*options)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: 8 bad rows:\nrows.jsonl:2: expected an answer under 'a'")
    assert not Path("prepared").exists()
    done = call(*options, "--skip-bad-rows")
    assert done.exit_code == 0
    assert "skipped in train: 1 empty question, 7 no answer" in done.stdout
    assert "  rows.jsonl:2: expected an answer under 'a'; got none" in done.stdout
    assert "  and 3 more" in done.stdout
    assert "verl has no scorer for the data source 'custom'" in done.stdout
    assert "recipe  data.train=[prepared/train.parquet]" in done.stdout
    assert "no question and no image occurs twice" in done.stdout
    assert "\x1b" not in done.output


def test_options_reach_the_rows(folder: Path) -> None:
    Path("a.png").write_bytes(png())
    Path("mine.csv").write_text("Frage,Antwort,Bild,Quelle\nWas?,7,a.png,Buch\n")
    columns = ("--question", "Frage", "--answer", "Antwort", "--image", "Bild", "--keep", "Quelle")
    more = ("--suffix", "Kurz.", "--data-source", "openai/gsm8k", "-o", "rows")
    done = call("test=mine.csv", *columns, *more)
    assert done.exit_code == 0, done.output
    (row,) = rows_of(Path("rows/test.parquet"))
    assert row["prompt"][0]["content"] == "<image>Was? Kurz."
    assert row["data_source"] == "openai/gsm8k"
    assert row["extra_info"]["Quelle"] == "Buch"
    assert "custom" not in done.stdout
    done = call("gsm8k", "--from", folder, "--config", "main")
    assert done.exit_code == 2
    assert "omit --config" in done.stderr


def test_a_name_in_the_data_cannot_drive_the_terminal(folder: Path) -> None:
    row = {**gsm8k_row(1), "data_source": "[red]\x1b[2Jx\u202e"}
    jsonl(Path("rows.jsonl"), row)
    done = call("rows.jsonl")
    assert done.exit_code == 0, done.output
    assert "[red]␛[2Jx‹U+202E› → prepared" in done.stdout
    assert "\x1b" not in done.output


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}B {{ m.content }} E {% endfor %}G"]
)
def test_lengths(template: str | None, folder: Path) -> None:
    words = pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = words
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    saved.chat_template = template
    saved.save_pretrained("tokenizer")
    rows = [
        {"question": "<image>" + " word" * n, "answer": "1", "image": "geo/images/0.png"}
        for n in (3, 9, 12)
    ]
    jsonl(Path("rows.jsonl"), *rows)
    around = 0 if template is None else 3
    limit = 9 + around
    done = call("rows.jsonl", "--tokenizer", "tokenizer", "--max-prompt-tokens", limit)
    assert done.exit_code == 0, done.output
    assert f"text > {limit}" in done.stdout
    assert cells(done.stdout, 0, "train")[-2:] == ["1", str(12 + around)]
    assert "images need additional tokens" in done.stdout
    done = call("rows.jsonl", "--tokenizer", "tokenizer", "--force")
    assert cells(done.stdout, 0, "train")[-2:] == ["0", str(12 + around)]


def test_a_tokenizer_that_is_none(folder: Path) -> None:
    Path("empty").mkdir()
    done = call("geo3k", "--from", folder, "--tokenizer", "empty")
    assert done.exit_code == 2
    assert "--tokenizer: expected a folder with a tokenizer" in done.stderr
    assert not Path("data").exists()


def test_help_shows_examples() -> None:
    said = " ".join(call("--help").stdout.split())
    assert "segcredit prepare geo3k" in said
    assert "--drop-duplicates" in said
