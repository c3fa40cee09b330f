"""One training step: read the batch, forward and backward in micro-batches, clip the gradients, apply them.

    loss = nats of all micro-batches of all processes / number of all their targets

Gradients are added up over the processes, not averaged as DDP would (`distributed.py`). The number of targets is known
before the first backward pass, so the result does not depend on how the rows are split into micro-batches or
distributed over processes. Nothing in a step waits for the device.

Auxiliary losses, which are added in training, are those of predictions by lower layers or of a second target, and the
penalties of activations; they are not part of the sums that a step returns.

Names of tensors in the state: `optimizer/PARAMETER/KEY`, `memory/NAME` (of all batch rows), `average/PARAMETER`,
`random/RANK/DEVICE`, where DEVICE is `cpu` or, for the GPU, `device`.

Shape suffixes: B batch rows of this process (in a micro-batch, some of them), T new tokens, X = T and the extended
context before them, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.checkpoint_record import CheckpointRecord, Numerics
from transformer_xl.config import FinetuneConfig, TrainConfig, UserError
from transformer_xl.device import autocast, to_device
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.text.segments import Batch, DatasetPosition, Shard, TokenDataset
from transformer_xl.training.averaging import WeightAverage
from transformer_xl.training.batches import StepBatch, read_batch, trained_targets
from transformer_xl.training.compiling import compile_layers
from transformer_xl.training.distributed import (
    SINGLE_PROCESS,
    DistributedContext,
    full_tensor,
    local_tensor,
    random_state,
    set_random_state,
    shard_rows,
)
from transformer_xl.training.numerics import choose_numerics, computing_with, differences
from transformer_xl.training.optimizers import (
    build_optimizers,
    empty_optimizer_state,
    freeze_parameters,
    load_optimizer_state,
    optimizer_state,
)
from transformer_xl.training.schedules import set_step_rates

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata


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
        self,
        inputs_BX: Tensor,
        targets_BT: npt.NDArray[np.int64],
        memory: Memory,
        progress: float | None = None,
        order_B2T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Memory]:
        """Return the losses of the targets.

        Args:
            inputs_BX: input token ids.
            targets_BT: target token ids, of the last T inputs. An array, because they should stay on the CPU (see
                `LanguageModel.nats`), and FSDP would copy a tensor to the device.
            memory: memory of the preceding tokens.
            progress: completed fraction of training, from 0 to 1, or None outside of training, where auxiliary losses
                are zero.
            order_B2T: that of the batch, or None.

        Returns:
            Losses of the targets in nats (B, T), in input order; auxiliary losses in nats (B, T); and the next memory.
        """
        if self.copy_memory:
            torch.compiler.cudagraph_mark_step_begin()
        targets = torch.from_numpy(targets_BT)
        if progress is None and order_B2T is None:
            hidden_BXD, memory = self.model(inputs_BX, memory)
            losses_BT = self.model.nats(hidden_BXD[:, -targets.shape[1] :], targets)
            auxiliary_BT = torch.zeros_like(losses_BT)
        else:
            losses_BT, auxiliary_BT, memory = self.model.training_losses(
                inputs_BX, targets, memory, progress=progress or 0.0, order=order_B2T
            )
        if self.copy_memory:
            memory = memory.map(Tensor.clone)
        return losses_BT, auxiliary_BT, memory


class Stepper:
    """The data, the model and the optimizers of a training: `step` trains on the next batch of the text.

    `state_dict` has the tensors that the next steps depend on, except the weights.
    """

    def __init__(
        self,
        model: LanguageModel,
        dataset: TokenDataset,
        config: TrainConfig,
        device: torch.device,
        world: DistributedContext = SINGLE_PROCESS,
        finetune: FinetuneConfig | None = None,
    ) -> None:
        """Prepare a model for training, which changes it.

        Args:
            model: the model with its initial weights, on the device.
            dataset: the training text, of which each process reads its own batch rows.
            config: settings of training.
            device: device to compute on.
            world: the processes that train together.
            finetune: settings of fine-tuning, which leave parameters out and lower the rates of others, or None.

        Raises:
            UserError: the device does not support the settings, or parameters to freeze do not exist.
        """
        self.model, self.dataset, self.config, self.device, self.world = model.train(), dataset, config, device, world
        self._kernel_setting = model.attn_implementation
        self.use(choose_numerics(self._kernel_setting, device, config.dtype, world))
        if finetune is not None:
            freeze_parameters(model, finetune.freeze)
        if world.rank:  # after the initial weights, so that each process draws different dropout masks
            world.seed(config.seed, step=0)
        model.activation_checkpointing = config.activation_checkpointing
        compile_layers(model, device, config.compile)
        self.wrapped_model = world.wrap(
            ModelWithLoss(model, copy_memory=config.compile == "cudagraphs"), config.parallelism
        )
        decay = finetune.layer_rate_decay if finetune is not None else 1.0
        # DDP and CUDA graphs have whole gradients, and MPS lacks some operators of sparse tensors
        is_whole = world.size > 1 or config.compile == "cudagraphs" or device.type == "mps"
        by_rows = config.ngram_learning_rate_ratio is not None and not is_whole
        self.table_gradients = model.ngrams.sparse_gradients if model.ngrams is not None and by_rows else nullcontext
        # after wrapping, which shards the weights
        self.optimizers = build_optimizers(model, config, layer_rate_decay=decay)
        self.weight_average = None if config.weight_average == "none" else WeightAverage(model, config)
        self.num_steps, self.position = 0, DatasetPosition()
        """Number of steps done, and the segment of the next one."""
        self.micro_batches = micro_batches(dataset.local_batch_size, config, world.size)
        """The batch rows of each micro-batch."""
        self.memories = self.initial_memories()
        """The memory of each micro-batch."""

    def use(self, numerics: Numerics) -> None:
        """Train with these implementations from the next step on."""
        self.numerics = numerics
        self.model.attn_implementation = numerics.attn_implementation

    def initial_memories(self) -> tuple[Memory, ...]:
        """Return an empty memory for each micro-batch."""
        return tuple(self.model.initial_memory(len(rows)) for rows in self.micro_batches)

    def step(self) -> tuple[Tensor, int]:
        """Train on the next batch.

        Returns:
            What `train_on` returns, and the number of tokens of all processes, estimated from the batch rows of this
            one without communication.
        """
        step, batch = self.num_steps, self.next_batch()
        set_step_rates(self.optimizers, step, self.config, batch.learning_rate_ratio)
        sums = self.train_on(batch.batch, done=step / self.config.max_steps)
        if self.weight_average is not None:
            self.weight_average.update(self.num_steps)
        return sums, round(batch.batch.num_tokens * self.config.batch_size / self.dataset.local_batch_size)

    def next_batch(self) -> StepBatch:
        """Read the batch at the position, and move on; memory is empty at the beginning of an epoch."""
        batch = read_batch(self.dataset, self.position, self.num_steps, self.config, self.world)
        if batch.batch.is_first:
            self.memories = self.initial_memories()
        self.num_steps, self.position = self.num_steps + 1, batch.next
        return batch

    def train_on(self, batch: Batch, *, done: float = 0.0) -> Tensor:
        """Take one optimizer step on the batch rows of this process, with the memory of the batch before.

        Args:
            batch: the batch rows of this process.
            done: completed fraction of training, from 0 to 1; auxiliary losses may depend on it.

        Returns:
            A tensor on the device with the sum of losses in nats, number of targets, gradient norm before clipping, and
            number of tokens read, each over all processes.
        """
        if self.config.compile == "cudagraphs":
            for parameter in self.wrapped_model.parameters():  # outside the graphs, see `_clip_and_apply`
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        loss_mask_BT = trained_targets(batch.loss_mask_BT, self.config)
        # number of targets in the loss, and of all targets (tokens read)
        counts = self.world.sum(to_device(torch.tensor([loss_mask_BT.sum(), batch.num_tokens]), self.device))
        weight_BT = to_device(torch.from_numpy(loss_mask_BT), self.device)
        inputs_BX, targets_BT = to_device(torch.from_numpy(batch.inputs_BX), self.device), batch.targets_BT
        order_B2T = None if batch.order_B2T is None else to_device(torch.from_numpy(batch.order_B2T), self.device)
        nats = torch.zeros((), device=self.device)
        new_memories: list[Memory] = []
        for indices, memory in zip(self.micro_batches, self.memories, strict=True):
            rows = slice(indices.start, indices.stop)
            self.world.set_gradient_sync(self.wrapped_model, indices is self.micro_batches[-1])
            # around the backward pass too, as layers may be computed again in it
            with computing_with(self.numerics), self.table_gradients():
                with autocast(self.device, self.config.dtype):
                    losses_BT, auxiliary_BT, memory = self.wrapped_model(
                        *(inputs_BX[rows], targets_BT[rows], memory, done),
                        None if order_B2T is None else order_B2T[rows],
                    )
                ((losses_BT + auxiliary_BT) * weight_BT[rows]).sum().div(counts[0].clamp(min=1)).backward()
            nats = nats + (losses_BT.detach() * weight_BT[rows]).sum()
            new_memories.append(memory)
        self.memories = tuple(new_memories)
        grad_norm = self._clip_and_apply()
        return torch.stack([sum.to(nats.dtype) for sum in (self.world.sum(nats), counts[0], grad_norm, counts[1])])

    def _clip_and_apply(self) -> Tensor:
        """Clip and apply the gradients; return their norm before clipping."""
        parameters = [_with_values(parameter) for parameter in self.wrapped_model.parameters()]
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))
        for optimizer in self.optimizers:
            optimizer.step()
            # CUDA graphs reuse the memory of the gradients they return, so add these to tensors allocated outside
            optimizer.zero_grad(set_to_none=self.config.compile != "cudagraphs")
        return norm

    def state_dict(self) -> dict[str, Tensor]:
        """Return tensors by name; of one that is divided among the processes, the shard of this process."""
        state = {
            **optimizer_state(self.optimizers, self.model),
            **_prefixed("memory", shard_rows(self._memory().tensors(), self.config.batch_size, self.world)),
            **_prefixed(f"random/{self.world.rank}", random_state(self.device)),
        }
        if self.weight_average is not None:
            state |= _prefixed("average", self.weight_average.tensors())
        return state

    def empty_tensors(self, saved: Mapping[str, TensorStorageMetadata], num_processes: int) -> dict[str, Tensor]:
        """Allocate the tensors that `load_state_dict` takes from a checkpoint, sharded as in this training.

        Left out are the memory if the batch size has changed, and the random state if the number of processes has.

        Args:
            saved: shape and dtype of each tensor of the checkpoint, by name.
            num_processes: the number of processes that wrote it.

        Raises:
            UserError: the checkpoint is of another model or memory length.
        """
        tensors, memory = empty_optimizer_state(self.optimizers, self.model, saved), self._memory().tensors()
        sizes = {name: entry.size for name, entry in _without_prefix("memory", saved).items()}
        if {name: size[1:] for name, size in sizes.items()} != {name: t.shape[1:] for name, t in memory.items()}:
            raise UserError("the saved memory does not fit this model and memory_length; start a new run")
        if sizes["valid"][0] == self.config.batch_size:
            tensors |= _prefixed("memory", shard_rows(memory, self.config.batch_size, self.world))
        if self.weight_average is not None:
            means = {name: torch.zeros_like(tensor) for name, tensor in self.weight_average.tensors().items()}
            tensors |= _prefixed("average", means)
        if num_processes == self.world.size:
            states = _prefixed(f"random/{self.world.rank}", random_state(self.device))
            tensors |= {name: state for name, state in states.items() if name in saved or name.endswith("/cpu")}
        return tensors

    def load_state_dict(
        self,
        tensors: Mapping[str, Tensor],
        step: int,
        position: DatasetPosition,
        record: CheckpointRecord,
        batch_size: int,
    ) -> list[str]:
        """Go on as the training would whose `state_dict` this is; its weights have been loaded before.

        Args:
            tensors: what `state_dict` returned, perhaps of another batch size or number of processes.
            step: number of steps that were done.
            position: the segment of the next step.
            record: the checkpoint's, with the implementations and the number of processes of that training.
            batch_size: that of that training.

        Returns:
            Warnings for the user: one line for each part of the state that cannot be restored exactly.
        """
        warnings: list[str] = []
        old, new, parts = batch_size, self.config.batch_size, self.micro_batches
        load_optimizer_state(self.optimizers, self.model, tensors)
        if self.weight_average is not None:
            self.weight_average.load_tensors(_without_prefix("average", tensors))
        if old == new:
            local = {name: local_tensor(tensor) for name, tensor in _without_prefix("memory", tensors).items()}
            memory = self._memory().with_tensors(local)
            self.memories = tuple(memory.select(part) for part in parts) if len(parts) > 1 else (memory,)
        else:
            position = position.model_copy(update={"segment_index": position.segment_index * old // new})
            warnings.append(
                f"the batch size changed from {old} to {new}: memory starts empty, at about the same position"
            )
        if position.segment_index >= self.dataset.segments_in(position.epoch):  # possible with another batch size
            position = DatasetPosition(epoch=position.epoch + 1)
        self.num_steps, self.position = step, position
        self.use(choose_numerics(self._kernel_setting, self.device, self.config.dtype, self.world, record.numerics))
        warnings += differences(record.numerics, self.numerics, self.model)
        if record.num_processes == self.world.size:
            set_random_state(_without_prefix(f"random/{self.world.rank}", tensors), self.device)
        else:
            self.world.seed(self.config.seed, self.num_steps)
            before = "1 process" if record.num_processes == 1 else f"{record.num_processes} processes"
            now = "is 1" if self.world.size == 1 else f"are {self.world.size}"
            warnings.append(f"the checkpoint was written by {before}, now there {now}: dropout masks will differ")
        return warnings

    def _memory(self) -> Memory:
        """Return the memory of all batch rows of this process."""
        return Memory.concatenate(self.memories)


def micro_batches(local_batch_size: int, config: TrainConfig, num_processes: int) -> list[range]:
    """Split the `local_batch_size` rows of this process evenly into micro-batches of at most `micro_batch_size` rows.

    All processes have the same number of micro-batches, since all take part in each forward and backward pass. If
    a process has fewer rows than this number, the number is reduced to its rows, and micro-batches become larger.
    """
    sizes = [len(Shard(index, num_processes).batch_rows(config.batch_size)) for index in range(num_processes)]
    number = min(-(-max(sizes) // (config.micro_batch_size or max(sizes))), *sizes)
    return [range(part * local_batch_size // number, (part + 1) * local_batch_size // number) for part in range(number)]


def _with_values(parameter: Tensor) -> Tensor:
    """Return the parameter, or if its gradient is sparse, a tensor whose gradient is the values of that."""
    if parameter.grad is None or not parameter.grad.is_sparse:
        return parameter
    parameter.grad = parameter.grad.coalesce()
    values = parameter.grad.values()
    stand_in = values.detach().requires_grad_()
    stand_in.grad = values
    return stand_in


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def _without_prefix(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names have the prefix, by the rest of their names."""
    return {name[len(prefix) + 1 :]: value for name, value in values.items() if name.startswith(f"{prefix}/")}
