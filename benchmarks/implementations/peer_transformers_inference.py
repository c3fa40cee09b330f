"""Hugging Face transformers in `inference.py`: TransfoXLLMHeadModel, which carries the memory `mems`."""

from __future__ import annotations

import torch
import transformers
from implementations.peer_transformers import build_model
from implementations.task import Task
from torch import Tensor


class Runner:
    """Inference; the model projects its whole memory to keys and values again in each step.

    Its memory begins with zeros of full length, which are attended to, so the first step takes as long as later ones.
    """

    versions = {"transformers": transformers.__version__}  # noqa: RUF012
    note = "cutoffs none, div_val 1, same_length; mems carried; sampling from the 40 most likely tokens"

    def __init__(self, task: Task) -> None:
        self.task = task
        clamp_length = -1 if task.clamp_length is None else task.clamp_length
        self.model = build_model(task, clamp_len=clamp_length, same_length=True).eval()
        self.mems: list[Tensor] | None = None

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """See `Implementation.step`; the next token is sampled from the 40 most likely (R in the code)."""
        with torch.inference_mode(), self.task.autocast():
            out = self.model(input_ids=inputs_BT.to(self.task.device), mems=self.mems)
            self.mems, log_probs_BTV = out.mems, out.prediction_scores
            if inputs_BT.shape[1] == 1:
                top_BR, _ = log_probs_BTV[:, -1].topk(40)
                torch.multinomial(top_BR.softmax(-1), 1)
            return -log_probs_BTV.gather(-1, targets_BT.to(log_probs_BTV.device)[..., None]).mean()
