"""What the heads of a model attend to, by distance between query and key.

Shape suffixes: B batch size, T queries, S keys, P distances (0 to P - 1), N heads, L layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.model.transformer_xl import RelativeLanguageModel


def require_attention_terms(model: LanguageModel) -> RelativeLanguageModel:
    """Return the model, if its attention scores are a sum of terms.

    Raises:
        UserError: the model has no attention; or absolute positions, so neither terms nor memory; or is an XLNet.
    """
    if isinstance(model, RelativeLanguageModel):
        return model
    missing = "attention terms and memory" if not model.config.has_memory else "attention"
    raise UserError(f"{model.config.architecture} has no {missing} that can be shown; use transformer-xl or shaw")


def attention_of_last(model: RelativeLanguageModel, tokens_BT: Tensor, memory: Memory) -> Tensor:
    """Return the attention of the last token by distance, for each layer and head.

    Args:
        model: in evaluation mode.
        tokens_BT: the tokens to process, with batch size 1; at least one.
        memory: the memory before them.

    Returns:
        probabilities (L, N, P) on the CPU, at distance 0 (the token itself) to P - 1; with the setting
        attend_empty_memory, what empty slots get is left out.
    """
    num_seen = int(memory.valid_B[0]) + tokens_BT.shape[1]
    num_distances = min(num_seen, memory.context_limits.attention_window or num_seen)
    layers = [
        by_distance(trace.terms.probabilities_BNTS[:, :, -1:], num_distances)[:, 0]
        for trace in model.trace(tokens_BT, memory)
    ]
    return torch.stack(layers).float().cpu()


def by_distance(x_BNTS: Tensor, num_distances: int) -> Tensor:
    """Rearrange values by query and key, with batch size 1, to values by query and distance; shape (N, T, P).

    Distances that reach beyond the first key get 0.
    """
    num_queries, num_keys = x_BNTS.shape[-2:]
    query_T = torch.arange(num_queries, device=x_BNTS.device)
    key_TP = num_keys - num_queries + query_T[:, None] - torch.arange(num_distances, device=x_BNTS.device)
    return x_BNTS[0].gather(-1, key_TP.clamp(min=0).expand(x_BNTS.shape[1], -1, -1)).masked_fill(key_TP < 0, 0)
