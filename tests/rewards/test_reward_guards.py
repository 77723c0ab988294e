from each import each
from hypothesis import given
from hypothesis import strategies as st

from segcredit.rewards.verify import refusal


@each(
    ("answer", "reason"),
    [
        ("44=45", "equation"),
        ("45 = 45", "equation"),
        ("44 == 45", "equation"),
        ("44 \\equiv 45", "equation"),
        ("45 ≈ 44", "equation"),
        ("2x = 45", "equation"),
        ("-x = 45", "equation"),
        ("\\sqrt{x} = 45", "equation"),
        ("x=44=45", "chain"),
        ("45 \\text{ or } 44", "or"),
        ("44 OR 45", "or"),
        ("44 \\lor 45", "or"),
        ("45 \\cup 44", "or"),
        ("45\\text{ (maybe 44)}", "words"),
        ("45_{44}", "subscript"),
        ("44 _ 45", "subscript"),
        ("9^{9^{9}}", "tower"),
        ("9^9^9", "tower"),
        ("9**9**9", "tower"),
        ("9^(9^9)", "tower"),
        ("9^{9^{9", "tower"),
        ("10^{1000000}", "tower"),
        ("(10^7)!", "factorial"),
        ("5!!", "factorial"),
        ("(5!)!", "factorial"),
        ("{9^9}!", "factorial"),
        ("99999999!", "factorial"),
        ("1" * 301, "301 characters"),
        ("{" * 20_000 + "}" * 20_000, "40,000 characters"),
    ],
)
def test_refused(answer: str, reason: str) -> None:
    assert reason in (refusal(answer, "45") or "")


@each(
    ("answer", "gold"),
    [
        ("45", "45"),
        ("x = 45", "45"),
        ("x_1 = 45", "45"),
        ("f(2) = 45", "45"),
        ("P(X = 1) = 45", "45"),
        ("m\\angle 1 = 45", "45"),
        ("x = 1, y = 2", "(1, 2)"),
        ("x \\le 3", "3"),
        ("x >= 3", "3"),
        ("x != 3", "3"),
        ("10,\\!080", "10080"),
        ("e^{x^2}", "e^{x^{2}}"),
        ("2^{2024}", "1"),
        ("5!", "120"),
        ("(n+1)!", "n"),
        ("\\frac{10!}{3!(7)!}", "120"),
        ("\\mathbf{45}", "45"),
        ("45\\text{ cm}^2", "45"),
        ("orange", "orange"),
        # what the expected answer has is no offence
        ("5x - 7y + 4 = 0", "y = x"),
        ("(1,2) \\cup (3,4)", "(1,2)\\cup(3,4)"),
        ("1 \\text{ or } 2", "1, 2"),
        ("52_{8}", "52_8"),
        ("2^{2^{5}}", "2^{2^{n}}"),
        ("2005!", "2004!"),
    ],
)
def test_not_refused(answer: str, gold: str) -> None:
    assert refusal(answer, gold) is None


@given(st.text(alphabet="1x^*!{}()[]=,;_\\ or"), st.text(alphabet="1x^!{}=,"))
def test_never_raises(answer: str, gold: str) -> None:
    assert refusal(answer, gold) != ""
