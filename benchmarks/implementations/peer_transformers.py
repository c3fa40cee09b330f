"""Hugging Face transformers in `training.py`: TransfoXLLMHeadModel, which 4.37.2 is the last version to contain."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from implementations.task import Task, optimizer_step
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel


def build_model(task: Task, **settings: Any) -> TransfoXLLMHeadModel:
    """Build the paper's model with a dense softmax.

    Args:
        task: the sizes of the model.
        settings: further settings of TransfoXLConfig.
    """
    config = TransfoXLConfig(
        vocab_size=task.vocab_size,
        cutoffs=[],
        div_val=1,
        d_model=task.d_model,
        d_embed=task.d_model,
        n_head=task.n_heads,
        d_head=task.d_head,
        d_inner=task.d_ff,
        n_layer=task.n_layers,
        mem_len=task.memory_length,
        untie_r=False,
        **settings,
    )
    return TransfoXLLMHeadModel(config).to(task.device)


class Runner:
    """Training with the memory `mems`; variant `compile` uses torch.compile.

    Float32 only: the model's loss does not work under bfloat16 autocast.
    """

    versions = {"transformers": transformers.__version__}  # noqa: RUF012
    note = (
        "relative attention of the paper, as the authors' code; cutoffs none, div_val 1; its loss shifts the labels "
        "inside a segment, so it has one target less in each row"
    )

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model = build_model(
            task, clamp_len=-1, same_length=False, dropout=task.dropout, dropatt=0.0, trainer_compatible=True
        ).train()
        if task.variant == "compile":
            self.model.compile(dynamic=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=task.learning_rate, fused=True)
        self.mems: list[Tensor] | None = None

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """See `Implementation.step`; the labels are the inputs, which the model shifts itself."""
        inputs_BT = inputs_BT.to(self.task.device)
        with self.task.autocast():
            out = self.model(input_ids=inputs_BT, labels=inputs_BT, mems=self.mems)
        self.mems = out.mems
        optimizer_step(out.loss, self.model, self.optimizer, self.task.max_grad_norm)
        return out.loss
