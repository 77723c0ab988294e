"""We-Math: 525 problems with their steps, scored by mastery."""

import json
import re
from collections import Counter

import pytest
from bench import DATA, box, needs_data, questions, random_letters, scores

from segcredit.benchmarks import make_benchmark
from segcredit.benchmarks.sets.wemath import split_options
from segcredit.data import RowError

NAME = "wemath"
STEPS = {"2steps": ("1", "2"), "3steps": ("1", "2", "3")}


@pytest.fixture(scope="module")
def rows() -> dict:
    found = json.loads((DATA / "wemath/data/testmini.json").read_text())
    return {f"{row['ID']}/{row['key'].split('_')[1]}": row for row in found}


def expected_scores(right: dict) -> dict:
    """The definitions of VLMEvalKit's dataset/utils/wemath.py, written problem by problem."""
    kinds = Counter()
    for problem in dict.fromkeys(key.partition("/")[0] for key in right):
        steps = [right[f"{problem}/{part}"] for part in STEPS[problem.partition("_")[0]]]
        solved = right[f"{problem}/multi"]
        kinds["CM"] += solved and all(steps)
        kinds["IG"] += not solved and all(steps)
        kinds["IK"] += not solved and not all(steps)
        kinds["RM"] += solved and not all(steps)
        kinds["RM loose"] += solved and not any(steps)
    strict = (525 - 0.5 * kinds["IG"] - kinds["RM"] - kinds["IK"]) / 525
    loose = (525 - 0.5 * kinds["IG"] - kinds["RM loose"] - kinds["IK"]) / 525
    return {
        "score (strict)": 100 * strict,
        "score (loose)": 100 * loose,
        "insufficient knowledge (IK)": 100 * kinds["IK"] / 525,
        "inadequate generalization (IG)": 100 * kinds["IG"] / 525,
        "complete mastery (CM)": 100 * kinds["CM"] / 525,
        "rote memorization (RM)": 100 * kinds["RM"] / 525,
    }


@pytest.mark.slow
@needs_data
def test_questions_and_image_bytes(rows: dict) -> None:
    asked = questions(NAME)
    assert len(asked) == 1740 == make_benchmark(NAME).count
    assert len({x.columns["problem"] for x in asked}) == 525
    assert {x.id for x in asked} == set(rows)
    for x in asked:
        row = rows[x.id]
        assert x.images[0].read_bytes() == (DATA / "wemath/data" / row["image_path"]).read_bytes()
        assert row["question"].strip() in x.messages[0]["content"]
        squeezed = re.sub(r"[;\s.．]", "", row["option"])
        again = "".join(f"{a}{b}" for a, b in x.columns["options"].items())
        assert re.sub(r"[;\s.．]", "", again) == squeezed, "no option is lost"


@pytest.mark.slow
@needs_data
def test_gold_answers_get_100() -> None:
    found, _ = scores(NAME, questions(NAME), lambda x: box(x.answer))
    best = {name: x.value for name, x in found.items()}
    for name in ("score (strict)", "score (loose)", "complete mastery (CM)"):
        assert best.pop(name) == 100
    assert [best.pop(f"{n}-step (S{i})") for i, n in ((1, "one"), (2, "two"), (3, "three"))] == [
        100
    ] * 3
    assert best.pop("complete mastery, loose") == 100
    assert set(best.values()) == {0.0}
    assert next(iter(found)) == "score (strict)"


@pytest.mark.slow
@needs_data
@pytest.mark.parametrize("said", ["A", "B", "random"])
def test_constant_and_random_letters(rows: dict, said: str) -> None:
    asked = questions(NAME)
    letters = random_letters(asked, "ABCD", 1) if said == "random" else dict.fromkeys(rows, said)
    found, right = scores(NAME, asked, lambda x: box(letters[x.id]))
    marks = {key: row["answer"] == letters[key] for key, row in rows.items()}
    assert right == [marks[x.id] for x in asked]
    for name, value in expected_scores(marks).items():
        assert found[name].value == pytest.approx(value), name
        assert found[name].count == 525


def test_options_that_name_points() -> None:
    text = "A. First north to ;C.  ;B. First west to ;C.  ;C. Both to ;C. ;D. No correct answer"
    assert split_options(text) == {
        "A": "First north to ;C.",
        "B": "First west to ;C.",
        "C": "Both to ;C.",
        "D": "No correct answer",
    }
    assert list(split_options("A. ①;B．②;C. ③; E. No correct answer")) == ["A", "B", "C", "E"]
    with pytest.raises(RowError, match="expected options such as"):
        split_options("three, four")
