"""Reproduction of the paper's tables: train and score its systems, and write a report; and the demo."""
