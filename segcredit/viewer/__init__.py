"""The viewer behind ``segcredit segment``: responses from a JSONL file, cut into segments."""
