"""x-transformers in `training.py`: its decoder with Transformer-XL's recurrence."""

from __future__ import annotations

from importlib.metadata import version

import torch
import torch.nn.functional as F
from implementations.task import Task
from torch import Tensor
from x_transformers import Decoder, TransformerWrapper


class Runner:
    """Its documentation names two ways to set positions beside a memory, and each is here.

    Rotary embeddings with `attn_flash`, its fastest way and the default. Variant `bias`: T5's relative position bias,
    the example its documentation gives, which cannot be had with `attn_flash`. Neither is the paper's attention, and
    both cost less: no product of queries with position keys. Layers stand in pre-norm, its default.
    """

    versions = {"x_transformers": version("x-transformers")}  # noqa: RUF012

    def __init__(self, task: Task) -> None:
        bias = "bias" in task.variant
        positions = {"rel_pos_bias": True} if bias else {"rotary_pos_emb": True, "attn_flash": True}
        self.note = (
            "T5 relative position bias, no flash attention (not to be had together)"
            if bias
            else "rotary embeddings, attn_flash"
        )
        self.note += "; its own attention, cheaper than the paper's"
        self.task = task
        decoder = Decoder(
            dim=task.d_model,
            depth=task.n_layers,
            heads=task.n_heads,
            attn_dim_head=task.d_head,
            ff_mult=task.d_ff / task.d_model,
            ff_dropout=task.dropout,
            attn_dropout=0.0,
            **positions,
        )
        self.model = TransformerWrapper(
            num_tokens=task.vocab_size,
            max_seq_len=task.segment_length,
            max_mem_len=task.memory_length,
            emb_dropout=task.dropout,
            tie_embedding=True,
            attn_layers=decoder,
        ).to(task.device)
        self.model.train()
        if "compile" in task.variant:
            self.model.compile(dynamic=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=task.learning_rate, fused=True)
        self.mems: list[Tensor] | None = None

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy of its logits, as its own wrapper for training forms it."""
        inputs_BT, targets_BT = inputs_BT.to(self.task.device), targets_BT.to(self.task.device)
        with self.task.autocast():
            logits_BTV, self.mems = self.model(inputs_BT, mems=self.mems, return_mems=True)
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.task.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss
