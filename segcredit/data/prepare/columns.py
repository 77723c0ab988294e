"""Columns that are not there: which there are, which is nearest, and what to type."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from shlex import quote

from segcredit.data.formats import Keys
from segcredit.printable import listed, named, printable, shown


@dataclass(frozen=True)
class Columns:
    """The columns that the user named; None: the usual names."""

    question: str | None = None
    answer: str | None = None
    image: str | None = None
    keep: tuple[str, ...] = ()

    def keys(self) -> Keys:
        """Where the loader shall look."""
        usual = Keys()
        return Keys(
            question=(self.question,) if self.question else usual.question,
            answer=(self.answer,) if self.answer else usual.answer,
            images=(self.image,) if self.image else usual.images,
        )

    def check(self, file: str, seen: Collection[str]) -> None:
        """Raise ValueError if a column that is needed is in no row of the file."""
        keys = self.keys()
        wanted = [("question", keys.question, self.question), ("answer", keys.answer, self.answer)]
        if self.image:
            wanted.append(("image", keys.images, self.image))
        for option, names, asked in wanted:
            if not any(name in seen or name.partition(".")[0] in seen for name in names):
                raise _missing(file, seen, option, names, asked)
        for name in self.keep:
            if name not in seen:
                raise _missing(file, seen, "keep", (name,), name)


def _missing(
    file: str, seen: Collection[str], option: str, names: tuple[str, ...], asked: str | None
) -> ValueError:
    near = _nearest(asked or option, names, seen)
    if asked:
        advice = f" Did you mean --{option} {near}?" if near else ""
        return ValueError(
            f"expected the column {shown(asked)} (--{option}) in {named(file)}; it has "
            f"{listed(seen, 20)}.{advice}"
        )
    usual = " or ".join(f"'{name}'" for name in names)
    return ValueError(
        f"expected a column with the {option}, {usual}, in {named(file)}; it has "
        f"{listed(seen, 20)}. Name yours: --{option} {near or 'COLUMN'}"
    )


def _nearest(asked: str, names: Iterable[str], seen: Iterable[str]) -> str | None:
    """Of the columns there are, the one most like what was looked for, as it is typed."""
    by_lower = {name.lower(): name for name in seen}
    for wanted in (asked, *names):
        near = get_close_matches(wanted.lower(), by_lower, n=1, cutoff=0.5)
        if near:
            return quote(printable(by_lower[near[0]], 60))
    return None
