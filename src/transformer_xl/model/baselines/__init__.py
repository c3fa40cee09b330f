"""The other systems of the paper's tables, each a language model by the one contract."""
