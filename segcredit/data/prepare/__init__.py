"""Convert datasets into verl's parquet format; check the rows and find leaked test questions.

>>> report = prepare("gsm8k", "data/gsm8k", source="downloads/gsm8k")  # doctest: +SKIP
"""

from segcredit.data.prepare.run import Duplicates, Report, SplitReport, prepare
from segcredit.data.prepare.sources import KNOWN, Columns, DataSet

__all__ = ["KNOWN", "Columns", "DataSet", "Duplicates", "Report", "SplitReport", "prepare"]
