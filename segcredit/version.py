"""The version of segcredit, for the package, the build, run folders and reports."""

__version__ = "0.1.0"
