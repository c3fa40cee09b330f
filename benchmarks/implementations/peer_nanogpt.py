"""nanoGPT in `training.py`: its own model and optimizer, from the checkout that the variable NANOGPT names."""

from __future__ import annotations

import contextlib
import os
import sys

from implementations.task import Task, optimizer_step
from torch import Tensor


class Runner:
    """Training as in its train.py, without memory: attention is to the tokens of a segment before it."""

    versions: dict[str, str] = {}  # noqa: RUF012
    note = "learned absolute positions, no memory, AdamW as in its train.py"

    def __init__(self, task: Task) -> None:
        sys.path.insert(0, os.environ["NANOGPT"])
        from model import GPT, GPTConfig  # of the checkout

        self.task = task
        sizes = {"n_layer": task.n_layers, "n_head": task.n_heads, "n_embd": task.d_model}
        config = GPTConfig(
            block_size=task.segment_length, vocab_size=task.vocab_size, dropout=task.dropout, bias=False, **sizes
        )
        with contextlib.redirect_stdout(sys.stderr):  # it prints
            self.model = GPT(config).to(task.device).train()
            self.optimizer = self.model.configure_optimizers(0.1, task.learning_rate, (0.9, 0.95), task.device)

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """See `Implementation.step`."""
        inputs_BT, targets_BT = (ids_BT.contiguous().to(self.task.device) for ids_BT in (inputs_BT, targets_BT))
        with self.task.autocast():
            loss = self.model(inputs_BT, targets_BT)[1]
        optimizer_step(loss, self.model, self.optimizer, self.task.max_grad_norm)
        return loss
