"""The classes of this folder: those of the package transformer-xl, which has to be installed."""

from transformer_xl.integrations.huggingface import (
    PretrainedTransformerXLConfig,
    TransformerXLForCausalLM,
    TransformerXLTokenizer,
)

__all__ = ["PretrainedTransformerXLConfig", "TransformerXLForCausalLM", "TransformerXLTokenizer"]
