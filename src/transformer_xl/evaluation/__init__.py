"""Evaluation of language models: the loss of every token in nats, and metrics of a whole text such as bits per byte."""
