"""Training: the training loop, optimizers and schedules, checkpoints, and training with several processes."""
