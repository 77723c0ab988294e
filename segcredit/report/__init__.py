"""Pages, pictures and terminal views of runs, read from their run directories."""
