"""The commands that train and evaluate, one file each."""
