"""One file per benchmark: its rows, its answers, its metrics."""
