"""The cost of a model: softmax cutoffs that minimize it, and the FLOPs and memory of one training step.

Cutoffs are the token ids at which the vocabulary is divided into the head and the tails of an adaptive softmax
(`adaptive.py`). Token ids are in descending order of frequency.

Shape suffixes: B batch size, T new tokens, X = T and their extended context, D model width, V vocabulary, G candidate
cutoffs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from transformer_xl.architectures import build_model
from transformer_xl.config import ModelConfig
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.ops.cross_entropy import without_chunks
from transformer_xl.ops.native import chosen

_MIN_HEAD_SHARE = 0.9  # minimum share of the text's tokens in the head, which has the widest embeddings
_MAX_TAILS = 3  # as in the authors' code; a fourth tail saves almost nothing
_NUM_CANDIDATES = 64  # number of candidate cutoffs, evenly spaced in the logarithm of the token id (frequency rank)
_MAX_COST_RATIO = 0.5  # use no cutoffs if the logits would be more than this fraction of those of the dense softmax
_BYTES_PER_PARAMETER = 16  # weight, gradient and Adam's two moving averages, 4 bytes each in float32


def find_cutoffs(counts_V: npt.NDArray[np.int64], max_tails: int = _MAX_TAILS) -> tuple[int, ...]:
    """Return the cutoffs that minimize the expected number of logits per token of the text.

    The head contains at least nine tenths of the text's tokens. A token of tail i requires the logits of the whole
    tail, so the expected number of logits is n0 + number of tails + sum over i of share(i) size(i), with n0 the size of
    the head and share(i) the fraction of tokens in tail i. Dynamic programming over candidate cutoffs finds the
    minimum (Grave et al. 2017, section 4).

    Args:
        counts_V: number of occurrences of each token id in the text, in descending order.
        max_tails: maximum number of tails; at most three are used. Settings with div_val, which divides the embedding
            width once for each tail, may allow fewer, because the width would reach 0.

    Returns:
        the cutoffs in ascending order; empty if they would save less than half of the dense softmax's logits.
    """
    size = len(counts_V)
    share_V = np.concatenate([[0.0], np.cumsum(counts_V) / counts_V.sum()])
    candidates_G = np.unique(np.geomspace(1, max(1, size - 1), _NUM_CANDIDATES).round().astype(np.int64))
    # For each candidate as the last cutoff: the lowest cost (expected number of logits) of the clusters before it, and
    # their cutoffs. If it is the only cutoff, the cluster before it is the head, whose logits are always computed.
    best = {int(stop): (float(stop), (int(stop),)) for stop in candidates_G if share_V[stop] >= _MIN_HEAD_SHARE}
    solutions: list[tuple[float, tuple[int, ...]]] = [(_MAX_COST_RATIO * size, ())]
    for num_tails in range(1, min(max_tails, _MAX_TAILS) + 1):
        with_last_tail = [(cost + _tail_cost(share_V, stop, size), cutoffs) for stop, (cost, cutoffs) in best.items()]
        solutions += [(cost + num_tails, cutoffs) for cost, cutoffs in with_last_tail]
        best = {
            int(stop): min(
                (cost + _tail_cost(share_V, start, int(stop)), (*cutoffs, int(stop)))
                for start, (cost, cutoffs) in best.items()
                if start < stop
            )
            for stop in candidates_G
            if any(start < stop for start in best)
        }
    return min(solutions)[1]


def _tail_cost(share_V: npt.NDArray[np.float64], start: int, stop: int) -> float:
    """Return the expected number of logits of a tail with ids from `start` to `stop`; share_V is cumulative."""
    return float(share_V[stop] - share_V[start]) * (stop - start)


@dataclass(frozen=True)
class StepCost:
    """Number of FLOPs of one training step, and the device memory in bytes that it needs in float32."""

    parameters: int
    """Number of trainable parameters."""
    flops: int
    """Additions and multiplications of matrix products, forward and backward."""
    state_bytes: int
    """Size of weights, gradients and optimizer state (Adam's two moving averages, but for tables updated by rows)."""
    activation_bytes: int
    """Size of the activations saved in the forward pass for the backward pass, without the parameters."""
    memory_bytes: int
    """Size of the model's memory (cached hidden states), which is passed from one segment to the next."""

    @property
    def bytes(self) -> int:
        """Sum of the three sizes; temporary buffers inside an operation are not included."""
        return self.state_bytes + self.activation_bytes + self.memory_bytes


def step_cost(
    config: ModelConfig,
    *,
    batch_size: int,
    segment_length: int,
    memory_length: int,
    extended_context_length: int = 0,
    tables_by_rows: bool = False,
) -> StepCost:
    """Return the cost of one training step, measured by running it on torch's meta device, which computes no values.

    Targets follow Zipf's law, so that each tail of an adaptive softmax has as many targets as in natural text. FLOPs
    exclude recomputation in the backward pass. Activations are those that the configured attention kernel saves (the
    CPU kernel for `auto`), with the masks of dropout, which native operators do not save. Auxiliary losses are those of
    the first step.

    Args:
        config: settings of the model.
        batch_size: number of sequences.
        segment_length: new tokens of each sequence.
        memory_length: memory slots, all of them filled.
        extended_context_length: tokens before the segment that are read with it.
        tables_by_rows: whether only the rows of n-gram tables that are looked up have gradients and state.
    """
    shape = (batch_size, segment_length, memory_length, extended_context_length)
    flops_config = config
    if config.attention_kernel is not None:  # FlopCounterMode can count the backward pass of sdpa only
        flops_config = config.model_copy(update={"attn_implementation": "sdpa"})
    with without_chunks():
        _run_step(flops_config, *shape, counter := FlopCounterMode(display=False))

    saved_bytes: dict[int, int] = {}  # sizes of the saved storages by address, each counted once

    def record(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        saved_bytes.setdefault(storage._cdata, storage.nbytes())
        return tensor

    with chosen(dropout="torch"):
        model, memory = _run_step(config, *shape, torch.autograd.graph.saved_tensors_hooks(record, lambda x: x))
    parameters = model.num_parameters()
    by_rows = config.ngram_table_parameters if tables_by_rows else 0  # weights alone
    parameter_storages = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    return StepCost(
        parameters=parameters,
        flops=counter.get_total_flops(),
        state_bytes=_BYTES_PER_PARAMETER * (parameters - by_rows) + 4 * by_rows,
        activation_bytes=sum(size for key, size in saved_bytes.items() if key not in parameter_storages),
        memory_bytes=sum(tensor.nbytes for tensor in memory.cache_tensors().values()),
    )


def _run_step(
    config: ModelConfig,
    batch_size: int,
    segment_length: int,
    memory_length: int,
    extended_context_length: int,
    context: AbstractContextManager[Any],
) -> tuple[LanguageModel, Memory]:
    """Run the forward and backward pass of one training step on the meta device, within a context.

    Returns:
        the model, and the memory that the step starts from, whose slots are all filled.
    """
    with torch.device("meta"), torch.no_grad():
        model = build_model(config, memory_length=memory_length).train()
        memory = model.initial_memory(batch_size)
        if memory_length:
            _, memory = model(torch.zeros(batch_size, memory_length, dtype=torch.int64), memory)
    num_inputs = extended_context_length + segment_length
    tokens_BX = torch.zeros(batch_size, num_inputs, dtype=torch.int64, device="meta")
    targets_BT = _zipf_targets(config.vocab_size, batch_size, segment_length)
    order_B2T = None
    if config.orders is not None:  # the cost depends on the number of predicted tokens alone
        order_B2T = torch.zeros(batch_size, 2, segment_length, dtype=torch.int64, device="meta")
    with context:
        losses_BT, auxiliary_BT, _ = model.training_losses(tokens_BX, targets_BT, memory, progress=0.0, order=order_B2T)
        (losses_BT + auxiliary_BT).sum().backward()
    return model, memory


def _zipf_targets(vocab_size: int, batch_size: int, segment_length: int) -> Tensor:
    """Return deterministic token ids (B, T) on the CPU whose frequencies are proportional to 1 / (rank + 2.7).

    This is the Zipf-Mandelbrot law of word frequencies, with its usual offset of 2.7.
    """
    cumulative_V = np.cumsum(1 / (np.arange(vocab_size) + 2.7))
    quantiles = (np.arange(batch_size * segment_length) + 0.5) / (batch_size * segment_length) * cumulative_V[-1]
    return torch.from_numpy(np.searchsorted(cumulative_V, quantiles)).view(batch_size, segment_length)
