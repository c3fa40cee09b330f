"""Transformer-XL (Dai et al. 2019, section 3): layers that attend to a memory of the previous segments.

    hidden_BTD, memory = model(tokens_BT, memory)

`relative_layers.py` has the layers and their memory.

Shape suffixes: B batch size, T new tokens, S = M + T keys (M memory slots), D model width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from transformer_xl.config import RelativeConfig, TransformerXLConfig, UserError
from transformer_xl.model.attention import Layer
from transformer_xl.model.kernels import AttentionTerms, reference
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import LayerCache, Memory
from transformer_xl.model.relative_layers import RelativeLayers
from transformer_xl.model.token_ids import TokenIds


@dataclass(frozen=True)
class LayerTrace:
    """The output, attention terms and cache of one layer, for attention maps and feature extraction."""

    output_BTD: Tensor
    """The layer's output, which is the next layer's input."""
    terms: AttentionTerms
    """The layer's four attention terms and probabilities, over [memory ; new tokens]."""
    cache: LayerCache
    """The layer's cache after the new tokens."""


class TransformerXL(RelativeLayers, LanguageModel):
    """Token embedding times sqrt(D), L layers, and a softmax that by default shares the embedding's weights."""

    config: RelativeConfig  # pyrefly: ignore[bad-override-mutable-attribute]
    config_class: ClassVar[type[RelativeConfig]] = TransformerXLConfig

    def __init__(self, config: RelativeConfig, *, memory_length: int = 128) -> None:
        """Build the model with initial weights as in the authors' code, drawn from torch's global random state.

        Args:
            config: settings of the model.
            memory_length: M, the default number of memory slots of `initial_memory`.

        Raises:
            UserError: the settings are those of another architecture, or the attention kernel is unknown.
        """
        super().__init__(config, memory_length=memory_length)
        if not isinstance(config, self.config_class):
            raise UserError(f"{type(self).__name__} is not the model of {config.architecture}; use build_model")
        self.make_layers(config)
        self.init_weights()

    @override
    def init_weights(self) -> None:
        super().init_weights()
        self.init_biases()

    @property
    @override
    def like(self) -> Tensor:
        return self.softmax.bias

    def trace(
        self, tokens_BT: TokenIds | None = None, memory: Memory | None = None, *, inputs_BTD: Tensor | None = None
    ) -> Iterator[LayerTrace]:
        """Run the layers one by one and yield the output and the separate attention terms of each.

        Each term has B x N x T x S elements; unless the caller stores them, they are freed before the next layer runs.
        The reference kernel is used, without dropout of the probabilities, even in training.

        Args:
            tokens_BT: as for `forward`.
            memory: as for `forward`.
            inputs_BTD: as for `forward`.

        Yields:
            a `LayerTrace` for each layer.
        """
        x_BTD, memory = self.embed(tokens_BT, memory, inputs_BTD, None)
        x_BTD = self.input_dropout(x_BTD)
        context = self.attention_context(x_BTD, memory, None)
        for layer, cache, biases in zip(self.layers, memory.layers, self.biases(), strict=True):
            assert isinstance(layer, Layer)
            inputs, cache = layer.attention.attention_inputs(x_BTD, cache, context, biases)
            terms = reference.attention_terms(inputs, context.mask)
            attended_BTNH = reference.weighted_values(terms, inputs.v_BSNH)
            x_BTD = layer.feed_forward(layer.attention.output(x_BTD, attended_BTNH))
            yield LayerTrace(x_BTD, terms, cache)
