"""The commands ``segcredit study`` and ``segcredit analyze``."""
