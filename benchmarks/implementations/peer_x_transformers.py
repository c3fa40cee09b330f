"""x-transformers in `training.py`: its decoder with the memory of Transformer-XL."""

from __future__ import annotations

from importlib.metadata import version

import torch
import torch.nn.functional as F
from implementations.task import Task, optimizer_step
from torch import Tensor
from x_transformers import Decoder, TransformerWrapper


class Runner:
    """Training with either of the two position encodings that the library documents for use with a memory.

    The default is rotary embeddings with `attn_flash`, the fastest. Variant `bias` is T5's relative position bias, the
    documented example, which excludes `attn_flash`. Both cost less than the paper's attention, which multiplies queries
    with position keys. Layers are pre-norm, the library's default. Variants with `compile` use torch.compile.
    """

    versions = {"x_transformers": version("x-transformers")}  # noqa: RUF012

    def __init__(self, task: Task) -> None:
        bias = "bias" in task.variant
        positions = {"rel_pos_bias": True} if bias else {"rotary_pos_emb": True, "attn_flash": True}
        encoding = "T5 relative position bias, without attn_flash" if bias else "rotary embeddings, attn_flash"
        self.note = f"{encoding}; its own attention, cheaper than the paper's"
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
        if "compile" in task.variant:
            self.model.compile(dynamic=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=task.learning_rate, fused=True)
        self.mems: list[Tensor] | None = None

    def step(self, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """See `Implementation.step`; the loss is the cross-entropy of the logits, as in the library's own wrapper."""
        inputs_BT, targets_BT = inputs_BT.to(self.task.device), targets_BT.to(self.task.device)
        with self.task.autocast():
            logits_BTV, self.mems = self.model(inputs_BT, mems=self.mems, return_mems=True)
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        optimizer_step(loss, self.model, self.optimizer, self.task.max_grad_norm)
        return loss
