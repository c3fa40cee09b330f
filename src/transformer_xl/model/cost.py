"""What a model costs: the cutoffs that make its softmax cheap, and the arithmetic and memory of one training step.

Letters: B batch rows, T new tokens, D model width, V vocabulary, G points of a grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from transformer_xl.config import ModelConfig, RelativeConfig
from transformer_xl.model.build import build_model
from transformer_xl.model.cross_entropy import plain_way
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory

_HEAD_SHARE = 0.9  # of the running text: what stands in the head is scored best, and most of the text should be
_MOST_TAILS = 3  # as the authors have; a fourth saves next to nothing
_GRID = 64  # points where a cutoff may be, evenly spread over the logarithm of the rank
_WORTHWHILE = 0.5  # share of the dense softmax's work above which clusters are not worth their trouble
_ADAM_STATE = 16  # bytes of a parameter: weight, gradient and Adam's two averages in float32


def find_cutoffs(counts_V: npt.NDArray[np.int64], most_tails: int = _MOST_TAILS) -> tuple[int, ...]:
    """Cutoffs for a vocabulary in order of falling frequency: the fewest expected scores for a word of the text.

    The head holds nine tenths of the running text at least. A word of tail i costs the tail's whole size, so the
    expected number of scores is n0 + tails + sum over i of share(i) size(i); the least is found by dynamic programming
    over a grid of points (Grave et al. 2017, section 4). None at all where less than half of the work would be saved.

    Args:
        counts_V: how often each id stood in the text.
        most_tails: no more than these, nor than three (div_val may leave further ones no width).

    """
    size = len(counts_V)
    share_V = np.concatenate([[0.0], np.cumsum(counts_V) / counts_V.sum()])
    grid_G = np.unique(np.geomspace(1, max(1, size - 1), _GRID).round().astype(np.int64))
    # cheapest scores so far, and the cutoffs that reach them, when the last cutoff is at a point of the grid
    best = {int(point): (float(point), (int(point),)) for point in grid_G if share_V[point] >= _HEAD_SHARE}
    finished: list[tuple[float, tuple[int, ...]]] = [(_WORTHWHILE * size, ())]
    for num_tails in range(1, min(most_tails, _MOST_TAILS) + 1):
        ends = [(work + _tail_work(share_V, point, size), cutoffs) for point, (work, cutoffs) in best.items()]
        finished += [(work + num_tails, cutoffs) for work, cutoffs in ends]
        best = {
            int(stop): min(
                (work + _tail_work(share_V, start, int(stop)), (*cutoffs, int(stop)))
                for start, (work, cutoffs) in best.items()
                if start < stop
            )
            for stop in grid_G
            if any(start < stop for start in best)
        }
    return min(finished)[1]


def _tail_work(share_V: npt.NDArray[np.float64], start: int, stop: int) -> float:
    return float(share_V[stop] - share_V[start]) * (stop - start)


@dataclass(frozen=True)
class StepCost:
    """What one training step takes, in float32."""

    parameters: int
    """Trained numbers."""
    flops: int
    """Additions and multiplications of matrix products, forward and backward."""
    state_bytes: int
    """Weights, gradients and Adam's two averages."""
    activation_bytes: int
    """Kept from the forward pass for the backward pass, beside the parameters."""
    memory_bytes: int
    """Memory carried from step to step."""

    @property
    def bytes(self) -> int:
        """All of them together; work space inside one operation comes on top."""
        return self.state_bytes + self.activation_bytes + self.memory_bytes


def step_cost(config: ModelConfig, *, batch_size: int, segment_length: int, memory_length: int) -> StepCost:
    """Counts one training step by walking through it without numbers (torch's meta device): nothing is computed.

    Targets are taken to follow Zipf's law over the ids, so that each tail is aimed at as often as in ordinary text.
    Operations are those of the model, without what is computed again in the backward pass; what is kept is what the
    settings' kernel keeps (with `auto` the CPU's). Auxiliary losses are those of the first step.
    """
    shape = (batch_size, segment_length, memory_length)
    counted = config
    if isinstance(config, RelativeConfig):  # sdpa: the operations of its backward pass can be counted
        counted = config.model_copy(update={"attn_implementation": "sdpa"})
    with plain_way():
        model, full = _meta_model(counted, *shape)
        with FlopCounterMode(display=False) as counter:
            _run_step(model, full, batch_size, segment_length)

    model, full = _meta_model(config, *shape)
    kept = {parameter.untyped_storage()._cdata: 0 for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        kept.setdefault(storage._cdata, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _run_step(model, full, batch_size, segment_length)
    parameters = model.num_parameters()
    return StepCost(
        parameters=parameters,
        flops=counter.get_total_flops(),
        state_bytes=_ADAM_STATE * parameters,
        activation_bytes=sum(kept.values()),
        memory_bytes=sum(tensor.nbytes for tensor in full.cache_tensors().values()),
    )


def _meta_model(
    config: ModelConfig, batch_size: int, segment_length: int, memory_length: int
) -> tuple[LanguageModel, Memory]:
    """The model on the meta device, in training mode, and a full memory."""
    with torch.device("meta"), torch.no_grad():
        model = build_model(config, memory_length=memory_length).train()
        full = model.initial_memory(batch_size)
        if memory_length:
            _, full = model(torch.zeros(batch_size, memory_length, dtype=torch.int64), full)
    return model, full


def _run_step(model: LanguageModel, full: Memory, batch_size: int, segment_length: int) -> None:
    """Forward and backward pass of one training step on the meta device."""
    tokens_BT = torch.zeros(batch_size, segment_length, dtype=torch.int64, device="meta")
    targets_BT = _zipf_targets(model.config.vocab_size, batch_size, segment_length)
    nats_BT, extra_BT, _ = model.training_losses(tokens_BT, targets_BT, full, progress=0.0)
    (nats_BT + extra_BT).sum().backward()


def _zipf_targets(size: int, batch_size: int, segment_length: int) -> Tensor:
    """Ids whose frequencies fall as 1 / (rank + 2.7), as words' do: (B, T) on the CPU, the same each time."""
    share_V = np.cumsum(1 / (np.arange(size) + 2.7))
    points = (np.arange(batch_size * segment_length) + 0.5) / (batch_size * segment_length) * share_V[-1]
    return torch.from_numpy(np.searchsorted(share_V, points)).view(batch_size, segment_length)
