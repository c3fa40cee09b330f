"""One optimiser step: forward and backward chunk by chunk, gradients of all processes added up, clipped, applied.

    loss = nats of all chunks of all processes / count of all their targets

The count is known before the first backward pass, so that the sum is divided once and the result does not depend on
how the rows are cut into chunks or shared out over processes. Nothing here waits for the device.

Shape suffixes: B rows of this process (in a chunk: some of them), T new tokens, M memory slots, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import TrainConfig
from transformer_xl.device import autocast, keep_freed_memory
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import HiddenMemory, Memory
from transformer_xl.text.segments import Batch, Shard
from transformer_xl.training.distributed import DistributedContext
from transformer_xl.training.optimizers import whole
from transformer_xl.training.pieces import in_loss


class ScoredModel(nn.Module):
    """A model together with its loss: all that uses weights in one forward pass, as wrapping it for processes needs."""

    def __init__(self, model: LanguageModel, *, own_memory: bool = False) -> None:
        """With `own_memory` the memory is copied: what CUDA graphs give is overwritten when they run again."""
        super().__init__()
        self.model, self.own_memory = model, own_memory

    @override
    def forward(
        self, inputs_BT: Tensor, targets_BT: npt.NDArray[np.int64], memory: Memory, done: float | None = None
    ) -> tuple[Tensor, Tensor, Memory]:
        """Gives nats of the targets and auxiliary losses, each (B, T) in input order, and the memory after the inputs.

        `done` is the share of training that is done. Outside of training it is none, and auxiliary losses are zeros.
        The targets are best on the CPU (see `LanguageModel.nats`), and an array stays there: tensors are sent to the
        device by what shares the weights out.
        """
        if self.own_memory:
            torch.compiler.cudagraph_mark_step_begin()
        targets = torch.from_numpy(targets_BT)
        if done is None:
            hidden_BTD, memory = self.model(inputs_BT, memory)
            nats_BT = self.model.nats(hidden_BTD, targets)
            extra_BT = torch.zeros_like(nats_BT)
        else:
            nats_BT, extra_BT, memory = self.model.training_losses(inputs_BT, targets, memory, done=done)
        if self.own_memory and isinstance(memory, HiddenMemory):
            memory = replace(memory, layers_BMD=tuple(layer_BMD.clone() for layer_BMD in memory.layers_BMD))
        return nats_BT, extra_BT, memory


@dataclass(frozen=True)
class TrainStep:
    """What moves weights: the model as the processes share it, its optimisers, and where they work."""

    scored: nn.Module
    """A `ScoredModel`, wrapped by the world."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    config: TrainConfig
    device: torch.device
    world: DistributedContext

    def __post_init__(self) -> None:
        """The work space of a step serves the next one too."""
        if self.device.type == "cpu":
            keep_freed_memory()

    def step(
        self, segment: Batch, memories: tuple[Memory, ...], *, done: float = 0.0
    ) -> tuple[Tensor, tuple[Memory, ...]]:
        """Moves the weights by one step.

        Args:
            segment: what the rows of this process read.
            memories: one for each chunk of the rows, in their order.
            done: share of training that is done: auxiliary losses may depend on it.

        Returns:
            in one tensor on the device: sum of nats, count of targets, norm of the gradient before clipping, and count
            of tokens read, of all processes and the same in each; and the memories after the segment.
        """
        if self.config.compile == "cudagraphs":
            self._provide_gradients()
        loss_mask_BT = in_loss(segment.loss_mask_BT, self.config)
        counts = self.world.sum(send(torch.tensor([loss_mask_BT.sum(), segment.loss_mask_BT.sum()]), self.device))
        weight_BT = send(torch.from_numpy(loss_mask_BT), self.device)
        inputs_BT, targets_BT = send(torch.from_numpy(segment.inputs_BT), self.device), segment.targets_BT
        nats, start = torch.zeros((), device=self.device), 0
        after: list[Memory] = []
        for place, memory in enumerate(memories):
            rows = slice(start, start + memory.batch_size)
            start = rows.stop
            self.world.sync_gradients(self.scored, place + 1 == len(memories))
            with autocast(self.device, self.config.dtype):
                nats_BT, extra_BT, memory = self.scored(inputs_BT[rows], targets_BT[rows], memory, done)
            ((nats_BT + extra_BT) * weight_BT[rows]).sum().div(counts[0].clamp(min=1)).backward()
            nats = nats + (nats_BT.detach() * weight_BT[rows]).sum()
            after.append(memory)
        assert start == len(inputs_BT)
        norm = self._move()
        nats = self.world.sum(nats)
        return torch.stack([number.to(nats.dtype) for number in (nats, counts[0], norm, counts[1])]), tuple(after)

    def _provide_gradients(self) -> None:
        for parameter in self.scored.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _move(self) -> Tensor:
        """Clips and applies the gradients; gives their norm before clipping."""
        norm = whole(torch.nn.utils.clip_grad_norm_(self.scored.parameters(), self.config.max_grad_norm))
        for optimizer in self.optimizers:
            optimizer.step()
            # CUDA graphs own the gradients they give: those must be added to tensors that are there already
            optimizer.zero_grad(set_to_none=self.config.compile != "cudagraphs")
        return norm


def chunks_of(batch_size: int, config: TrainConfig, shards: int) -> list[range]:
    """Which of this process's sequences are in each micro-batch: as even as can be, micro_batch_size at most.

    All processes have the same number of micro-batches, since all take part in each forward and backward pass; if one
    process has fewer sequences than that, as many micro-batches as it has sequences.
    """
    sizes = [len(Shard(index, shards).rows_of(config.batch_size)) for index in range(shards)]
    number = min(-(-max(sizes) // (config.micro_batch_size or max(sizes))), *sizes)
    return [range(part * batch_size // number, (part + 1) * batch_size // number) for part in range(number)]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device without waiting for it: only a copy from pinned memory does not."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def whole_weights(model: LanguageModel, world: DistributedContext) -> dict[str, Tensor]:
    """All weights by name, gathered where they are shared out; every process must ask, the first one gets them."""
    if world.size == 1:
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: tensor for name, tensor in gathered.items() if isinstance(tensor, Tensor)}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, and without keeping anything for a backward pass."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
