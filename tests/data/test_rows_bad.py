"""Every kind of bad row is named with its place, all of them at once, before training."""

import base64
import json
from io import BytesIO
from pathlib import Path

import pytest
from each import each
from PIL import Image

from segcredit.data import BadRows, load_prompts, prompts_from_rows
from segcredit.types import Prompt

GOOD = {"problem": "2 + 2?", "answer": "4"}


def png() -> bytes:
    written = BytesIO()
    Image.effect_noise((32, 32), 80).save(written, "PNG")
    return written.getvalue()


def uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def talk(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": "text"} for role in roles]


def with_image(problem: str, *images: object) -> dict[str, object]:
    return {"problem": problem, "images": list(images), "answer": "1"}


BAD_ROWS: list[tuple[object, str]] = [
    ([1, 2], "expected an object, {…}, with the row's keys; got a list of 2"),
    (None, "expected an object, {…}, with the row's keys; got nothing (null)"),
    ({"text": "a", "answer": "1"}, "expected a question under 'prompt' or 'problem' or 'question'; "
     "got the keys 'text', 'answer'"),
    ({"problem": " \n", "answer": "1"}, "got an empty prompt: 'problem' is ' ↵'"),
    ({"prompt": [], "answer": "1"}, "got an empty prompt: 'prompt' is a list of 0"),
    ({"prompt": 7, "answer": "1"}, "expected a text or chat messages as prompt; got 7"),
    ({"prompt": ["hi"], "answer": "1"}, "expected message 1 as {'role', 'content'}; got 'hi'"),
    ({"prompt": [{"from": "human", "value": "hi"}], "answer": "1"},
     "expected message 1 as {'role', 'content'}; got an object with the keys 'from', 'value'"),
    ({"prompt": talk("user", "tool", "user"), "answer": "1"},
     "expected the role system, user or assistant in message 2; got 'tool'"),
    ({"prompt": [{"role": ["user"], "content": "a"}], "answer": "1"}, "got a list of 1"),
    ({"prompt": talk("user", "assistant"), "answer": "1"},
     "expected the last message from the user; got the role 'assistant'"),
    ({"prompt": [{"role": "user", "content": "  "}], "answer": "1"},
     "expected a question in the last message; got an empty prompt"),
    ({"prompt": [{"role": "user", "content": None}], "answer": "1"},
     "expected text, or a list of parts, in message 1; got nothing (null)"),
    ({"prompt": [{"role": "user", "content": [{"type": "video"}]}], "answer": "1"},
     "expected the parts {'type': 'text', 'text': …} and {'type': 'image'} in message 1"),
    ({"problem": "?"}, "expected an answer under 'reward_model.ground_truth' or 'ground_truth' or "
     "'answer' or 'solution'; got the keys 'problem'"),
    ({"problem": "?", "answer": ""}, "'solution'; got none"),
    ({"problem": "?", "answer": None}, "'solution'; got none"),
    ({"problem": "\ud800", "answer": "1"}, "got half a surrogate pair, '‹U+D800›'"),
    ({"problem": "?", "answer": "\udfff"}, "expected Unicode text in 'answer'"),
    ({"problem": "?", "answer": "1", "id": [1]},
     "expected a text or a whole number under 'id'; got a list of 1"),
    ({"problem": "?", "answer": "1", "id": True}, "under 'id'; got True"),
    (with_image("<image><image>?", uri(png())),
     "expected one <image> in the prompt per image; got 2 <image> and 1 image"),
    (with_image("<image>?", uri(png()), uri(png())), "got 1 <image> and 2 images"),
    (with_image("Where is <image>?"), "got 1 <image> and 0 images"),
    (with_image("?", "images/gone.png"), "expected an image in 'images/gone.png'; got no such"),
    (with_image("?", uri(png()), "gone.png"), "image 2 of 2: expected an image in 'gone.png'"),
    (with_image("?", None), "got nothing (null)"),
    (with_image("?", uri(b"GIF?")), "expected an image (PNG, JPEG"),
    (with_image("?", uri(png()[:400])), "expected an image that can be decoded"),
    (with_image("?", "data:image/png;base64,*"), "expected base64"),
    ({"prompt": [{"role": "user", "content": [{"type": "image", "image": uri(png())}]}],
      "images": [uri(png())], "answer": "1"}, "expected images either in the messages or under"),
]  # fmt: skip


@each(
    ("row", "said"),
    BAD_ROWS,
)
def test_each_kind_in_python_and_in_a_file(row: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadRows) as caught:
        prompts_from_rows([GOOD, row], folder=tmp_path)
    (bad,) = caught.value.bad
    assert bad.where == "rows[1]"
    assert said in bad.problem
    assert bad.problem.isprintable()
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(BadRows) as caught:
        load_prompts(path)
    assert f"{path}:3: {bad.problem}\n" in str(caught.value)


@each(
    ("line", "said"),
    [
        (
            b"{'problem': 1}",
            "expected a JSON object; got '{'problem': 1}': expecting property name",
        ),
        (b'{"problem": "2', "unterminated string starting at at column 13"),
        (b"hello", "got 'hello': expecting value at column 1"),
        (b'{"problem": "caf\xe9"}', "expected UTF-8; got byte 0xe9 at byte 17"),
        (b"\xff\xfe{\x00", "expected UTF-8; got byte 0xff at byte 1"),
        (b'{"n": ' + b"9" * 5000 + b"}", "got unreadable JSON"),
        (b"[" * 100_000, "got unreadable JSON"),
        (b'"\x1b[31m', "␛[31m"),
        (b"x" * 100_000, "x…'"),
    ],
)
def test_lines_that_are_no_json(line: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    good = json.dumps(GOOD).encode()
    path.write_bytes(good + b"\n" + line + b"\n" + good)
    with pytest.raises(BadRows) as caught:
        load_prompts(path)
    (bad,) = caught.value.bad
    assert bad.where == f"{path}:2"
    assert said in bad.problem
    assert bad.problem.isprintable()
    assert len(bad.problem) < 300


def test_an_id_twice_names_both_places(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("".join(json.dumps(GOOD | {"id": n}) + "\n" for n in (1, 2, 1)))
    second.write_text(json.dumps(GOOD | {"id": "2"}))
    with pytest.raises(BadRows) as caught:
        load_prompts([first, second])
    assert [str(bad) for bad in caught.value.bad] == [
        f"{first}:3: expected a unique id; got '1', the id of {first}:1",
        f"{second}:1: expected a unique id; got '2', the id of {first}:2",
    ]


def test_all_are_told_at_once_over_all_files(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.json"]
    paths[0].write_text('{"problem"\n' + json.dumps(GOOD) + "\n" + json.dumps({"answer": "1"}))
    paths[1].write_text(json.dumps([GOOD, 5]))
    with pytest.raises(BadRows) as caught:
        load_prompts(paths)
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 bad rows:"
    assert [line.partition(": ")[0] for line in lines[1:4]] == [
        f"{paths[0]}:1",
        f"{paths[0]}:3",
        f"{paths[1]} row 2",
    ]
    assert "--skip-bad-rows" in lines[4]
    assert "skip_bad_rows=True (Trainer: data={" in lines[4]
    assert isinstance(caught.value, ValueError)


def test_the_first_twenty_are_shown_and_the_rest_counted() -> None:
    with pytest.raises(BadRows) as caught:
        prompts_from_rows([{}] * 50)
    lines = str(caught.value).splitlines()
    assert lines[0] == "50 bad rows:"
    assert lines[20].startswith("rows[19]: ")
    assert lines[21] == "and 30 more"
    assert len(lines) == 23
    assert len(caught.value.bad) == 50


def test_skipped_rows_are_handed_back(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(["{", json.dumps(GOOD), json.dumps({"problem": "?"})]))
    loaded = load_prompts(path, skip_bad_rows=True)
    assert [prompt.id for prompt in loaded.prompts] == ["train:2"]
    assert [bad.where for bad in loaded.bad] == [f"{path}:1", f"{path}:3"]


def test_a_skipped_row_does_not_hold_its_id() -> None:
    rows = [{"id": 1, "problem": "?", "images": ["gone.png"], "answer": "1"}, GOOD | {"id": 1}]
    loaded = prompts_from_rows(rows, skip_bad_rows=True)
    assert [prompt.answer for prompt in loaded.prompts] == ["4"]


def test_skipping_must_leave_something() -> None:
    with pytest.raises(BadRows, match="Every row is bad, so skipping"):
        prompts_from_rows([{}], skip_bad_rows=True)


def test_skipping_is_not_advised_if_it_would_leave_nothing(tmp_path: Path) -> None:
    """A chat template that refuses every row, for example."""

    def refuse(prompt: Prompt) -> int:
        raise ValueError("the chat template refuses system messages")

    with pytest.raises(BadRows, match="Every row is bad") as caught:
        prompts_from_rows([GOOD, GOOD | {"id": 2}], count_tokens=refuse)
    assert "skip-bad-rows" not in str(caught.value)
    assert "chat template" in str(caught.value).splitlines()[-1]


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "tr\x1b]0;ain.jsonl"
    path.write_text(json.dumps({"\x1b[2J\u202e" + "k" * 500: 1}))
    with pytest.raises(BadRows) as caught:
        load_prompts(path)
    assert all(line.isprintable() for line in str(caught.value).splitlines())
    assert len(str(caught.value)) < 600 + len(str(path))


class TestSeveralAnswers:
    """A reward that compares one answer can never call a response right for them."""

    @each("key", ["answer", "solution", "ground_truth"])
    @each(
        ("value", "kind"),
        [
            (["1", "2"], "a list of 2"),
            ({"target": "1"}, "an object"),
            ([["1", "2"]], "a list of 2"),
            ([{"a": 1}], "an object"),
        ],
    )
    def test_is_a_bad_row_that_is_named(self, key: str, value: object, kind: str) -> None:
        rows = [{"problem": "?", key: "1"}, {"problem": "?", key: value}]
        with pytest.raises(BadRows) as told:
            prompts_from_rows(rows, one_answer=True)
        message = str(told.value)
        assert "rows[1]" in message
        assert f"under '{key}'; got {kind}" in message
        left = prompts_from_rows(rows, one_answer=True, skip_bad_rows=True)
        assert [x.answer for x in left.prompts] == ["1"]

    def test_one_in_a_list_is_that_one(self) -> None:
        rows = [{"problem": "?", "answer": ["1"]}, {"problem": "?", "answer": [2]}]
        loaded = prompts_from_rows(rows, one_answer=True)
        assert [x.answer for x in loaded.prompts] == ["1", "2"]

    def test_a_function_of_ones_own_gets_them_as_they_are(self) -> None:
        (prompt,) = prompts_from_rows([{"problem": "?", "answer": ["1", "2"]}]).prompts
        assert prompt.columns["answer"] == ["1", "2"]
