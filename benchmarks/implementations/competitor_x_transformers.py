"""x-transformers with memory and rotary positions in `equal_time.py`, trained on pieces of 256 tokens with AdamW.

Settings: `segment_length`, `memory_length`, `batch_size`, `learning_rate`, the sizes `n_layer`, `n_head`, `n_embd`, and
`ngrams`, which reach into the segment before.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import torch
from implementations.competitor import Assignment, ConsecutiveSegments, in_pieces
from implementations.hashed_ngrams import with_ngrams
from torch import Tensor
from torch.nn.functional import cross_entropy
from x_transformers import Decoder, TransformerWrapper


class XTransformers:
    """See `implementations.competitor.Competitor`."""

    min_rate_ratio = 0.0

    def __init__(self, assignment: Assignment) -> None:
        settings = assignment.settings
        self.segment_length, memory_length = settings["segment_length"], settings["memory_length"]
        self.learning_rate = settings["learning_rate"]
        width, heads = settings["n_embd"], settings["n_head"]
        self.model = TransformerWrapper(
            num_tokens=assignment.vocab_size,
            max_seq_len=self.segment_length,
            max_mem_len=memory_length,
            attn_layers=Decoder(
                dim=width,
                depth=settings["n_layer"],
                heads=heads,
                attn_dim_head=width // heads,
                ff_mult=4,
                rotary_pos_emb=True,
                attn_flash=True,
            ),
        ).train()
        self.model.token_emb.emb = self.embedding = with_ngrams(self.model.token_emb.emb, settings)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.contexts = tuple(memory_length * factor for factor in (1, 2, 4))
        self.note = "rotary positions, attn_flash, memory; the memory length of scoring chosen on the validation text"
        self.versions = {"x_transformers": version("x-transformers")}
        train_K = in_pieces(assignment.tokens("train"), settings["shuffle_length"])
        self._segments = ConsecutiveSegments(train_K, settings["batch_size"], self.segment_length)
        self._mems: list[Tensor] | None = None

    def loss(self) -> Tensor:
        """See `Competitor.loss`."""
        inputs_BT, targets_BT = self._segments.next()
        logits_BTV, self._mems = self.model(inputs_BT, mems=self._mems, return_mems=True)
        self.embedding.before_BR = inputs_BT
        return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    def nats(self, inputs_K: Tensor, targets_K: Tensor, context: int) -> Iterator[Tensor]:
        """See `Competitor.nats`; `context` is the memory length."""
        self.model.max_mem_len, mems, self.embedding.before_BR = context, None, None
        for inputs_T, targets_T in zip(
            inputs_K.split(self.segment_length), targets_K.split(self.segment_length), strict=True
        ):
            logits_BTV, mems = self.model(inputs_T[None], mems=mems, return_mems=True)
            self.embedding.before_BR = inputs_T[None]
            yield cross_entropy(logits_BTV[0].float(), targets_T, reduction="none")


def build(assignment: Assignment) -> XTransformers:
    """Return the competitor of an assignment."""
    return XTransformers(assignment)
