"""Hugging Face transformers in `inference.py`: TransfoXLLMHeadModel carrying its `mems`, as its documentation says."""

from __future__ import annotations

import torch
import transformers
from implementations.task import Task
from torch import Tensor
from transformers import TransfoXLConfig, TransfoXLLMHeadModel


class Runner:
    """The paper's model with a plain softmax; it projects its whole memory in each step.

    Its memory is zeros of full length at first, which are attended, so a step takes as long as any later one.
    """

    versions = {"transformers": transformers.__version__}  # noqa: RUF012
    note = "cutoffs none, div_val 1, same_length; mems carried; the 40 likeliest tokens drawn from"

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
            clamp_len=-1 if task.clamp_length is None else task.clamp_length,
            same_length=True,
            untie_r=False,
        )
        self.task = task
        self.model = TransfoXLLMHeadModel(config).to(task.device).eval()
        self.mems: list[Tensor] | None = None

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Reads on; a single token is followed by the choice of the next, as in generation."""
        with torch.inference_mode(), self.task.autocast():
            out = self.model(input_ids=inputs_BT.to(self.task.device), mems=self.mems)
            self.mems, log_BTV = out.mems, out.prediction_scores
            if inputs_BT.shape[1] == 1:
                scores_BR, _ = log_BTV[:, -1].topk(40)
                torch.multinomial(scores_BR.softmax(-1), 1)
            return -log_BTV.gather(-1, targets_BT.to(log_BTV.device)[..., None]).mean()
