"""Build the model that a configuration describes: Transformer-XL, XLNet, or one of the paper's other systems."""

from __future__ import annotations

from collections.abc import Callable

from transformer_xl.baselines.absolute import AbsoluteTransformer
from transformer_xl.baselines.recurrent import RecurrentModel
from transformer_xl.baselines.shaw import ShawTransformer
from transformer_xl.config import BaseModelConfig, ModelConfig, check_type
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.xlnet.two_streams import XLNet

_MODELS: dict[str, Callable[..., LanguageModel]] = {
    "transformer-xl": TransformerXL,
    "xlnet": XLNet,
    "shaw": ShawTransformer,
    "vaswani": AbsoluteTransformer,
    "al-rfou": AbsoluteTransformer,
    "lstm": RecurrentModel,
    "qrnn": RecurrentModel,
}
"""The class of each architecture."""


def build_model(config: ModelConfig, *, memory_length: int | None = None) -> LanguageModel:
    """Build a model with initial weights drawn from torch's global random state.

    Args:
        config: settings of the model.
        memory_length: M, the default number of memory slots of `initial_memory`; None means 128, or 0 if the
            architecture has no memory.

    Raises:
        UserError: the attention kernel is unknown, or a setting that the model needs is missing.
    """
    check_type(config, BaseModelConfig, "config", "give the settings of a model, such as TransformerXLConfig()")
    lengths: dict[str, int] = {} if memory_length is None else {"memory_length": memory_length}
    return _MODELS[config.architecture](config, **lengths)
