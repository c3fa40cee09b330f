"""nanochat in `equal_time.py`: its own model, optimizer and schedules from a checkout, on random blocks.

Settings: `checkout` (folder of nanochat), `block_size`, `batch_size`, `learning_rate`, the sizes `n_layer`, `n_head`,
`n_embd`, and `ngrams`. `learning_rate` is that of the matrices, which Muon trains. The other rates, for AdamW, keep the
proportions of nanochat's base_train.py, and the schedules are its: of the rates, of Muon's momentum, and of its weight
decay, which here begins at 0.28 whatever the number of tokens. As there, the model is compiled in training, gradients
are not clipped, and `NANOCHAT_DTYPE` sets the dtype, of the token embeddings too. n-gram embeddings are trained at the
rate of the output layer; that of the token embedding, 37 times as high, is worse.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator

import torch
from implementations.competitor import Assignment, RandomBlocks, window_nats
from implementations.hashed_ngrams import with_ngrams
from torch import Tensor

MATRIX_RATE = 0.02
"""The learning rate of the matrices in base_train.py, to which its other rates belong."""


class Nanochat:
    """See `implementations.competitor.Competitor`."""

    min_rate_ratio = 0.05

    def __init__(self, assignment: Assignment) -> None:
        settings = assignment.settings
        sys.path.insert(0, settings["checkout"])
        os.environ["NANOCHAT_DTYPE"] = assignment.dtype  # read when it is imported
        from nanochat.gpt import GPT, GPTConfig  # of the checkout

        self.block_size = settings["block_size"]
        self.learning_rate, self.steps = settings["learning_rate"], assignment.steps or 1
        sizes = {name: settings[name] for name in ("n_layer", "n_head", "n_embd")}
        config = GPTConfig(self.block_size, assignment.vocab_size, n_kv_head=settings["n_head"], **sizes)
        scale = self.learning_rate / MATRIX_RATE
        with contextlib.redirect_stdout(sys.stderr):  # it prints
            self.model = GPT(config).train()
            self.model.init_weights()
            self.optimizer = self.model.setup_optimizer(
                unembedding_lr=0.008 * scale,
                embedding_lr=0.3 * scale,
                matrix_lr=self.learning_rate,
                scalar_lr=0.5 * scale,
            )
        embedding = self.model.transformer.wte
        self.model.transformer.wte = with_ngrams(embedding, settings)
        ngrams = [weight for weight in self.model.transformer.wte.parameters() if weight is not embedding.weight]
        self.optimizer.param_groups[0]["params"] += ngrams  # the group of the output layer
        self.compiled = torch.compile(self.model, dynamic=False)
        self.contexts = (self.block_size,)
        self.note = "compiled; rotary positions; scored in windows that overlap by seven eighths"
        self.versions: dict[str, str] = {}
        self.blocks = RandomBlocks(assignment)

    def schedule(self, progress: float) -> None:
        """Set the rates, and Muon's momentum and weight decay, as base_train.py."""
        step, left = round(progress * self.steps), min(1.0, (1 - progress) / 0.65)
        factor = min((step + 1) / 40, self.min_rate_ratio + (1 - self.min_rate_ratio) * left)
        for group in self.optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]
            if group["kind"] == "muon":
                group["momentum"] = 0.85 + 0.12 * step / 400 if step < 400 else 0.90 + 0.07 * left
                group["weight_decay"] = 0.28 * 0.5 * (1 + math.cos(math.pi * progress))

    def loss(self) -> Tensor:
        """See `Competitor.loss`."""
        return self.compiled(*self.blocks.next())

    def nats(self, inputs_K: Tensor, targets_K: Tensor, context: int) -> Iterator[Tensor]:
        """See `Competitor.nats`."""
        return window_nats(inputs_K, targets_K, context, self.model)


def build(assignment: Assignment) -> Nanochat:
    """Return the competitor of an assignment."""
    return Nanochat(assignment)
