"""How the weights are found: the loop, the optimiser and its schedule, and checkpoints training can go on from."""
