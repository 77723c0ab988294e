r"""Find the final answer in a response: option letters, a number, or a free answer.

The rules replace the judge models of the original benchmarks. A response is untrusted text, so
every function takes linear time. Only the text after the reasoning counts: letters inside
``<think>…</think>`` are ignored, and a response whose thinking is not closed has no answer.
"""

import re
import unicodedata
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, pi

from segcredit.rewards.extract import answer_part, boxed
from segcredit.rewards.verify import Verdict, quick_verdict, right, wrong

Options = Mapping[str, str]
"""Text of each option by its letter."""

Verify = Callable[[Sequence[tuple[str, str]]], Sequence[Verdict]]
"""Compares pairs (expected, answer) as mathematics, in processes that can be killed."""

STATEMENTS = 100
"""Maximum number of statements such as "the answer is" that are read, counted from the end."""
SHORT = 60
"""Maximum number of characters of a free answer that no box, tag or statement marks."""
LONGEST = 100_000
"""Maximum number of characters of a response that are read, counted from its end."""

# full-width signs and letters, as in （Ｃ）：, and circled letters
_ASCII = {
    **{0xFF01 + i: 0x21 + i for i in range(94)},
    **{0x24B6 + i: 0x41 + i for i in range(26)},
    0x3000: 0x20,
    0x2212: 0x2D,
}
_FONT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt)?|math(?:rm|bf|it|sf|tt)|boldsymbol|mbox|bf|rm)\b\s?"
)
_QUOTED = re.compile(r"['‘’]([A-Z])['‘’]")
_MARKUP = re.compile(r"[*`$\"“”]|\\[()\[\]]|\\boxed\b|\\fbox\b")
_LETTER = re.compile(r"[(\[{<]{0,3}\s{0,2}(?<![A-Za-z0-9])([A-Z0-9])(?:\s{0,2}[)\]}>]{1,3})?")
_BETWEEN = re.compile(r"\s{0,2}(?:,\s?(?:and|or)\b|,|;|、|and\b|or\b|&|/|\+|和|或|及)\s{0,2}")
_OR = re.compile(r"\bor\b|或|/")
_RUN = re.compile(r"[(\[{<]{0,3}([A-Z]{2,8})[)\]}>]{0,3}(?![A-Za-z0-9])")

# words that lead to the letter; every repetition is bounded
_ANSWER = (
    r"answers?|(?:correct|right|best|final|matching|missing|chosen)\s(?:option|choice|letter|figure"
    r"|image|picture|shape|statement|one)s?"
)
_ANSWER_CHINESE = r"(?<!不)(?<!不应)(?<!不能)(?<!不该)(?:答案|正确的?(?:选项)?|选择?|正解|정답)"
_LINK = (
    r"is|are|would be|should be|must be|will be|to (?:the|this) question|here|therefore|thus"
    r"|choice|option|letter|the|figure|image|picture|number|correct(?:ly)?|[:=>→⇒]|-(?=\s)"
    r"|应该是|应该|应为|是|为|选项|选|项|は|은"
)
_STATEMENT = re.compile(
    rf"(?<![A-Za-z])(?:(?i:{_ANSWER})(?![A-Za-z])|{_ANSWER_CHINESE})(?:[\s>:=]{{0,4}}(?i:{_LINK})(?![a-z])){{0,6}}"
    rf"[\s>:=]{{0,4}}"
)
_CHOICE = re.compile(
    r"(?<![A-Za-z])(?i:choose|chose|select(?:ed)?|pick|go with)"
    r"(?:\s(?i:the|option|choice|answer|letter|figure)){0,3}\s"
)
_REVERSED = re.compile(
    r"(?:\b(?i:option|choice|answer|figure|statement|letter)\s|(?:^|(?<=[\s,;.:])))"
    r"(?=[(\[{]{0,2}[A-Z0-9])"
)
_IS_CORRECT = re.compile(
    r"\s(?i:is|must be|has to be|are)\s(?i:the\s)?(?i:correct|right|best|answer)"
    r"|\s?[是项为]{0,3}正确"
)
_CONNECTIVE = re.compile(
    r"\s(?i:because|since|as|is|are|and|or|which|with|for|due|so|where|while|but|by|given|based|–|—|-)"
    r"(?![A-Za-z])"
)
_ARTICLE = re.compile(r"\s?(?!(?:and|or)\b)[a-z]")
_NAMES = re.compile(  # a letter after these words names a point, not an option
    r"(?i:points?|angles?|sides?|vertex|vertices|triangles?|lines?|segments?|circles?|arc|∠|△"
    r"|quadrilateral|edge|node|label|variable|vitamin|grade|type|class|event|set|plane|chord|ray"
    r"|点|角|线段|直线)\s?$"
)
_SENTENCE_END = re.compile(r"(?<=[!?。！？;；])\s{0,3}|(?<=[.])\s{1,3}")
_NEGATION = re.compile(r"(?i:\b(?:not|neither|nor|cannot|isn't|aren't|wrong|incorrect)\b|n't\b|不)")
_TAG = re.compile(r"<(/?)(?i:answer)>")
_SHORT_ANSWER = re.compile(
    r'(?i:"short[ _]answer")\s{0,4}:\s{0,4}("(?:[^"\\\n]|\\.){0,400}"|[^,}\n]{1,200})'
)
_LISTED = re.compile(r"^\s{0,4}[(\[]?([A-Z])[).:、\]]", re.MULTILINE)


_IS = re.compile(
    r"\b(?i:is|are|was|be|equals)\b"
    r"(?:\s(?i:approximately|about|roughly|exactly|equal to|therefore|thus|then|given by)){0,3}"
    r"[\s:]{0,4}"
)
_BECAUSE = re.compile(r",?\s(?:because|since)\s")
_THEREFORE = re.compile(r"^(?i:therefore|thus|hence|so|then|finally)\b,?\s")


def after_thinking(text: str) -> str | None:
    """Return the text after the reasoning; None if ``<think>`` is not closed."""
    text = answer_part(text[-LONGEST:])
    return None if "<think>" in text else text.strip()


def choose(text: str, letters: Collection[str], options: Options | None = None) -> str | None:
    r"""Return the single option letter that a response chooses, or None.

    The first rule that finds exactly one letter decides: the last ``\boxed{}``; the last
    ``<answer>`` element; the last sentence such as "the answer is C", "答案：C" or "C is correct";
    a line that is only a letter; a letter that ends the last sentence; the text of exactly one
    option.

    Args:
        text: The whole response.
        letters: Letters of the question's options.
        options: The texts of the options; without them only letters are found.
    """
    found = choose_set(text, letters, options, single=True)
    return next(iter(found)) if len(found) == 1 else None


def choose_set(
    text: str, letters: Collection[str], options: Options | None = None, *, single: bool = False
) -> frozenset[str]:
    """Return all option letters that a response chooses; empty if there are none.

    The rules are those of :func:`choose`, but a place may name several letters: "A, C", "AC" or
    "B and D". Letters joined by "or" are no answer.
    """
    answer = after_thinking(text)
    if not answer:
        return frozenset()
    reader = _Letters(frozenset(letters), options or {}, single)
    for content in (boxed(answer), _tagged(answer)):
        if content is not None and (found := reader.lone(content)):
            return found
    plain = _plain(answer)
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    if len(set(_LISTED.findall(plain))) > 1:  # a discussion of all options, line by line
        lines = [line for line in lines if len(line) <= len("(C).") or not _LISTED.match(line)]
    if not lines:
        return frozenset()
    last = [reader.ending, reader.named]
    if any(re.search(r"\b[A-Z]\b", option) for option in reader.options.values()):
        last.reverse()  # "sample B" is the text of an option, not option B
    for find in (reader.stated, reader.on_a_line, *last):
        if found := find(plain, lines):
            return found
    return frozenset()


@dataclass(frozen=True)
class _Letters:
    """Rules that find letters in the plain text after the reasoning."""

    allowed: frozenset[str]
    options: Options
    single: bool

    @cached_property
    def texts(self) -> dict[str, str]:
        """Comparable text of each option; if several options have the same text, only the first.

        An option whose text is a letter is left out: if option A is "B", then "B" means option B.
        """
        first: dict[str, str] = {}
        for key, text in self.options.items():
            if text.strip() not in self.allowed:
                first.setdefault(_comparable(text), key)
        return {key: text for text, key in first.items() if text and key in self.allowed}

    @cached_property
    def quantities(self) -> dict[str, tuple[str, str]]:
        """Value and unit of each option that has a number."""
        found = {key: quantity(self.options[key]) for key in self.texts}
        return {k: (_squeezed(x), u) for k, (x, u) in found.items() if re.search("[0-9]", x)}

    def lone(self, content: str) -> frozenset[str]:
        """Read a box, an element or a line that should contain only the answer."""
        plain = _plain(content).strip()
        plain = re.sub(
            r"^(?i:option|choice|answer|figure|选项)\s?[:]?\s?(?=[(\[{]?[A-Z0-9])", "", plain
        )
        if found := self._by_text(plain) or self._by_quantity(content):
            return found
        found, end = self._letters_at(plain if len(plain) > 1 else plain.upper(), 0, runs=True)
        rest = plain[end:].strip()
        if found and (not rest.strip(".,:;!)}] ") or self._labels(found, rest)):
            return found
        if re.fullmatch(r"[({\[]{1,2}[a-z][)}\]]{1,2}\.?", plain):
            return self._accept([plain.strip("(){}[].").upper()])
        return frozenset()

    def stated(self, plain: str, lines: Sequence[str]) -> frozenset[str]:
        """Find the last sentence that states an answer."""
        last = (-1, frozenset[str]())
        for start, found in self._statements(plain):
            if start >= last[0]:
                last = start, found
        return last[1]

    def on_a_line(self, plain: str, lines: Sequence[str]) -> frozenset[str]:
        """Read the last line, then the first, if it has only a letter, with or without its text."""
        for line in (lines[-1], lines[0]):
            found = self.lone(line)
            listed = re.match(r"[(\[]?([A-Z])[).:、\]]\s", line)
            if not found and listed and not _NEGATION.search(line):
                found = self._accept([listed.group(1)])
            if found:
                return found
        return frozenset()

    def ending(self, plain: str, lines: Sequence[str]) -> frozenset[str]:
        """Find a letter in brackets or at the end of the last sentence, if it is the only one."""
        sentences = [part for part in _SENTENCE_END.split(lines[-1]) if part.strip()]
        for part in (sentences[-1] if sentences else "", lines[-1]):
            named: list[str] = []
            closing = False
            end = len(part.rstrip(" .!)]}'。！"))
            for match in _LETTER.finditer(part):
                after = part[match.end() : match.end() + 1]
                bracketed = match.group()[:1] in "([{" and match.group().rstrip()[-1:] in ")]}"
                if after.isalnum() or match.group(1) not in self.allowed or after in ("'", "’"):
                    continue
                if _NAMES.search(part[max(0, match.start() - 16) : match.start()]):
                    continue
                if match.group(1) == "A" and not bracketed and _ARTICLE.match(part, match.end()):
                    continue
                named.append(match.group(1))
                closing = bracketed or match.end() >= end
            if closing and not _NEGATION.search(part) and not _OR.search(part):
                found = self._accept(named)
                if found:
                    return found
        return frozenset()

    def named(self, plain: str, lines: Sequence[str]) -> frozenset[str]:
        """Find the text of one option: as an answer, as the whole text, in the last line."""
        if not self.texts:
            return frozenset()
        for part in (" ".join(lines), lines[-1]):
            if found := self._by_text(part):
                return found
        sentences = [part for part in _SENTENCE_END.split(lines[-1]) if part.strip()]
        stated = [plain[match.end() :] for match in deque(_STATEMENT.finditer(plain), 1)]
        for part in (*map(_first_sentence, stated), *sentences[-1:], lines[-1]):
            if not _NEGATION.search(part) and (found := self._contained(part)):
                return found
        return frozenset()

    def _statements(self, plain: str) -> Iterator[tuple[int, frozenset[str]]]:
        for pattern in (_STATEMENT, _CHOICE):
            for match in deque(pattern.finditer(plain), STATEMENTS):
                if named := self._by_text(_first_sentence(plain[match.end() : match.end() + 400])):
                    yield match.start(), named  # "A ∪ B" is the text of an option, not option A
                    continue
                found, end = self._letters_at(plain, match.end(), runs=True)
                if found and not self._article(plain, match.end(), end):
                    yield match.start(), found
        end = 0
        for match in _REVERSED.finditer(plain):
            if match.start() < end:
                continue  # the last letter of "A or B is correct"
            found, end = self._letters_at(plain, match.end())
            if found and _IS_CORRECT.match(plain, end):
                yield match.start(), found

    def _letters_at(self, text: str, at: int, runs: bool = False) -> tuple[frozenset[str], int]:
        """Read the letters that begin at a place; return them and their end."""
        if runs and not self.single and (match := _RUN.match(text, at)):
            return self._accept(list(match.group(1))), match.end()
        named: list[str] = []
        end = at
        hedged = False
        while (match := _LETTER.match(text, at)) and len(named) < 26:
            after = text[match.end() : match.end() + 2]
            inside = match.group()[-1:] in ")]}>"
            if not inside and (
                (after[:1].isalnum() and after[:1].isascii()) or after[:1] in ("'", "’", "°", "%")
            ):
                break
            if match.group(1).isdigit() and re.match(r"[.,/]\d|\\", after):
                break
            named.append(match.group(1))
            end = match.end()
            joined = _BETWEEN.match(text, end)
            if joined is None:
                break
            at = joined.end()
            if _OR.search(joined.group()) and _LETTER.match(text, at):
                hedged = True
        return frozenset() if hedged else self._accept(named), end

    def _accept(self, named: Sequence[str]) -> frozenset[str]:
        found = frozenset(named)
        if not found <= self.allowed or (self.single and len(found) != 1):
            return frozenset()
        return found

    def _article(self, text: str, start: int, end: int) -> bool:
        """Whether "A" is the English article, as in "the answer is A rectangle"."""
        if text[start:end].strip() != "A" or not re.match(r"\s{1,2}[a-z]", text[end : end + 3]):
            return False
        if "A" in self.texts and _comparable(text[end : end + 400]).startswith(self.texts["A"]):
            return False
        return _CONNECTIVE.match(text, end) is None

    def _labels(self, found: frozenset[str], rest: str) -> bool:
        """Whether the text after a letter, as in ``C. 12 cm``, may be part of an answer line."""
        if len(found) != 1:
            return False
        (letter,) = found
        text = _comparable(rest)
        if letter in self.texts:
            return text == self.texts[letter]
        short = not self.options and rest[:1] in ".:)、" and len(rest) <= 80
        return short and not _NEGATION.search(rest)

    def _by_text(self, part: str) -> frozenset[str]:
        """Return the option with this text; a capital letter, as in "(E)", is never a text."""
        if re.fullmatch(r"[(\[{<]{0,3}[A-Z][)\]}>]{0,3}[.:]?", part.strip()):
            return frozenset()
        text = _comparable(part)
        found = frozenset(key for key, option in self.texts.items() if option == text)
        return found or self._by_quantity(part)

    def _by_quantity(self, part: str) -> frozenset[str]:
        """Return the only option with this quantity; the unit may be missing on one side."""
        if len(part) > SHORT:
            return frozenset()
        value, unit = quantity(part)
        found = [
            key
            for key, (option, its_unit) in self.quantities.items()
            if option == _squeezed(value) and (unit == its_unit or not (unit and its_unit))
        ]
        return self._accept(found) if len(found) == 1 else frozenset()

    def _contained(self, part: str) -> frozenset[str]:
        text = _comparable(part)
        inside = {key: option for key, option in self.texts.items() if _has_words(text, option)}
        longest = [
            key
            for key, option in inside.items()
            if not any(option != other and _has_words(other, option) for other in inside.values())
        ]
        return self._accept(longest) if len(longest) == 1 else frozenset()


def final_answer(text: str) -> str | None:
    r"""Return the free answer of a response, or None.

    This is the last ``\boxed{}``, the last ``<answer>`` element, the value of the last JSON key
    "short answer", the rest of the last sentence that begins with "the answer is" or 答案, or what
    follows the last "is" of the last sentence, if it is short.
    """
    answer = after_thinking(text)
    if not answer:
        return None
    for content in (boxed(answer), _tagged(answer), _short_answer(answer)):
        if content is not None:
            return content.strip()
    answer = answer.translate(_ASCII).replace("**", "")
    stated = [match.end() for match in _STATEMENT.finditer(answer)]
    if stated and (tail := _first_sentence(answer[stated[-1] :])):
        return _BECAUSE.split(tail, 1)[0][:400]
    last = last_sentence(answer).rstrip(".。 ")
    copulas = [match.end() for match in _IS.finditer(last)]
    tail = last[copulas[-1] :] if copulas and last[copulas[-1] :] else _THEREFORE.sub("", last)
    return tail.strip() if len(tail) <= SHORT else None


def last_sentence(text: str) -> str:
    """Return the last sentence after the reasoning, '' if there is none."""
    answer = after_thinking(text)
    lines = [line for line in (answer or "").splitlines() if line.strip()]
    if not lines:
        return ""
    return [part for part in _SENTENCE_END.split(lines[-1].strip()) if part][-1]


_FRACTION = re.compile(
    r"\\[dt]?frac\s?\{\s?(-?[0-9.]{1,30})\s?\}\s?\{\s?([0-9.]{1,30})\s?\}|\\[dt]?frac([0-9])([0-9])"
)
_GROUPING = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!]|[\u2009\u202f\u00a0])(?=[0-9]{3})")
_EXPONENT = re.compile(r"\^\{?\s?(?:\\circ|\\prime)?[0-9]{0,2}\s?\}?|[²³]")
_SCIENTIFIC = re.compile(
    r"(?<=[0-9])\s?(?:\\times|\\cdot|[x×·*])\s?10\s?\^\s?\{?\s?([-+]?[0-9]{1,2})(?![0-9])\s?\}?"
)
_POWER = re.compile(r"[0-9][)}]?\s?(?:\^\s?\{?\s?[-+]?[0-9]|[²³])")
_OPERATION = re.compile(
    r"\\(?:[dt]?frac|times|cdot|div)(?![A-Za-z])|[√π×÷]"
    r"|(?<![A-Za-z])(?:sqrt|pi|log|ln|sin|cos|tan)(?![A-Za-z])"
)
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.])([-+]?)\s?\$?\s?((?:[0-9]{1,3}(?:,[0-9]{3}){1,8}(?![0-9])|[0-9]{1,300})(?:\.[0-9]{1,300})?"
    r"|\.[0-9]{1,40})(?:[eE]([-+]?[0-9]{1,2})(?![0-9A-Za-z]))?"
    r"(?:\s?/\s?([0-9]{1,20}(?:\.[0-9]{1,20})?))?(\s?(?:\\pi\b|π|pi\b))?"
)


def numbers(text: str) -> list[float]:
    r"""Return the numbers in an answer, in order.

    Thousands separators, units, ``\$``, degrees, ``3/4``, ``\frac{3}{4}``, ``1.5e3``,
    ``1.5 \times 10^3`` and multiples of π are understood; a percent sign is dropped.
    """
    text = _EXPONENT.sub(" ", _arithmetic(text))
    found = []
    for match in _NUMBER.finditer(text):
        sign, digits, power, divisor, times_pi = match.groups()
        value = float(digits.replace(",", "")) * 10.0 ** int(power or 0)
        if divisor is not None:
            if float(divisor) == 0:
                continue
            value /= float(divisor)
        if times_pi:
            value *= pi
        if isfinite(value):
            found.append(-value if sign == "-" else value)
    return found


def number(answer: str) -> float | None:
    """Return the value of an answer with one number; if it contains "=" or "≈", of its last part.

    An answer with several numbers, such as "3 or 4" and "x = 3, y = 4", or with an operation that
    :func:`numbers` does not evaluate, such as a root or a power, has no value.
    """
    if (value := _value(answer)) is not None:
        return value
    *before, last = _EQUAL.split(answer)
    return None if any(map(_SEVERAL.search, before)) else _value(last)


def _value(text: str) -> float | None:
    """Return the value of a text that is one number, with or without words and a unit."""
    found = numbers(text)
    plain = _arithmetic(text)
    if len(found) != 1 or _POWER.search(plain) or _OPERATION.search(_NUMBER.sub(" ", plain)):
        return None
    return found[0]


def _arithmetic(text: str) -> str:
    """Return the text with plain digits, quotients such as 3/4, and exponents such as e3."""
    text = text[:LONGEST].translate(_ASCII)
    text = _GROUPING.sub("", text).replace("\\$", "$").replace("\\%", "%")
    return _SCIENTIFIC.sub(r"e\1 ", _FRACTION.sub(_as_quotient, text))


_EQUAL = re.compile(r"=|≈|\\approx(?![A-Za-z])")
_SEVERAL = re.compile(r"[,;]\s|\b(?:and|or)\b")
_MOJIBAKE = {"掳": "°", "鈭": "√"}
_DEGREES = re.compile(
    r"\s?(?:\^\s?\{?\s?\\circ\s?\}?|°|º|\\degree(?![A-Za-z])|\bdegrees?\b)(?:\s?T\b)?"
)
_LABEL = re.compile(
    r"^\s{0,4}(?:the\s)?\{?[A-Za-z][A-Za-z.]{1,20}(?:\s[A-Za-z.]{1,20}){0,5}\}?[\s$]{0,3}=(?=\s?\S)",
    re.I,
)
_UNITS = {
    "mm": "millimeters? millimetres?",
    "cm": "centimeters? centimetres?",
    "km": "kilometers? kilometres?",
    "m": "meters? metres?",
    "in": "inch inches",
    "ft": "foot feet",
    "kg": "kilograms?",
    "g": "grams?",
    "s": "sec seconds?",
    "min": "minutes?",
    "h": "hours? hrs?",
    "l": "liters? litres?",
    "ml": "milliliters? millilitres?",
    "km/h": "kmh kph",
    "m/s": "",
    "yd": "yards?",
    "mi": "miles?",
    "units": "unit",
    "years": "years? yrs?",
    "°c": "",
    "v": "volts?",
    "hz": "hertz",
    "ω": "ohms?",
    "%": "percent",
    "dollars": "dollars?",
}
_UNIT = "|".join(
    sorted(
        (word for unit, more in _UNITS.items() for word in (re.escape(unit), *more.split())),
        key=len,
        reverse=True,
    )
)
_UNIT_AT_END = re.compile(
    rf"(?<=[0-9A-Za-z.)}}π√\s~$])[\s~$]{{0,4}}(?:(square|sq\.?|cubic)\s)?"
    rf"(?<![A-Za-z\\])(?!(?<!\s)[a-z]\b)({_UNIT})\s?\$?(?:\s?\^\s?\{{?([23])\}}?|([²³]))?\s?\$?\s?$",
    re.I,
)


def quantity(answer: str) -> tuple[str, str]:
    r"""Split a free answer into its value and its unit; the unit is '' if there is none.

    A label ("Area $=$") and degree signs are dropped; ``9 \pi \mathrm{cm}^{2}`` is
    (``9 \pi``, ``cm2``).
    """
    text = answer.translate(_ASCII)
    for wrong_sign, sign in _MOJIBAKE.items():
        text = text.replace(wrong_sign, sign)
    text = re.sub(r"\\[,;:! ]|~", " ", _FONT.sub("", _GROUPING.sub("", text)))
    text = text.replace("\\%", "%").replace("\\$", "$")
    text = re.sub(r"\\[()\[\]]", "", text).strip().rstrip(".,; ")
    text = re.sub(r"(?<=[a-z])\s?/\s?(?=[a-z])", "/", text)
    text = re.sub(r"\{\s?([A-Za-z/%°. ]{1,24}?)\s?\}", r" \1", text)
    text = _DEGREES.sub("", text)
    text = _LABEL.sub("", text).replace("$", "").strip()
    text = text.removeprefix("=").strip()
    match = _UNIT_AT_END.search(text[-60:])
    if match is None:
        return text, ""
    value = text[: len(text) - len(text[-60:]) + match.start()].strip()
    if not re.search(r"[0-9π)}]|\\pi|[a-z]$", value):
        return text, ""
    power = {"square": "2", "sq": "2", "cubic": "3"}.get(
        (match.group(1) or "").lower().strip("."), ""
    )
    power = power or {"²": "2", "³": "3"}.get(match.group(4) or "", match.group(3) or "")
    return value.rstrip(",; "), _unit(match.group(2).lower()) + power


def _unit(word: str) -> str:
    for unit, more in _UNITS.items():
        if word == unit or any(re.fullmatch(pattern, word) for pattern in more.split()):
            return unit
    return word


def verify_quantities(pairs: Sequence[tuple[str, str]], verify: Verify) -> list[Verdict]:
    """Compare free answers with the expected ones: as text, then as mathematics by ``verify``.

    A unit may be missing on one side. Two different units are wrong, even if a conversion would
    make the quantities equal.
    """
    compared = [_compare_quantities(gold, answer) for gold, answer in pairs]
    graded = iter(verify([values for verdict, values in compared if verdict is None]))
    return [next(graded) if verdict is None else verdict for verdict, _ in compared]


def _compare_quantities(gold: str, answer: str) -> tuple[Verdict | None, tuple[str, str]]:
    """Return a verdict that needs no worker, or None, and the values to compare."""
    pair = gold.strip(), answer[:LONGEST].strip()
    if _squeezed(pair[0]) == _squeezed(pair[1]):
        return right(answer), pair
    (expected, unit), (given, its_unit) = quantity(pair[0]), quantity(pair[1])
    plain = {"", "units", "units2", "units3"}
    if unit != its_unit and unit not in plain and its_unit not in plain:
        return wrong(gold, answer, " (another unit)"), (expected, given)
    if expected and _squeezed(expected) == _squeezed(given):
        return right(answer), (expected, given)
    return quick_verdict(expected, given), (expected, given)


def _as_quotient(match: re.Match[str]) -> str:
    above, below = match.group(1) or match.group(3), match.group(2) or match.group(4)
    return f" {above}/{below} "


def _plain(text: str) -> str:
    """Return the text without markup, with full-width signs as ASCII."""
    text = _FONT.sub("", text.translate(_ASCII))
    return _MARKUP.sub("", _QUOTED.sub(r"\1", text))


def _comparable(text: str) -> str:
    """Return a text for comparison with an option: no markup, case or final punctuation."""
    text = unicodedata.normalize("NFC", _plain(text)).casefold().replace("\\", "")
    text = re.sub(r"\s?(?:\^\s?\{?circ\}?|°|degrees?\b)", "°", text)
    text = re.sub(r"[{}~]", "", text)
    return " ".join(text.split()).strip(" .,:;!?)(、。'")


def _has_words(text: str, words: str) -> bool:
    """Whether the text has these words, not as part of a longer word or number."""
    at = text.find(words)
    while at >= 0:
        before, after = text[at - 1 : at] if at else "", text[at + len(words) : at + len(words) + 2]
        joined = after[:1].isalnum() or re.match(r"[.,/]\d", after) is not None
        if not joined and not (before.isalnum() or before in tuple("-./")):
            return True
        at = text.find(words, at + max(1, len(words)))
    return False


def _first_sentence(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return re.split(r"(?<=[.!?。])\s|(?<=[。！？])", line)[0].strip().rstrip(".。 ").strip()


def _tagged(text: str) -> str | None:
    """Return the content of the last closed ``<answer>`` element."""
    opened, found = None, None
    for match in _TAG.finditer(text):
        if not match.group(1):
            opened = match.end()
        elif opened is not None:
            found, opened = text[opened : match.start()].strip(), None
    return found


def _short_answer(text: str) -> str | None:
    found = _SHORT_ANSWER.findall(text)
    return found[-1].strip().strip('"').strip() if found else None


def _squeezed(text: str) -> str:
    return re.sub(r"[\s$]|\\left(?![A-Za-z])|\\right(?![A-Za-z])", "", text).casefold()
