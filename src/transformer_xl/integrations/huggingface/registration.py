"""Registers our classes with the Auto classes of transformers."""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from transformer_xl.integrations.huggingface.configuration import PretrainedTransformerXLConfig, TransfoXLConfig
from transformer_xl.integrations.huggingface.modeling import TransformerXLForCausalLM
from transformer_xl.integrations.huggingface.tokenization import TransformerXLTokenizer, TransfoXLTokenizer


def register() -> None:
    """Register configuration, model and tokenizer; registering them again changes nothing."""
    for config_class in (PretrainedTransformerXLConfig, TransfoXLConfig):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    # an old folder's tokenizer_config.json names its class
    AutoTokenizer.register(TransfoXLConfig, TransfoXLTokenizer, exist_ok=True)
    AutoTokenizer.register(PretrainedTransformerXLConfig, TransformerXLTokenizer, exist_ok=True)
    AutoModelForCausalLM.register(PretrainedTransformerXLConfig, TransformerXLForCausalLM, exist_ok=True)
    # Trainer's label smoothing shifts the labels of the models named there only
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[PretrainedTransformerXLConfig.model_type] = TransformerXLForCausalLM.__name__
