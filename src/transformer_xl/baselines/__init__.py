"""The models that the paper compares Transformer-XL with; each is a `LanguageModel`."""
