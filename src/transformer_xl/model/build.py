"""The one place that chooses a model: Transformer-XL, or one of the paper's other systems."""

from __future__ import annotations

from transformer_xl.config import ModelConfig
from transformer_xl.model.baselines.absolute import AbsoluteTransformer
from transformer_xl.model.baselines.recurrent import RecurrentModel
from transformer_xl.model.baselines.shaw import ShawTransformer
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.transformer_xl import TransformerXL


def build_model(config: ModelConfig) -> LanguageModel:
    """The model that the settings ask for, with first weights from torch's global random state.

    Raises:
        UserError: the settings name no known attention kernel, or leave open what the model needs.
    """
    if config.kind != "transformer":
        return RecurrentModel(config)
    if config.is_absolute:
        return AbsoluteTransformer(config)
    return ShawTransformer(config) if config.encoding == "shaw" else TransformerXL(config)
