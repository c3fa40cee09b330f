"""Runs of small models with random weights, of every architecture, as folders.

Shape suffixes: B batch rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from model_configs import settings_of
from torch import Tensor

from transformer_xl.architectures import build_model
from transformer_xl.config import ARCHITECTURES, run_settings
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.run import Run, load
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer

SEGMENT, MEMORY = 7, 11
# settings of every kind of model, by name
MODELS: dict[str, dict[str, Any]] = {
    "transformer-xl": {},
    "n-grams": {"max_ngram": 3, "ngram_buckets": 101, "d_ngram": 7},
    "pre-norm": {"qk_norm": True, "norm_first": True, "tie_attention_biases": False},
    "adaptive": {"cutoffs": (50, 120), "div_val": 2, "tie_projections": "all_but_first"},
    "narrow embeddings": {"tie_word_embeddings": False, "d_embed": 10},
    "window": {"attention_window": 9, "clamp_length": 5},
    "value embeddings": {"value_embeddings": True},
    "key offset": {"key_offset": True, "attention_sinks": True},
    "attends to empty memory": {"attend_empty_memory": True},
    "xlnet": {"architecture": "xlnet", "d_head": 7, "perm_size": 8, "max_gram": 3},
    "shaw": {"architecture": "shaw"},
    "vaswani": {"architecture": "vaswani"},
    "al-rfou": {"architecture": "al-rfou", "num_targets": 2, "intermediate_layer_losses": True},
    "lstm": {"architecture": "lstm"},
    "qrnn": {"architecture": "qrnn"},
}


def make_run(
    path: Path,
    name: str = "transformer-xl",
    *,
    tokenizer: Tokenizer | None = None,
    evaluation: dict[str, Any] | None = None,
    noise: float = 0.1,
    **settings: Any,
) -> Run:
    """Write the run folder of a small model, and load it.

    Args:
        path: the folder.
        name: a key of MODELS.
        tokenizer: the tokenizer, or None for bytes.
        evaluation: settings of evaluation.
        noise: standard deviation of what is added to the initial weights, so that every part affects the results.
        settings: further settings of the model.
    """
    tokenizer = tokenizer or ByteTokenizer()
    small = {"n_layers": 2, "d_model": 14, "n_heads": 2, "d_head": 5, "d_ff": 19, "dropout": 0.1}
    model = settings_of(**{**small, "vocab_size": tokenizer.vocab_size, **MODELS[name], **settings})
    has_memory = ARCHITECTURES[model.get("architecture", "transformer-xl")].has_memory
    train = {"segment_length": SEGMENT, "memory_length": MEMORY if has_memory else 0}
    config = run_settings({"model": model, "train": train, "evaluation": evaluation or {}}, "test")
    torch.manual_seed(7)
    made = build_model(config.model, memory_length=config.train.memory_length)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    RunFolder.create(path, config, tokenizer, made.state_dict())
    return load(path, device="cpu")


def ids(rows: int, length: int, vocab_size: int = 256, seed: int = 3) -> Tensor:
    """Return random token ids (B, T)."""
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def own_logits(run: Run, ids_BT: Tensor) -> Tensor:
    """Return the logits (B, T, V) as `evaluate` computes them: in segments, with the memory of evaluation."""
    plan = EvaluationPlan.resolve(run.config)
    model = run.inference(plan.dtype)
    memory = model.initial_memory(len(ids_BT), plan.context_limits)
    parts = []
    for part_BT in ids_BT.split(plan.segment_length, dim=1):
        hidden_BTD, memory = model(part_BT, memory)
        parts.append(model.logits(hidden_BTD))
    return torch.cat(parts, dim=1)
