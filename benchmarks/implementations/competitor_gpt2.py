"""GPT-2 of Hugging Face transformers in `equal_time.py`, trained on random blocks with AdamW.

Settings: `block_size`, `batch_size`, `learning_rate`, the sizes `n_layer`, `n_head`, `n_embd`, and `ngrams`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import transformers
from implementations.competitor import Assignment, RandomBlocks, window_nats
from implementations.hashed_ngrams import with_ngrams
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel


class GPT2:
    """See `implementations.competitor.Competitor`."""

    min_rate_ratio = 0.0

    def __init__(self, assignment: Assignment) -> None:
        settings = assignment.settings
        self.block_size = settings["block_size"]
        self.learning_rate = settings["learning_rate"]
        config = GPT2Config(
            vocab_size=assignment.vocab_size,
            n_positions=self.block_size,
            **{name: settings[name] for name in ("n_layer", "n_head", "n_embd")},
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        )
        self.model = GPT2LMHeadModel(config).train()
        self.model.transformer.wte = with_ngrams(self.model.transformer.wte, settings)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.contexts = (self.block_size,)
        self.note = "learned absolute positions; scored in windows that overlap by seven eighths"
        self.versions = {"transformers": transformers.__version__}
        self.blocks = RandomBlocks(assignment)

    def loss(self) -> Tensor:
        """See `Competitor.loss`."""
        inputs_BT, targets_BT = self.blocks.next()
        logits_BTV = self.model(input_ids=inputs_BT).logits
        return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    def nats(self, inputs_K: Tensor, targets_K: Tensor, context: int) -> Iterator[Tensor]:
        """See `Competitor.nats`."""
        return window_nats(inputs_K, targets_K, context, lambda inputs_BT: self.model(input_ids=inputs_BT).logits)


def build(assignment: Assignment) -> GPT2:
    """Return the competitor of an assignment."""
    return GPT2(assignment)
