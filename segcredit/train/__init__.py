"""Training: stages of steps, run folders, checkpoints, resume."""
