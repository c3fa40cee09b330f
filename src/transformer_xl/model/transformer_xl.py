"""Transformer-XL (Dai et al. 2019, section 3), from the tokens to the last hidden states.

    hidden_BTD, memory = model(tokens_BT, memory)

For each layer n, with the memory m of its inputs in earlier segments, which passes no gradient (SG):

    h = dropout(E[token] sqrt(D))                                      the input of the first layer
    g = [ SG(m) ; h ]                                                  memory and segment
    q, k, v = h W_q, g W_{k,E}, g W_v                                  for each of N heads
    A[i, j] = q_i . k_j + q_i . r[i - j] + u . k_j + w . r[i - j]      r[d] = R[d] W_{k,R}, R sinusoids of distances
    a = LayerNorm(h + softmax(A / sqrt(H)) v W_o)                      softmax over j <= i
    h = LayerNorm(a + ReLU(a W_1 + b_1) W_2 + b_2)                     the input of the next layer

With the setting value_embeddings some layers add E_n[token] sqrt(D) 2 sigmoid(g W_s) to v, of g the first channels;
with key_offset the second half of each head's k is that of the token before. u and w are `content_bias` and
`position_bias`, which the layers share; the paper calls w v. One layer is in `attention.py`, a memory in `memory.py`,
embedding, softmax and losses in `language_model.py`, masks and encodings of distances in `relative.py`.

Shape suffixes: B batch size, T new tokens, S = M + T keys (M memory slots), D model width, N heads, H head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, cast

from torch import Tensor
from typing_extensions import override

from transformer_xl.config import RelativeConfig, TransformerXLConfig, UserError
from transformer_xl.model.attention import Layer, RelativeAttention, ValueEmbedding
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import LayerCache, Memory
from transformer_xl.model.relative import RelativeModel
from transformer_xl.model.token_ids import TokenIds
from transformer_xl.ops.kernels import AttentionTerms, reference


def run_layers(
    model: RelativeModel,
    x_BTD: Tensor,
    memory: Memory,
    *,
    lengths_B: Tensor | None = None,
    visible_BT: Tensor | None = None,
    last_start_BT: Tensor | None = None,
) -> tuple[list[Tensor], Memory]:
    """Return the inputs of all layers and the last hidden states, L + 1 tensors (B, T, D), and the next memory.

    Args:
        model: a model of layers with relative attention, for texts or (`backbone.py`) for continuous inputs.
        x_BTD: the inputs, without dropout.
        memory: the memory of the tokens before them.
        lengths_B: as for `LanguageModel.forward`.
        visible_BT: as for `LanguageModel.forward`.
        last_start_BT: index of the token that starts the episode of each token, below 0 if that is before them.
    """
    x_BTD = model.input_dropout(x_BTD)
    context = model.attention_context(x_BTD, memory, lengths_B, visible_BT=visible_BT, last_start_BT=last_start_BT)
    states_BTD: list[Tensor] = [x_BTD]
    caches: list[LayerCache] = []
    for layer, cache, biases in zip(model.layers, memory.layers, model.layer_biases(), strict=True):
        x_BTD, cache = model.run_layer(layer, x_BTD, cache, context, biases)
        states_BTD.append(x_BTD)
        caches.append(cache)
    states_BTD[-1] = model.final_norm(x_BTD)
    last_start_B = None if last_start_BT is None else last_start_BT[:, -1]
    return states_BTD, memory.advance(caches, x_BTD.shape[1], lengths_B, last_start_B)


@dataclass(frozen=True)
class LayerTrace:
    """The input, output, attention terms and cache of one layer, for attention maps and feature extraction."""

    input_BTD: Tensor
    """The layer's input."""
    output_BTD: Tensor
    """The layer's output, which is the next layer's input."""
    terms: AttentionTerms
    """The layer's four attention terms and probabilities, over [memory ; new tokens]."""
    cache: LayerCache
    """The layer's cache after the new tokens."""


class RelativeLanguageModel(RelativeModel, LanguageModel):
    """Token embedding times sqrt(D), layers with relative attention and memory, a softmax.

    Subclasses name their settings and where the position keys come from.
    """

    config: RelativeConfig  # pyrefly: ignore[bad-override-mutable-attribute]
    config_class: ClassVar[type[RelativeConfig]]
    attention_class: ClassVar[type[RelativeAttention]] = RelativeAttention

    def __init__(self, config: RelativeConfig, *, memory_length: int = 128) -> None:
        """Build the model with initial weights as in the authors' code, drawn from torch's global random state.

        Args:
            config: settings of the model.
            memory_length: M, the default number of memory slots of `initial_memory`.

        Raises:
            UserError: the settings are those of another architecture, a setting that the model needs is missing, or
                the attention kernel is unknown.
        """
        super().__init__(config, memory_length=memory_length)
        if not isinstance(config, self.config_class):
            raise UserError(f"{type(self).__name__} is not the model of {config.architecture}; use build_model")
        self.make_layers(self.attention_class)
        for layer in config.value_layers:
            cast(Layer, self.layers[layer]).attention.value_embedding = ValueEmbedding(config, config.vocab_size)
        self.init_weights()

    @override
    def init_weights(self) -> None:
        super().init_weights()
        self.init_biases()
        for module in self.layers.modules():
            if isinstance(module, ValueEmbedding):
                module.init_weights()
            elif isinstance(module, RelativeAttention):
                module.init_sinks()

    @override
    def run_layers(
        self, x_BTD: Tensor, memory: Memory, lengths_B: Tensor | None = None, visible_BT: Tensor | None = None
    ) -> tuple[list[Tensor], Memory]:
        return run_layers(self, x_BTD, memory, lengths_B=lengths_B, visible_BT=visible_BT)

    @property
    @override
    def limits_visible(self) -> bool:
        return not self.config.attends_empty_slots

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
        x_BTD, memory = self.embed(tokens_BT, memory, inputs_BTD)
        x_BTD = self.input_dropout(x_BTD)
        context = self.attention_context(x_BTD, memory)
        for layer, cache, biases in zip(self.layers, memory.layers, self.layer_biases(), strict=True):
            assert isinstance(layer, Layer)
            inputs, cache = layer.attention.attention_inputs(x_BTD, cache, context, biases)
            terms = reference.attention_terms(inputs, context.mask, by_distance=True)
            attended_BTNH = reference.weighted_values(terms, inputs.v_BSNH)
            output_BTD = layer.feed_forward(layer.attention.output(x_BTD, attended_BTNH))
            yield LayerTrace(x_BTD, output_BTD, terms, cache)
            x_BTD = output_BTD


class TransformerXL(RelativeLanguageModel):
    """The paper's model."""

    config_class = TransformerXLConfig
