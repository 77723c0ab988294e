r"""Grade an answer like MathRuler 0.1.0, the grader of verl's ``geo3k`` reward.

An answer is right if it equals the expected one (1) as text, after Hendrycks' rules for MATH; or
(2) as text, after PRM800K's rules (units, thousands separators, mixed numbers, LaTeX as plain
text); or (3) if sympy simplifies the difference to zero. Fractions and integers are exempt from
(3): ``2/4`` is wrong for ``1/2``, ``4/2`` is wrong for ``2``.

Steps (1) and (2) take linear time in this process. Step (3) runs in a worker that can be killed.
MathRuler evaluates model output as Python and without a time limit; here only plain arithmetic
reaches sympy. docs/deviations.md lists the answers that are graded differently.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from segcredit.rewards.verify import LONGEST, Verdict, Verifier, computes_too_much, right, wrong

_ENCLOSING_TEXT = re.compile(r"\\text\{(.+)\}\n?")
_UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day"),
    *("week", "month", "year", "foot", "feet", "inch", "yard"),
)
"""Removed in this order, one after the other, wherever they occur: ``5centimeter`` becomes
``5enti``, as in MathRuler."""
_UNIT_PATTERNS = [re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in _UNITS]
_DEGREES = re.compile(r"\^ *\\circ")
_THIN_COMMA = re.compile(r",\\! *")
_MINUS = re.compile(r"- *")
_MIXED_NUMBER = re.compile(r"([0-9]) +([0-9])")
_THOUSANDS = re.compile(r"(\d),(\d\d\d)(?=$|\D)")
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_UNSAFE_POWER = re.compile(r"\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
_ARITHMETIC = re.compile(r"(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+|[^\W\d_]+|[-+*/()!,^])+")
"""Numbers, names, brackets and operators. Strings, attributes and subscripts are excluded, because
sympy's parser passes the text to Python's eval()."""
_BRACKETS = "()[]"

_TOKEN = re.compile(r"\\[^\W\d_]+\s*|\\.|\\$|---|--|''|``|\?`|!`|.", re.DOTALL)
_TAKES_AND_DROPS = ("mbox", "hspace", "vspace", "label")
_SPECIALS = {"---": "—", "--": "–", "''": "”", "``": "“", "?`": "¿", "!`": "¡", "~": "\xa0"}
_NAMED_SIGNS = """
alpha α beta β gamma γ delta δ zeta ζ eta η theta θ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π
rho ρ sigma σ tau τ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ
Psi Ψ Omega Ω ell ℓ infty ∞ cup ∪ cap ∩ in ∈ emptyset ∅ pm ± mp ∓ cdot · times × div ÷ circ ∘
bullet ∙ angle ∠ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠ approx ≈ equiv ≡ sim ∼ cong ≅ perp ⊥ parallel ∥
to → rightarrow → ldots … cdots ⋯ lvert | rvert | prime '
epsilon ϵ varepsilon ε phi ϕ varphi φ upsilon υ star ⋆ square □ nabla ∇ subset ⊂ langle ⟨ rangle ⟩
leftarrow ← Rightarrow ⇒ forall ∀ exists ∃
sin sin cos cos tan tan cot cot sec sec csc csc log log ln ln exp exp max max min min lim lim
arcsin arcsin arccos arccos arctan arctan sinh sinh cosh cosh tanh tanh det det gcd gcd
{ { } } $ $ % % & & # # _ _
"""
_SPACES = {",": " ", ";": " ", ":": " ", " ": " ", "quad": "  ", "qquad": "    ", "\\": "\n"}
_SYMBOLS = _SPACES | dict(zip(_NAMED_SIGNS.split()[::2], _NAMED_SIGNS.split()[1::2], strict=True))
"""Text of each macro. Any other macro is dropped and its argument kept."""


class MathRuler(Verifier):
    """Grades pairs (expected, answer) by MathRuler's rules."""

    mode = "sympy"

    def quick_verdict(self, gold: str, answer: str) -> Verdict | None:
        """Return the verdict if the text alone decides; None if sympy has to compute."""
        if len(answer) > max(LONGEST, len(gold) + 2):
            reason = f"the answer has {len(answer):,} characters; at most {LONGEST} are graded"
            return Verdict(False, f"refused: {reason}")
        if hendrycks(gold) == hendrycks(answer) or plain_text(gold) == plain_text(answer):
            return right(answer)
        pairs = _comparable(plain_text(gold), plain_text(answer))
        if pairs is None:
            return wrong(gold, answer)
        for expected, given in pairs:
            if trouble := computes_too_much(f"({expected})-({given})".replace("^", "**")):
                return Verdict(False, f"refused: {trouble}")
        return None

    def request(self, gold: str, answer: str) -> Mapping[str, Any]:
        pairs = _comparable(plain_text(gold), plain_text(answer)) or []
        return {"zero": [f"({a})-({b})".replace("^", "**") for a, b in pairs]}

    def verdict(self, gold: str, answer: str, reply: Mapping[str, bool]) -> Verdict:
        return right(answer) if reply["right"] else wrong(gold, answer)


def hendrycks(answer: str) -> str:
    r"""Normalize by the rules of the MATH release: ``\tfrac12`` and ``1/2`` are ``\frac{1}{2}``."""
    answer = _without_text(answer.strip()).strip()
    x = answer.replace("\n", "").replace("\\!", "").replace("\\\\", "\\")
    x = x.replace("tfrac", "frac").replace("dfrac", "frac")
    for dropped in ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"):
        x = x.replace(dropped, "")
    if x.count("\\text{ ") > 1:
        return answer  # more than one unit: MathRuler gives up and compares the text as it is
    x = x.partition("\\text{ ")[0]
    x = x.replace("\\%", "").replace("%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not x:
        return x
    if x[0] == ".":
        x = "0" + x
    name, equals, value = x.partition("=")
    if equals and "=" not in value and len(name) <= 2:
        x = value
    if x.endswith("\\sqrt") or "\\sqrt\\sqrt" in x:
        return answer
    x = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", x, flags=re.DOTALL).replace(" ", "")
    if x.endswith("\\frac") or "\\frac\\frac" in x:
        return answer
    x = _braced_fractions(x)
    if x == "0.5":
        return "\\frac{1}{2}"
    halves = re.fullmatch(r"(-?[1-9][0-9]*|0)/(-?[1-9][0-9]*|0)", x)
    return f"\\frac{{{halves[1]}}}{{{halves[2]}}}" if halves else x


def plain_text(answer: str) -> str:
    r"""Normalize by PRM800K's rules: ``2 \tfrac{1}{2}\text{ cm}`` is ``2+1/2``."""
    x = _without_text(answer)
    for old, new in (("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", "")):
        x = x.replace(old, new)
    x = x.replace(" or ", " , ").replace(" and ", " , ")
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        x = x.replace(word, f"*10^{power}")
    for pattern in _UNIT_PATTERNS:
        x = pattern.sub("", x)
    x = _DEGREES.sub("", x)
    if x.startswith("{") and x.endswith("}"):
        x = x[1:-1]
    x = _THIN_COMMA.sub("", x)
    number = _float(x)
    if number is not None and _whole(number):
        x = str(round(number))
    if "\\" in x:
        with suppress(ValueError):
            x = latex_as_text(x)
    x = _MIXED_NUMBER.sub(r"\1+\2", _MINUS.sub("-", x))
    for dropped in " {}":
        x = x.replace(dropped, "")
    x = x.lower()
    return str(int(float(x.replace(",", "")))) if _is_integer(x) else x


def latex_as_text(latex: str) -> str:
    r"""Spell LaTeX as text: ``\frac{a}{b}`` is ``a/b`` (no brackets), ``\sqrt{a}`` ``sqrt(a)``."""
    for name in ("\\tfrac", "\\dfrac"):
        latex = latex.replace(name, "\\frac")
    latex = latex.replace("\\frac", " \\frac")  # keeps mixed numbers apart: 7\frac34
    tokens = _TOKEN.findall(latex)[::-1]
    text = ""
    while tokens:
        text += _next(tokens)
    for sign, spelled in {"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"}.items():
        text = text.replace(sign, spelled)
    return text.strip()


def _next(tokens: list[str]) -> str:
    """Return the text of the next token with its arguments; ``tokens`` is a stack."""
    token = tokens.pop()
    if token == "{":
        text = ""
        while tokens and tokens[-1] != "}":
            text += _next(tokens)
        if tokens:
            tokens.pop()
        return text
    if token == "}":
        return ""
    if not token.startswith("\\"):
        return _SPECIALS.get(token, token)
    name = token[1:].strip() or token[1:2]
    if name == "frac":
        if not _has_argument(tokens):
            return "%s/%s"
        above = _argument(tokens)
        return f"{above}/{_argument(tokens)}" if _has_argument(tokens) else f"%s/%s{above}"
    if name == "sqrt":
        _skip_option(tokens)
        if not _has_argument(tokens):
            raise ValueError("a root of nothing")
        return f"√({_argument(tokens)})"
    if name in _TAKES_AND_DROPS:
        if _has_argument(tokens):
            _argument(tokens)
        return ""
    return _SYMBOLS.get(name, "")


def _argument(tokens: list[str]) -> str:
    """Return the text of an argument: a group, a character, or a macro without arguments."""
    return _next([tokens.pop()]) if tokens[-1].startswith("\\") else _next(tokens)


def _has_argument(tokens: list[str]) -> bool:
    """Whether an argument follows; blanks before it are dropped."""
    while tokens and tokens[-1].isspace():
        tokens.pop()
    return bool(tokens) and tokens[-1] != "}"


def _skip_option(tokens: list[str]) -> None:
    if tokens and tokens[-1] == "[" and "]" in tokens:
        while tokens.pop() != "]":
            pass


def _comparable(gold: str, answer: str) -> list[tuple[str, str]] | None:
    """Return pairs of elements whose differences must be zero; None if the answer is wrong."""
    if not answer:
        return None
    expected, given = _elements(gold), _elements(answer)
    if len(expected) != len(given):
        return None
    if len(expected) > 1 and (gold[0] != answer[0] or gold[-1] != answer[-1]):
        return None
    left: list[tuple[str, str]] = []
    for a, b in zip(expected, given, strict=True):
        if _FRACTION.fullmatch(a) and _FRACTION.fullmatch(b):
            if a != b:
                return None
        elif _is_integer(a) != _is_integer(b) or not _may_compute(f"({a})-({b})"):
            return None
        else:
            left.append((a, b))
    return left


def _elements(text: str) -> list[str]:
    """Split a tuple or interval into entries; anything else is one entry."""
    text = _without_thousands(text)
    if not text:
        return []
    inside = text[1:-1]
    enclosed = len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS
    if enclosed and not any(bracket in inside for bracket in _BRACKETS):
        return [entry.strip() for entry in inside.split(",")]
    return [text]


def _may_compute(difference: str) -> bool:
    """Whether the text is safe arithmetic: at most two letters, no large powers."""
    letters = {c for c in difference.replace("sqrt", "").replace("frac", "") if c.isalpha()}
    if len(letters) > 2 or _UNSAFE_POWER.search(difference):
        return False
    return _ARITHMETIC.fullmatch(difference) is not None


def _without_text(answer: str) -> str:
    match = _ENCLOSING_TEXT.fullmatch(answer)
    return match[1] if match else answer


def _without_thousands(text: str) -> str:
    """Remove thousands separators: ``1,234,567`` → ``1234567``; keep the commas of a tuple."""
    while (shorter := _THOUSANDS.sub(r"\1\2", text)) != text:
        text = shorter
    return text


def _braced_fractions(x: str) -> str:
    r"""Add braces to fractions: ``\frac12`` → ``\frac{1}{2}``, ``\frac1{7}`` → ``\frac{1}{7}``."""
    first, *rest = x.split("\\frac")
    fixed = first
    for part in rest:
        if part[0] == "{":
            fixed += "\\frac" + part
        elif len(part) < 2:
            return x
        elif part[1] == "{":
            fixed += f"\\frac{{{part[0]}}}{part[1:]}"
        else:
            fixed += f"\\frac{{{part[0]}}}{{{part[1]}}}{part[2:]}"
    return fixed


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(x: float) -> bool:
    try:
        return abs(x - round(x)) <= 1e-7
    except (OverflowError, ValueError):  # infinite, or not a number
        return False


def _is_integer(text: str) -> bool:
    number = _float(_without_thousands(text))
    return number is not None and _whole(number)
