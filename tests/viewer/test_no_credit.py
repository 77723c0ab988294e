"""A table without Â says why."""

import pytest
from typer.testing import CliRunner

from segcredit.cli import app


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"tokens": ["a", "b"], "entropy": [1, 2], "reward": 1}', "no Â: this row has no value"),
        ('{"tokens": ["a", "b"], "value": [1, 2]}', "no Â: this row has no reward"),
        ('{"text": "a b"}', "no Â: this row has no value and no reward"),
    ],
)
def test_why_there_is_no_credit(row: str, reason: str) -> None:
    shown = CliRunner().invoke(app, ["segment", "-"], input=row)
    assert shown.exit_code == 0
    assert reason in shown.output


def test_nothing_is_said_when_there_is_credit() -> None:
    row = '{"tokens": ["a"], "entropy": [1], "value": [0.5], "reward": 1}'
    assert "no Â" not in CliRunner().invoke(app, ["segment", "-"], input=row).output
