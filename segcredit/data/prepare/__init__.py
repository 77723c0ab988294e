"""Data sets made ready: verl's rows in parquet, with their pictures, checked and compared.

>>> report = prepare("gsm8k", "data/gsm8k", source="downloads/gsm8k")  # doctest: +SKIP
"""

from segcredit.data.prepare.columns import Columns
from segcredit.data.prepare.report import Report, SplitReport
from segcredit.data.prepare.run import prepare
from segcredit.data.prepare.sets import KNOWN, DataSet
from segcredit.data.prepare.shared import Shared

__all__ = ["KNOWN", "Columns", "DataSet", "Report", "Shared", "SplitReport", "prepare"]
