"""Lower bounds of what a model must store, computed from its settings alone: nothing is built or allocated.

They count only large tensors that certainly exist at the same time, so that sizes which exceed the device's memory
can be refused before anything is allocated (`device.require_memory`), and nothing that fits is refused. `cost.py`
counts exactly, by running a step on the meta device, which is too slow to do before each command.

Shape suffixes: D model width, F inner width of the feed-forward layers, V vocabulary.
"""

from __future__ import annotations

from itertools import pairwise

from transformer_xl.config import (
    AbsoluteConfig,
    AlRfouConfig,
    BaseModelConfig,
    LSTMConfig,
    QRNNConfig,
    RecurrentConfig,
    RelativeConfig,
    ShawConfig,
    TransformerConfig,
    TransformerXLConfig,
)

_MIN_LAYER_BYTES = 8192  # of a layer's Python objects; they matter for very many narrow layers


def min_weight_bytes(config: BaseModelConfig) -> int:
    """Return the size of the weights in float32 and of the layers' Python objects."""
    return 4 * min_parameters(config) + _MIN_LAYER_BYTES * config.n_layers


def min_parameters(config: BaseModelConfig) -> int:
    """Return the number of parameters in the matrices of the layers, the embedding and the softmax.

    Biases, LayerNorms and projections of embeddings are left out.
    """
    sizes = (stop - start for start, stop in pairwise(config.cluster_boundaries))
    tables = sum(size * width for size, width in zip(sizes, config.cluster_widths, strict=True))
    ngrams = config.ngram_table_parameters + (config.max_ngram - 1) * config.d_ngram * config.d_model
    return (1 if config.tie_word_embeddings else 2) * tables + ngrams + config.n_layers * _layer_parameters(config)


def _layer_parameters(config: BaseModelConfig) -> int:
    width = config.d_model
    if isinstance(config, LSTMConfig):
        return 8 * width**2
    if isinstance(config, QRNNConfig):
        return 3 * config.qrnn_kernel_size * width**2
    assert isinstance(config, TransformerConfig)
    inner = config.n_heads * config.head_dim
    count = 4 * width * inner + 2 * width * config.d_ff
    if isinstance(config, ShawConfig):
        return count + (config.max_relative_positions or 0) * inner
    if isinstance(config, AlRfouConfig):
        return count + (config.max_position_embeddings or 0) * width
    if isinstance(config, RelativeConfig):  # on average
        count += len(config.value_layers) * config.vocab_size * inner // config.n_layers
    has_r_proj = isinstance(config, RelativeConfig) and config.position_keys == "projected"
    return count + width * inner if has_r_proj else count


def min_activations(
    config: BaseModelConfig, *, segment_length: int, memory_length: int, recomputed: bool = False
) -> int:
    """Return the number of activations of one batch row that a training step keeps for the backward pass.

    Args:
        config: settings of the model.
        segment_length: new tokens.
        memory_length: memory slots.
        recomputed: count only the inputs of the layers, because the backward pass recomputes the activations inside.
    """
    if recomputed:
        return config.n_layers * segment_length * config.d_model
    if not isinstance(config, TransformerConfig):
        # the gates, the state and the output of each token
        return config.n_layers * segment_length * 5 * config.d_model
    inner = config.n_heads * config.head_dim
    # input, normalized sums, queries, attended values and inner activations of a token; keys and values of all
    per_token = 3 * config.d_model + 2 * inner + config.d_ff
    per_key = 2 * inner
    if isinstance(config, TransformerXLConfig):
        # the normalized hidden states that keys are computed from, and the keys before they are normalized
        per_key += config.norm_first * config.d_model + config.qk_norm * inner
    # the scores' mask of each stream is a matrix
    per_key += 2 * config.n_heads * segment_length if config.orders is not None else 0
    return config.n_layers * (segment_length * per_token + (memory_length + segment_length) * per_key)


def min_cache(config: BaseModelConfig, memory_length: int, *, training: bool = False) -> int:
    """Return the number of elements of one batch row in a memory with all slots filled.

    Args:
        config: settings of the model.
        memory_length: memory slots.
        training: hidden states, as in training, instead of keys and values, as in inference.
    """
    if isinstance(config, RecurrentConfig):
        return config.n_layers * config.d_model
    if isinstance(config, AbsoluteConfig):
        return memory_length  # token ids
    assert isinstance(config, RelativeConfig)
    hidden = training or (config.attend_empty_memory and config.norm_first)
    inner, num_begun = config.n_heads * config.head_dim, int(config.has_key_offset)  # before or after the slots
    if hidden:
        return (memory_length + num_begun) * (config.n_layers * config.d_model + len(config.id_layers))
    return (2 * memory_length + num_begun) * config.n_layers * inner
