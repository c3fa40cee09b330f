"""Hugging Face transformers in `training.py`: TransfoXLLMHeadModel, the last release line that still runs (4.37.2)."""

from __future__ import annotations

import torch
import transformers
from implementations.task import Task
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel


class Runner:
    """The paper's model with a plain softmax; its loss does not work under bfloat16 autocast."""

    versions = {"transformers": transformers.__version__}  # noqa: RUF012
    note = (
        "relative attention of the paper, as the authors' code; cutoffs none, div_val 1; its loss shifts the labels "
        "inside a segment, so it has one target less in each row"
    )

    def __init__(self, task: Task) -> None:
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
            clamp_len=-1,
            same_length=False,
            dropout=task.dropout,
            dropatt=0.0,
            untie_r=False,
            trainer_compatible=True,
        )
        self.task = task
        self.model = TransfoXLLMHeadModel(config).to(task.device).train()
        if task.variant == "compile":
            self.model.compile(dynamic=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=task.learning_rate, fused=True)
        self.mems: list[Tensor] | None = None

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Labels are the inputs, as its documentation says: it shifts them itself."""
        inputs_BT = inputs_BT.to(self.task.device)
        with self.task.autocast():
            out = self.model(input_ids=inputs_BT, labels=inputs_BT, mems=self.mems)
        self.mems = out.mems
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return out.loss
