"""A model with memory as a graph of torch.export or ONNX, for programs without this package.

    logits_BTV, *memory = exported(tokens_BT, *memory)

Memory is the graph's inputs and outputs: the inputs of each layer at the last M tokens, how many of them are filled,
and how many tokens were read. T, the number of new tokens, is any number; the batch size and M are fixed.

Shape suffixes: B batch size, T new tokens, V vocabulary.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.architectures import build_model
from transformer_xl.config import UserError
from transformer_xl.config.extras import missing_extra
from transformer_xl.config.settings import check_type
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.files import as_path, atomic_file
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.run import Run, check_run

_EXAMPLE_TOKENS = 3  # T in tracing; no number that the graph could take for a constant of the model
_MAX_BYTES = 2**31  # of an ONNX file, a message of protobuf


class ExportableModel(nn.Module):
    """A model whose memory is plain tensors."""

    def __init__(self, model: LanguageModel, memory: Memory) -> None:
        """Args: the model, and an empty memory of the batch size and length that all memories will have."""
        super().__init__()
        self.model, self._empty = model, memory

    @override
    def forward(self, tokens_BT: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """Return the logits (B, T, V) of the token after each, and the tensors of the next memory."""
        before = self._empty.with_tensors(dict(zip(self._empty.tensors(), memory, strict=True)))
        hidden_BTD, after = self.model(tokens_BT, before)
        return self.model.logits(hidden_BTD), *after.tensors().values()


@dataclass(frozen=True)
class Exported:
    """A graph of torch.export, and the memory to begin with."""

    program: torch.export.ExportedProgram
    memory: dict[str, Tensor]
    """The tensors of an empty memory by name, in the order of the graph's inputs and outputs."""


def export(run: Run, *, batch_size: int = 1, memory_length: int | None = None) -> Exported:
    """Return a run's model as a graph of torch.export.

    Args:
        run: a loaded run.
        batch_size: B.
        memory_length: M, or None for that with which the run is evaluated.

    Raises:
        UserError: the architecture has no such memory, a size is wrong, the weights are those of `to_int8`, or a limit
            of attention or the number of distances of Shaw's model is longer than the memory.
    """
    check_run(run)
    run.model.check_plain("exported")
    config = run.config.model
    if config.attention_kernel is None:
        raise UserError(f"export needs a model with relative attention, and this is {config.architecture}; train one")
    limits = EvaluationPlan.for_reading(run).context_limits
    memory_length = limits.memory_length if memory_length is None else memory_length
    for name, value in (("batch_size", batch_size), ("memory_length", memory_length)):
        check_type(value, int, name, "give 1 or more")
        if value < 1:
            raise UserError(f"{name} is {value}; a graph has memory as inputs and outputs, so give 1 or more")
    limits = replace(limits, memory_length=memory_length)
    for name, length in (
        ("attention_window", limits.attention_window),
        ("clamp_length", limits.clamp_length),
        ("max_relative_positions", config.max_vectors),
    ):
        if length is not None and length > limits.memory_length:
            raise UserError(
                f"{name} {length:,} is above memory_length {limits.memory_length:,}, so the graph would depend on the "
                f"number of new tokens; give memory_length {length:,} or more"
            )
    # the kernel that branches on no number of tokens
    model = build_model(config.model_copy(update={"attn_implementation": "reference"}), memory_length=0).eval()
    model.load_state_dict(run.model.state_dict())
    empty = model.initial_memory(batch_size, limits)
    tensors = empty.tensors()
    tokens_BT = torch.zeros(batch_size, _EXAMPLE_TOKENS, dtype=torch.int64)
    shapes = ({1: torch.export.Dim("tokens", min=1)}, (None,) * len(tensors))
    with torch.no_grad():
        program = torch.export.export(
            ExportableModel(model, empty), (tokens_BT, *tensors.values()), dynamic_shapes=shapes, strict=False
        )
    return Exported(program, tensors)


def export_onnx(run: Run, path: Path | str, *, batch_size: int = 1, memory_length: int | None = None) -> Path:
    """Write a run's model as an ONNX file and return its path.

    Inputs are `tokens` (B, T) and the tensors of the memory, which begin as zeros; outputs are `logits` (B, T, V) and
    each tensor of the next memory as `next_NAME`. The tokens of a text follow the BOS token.

    Args:
        run: a loaded run.
        path: the file to write; one that exists is replaced.
        batch_size: B.
        memory_length: M, or None for that with which the run is evaluated.

    Raises:
        UserError: ONNX is not installed, the model is too large for an ONNX file, or a reason that `export` lists.
    """
    check_run(run)
    path = as_path(path, "path", "give the path of a file such as model.onnx")
    if find_spec("onnx") is None or find_spec("onnxscript") is None:
        raise missing_extra("onnx", "onnx")
    if 4 * run.model.num_parameters() >= _MAX_BYTES:
        raise UserError(f"an ONNX file holds less than 2 GiB, and the model has {run.model.num_parameters():,} weights")
    exported = export(run, batch_size=batch_size, memory_length=memory_length)
    names = list(exported.memory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about torch's own code
        program = torch.onnx.export(
            exported.program,
            dynamo=True,
            verbose=False,
            input_names=["tokens", *names],
            output_names=["logits", *(f"next_{name}" for name in names)],
        )
    assert program is not None
    with atomic_file(path) as temporary:
        program.save(temporary, external_data=False)
    return path
