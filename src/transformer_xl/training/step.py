"""One optimizer step: forward and backward in micro-batches, gradients summed over all processes, clipped, applied.

    loss = nats of all micro-batches of all processes / number of all their targets

The number of targets is known before the first backward pass, so the result does not depend on how the rows are split
into micro-batches or distributed over processes. Nothing in this file waits for the device.

Auxiliary losses, which are added in training, are those of predictions by lower layers or of a second target, and the
penalties of activations; they are not part of the metrics.

Shape suffixes: B batch rows of this process (in a micro-batch, some of them), T new tokens, X = T and the extended
context before them, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import TrainConfig
from transformer_xl.device import autocast, to_device
from transformer_xl.model.dropout import DropoutKernel, dropout_kernel, fastest_dropout_kernel
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.linear import MatmulLibrary, fastest_matmul_library, matmul_library
from transformer_xl.model.memory import Memory
from transformer_xl.text.segments import Batch, Shard
from transformer_xl.training.batches import trained_targets
from transformer_xl.training.distributed import DistributedContext, full_tensor


class ModelWithLoss(nn.Module):
    """A model and its loss in one module, so that a forward pass uses all weights, as DDP and FSDP require."""

    def __init__(self, model: LanguageModel, *, copy_memory: bool = False) -> None:
        """Wrap a model.

        Args:
            model: the model that computes the losses.
            copy_memory: copy the memory that the model returns; needed with CUDA graphs, which overwrite their outputs
                when they run again.
        """
        super().__init__()
        self.model, self.copy_memory = model, copy_memory

    @override
    def forward(
        self, inputs_BX: Tensor, targets_BT: npt.NDArray[np.int64], memory: Memory, progress: float | None = None
    ) -> tuple[Tensor, Tensor, Memory]:
        """Return the losses of the targets.

        Args:
            inputs_BX: input token ids.
            targets_BT: target token ids, of the last T inputs. An array, because they should stay on the CPU (see
                `LanguageModel.nats`), and FSDP would copy a tensor to the device.
            memory: memory of the preceding tokens.
            progress: completed fraction of training, from 0 to 1, or None outside of training, where auxiliary losses
                are zero.

        Returns:
            Losses of the targets in nats (B, T), in input order; auxiliary losses in nats (B, T); and the next memory.
        """
        if self.copy_memory:
            torch.compiler.cudagraph_mark_step_begin()
        targets = torch.from_numpy(targets_BT)
        if progress is None:
            hidden_BXD, memory = self.model(inputs_BX, memory)
            losses_BT = self.model.nats(hidden_BXD[:, -targets.shape[1] :], targets)
            auxiliary_BT = torch.zeros_like(losses_BT)
        else:
            losses_BT, auxiliary_BT, memory = self.model.training_losses(inputs_BX, targets, memory, progress=progress)
        if self.copy_memory:
            memory = memory.map(Tensor.clone)
        return losses_BT, auxiliary_BT, memory


@dataclass(frozen=True)
class TrainStep:
    """Runs optimizer steps: contains the wrapped model, its optimizers, the device and the processes."""

    model: nn.Module
    """A `ModelWithLoss`, as `DistributedContext.wrap` returned it."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    config: TrainConfig
    device: torch.device
    world: DistributedContext
    library: MatmulLibrary = field(default_factory=lambda: fastest_matmul_library())
    """What multiplies float32 matrices on a CPU."""
    dropout: DropoutKernel = field(default_factory=lambda: fastest_dropout_kernel())
    """The implementation of dropout on a CPU."""

    def __call__(
        self, batch: Batch, memories: tuple[Memory, ...], *, done: float = 0.0
    ) -> tuple[Tensor, tuple[Memory, ...]]:
        """Take one optimizer step.

        Args:
            batch: the batch rows of this process.
            memories: the memories of the micro-batches, in order.
            done: completed fraction of training, from 0 to 1; auxiliary losses may depend on it.

        Returns:
            A tensor on the device with the sum of losses in nats, number of targets, gradient norm before clipping, and
            number of tokens read, each over all processes; and the memories after the batch.
        """
        if self.config.compile == "cudagraphs":
            self._allocate_gradients()  # outside the graphs, see `_clip_and_apply`
        loss_mask_BT = trained_targets(batch.loss_mask_BT, self.config)
        # number of targets in the loss, and of all targets (tokens read)
        counts = self.world.sum(to_device(torch.tensor([loss_mask_BT.sum(), batch.loss_mask_BT.sum()]), self.device))
        weight_BT = to_device(torch.from_numpy(loss_mask_BT), self.device)
        inputs_BX, targets_BT = to_device(torch.from_numpy(batch.inputs_BX), self.device), batch.targets_BT
        nats, start = torch.zeros((), device=self.device), 0
        new_memories: list[Memory] = []
        for index, memory in enumerate(memories):
            rows = slice(start, start + memory.batch_size)
            start = rows.stop
            self.world.set_gradient_sync(self.model, index + 1 == len(memories))
            # in the backward pass too, where layers may be computed again
            with matmul_library(self.library), dropout_kernel(self.dropout):
                with autocast(self.device, self.config.dtype):
                    losses_BT, auxiliary_BT, memory = self.model(inputs_BX[rows], targets_BT[rows], memory, done)
                ((losses_BT + auxiliary_BT) * weight_BT[rows]).sum().div(counts[0].clamp(min=1)).backward()
            nats = nats + (losses_BT.detach() * weight_BT[rows]).sum()
            new_memories.append(memory)
        assert start == len(inputs_BX)
        grad_norm = self._clip_and_apply()
        metrics = (self.world.sum(nats), counts[0], grad_norm, counts[1])
        return torch.stack([metric.to(nats.dtype) for metric in metrics]), tuple(new_memories)

    def _allocate_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _clip_and_apply(self) -> Tensor:
        """Clip and apply the gradients; return their norm before clipping."""
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm))
        for optimizer in self.optimizers:
            optimizer.step()
            # CUDA graphs reuse the memory of the gradients they return, so add these to tensors allocated outside
            optimizer.zero_grad(set_to_none=self.config.compile != "cudagraphs")
        return norm


def micro_batches(local_batch_size: int, config: TrainConfig, num_processes: int) -> list[range]:
    """Split the `local_batch_size` rows of this process evenly into micro-batches of at most `micro_batch_size` rows.

    All processes have the same number of micro-batches, since all take part in each forward and backward pass. If
    a process has fewer rows than this number, the number is reduced to its rows, and micro-batches become larger.
    """
    sizes = [len(Shard(index, num_processes).batch_rows(config.batch_size)) for index in range(num_processes)]
    number = min(-(-max(sizes) // (config.micro_batch_size or max(sizes))), *sizes)
    return [range(part * local_batch_size // number, (part + 1) * local_batch_size // number) for part in range(number)]
