r"""The data sets that are known by name: where they lie, how verl asks them, how it scores them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from segcredit.data.prepare.answers import Rule, as_it_is, boxed_solution, chosen_text, number
from segcredit.printable import listed, shown


@dataclass(frozen=True)
class DataSet:
    """What ``segcredit prepare NAME`` knows of a data set."""

    name: str
    hub: str
    """Its id on the Hugging Face Hub."""
    data_sources: tuple[str, ...]
    """Names by which verl chooses the right scorer; the first, unless the place bears another."""
    suffix: str
    """What verl puts behind every question, joined by one space."""
    rule: Rule
    """How the answer is read off a row."""
    reward: str | None
    """The reward of ours that grades it."""
    config: str | None = None
    """The part of it on the Hub."""
    named_rule: Rule = as_it_is
    """The same where the user names the answer's column."""
    keep: tuple[str, ...] = ()
    """Columns that go into extra_info, where a row has them."""

    def data_source(self, place: str) -> str:
        """The name for verl of rows that lie there: ``…/math500`` holds MATH-500."""
        words = {_bare(place), _bare(Path(place).name), _bare(Path(place).parent.name)}
        for name in self.data_sources:
            if words & {_bare(name), _bare(name.rpartition("/")[2])}:
                return name
        return self.data_sources[0]


OWN = DataSet("own", "", ("custom",), "", as_it_is, None)
"""Files of the user's: no suffix, and a name for which verl has no scorer."""

GEO3K = DataSet(
    "geo3k",
    "hiyouga/geometry3k",
    ("hiyouga/geometry3k",),
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final "
    "answer MUST BE put in \\boxed{}.",
    chosen_text,
    "geo3k",
    keep=("id", "choices"),
)
GSM8K = DataSet(
    "gsm8k",
    "openai/gsm8k",
    ("openai/gsm8k",),
    'Let\'s think step by step and output the final answer after "####".',
    number,
    "gsm8k",
    config="main",
    named_rule=number,
    keep=("answer",),
)
MATH = DataSet(
    "math",
    "DigitalLearningGmbH/MATH-lighteval",
    ("DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    "Let's think step by step and output the final answer within \\boxed{}.",
    boxed_solution,
    "math",
    keep=("solution", "level", "type", "subject", "unique_id"),
)
KNOWN = {known.name: known for known in (GEO3K, GSM8K, MATH)}


def choose(what: Sequence[str], places: Sequence[str]) -> tuple[DataSet, list[str]]:
    """The data set that is meant, and where its rows lie."""
    names = [name for name in what if name in KNOWN]
    if names and len(what) > 1:
        others = " ".join(f"--from {name}" for name in what if name not in KNOWN)
        raise ValueError(
            f"expected one data set, or files; got {listed(what)}. For files that are like "
            f"{names[0]}: segcredit prepare {names[0]} {others or '--from FILE'}"
        )
    if names:
        known = KNOWN[names[0]]
        return known, list(places) or [known.hub]
    if places:
        raise ValueError(
            f"--from goes with a data set, {', '.join(KNOWN)}; got {listed(what)}.{_near(what[0])} "
            f"Files of your own stand alone: segcredit prepare {' '.join(places)}"
        )
    if not what:
        raise ValueError(f"expected a data set, {', '.join(KNOWN)}, or files; got nothing.")
    for name in what:
        if re.fullmatch(r"[\w-]+", name) and not Path(name).exists():
            raise ValueError(
                f"expected a data set, {', '.join(KNOWN)}, or a file; got {shown(name)}."
                f"{_near(name)}"
            )
    if len(what) == 1:
        for known in KNOWN.values():
            if what[0] in known.data_sources and not Path(what[0]).exists():
                return known, list(what)
    return OWN, list(what)


def _near(name: str) -> str:
    near = get_close_matches(name.lower(), [*KNOWN, "geometry3k"], n=1, cutoff=0.4)
    return f" Did you mean {near[0].replace('geometry3k', 'geo3k')}?" if near else ""


def _bare(name: str) -> str:
    return re.sub(r"\W|_", "", name).lower()
