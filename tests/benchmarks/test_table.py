"""Tables in the paper's layout, in four formats."""

import csv
import io
import json
import re

import pytest

from segcredit.benchmarks import BENCHMARKS, Score
from segcredit.benchmarks.table import (
    FORMATS,
    ModelScores,
    make_tables,
    paper_tables,
    set_names,
)


def scores(**values: float) -> dict:
    return {name: {"accuracy": Score(x, x - 2, x + 2, 100)} for name, x in values.items()}


NAMES = ("geo3k", "logicvista", "mathverse", "wemath", "mathvista", "dynamath")
ALL = dict(zip(NAMES, (50, 40, 30, 20, 60, 10), strict=True))


def test_averages_of_the_paper() -> None:
    """Every printed average is the mean of its row, within rounding."""
    for table in paper_tables().values():
        for name, values in table.rows.items():
            assert len(values) == len(table.columns) + table.average, name
            if table.average:
                *row, mean = values
                assert mean == pytest.approx(sum(row) / len(row), abs=0.011), name


def test_the_worst_case_column_is_a_multiple_of_one_in_501() -> None:
    column = paper_tables()[1].columns.index("dynamath")
    for values in paper_tables()[1].rows.values():
        hits = round(values[column] * 501 / 100)
        assert values[column] == pytest.approx(100 * hits / 501, abs=0.01)


def test_table_1() -> None:
    part = {name: x for name, x in ALL.items() if name != "mathvista"}
    (table,) = make_tables([ModelScores("all", scores(**ALL)), ModelScores("part", scores(**part))])
    assert table.number == 1
    assert table.columns[0] == "Geo3K"
    assert table.columns[-1] == "Avg."
    first, second, *paper = table.rows
    assert first.values == (50, 40, 30, 20, 60, 10, 35)
    assert first.intervals[0] == (48, 52)
    assert second.values == (50, 40, 30, 20, None, 10, None), "no average of a part"
    assert [x.name for x in paper] == list(paper_tables()[1].rows)
    assert all(x.paper for x in paper)


def test_formats() -> None:
    tables = make_tables([ModelScores("my_model|x", scores(**ALL), "driver")])
    text = FORMATS["md"](tables)
    assert "| my_model\\|x (driver) | 50.00 | 40.00 |" in text
    assert "| 7B +SAPO *(paper)* | 52.75 |" in text
    latex = FORMATS["tex"](tables)
    assert r"my\_model|x (driver) & 50.00 & 40.00" in latex
    assert latex.count(r"\begin{tabular}{lccccccc}") == 1
    assert len(re.findall(r"\\\\$", latex, re.MULTILINE)) == 1 + 1 + 10
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](tables))))
    assert rows[0] == {
        "table": "1",
        "model": "my_model|x (driver)",
        "source": "measured",
        "column": "Geo3K",
        "score": "50.0000",
        "low": "48.0000",
        "high": "52.0000",
    }
    assert rows[-1]["score"] == "46.9000"
    assert json.loads(FORMATS["json"](tables))[0]["rows"][0]["values"][0] == 50


def test_other_sets_have_a_table_of_their_own() -> None:
    tables = make_tables([ModelScores("m", scores(logicvista=40, gsm8k=70, own=5))])
    assert [x.number for x in tables] == [1, None]
    assert tables[1].columns == ("GSM8K", "own")
    assert tables[1].rows[0].values == (70, 5)


def test_tables_that_are_asked_for() -> None:
    (table,) = make_tables([ModelScores("m", scores(logicvista=40))], numbers=[3])
    assert [x.name for x in table.rows][1:] == list(paper_tables()[3].rows)
    assert "Avg." not in table.columns


def test_names_of_sets() -> None:
    assert set_names(["table1"]) == [*ALL]
    assert set_names(["wemath,gsm8k", "wemath"]) == ["wemath", "gsm8k"]
    assert set_names(["paper"]) == list(BENCHMARKS)
    assert set_names(["my.py:Set"]) == ["my.py:Set"]
    with pytest.raises(ValueError, match=r"unknown set 'tabel1'. Did you mean 'table1'"):
        set_names(["tabel1"])
