"""One test for a list of small cases: it runs all of them and reports every one that fails.

Use it instead of ``pytest.mark.parametrize`` where a case is one short assertion, so that the
number of tests says how many things are tested. Function-scoped fixtures are shared by the cases.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Call the test once per case, with the arguments of ``pytest.mark.parametrize``."""
    several = [names] if isinstance(names, str) else [*names]
    listed = list(cases)

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*instance: Any, **fixtures: Any) -> None:
            failed: list[Exception] = []
            for case in listed:
                values = [case] if isinstance(names, str) else case
                given = dict(zip(several, values, strict=True))
                try:
                    test(*instance, **given, **fixtures)
                except pytest.fail.Exception as error:  # not an Exception: of pytest.raises
                    failed.append(AssertionError(f"{given}: {error.msg}"))
                except Exception as error:
                    error.add_note(f"case: {given}")
                    failed.append(error)
            if failed:
                raise ExceptionGroup(f"{len(failed)} of {len(listed)} cases failed", failed)

        signature = inspect.signature(test)
        rest = [x for name, x in signature.parameters.items() if name not in several]
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return decorate
