"""Training: stages of steps, run directories, checkpoints, resume."""
