"""nanoGPT in `equal_time.py`: its own model and optimizer from a checkout, on random blocks as in its train.py.

Settings: `checkout` (folder of nanoGPT), `block_size`, `batch_size`, `learning_rate`, the sizes `n_layer`, `n_head`,
`n_embd`, and `ngrams`. The optimizer has the settings of its train.py: weight decay 0.1, betas 0.9 and 0.95, clipping
at 1, a final learning rate of a tenth of the peak.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from implementations.competitor import Assignment, RandomBlocks, window_nats
from implementations.hashed_ngrams import with_ngrams
from torch import Tensor


class NanoGPT:
    """See `implementations.competitor.Competitor`."""

    min_rate_ratio = 0.1

    def __init__(self, assignment: Assignment) -> None:
        settings = assignment.settings
        sys.path.insert(0, settings["checkout"])
        from model import GPT, GPTConfig  # of the checkout

        self.block_size = settings["block_size"]
        self.learning_rate = settings["learning_rate"]
        sizes = {name: settings[name] for name in ("n_layer", "n_head", "n_embd")}
        config = GPTConfig(
            block_size=self.block_size, vocab_size=assignment.vocab_size, dropout=0.0, bias=False, **sizes
        )
        with contextlib.redirect_stdout(sys.stderr):  # it prints
            self.model = GPT(config).train()
            self.model.transformer.wte = with_ngrams(self.model.transformer.wte, settings)
            self.optimizer = self.model.configure_optimizers(0.1, self.learning_rate, (0.9, 0.95), "cpu")
        self.contexts = (self.block_size,)
        self.note = "learned absolute positions; scored in windows that overlap by seven eighths"
        self.versions: dict[str, str] = {}
        self.blocks = RandomBlocks(assignment)

    def loss(self) -> Tensor:
        """See `Competitor.loss`."""
        inputs_BT, targets_BT = self.blocks.next()
        return self.model(inputs_BT, targets_BT)[1]

    def nats(self, inputs_K: Tensor, targets_K: Tensor, context: int) -> Iterator[Tensor]:
        """See `Competitor.nats`."""

        def logits(inputs_BT: Tensor) -> Tensor:
            return self.model(inputs_BT, torch.zeros_like(inputs_BT))[0]  # with targets it returns all logits

        return window_nats(inputs_K, targets_K, context, logits)


def build(assignment: Assignment) -> NanoGPT:
    """Return the competitor of an assignment."""
    return NanoGPT(assignment)
