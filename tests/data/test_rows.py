"""Rows of every format, given in Python: what becomes prompt, picture, answer, id, columns."""

from pathlib import Path

import numpy as np
import pytest
from each import each
from PIL import Image
from small_data import png

from segcredit.data import BadRows, Keys, PromptSet, prompts_from_rows
from segcredit.models.images import open_image
from segcredit.types import Prompt


def one(row: dict[str, object], **options: object) -> Prompt:
    (prompt,) = prompts_from_rows([row], **options).prompts
    return prompt


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


VERL = {
    "data_source": "hiyouga/geometry3k",
    "prompt": [user("<image>Find x.")],
    "images": [{"bytes": png(), "path": None}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3,000"},
    "extra_info": {"split": "train", "index": 7, "answer": "3,000", "data_source": "other"},
}


class TestFormats:
    def test_verl(self) -> None:
        assert one(VERL) == Prompt(
            id="7",
            messages=(user("<image>Find x."),),
            images=(png(),),
            answer="3,000",
            columns={
                "data_source": "hiyouga/geometry3k",
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": "3,000"},
                "split": "train",
                "index": 7,
                "answer": "3,000",
            },
        )

    @each("nothing", [None, [], "", {"bytes": None, "path": None}, float("nan")])
    def test_no_images_means_text_only(self, nothing: object) -> None:
        for key in ("images", "image"):
            prompt = one({"prompt": "2 + 2?", key: nothing, "solution": "4"})
            assert prompt.images == ()
            assert prompt.messages == (user("2 + 2?"),)

    def test_trl_conversation(self) -> None:
        system = {"role": "system", "content": "Be brief."}
        row = {"prompt": [system, user("2 + 2?")], "solution": r"So \boxed{4}.", "source": "me"}
        prompt = one(row)
        assert prompt.messages == (system, user("2 + 2?"))
        assert prompt.answer == "4"
        assert prompt.columns == {"solution": r"So \boxed{4}.", "source": "me"}

    def test_trl_parts(self) -> None:
        parts = [
            {"type": "text", "text": "Is ", "image": None},
            {"type": "image", "text": None},
            {"type": "text", "text": " like "},
            {"type": "image"},
            {"type": "text", "text": "?"},
        ]
        prompt = one(
            {
                "prompt": [{"role": "user", "content": parts}],
                "images": [png("red"), png("blue")],
                "answer": "no",
            }
        )
        assert prompt.messages == (user("Is <image> like <image>?"),)
        assert prompt.images == (png("red"), png("blue"))

    @pytest.mark.parametrize(
        "part",
        [
            {"type": "image", "image": png()},
            {"type": "image", "image": None, "path": "a.png"},
            {"type": "image_url", "image_url": {"url": "a.png"}},
        ],
    )
    def test_a_picture_inside_the_messages(self, part: dict[str, object], tmp_path: Path) -> None:
        (tmp_path / "a.png").write_bytes(png())
        content = [part, {"type": "text", "text": "Color?"}]
        row = {"prompt": [{"role": "user", "content": content}], "answer": "red"}
        prompt = one(row, folder=tmp_path)
        assert prompt.messages == (user("<image>Color?"),)
        assert open_image(prompt.images[0]).getpixel((0, 0)) == (255, 0, 0)

    def test_without_marks_the_pictures_come_first_in_the_first_user_message(self) -> None:
        talk = [
            {"role": "system", "content": "S"},
            user("A"),
            {"role": "assistant", "content": "B"},
            user("C"),
        ]
        prompt = one({"prompt": talk, "images": [png(), png("blue")], "answer": "1"})
        assert [m["content"] for m in prompt.messages] == ["S", "<image><image>A", "B", "C"]
        assert talk[1] == user("A"), "the caller's row is left alone"

    def test_easy_r1(self) -> None:
        prompt = one({"problem": "<image>Find x.", "answer": "60", "images": [png()]})
        assert prompt == Prompt("rows:0", (user("<image>Find x."),), (png(),), "60", prompt.columns)
        assert prompt.columns == {"answer": "60"}

    def test_a_single_pil_image(self) -> None:
        prompt = one({"problem": "?", "answer": "1", "image": Image.new("RGB", (6, 3), "blue")})
        assert prompt.messages == (user("<image>?"),)
        assert open_image(prompt.images[0]).size == (6, 3)

    def test_prompt_goes_before_problem_which_stays_a_column(self) -> None:
        prompt = one({"problem": "short", "prompt": "long", "answer": "1"})
        assert prompt.messages == (user("long"),)
        assert prompt.columns == {"problem": "short", "answer": "1"}

    def test_numpy_as_pandas_hands_it_out(self) -> None:
        row = {
            "id": np.int64(3),
            "prompt": np.array([user("<image>?")], dtype=object),
            "images": np.array([{"bytes": png(), "path": None}], dtype=object),
            "answer": np.float64(2.5),
        }
        prompt = one(row)
        assert (prompt.id, prompt.answer, prompt.images) == ("3", "2.5", (png(),))

    def test_keys_of_ones_own(self) -> None:
        row = {"q": "2 + 2?", "meta": {"gold": 4}, "name": "n1", "answer": "5", "id": 9}
        keys = Keys(question=("q",), answer=("meta.gold",), id=("name",))
        prompt = one(row, keys=keys)
        assert (prompt.id, prompt.answer, prompt.messages) == ("n1", "4", (user("2 + 2?"),))
        assert prompt.columns == {"meta": {"gold": 4}, "answer": "5", "id": 9}


class TestAnswers:
    @each(
        ("key", "value", "expected"),
        [
            ("answer", "16 - 3 = <<16-3=13>>13.\n#### 13", "13"),
            ("answer", "#### -1,234,567 \n", "-1234567"),
            ("answer", "####1,2", "1,2"),
            ("answer", "so #### 1 #### 2", "2"),
            ("answer", "5 ####", "5 ####"),
            ("answer", "#### Step 1\nthen 5", "#### Step 1\nthen 5"),
            ("solution", r"a \boxed{1} b \boxed{\frac{1}{2}} c", r"\frac{1}{2}"),
            ("solution", r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
            ("solution", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
            ("solution", r"\boxed{1", r"\boxed{1"),
            ("solution", "\\boxed{1\\", "\\boxed{1\\"),
            ("solution", r"\boxed{}", r"\boxed{}"),
            ("answer", " 60 ", "60"),
            ("answer", 60, "60"),
            ("answer", 0, "0"),
            ("answer", 2.5, "2.5"),
            ("answer", True, "true"),
            ("answer", {"target": ["é"]}, '{"target": ["é"]}'),
            ("ground_truth", "x #### 1,000", "x #### 1,000"),
        ],
    )
    def test_the_final_answer(self, key: str, value: object, expected: str) -> None:
        prompt = one({"problem": "?", key: value})
        assert prompt.answer == expected
        assert prompt.columns == {key: value}, "the column stays as it was"

    def test_which_key_counts(self) -> None:
        row = {"problem": "?", "solution": "s", "answer": "a", "ground_truth": "g"}
        assert one(row).answer == "g"
        assert one(row | {"ground_truth": None}).answer == "a"
        assert one(row | {"ground_truth": "", "answer": " "}).answer == "s"
        assert one(row | {"reward_model": {"ground_truth": "v"}}).answer == "v"
        assert one(row | {"reward_model": {"ground_truth": None}}).answer == "g"
        assert one(row, keys=Keys(answer=("answer",))).answer == "a"

    def test_a_pattern(self) -> None:
        row = {"problem": "?", "ground_truth": "<answer> 3 </answer> <answer>4 </answer>"}
        assert one(row, answer_pattern="<answer>(.*?)</answer>").answer == "4"
        assert one(row, answer_pattern=r"\d").answer == "4"
        with pytest.raises(BadRows, match=r"rows\[0\]: expected an answer that matches 'x\+'"):
            one(row, answer_pattern="x+")
        with pytest.raises(ValueError, match="must be a regular expression; got '\\('"):
            one(row, answer_pattern="(")

    def test_rows_without_an_answer_can_be_wanted(self) -> None:
        assert one({"prompt": "Write a poem."}, need_answer=False).answer is None

    def test_a_long_solution_is_read_in_no_time(self) -> None:
        text = "####" * 200_000 + "\n" + "\\boxed{" * 100_000
        assert one({"problem": "?", "solution": text}).answer == text


class TestIds:
    @each(
        ("row", "expected"),
        [
            ({"id": 0}, "0"),
            ({"id": "a"}, "a"),
            ({"unique_id": "test/7.json"}, "test/7.json"),
            ({"id": 3.0}, "3"),
            ({"id": None, "index": 4}, "4"),
            ({"extra_info": {"index": 5}}, "5"),
            ({"extra_info": None}, "rows:0"),
            ({}, "rows:0"),
        ],
    )
    def test_where_an_id_comes_from(self, row: dict[str, object], expected: str) -> None:
        assert one({"problem": "?", "answer": "1"} | row).id == expected

    def test_an_index_that_begins_anew_gives_way_to_the_place(self) -> None:
        loaded = prompts_from_rows([VERL, VERL, VERL])
        assert [prompt.id for prompt in loaded.prompts] == ["7", "rows:1", "rows:2"]


class TestOptions:
    ROWS = tuple({"problem": f"{n}?", "answer": "1"} for n in range(5))

    def test_suffix_is_joined_by_one_space_to_the_last_user_message(self) -> None:
        talk = [user("A"), {"role": "assistant", "content": "B"}, user("C")]
        row = {"prompt": talk, "answer": "1"}
        prompt = one(row, suffix="Think.")
        assert [m["content"] for m in prompt.messages] == ["A", "B", "C Think."]
        assert one(row | {"prompt": list(prompt.messages)}, suffix="Think.") == prompt
        assert one(row, suffix="").messages[-1] == user("C")

    def test_limit_leaves_the_rest_unread(self) -> None:
        def rows():
            yield from self.ROWS[:2]
            raise AssertionError("read too far")

        assert len(prompts_from_rows(rows(), limit=2).prompts) == 2

    def test_a_limit_counts_good_rows(self) -> None:
        rows = [self.ROWS[0], {}, *self.ROWS[1:]]
        loaded = prompts_from_rows(rows, limit=2, skip_bad_rows=True)
        assert [p.messages[0]["content"] for p in loaded.prompts] == ["0?", "1?"]
        assert [bad.where for bad in loaded.bad] == ["rows[1]"]

    def test_length_is_counted_by_the_given_function(self) -> None:
        def count(prompt: Prompt) -> int:
            words = len(prompt.messages[-1]["content"].split())
            if words == 1:
                raise ValueError("too thin a picture")
            return words + 10 * len(prompt.images)

        rows = [{"problem": text, "answer": "1"} for text in ("a b", "a b c d", "a")]
        rows.append({"problem": "a b", "answer": "1", "images": [png()]})
        loaded = prompts_from_rows(
            rows, max_prompt_tokens=3, count_tokens=count, skip_bad_rows=True
        )
        assert [prompt.id for prompt in loaded.prompts] == ["rows:0"]
        assert [str(bad) for bad in loaded.bad] == [
            "rows[1]: expected a prompt of at most 3 tokens; got 4",
            "rows[2]: expected a prompt the model can process; got too thin a picture",
            "rows[3]: expected a prompt of at most 3 tokens; got 12",
        ]

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"limit": 0}, "limit must be at least 1; got 0"),
            ({"max_prompt_tokens": 0, "count_tokens": len}, "max_prompt_tokens must be at least 1"),
            ({"max_prompt_tokens": 9}, "max_prompt_tokens needs count_tokens"),
        ],
    )
    def test_settings_that_cannot_be(self, options: dict[str, object], said: str) -> None:
        with pytest.raises(ValueError, match=said):
            prompts_from_rows(self.ROWS, **options)

    def test_nothing_bad_returns_an_empty_list(self) -> None:
        loaded = prompts_from_rows(self.ROWS)
        assert isinstance(loaded, PromptSet)
        assert (len(loaded.prompts), loaded.bad) == (5, [])

    def test_no_rows(self) -> None:
        with pytest.raises(ValueError, match="expected at least one row; 'rows' is empty"):
            prompts_from_rows([])
