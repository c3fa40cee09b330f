"""Training: the loop, the optimizers and their schedules, checkpoints, and several processes."""
