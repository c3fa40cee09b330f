"""Build the model that a configuration describes: Transformer-XL, or one of the paper's other systems."""

from __future__ import annotations

from transformer_xl.config import (
    AbsoluteConfig,
    ModelConfig,
    RecurrentConfig,
    ShawConfig,
    TransformerXLConfig,
    check_type,
)
from transformer_xl.model.baselines.absolute import AbsoluteTransformer
from transformer_xl.model.baselines.recurrent import RecurrentModel
from transformer_xl.model.baselines.shaw import ShawTransformer
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.transformer_xl import TransformerXL


def build_model(config: ModelConfig, *, memory_length: int | None = None) -> LanguageModel:
    """Build a model with initial weights drawn from torch's global random state.

    Args:
        config: settings of the model.
        memory_length: M, the default number of memory slots of `initial_memory`; None means 128, or 0 if the
            architecture has no memory.

    Raises:
        UserError: the attention kernel is unknown, or a setting that the model needs is missing.
    """
    lengths = {} if memory_length is None else {"memory_length": memory_length}
    if isinstance(config, AbsoluteConfig):
        return AbsoluteTransformer(config, **lengths)
    if isinstance(config, RecurrentConfig):
        return RecurrentModel(config, **lengths)
    if isinstance(config, ShawConfig):
        return ShawTransformer(config, **lengths)
    check_type(config, TransformerXLConfig, "config", "give the settings of a model, such as TransformerXLConfig()")
    return TransformerXL(config, **lengths)
