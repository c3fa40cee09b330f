"""Reproductions of the tables of the paper: runs side by side, and the report made from them."""
