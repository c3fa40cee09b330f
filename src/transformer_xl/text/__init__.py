"""Text: where it comes from, tokenizers, corpora of tokens on disk, and datasets that read them in segments."""
