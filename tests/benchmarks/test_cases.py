"""The hand-written responses, graded by every set that they are written for, and by VLMEvalKit."""

import json
from pathlib import Path
from typing import Any

import pytest
from tables import choice_row, encoded, mathverse_row, mathvista_row, read, rotations, write_tsv
from test_answers import CASES, answer_of

from segcredit.benchmarks import make_benchmark
from segcredit.rewards.verify import Verifier
from segcredit.types import Prompt, Response

SETS = sorted({name for group in CASES for name in group["sets"]})


def listed(group: dict[str, Any]) -> str:
    return "\n".join(f"{letter}:{text}" for letter, text in group["options"].items())


def rows_of(name: str, group: dict[str, Any]) -> list[dict]:
    """The question of a group as a row of a set's table."""
    text, gold, kind = group["question"], group["gold"], group["kind"]
    if name == "mathverse":
        problem = f"{text}\nChoices:\n{listed(group)}" if kind == "choice" else text
        return [
            mathverse_row(1, problem, "multi-choice" if kind == "choice" else "free-form", gold)
        ]
    if name == "mathvista" and kind == "choice":
        options = list(group["options"].values())
        types = {"question_type": "multi_choice", "answer_type": "text", "choices": options}
        return [mathvista_row(1, question=text, answer=group["options"][gold], **types)]
    if name == "mathvista":
        types = {"question_type": "free_form", "answer_type": kind}
        return [mathvista_row(1, question=text, answer=gold, **types)]
    if name == "wemath":
        row = choice_row(1, text, group["options"], gold)
        return [row | {"ID": "1", "key": f"2steps_{part}"} for part in ("1", "2", "multi")]
    if name == "dynamath":
        common = {"question": text, "answer": gold, "answer_type": "float", "image": encoded()}
        more = {"qid": 1, "subject": "algebra", "knowledge_level": "school"}
        return [common | more | {"index": i, "varid": i} for i in range(1, 11)]
    if name == "logicvista":
        common = {"index": 1, "question": text, "answer": gold, "skill": "inductive"}
        return [common | {"image": encoded()}]
    if name == "mmbench":
        return rotations(1, text, group["options"], gold)
    return [choice_row(1, text, group["options"], gold)]


@pytest.mark.parametrize("name", SETS)
def test_every_set_gives_the_expected_verdicts(name: str, tmp_path: Path) -> None:
    benchmark, verifier = make_benchmark(name), Verifier()
    unexpected = []
    for group in CASES:
        if name not in group["sets"]:
            continue
        question: Prompt = read(name, write_tsv(tmp_path / "x.tsv", rows_of(name, group)))[0]
        responses = [Response(question, case[0], 10, False, 100) for case in group["cases"]]
        grades = benchmark.grade(responses, verifier)
        for (response, _, right), grade in zip(group["cases"], grades, strict=True):
            if grade.correct is not right:
                unexpected.append((group["name"], response, grade))
    verifier.close()
    assert unexpected == []


RULES = {  # rule of VLMEvalKit: where it decides otherwise, and why ours is meant
    "can_infer": {
        "<think>The whiskers suggest C, answer: C": "thinking that is not closed has no answer",
        "The answer is not C.": "a negation does not choose an option",
        "D. dog is wrong, and so is C.": "a negation does not choose an option",
        "It is not C.": "a negation does not choose an option",
        "It is not a cat.": "a negation does not choose an option",
        "The answer is A cat.": "'A' is an article; the text of option C follows",
        "It is a caterpillar.": "'cat' is only a part of a word",
        "sample A": "the text of option B",
        "The answer is sample A.": "the text of option B",
        "So it is sample A.": "the text of option B",
        "\\boxed{\\text{sample B}}": "the text of option C",
    },
    "wemath": {},
    "mathvista": {},
    "mathverse": {},
    "dynamath": {},
}
AGREEMENT = {  # cases, same answer, another answer, left to the judge model
    "can_infer": (166, 84, 11, 71),
    "wemath": (10, 8, 0, 2),
    "mathvista": (46, 1, 0, 45),
    "mathverse": (48, 5, 0, 43),
    "dynamath": (16, 10, 0, 6),
}
HERE = Path(__file__).parent


def theirs() -> dict[str, list[dict[str, Any]]]:
    """Answers of ms-vlmeval 0.0.20; None: its rule does not decide, and a judge model is asked."""
    lines = map(json.loads, (HERE / "vlmevalkit.jsonl").read_text().splitlines())
    return {line["group"]: line["answers"] for line in lines}


@pytest.mark.parametrize("rule", RULES)
def test_agreement_with_the_rules_of_vlmevalkit(rule: str) -> None:
    recorded = theirs()
    same, left, other = 0, 0, []
    for group in CASES:
        assert len(recorded[group["name"]]) == len(group["cases"])
        for (response, _, right), answers in zip(
            group["cases"], recorded[group["name"]], strict=True
        ):
            if rule not in answers:
                continue
            letters = rule in ("can_infer", "wemath")
            ours = answer_of(group, response) if letters else right
            if answers[rule] is None:
                left += 1
            elif answers[rule] == ours:
                same += 1
            else:
                other.append(response)
    assert sorted(other) == sorted(RULES[rule])
    assert (same + left + len(other), same, len(other), left) == AGREEMENT[rule]


def test_the_page_lists_the_agreement() -> None:
    page = (HERE.parents[1] / "docs/appendix/benchmarks.md").read_text()
    for rule, counts in AGREEMENT.items():
        assert f"| `{rule}` | {' | '.join(map(str, counts))} |" in page
    for rule in RULES.values():
        for response, reason in rule.items():
            assert f"| `{response}` |" in page
            assert reason in page
