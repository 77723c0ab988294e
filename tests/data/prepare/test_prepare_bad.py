"""Hostile rows, wrong columns, full folders: all is told at once, and nothing half is left."""

import json
from pathlib import Path
from typing import Any

import pytest
from each import each
from miniature import contents, geo3k_folder, gsm8k_row, jsonl, png, rows_of

from segcredit.data import BadRows, load_prompts
from segcredit.data.prepare import Columns, prepare
from segcredit.data.prepare.rows import IMAGE, NO_ANSWER, NO_QUESTION, OTHER, UNREADABLE

GOOD = {"problem": "2 + 2?", "answer": "4"}

BAD: list[tuple[str, str, str]] = [
    ("{", UNREADABLE, "expected a JSON object"),
    ("[" * 100_000, UNREADABLE, "got unreadable JSON"),
    ('{"problem": 1' + "0" * 5000 + "}", UNREADABLE, "got unreadable JSON"),
    ("[1, 2]", OTHER, "expected an object"),
    ('{"problem": "", "answer": "1"}', NO_QUESTION, "got an empty prompt"),
    ('{"problem": " \\n ", "answer": "1"}', NO_QUESTION, "got an empty prompt"),
    ('{"answer": "1"}', NO_QUESTION, "expected a question under"),
    ('{"prompt": [{"role": "user", "content": ""}], "answer": "1"}', NO_QUESTION, "an empty"),
    ('{"prompt": [{"role": "tool", "content": "x"}], "answer": "1"}', OTHER, "the role"),
    ('{"problem": "?"}', NO_ANSWER, "expected an answer under"),
    ('{"problem": "?", "answer": null}', NO_ANSWER, "expected an answer under"),
    ('{"problem": "?", "answer": "  "}', NO_ANSWER, "expected an answer under"),
    ('{"problem": "?", "answer": "1", "image": "gone.png"}', IMAGE, "got no such file"),
    ('{"problem": "?", "answer": "1", "image": "../../../etc/passwd"}', IMAGE, "leads out of it"),
    ('{"problem": "?", "answer": "1", "image": "empty.png"}', IMAGE, "expected an image"),
    ('{"problem": "?", "answer": "1", "image": "cut.png"}', IMAGE, "can be decoded"),
    ('{"problem": "?", "answer": "1", "image": "text.png"}', IMAGE, "beginning with b'hello'"),
    ('{"problem": "?", "answer": "1", "image": "good\\ud800.png"}', IMAGE, "expected a"),
    ('{"problem": "?", "answer": "1", "images": ["good.png", "cut.png"]}', IMAGE, "2 of 2"),
    ('{"problem": "?", "answer": "1", "images": ["good.png", "gone"]}', IMAGE, "2 of 2"),
    ('{"problem": "?", "answer": "1", "image": "https://a/b.png"}', IMAGE, "Download it first"),
    ('{"problem": "<image>?", "answer": "1"}', OTHER, "one <image> in the prompt per image"),
    ('{"problem": "\\ud800", "answer": "1"}', OTHER, "half a surrogate pair"),
    ('{"problem": "?", "answer": "\\ud800"}', OTHER, "half a surrogate pair"),
    ('{"problem": "?", "answer": "1", "extra_info": {"a": ["\\ud800"]}}', OTHER, "in 'a'"),
    ('{"problem": "?", "answer": "1", "extra_info": {"\\udfff": 1}}', OTHER, "a column's name"),
    ('{"problem": "?", "answer": "1", "data_source": "\\ud800"}', OTHER, "'data_source'"),
    ('{"problem": "?", "answer": "1", "ability": "\\ud800"}', OTHER, "'ability'"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.png").write_bytes(png())
    (tmp_path / "cut.png").write_bytes(png()[:70])
    (tmp_path / "text.png").write_bytes(b"hello")
    (tmp_path / "empty.png").write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize(("line", "reason", "said"), BAD, ids=range(len(BAD)))
def test_each_kind(line: str, reason: str, said: str, folder: Path) -> None:
    path = folder / "train.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n{json.dumps(GOOD)}\n")
    with pytest.raises(BadRows) as caught:
        prepare(str(path), folder / "out")
    (bad,) = caught.value.bad
    assert bad.where == f"{path}:2"
    assert said in bad.problem
    assert bad.problem.isprintable()
    assert len(bad.problem) < 500
    assert not (folder / "out").exists()
    report = prepare(str(path), folder / "out", skip_bad_rows=True)
    assert report.splits[0].skipped == {reason: 1}
    assert report.bad == [bad]
    assert (report.splits[0].read, report.splits[0].written) == (3, 2)
    rows = rows_of(folder / "out/train.parquet")
    assert [row["extra_info"]["index"] for row in rows] == [0, 2]
    assert len(load_prompts(folder / "out/train.parquet").prompts) == 2


def test_all_are_told_at_once_over_all_splits(folder: Path) -> None:
    train, test = folder / "train.jsonl", folder / "test.jsonl"
    train.write_text("\n".join(line for line, _, _ in BAD))
    test.write_text('{"problem": "?"}\n' + json.dumps(GOOD))
    with pytest.raises(BadRows) as caught:
        prepare([str(train), str(test)], folder / "out")
    assert len(caught.value.bad) == len(BAD) + 1
    assert "--skip-bad-rows" in str(caught.value)
    assert all(line.isprintable() for line in str(caught.value).splitlines())
    with pytest.raises(BadRows, match=r"No row is left for train\.parquet"):
        prepare([str(train), str(test)], folder / "out", skip_bad_rows=True)
    assert not (folder / "out").exists()


def test_dropping_must_leave_something(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", GOOD)
    jsonl(tmp_path / "test.jsonl", GOOD)
    with pytest.raises(BadRows, match=r"No row is left for train\.parquet"):
        prepare(str(tmp_path), tmp_path / "out", drop_duplicates=True)


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("gsm8k", {"question": "?", "answer": "It is 18."}, "ends in '#### number'"),
        ("gsm8k", {"question": "?", "answer": "\n#### many"}, "ends in '#### number'"),
        ("math", {"problem": "?", "solution": "It is 18."}, "--answer solution"),
        ("geo3k", {"problem": "?", "answer": "D", "choices": ["1"]}, "for the choice D"),
    ],
)
def test_answers_that_the_data_set_would_not_have(
    name: str, row: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = jsonl(tmp_path / "train.jsonl", row)
    with pytest.raises(BadRows, match=said):
        prepare(name, tmp_path / "out", source=str(path))
    if name == "math":  # as the message advises
        prepare(name, tmp_path / "out", source=str(path), columns=Columns(answer="solution"))
        assert rows_of(tmp_path / "out/train.parquet")[0]["reward_model"] == {
            "style": "rule",
            "ground_truth": "It is 18.",
        }


ODD = {"Question": "a?", "Antwort": "1", "bild": "a.png"}


class TestColumns:
    @each(
        ("columns", "said"),
        [
            (Columns(), "with the question, 'prompt' or 'problem' or 'question', in "),
            (Columns(), "it has 'Question', 'Antwort', 'bild'. Name yours: --question Question"),
            (Columns("Question"), "'solution', in .* Name yours: --answer Antwort"),
            (Columns("Qestion"), r"a column 'Qestion' \(--question\) in .* --question Question"),
            (Columns("Question", "antword"), "Did you mean --answer Antwort"),
            (Columns("Question", "Antwort", "Bilder"), "Did you mean --image bild"),
            (Columns("Question", "Antwort", keep=("bld",)), "Did you mean --keep bild"),
            (Columns("Question", "Antwort", keep=("bild.x",)), "a column 'bild[.]x'"),
            (Columns("zzzzzz"), r"it has 'Question', 'Antwort', 'bild'\.$"),
        ],
    )
    @each("ending", ["jsonl", "csv"])
    def test_names_that_are_not_there(
        self, columns: Columns, said: str, ending: str, tmp_path: Path
    ) -> None:
        (tmp_path / "a.png").write_bytes(png())
        path = tmp_path / f"rows.{ending}"
        if ending == "jsonl":
            jsonl(path, ODD)
        else:
            path.write_text(",".join(ODD) + "\n" + ",".join(ODD.values()) + "\n")
        with pytest.raises(ValueError, match=said):
            prepare(str(path), tmp_path / "out", columns=columns)

    def test_one_row_without_it_is_a_bad_row(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "rows.jsonl", {"q": "1?", "a": "1"}, {"a": "1"})
        with pytest.raises(BadRows, match=r"rows\.jsonl:2: expected a question under 'q'"):
            prepare(str(path), tmp_path / "out", columns=Columns("q", "a"))

    def test_advice_can_be_typed(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "rows.jsonl", {"the question": "1?", "\x1banswer": "1"})
        with pytest.raises(ValueError, match="Name yours: --question 'the question'"):
            prepare(str(path), tmp_path / "out")
        with pytest.raises(ValueError, match="Name yours: --answer '␛answer'"):
            prepare(str(path), tmp_path / "out", columns=Columns("the question"))

    def test_hostile_names(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "rows.jsonl", {"\x1b[2J\u202e" + "k" * 500: 1, "b": 2})
        with pytest.raises(ValueError, match="it has '␛") as caught:
            prepare(str(path), tmp_path / "out")
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500 + len(str(path))

    def test_extra_info_has_some_of_its_own(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "rows.jsonl", GOOD | {"split": "x"})
        with pytest.raises(
            ValueError, match="--keep: prepare fills 'split', 'index', 'question' of extra_info"
        ):
            prepare(str(path), tmp_path / "out", columns=Columns(keep=("split",)))


class TestOutput:
    def test_what_is_there_is_not_overwritten(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "train.jsonl", GOOD)
        out = tmp_path / "out"
        out.mkdir()
        (out / "train.parquet").write_text("precious")
        with pytest.raises(ValueError, match=r"has 'train.parquet' already. Overwrite: --force"):
            prepare(str(path), out)
        assert contents(out) == {"train.parquet": b"precious"}
        prepare(str(path), out, force=True)
        assert len(rows_of(out / "train.parquet")) == 1

    def test_what_is_read_is_not_written(self, tmp_path: Path) -> None:
        prepare("geo3k", tmp_path / "one", source=str(geo3k_folder(tmp_path / "geo")))
        before = contents(tmp_path / "one")
        (tmp_path / "link").symlink_to(tmp_path / "one")
        for out in ("one", "link"):
            with pytest.raises(ValueError, match="is an input"):
                prepare(str(tmp_path / "one"), tmp_path / out, force=True)
        assert contents(tmp_path / "one") == before

    def test_a_file_in_place_of_the_folder(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "train.jsonl", GOOD)
        with pytest.raises(ValueError, match="--output: expected a folder; got the file"):
            prepare(str(path), path)

    @pytest.mark.parametrize("change", ["fewer", "broken", "picture"])
    def test_rows_that_change_between_the_two_readings(self, change: str, tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(png())
        test = jsonl(tmp_path / "test.jsonl", *[{**GOOD, "problem": f"{n}?"} for n in range(150)])
        train = jsonl(tmp_path / "train.jsonl", *[GOOD] * 150)
        out = tmp_path / "out"
        out.mkdir()
        (out / "test.parquet").write_text("precious")
        changed = {"fewer": [GOOD], "broken": [{}] * 150, "picture": [{**GOOD, "image": "a.png"}]}

        def watch(doing: str) -> None:
            if doing.startswith("writing train"):
                jsonl(test, *changed[change])

        with pytest.raises(ValueError, match=r"test\.jsonl' changed while it was read") as caught:
            prepare([str(train), str(test)], out, force=True, progress=watch)
        assert not isinstance(caught.value, BadRows)
        assert contents(out) == {"test.parquet": b"precious"}  # and no temporary file

    def test_an_interruption_leaves_nothing(self, tmp_path: Path) -> None:
        path = jsonl(tmp_path / "train.jsonl", *[GOOD] * 150)

        def watch(doing: str) -> None:
            if doing.startswith("writing"):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare(str(path), tmp_path / "out", progress=watch)
        assert contents(tmp_path / "out") == {}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_prompt_tokens": 5}, "--max-prompt-tokens needs a tokenizer"),
        ({"max_prompt_tokens": 0, "tokenizer": "x"}, "must be at least 1; got 0"),
    ],
)
def test_settings(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "train.jsonl", gsm8k_row(1))
    with pytest.raises(ValueError, match=said):
        prepare(str(path), tmp_path / "out", **settings)
