"""XLNet (Yang et al. 2019): the model of two streams, and what it learns from."""
