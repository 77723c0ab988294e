import time

from each import each
from hypothesis import given
from hypothesis import strategies as st

from segcredit.rewards.extract import boxed, expected, format_ok, hash_answer


@each(
    ("text", "answer"),
    [
        (r"\boxed{12}", "12"),
        (r"first \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{ 3 }", "3"),
        (r"\boxed {4}", "4"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\{b}}", r"a \\{b}"),
        (r"\boxed{}", ""),
        (r"{\boxed{6}", "6"),
        (r"\boxed{7} and \boxed{8", "7"),
        (r"}}} \boxed{9}", "9"),
        (r"\boxed{8 \boxed{9}", "9"),
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
        (r"<think>\boxed{1}</think> so 2", None),
        (r"<think>\boxed{1}", "1"),
        (r"\boxed{{1}", None),
        (r"\boxed{1", None),
        (r"\boxed 1", None),
        (r"\unboxed{1}", None),
        ("", None),
    ],
)
def test_the_last_balanced_box(text: str, answer: str | None) -> None:
    assert boxed(text) == answer


@given(st.text(alphabet="{}\\a", max_size=12), st.text(alphabet="{}\\ab"), st.text())
def test_a_box_at_the_end_is_found_whatever_comes_before(inner: str, before: str, any: str) -> None:
    balanced = "\\frac{1}{" + any.replace("\\", "").replace("{", "").replace("}", "") + "}"
    if "</think>" in any:
        return
    assert boxed(f"{before} \\boxed{{{balanced}}}") == balanced.strip()
    boxed(inner)  # and nothing raises


@each(
    ("text", "answer"),
    [
        ("#### 18", "18"),
        ("#### 1\nno\n#### 1,234", "1234"),
        ("#### $1,234.50.", "1234.50"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### +5", "5"),
        ("####7 apples", "7"),
        ("#### .5", ".5"),
        ("#### 3 #### none", "3"),
        ("#### none", None),
        ("### 3", None),
        ("#### 1.2.3", None),
        ("<think>#### 3</think> hm", None),
        ("", None),
    ],
)
def test_the_last_hash_number(text: str, answer: str | None) -> None:
    assert hash_answer(text) == answer


@each(
    ("text", "ok"),
    [
        ("<think>so</think> \\boxed{1}", True),
        (" \n<think>so\n</think>\n\\boxed{1} done", True),
        ("so \\boxed{1}", False),
        ("<think>so \\boxed{1}", False),
        ("<think>so \\boxed{1}</think>", False),
        ("</think> \\boxed{1}", False),
        ("<think>so</think> \\boxed{1", False),
    ],
)
def test_format(text: str, ok: bool) -> None:
    assert format_ok(text) is ok


def test_gold_text_may_be_a_solution() -> None:
    assert expected("16 - 3 = <<16-3=13>>13\n#### 1,013") == "1013"
    assert expected("hence $\\boxed{p - q}$.") == "p - q"
    assert expected(" \\sqrt{3} ") == "\\sqrt{3}"


@each(
    "text",
    [
        "\\boxed{" + "{" * 20_000 + "}" * 20_000 + "}",
        "\\boxed{" * 100_000,
        "\\boxed" + " " * 500_000,
        "<think></think>\\boxed{" * 30_000,
        "<think>" * 100_000 + "\\boxed{1}",
        "</think>" * 100_000 + "\\boxed{",
        "#### " * 200_000,
        "#" * 1_000_000,
        "####" + " " * 1_000_000,
        "#### " + "1," * 500_000,
        "\\" * 1_000_001,
    ],
)
def test_time_is_linear(text: str) -> None:
    start = time.process_time()
    boxed(text), hash_answer(text), format_ok(text)
    assert time.process_time() - start < 3.0  # quadratic would take minutes
