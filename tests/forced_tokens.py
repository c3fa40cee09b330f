"""What the tests of generation share: a logits processor that forces tokens, and a model that records its calls.

Shape suffixes: B batch size, T new tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_xl.inference import TokenModel
from transformer_xl.model.memory import ContextLimits, Memory

CLOSE = {"rtol": 0, "atol": 1e-10}  # tolerance of comparisons in float64
# token ids below 23, the vocabulary size of the small models
TEXT = [3, 19, 7, 7, 0, 22, 11, 5, 17, 2, 13, 1, 20, 9, 4, 16, 8, 21, 6, 14, 10, 18, 12, 15, 3, 19, 0, 7, 22]


class ForcedTokens:
    """A logits processor that forces the next tokens of every sequence, and records the logits it was called with."""

    def __init__(self, token_ids: list[int] | bytes) -> None:
        self.remaining_ids, self.recorded_logits = list(token_ids), []

    def __call__(self, token_ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
        self.recorded_logits.append(logits_BV.clone())
        next_id = torch.tensor(self.remaining_ids.pop(0))
        return torch.full_like(logits_BV, -torch.inf).index_fill(-1, next_id, 0.0)  # probability 1 for this token


class RecordedModel:
    """A model that records the number of tokens of each call (in `lengths`, for each row) and its last memory."""

    training = False

    def __init__(self, model: TokenModel) -> None:
        self.recorded, self.lengths = model, []

    def __call__(self, tokens_BT: Tensor, memory: Memory, **arguments: Any) -> tuple[Tensor, Memory]:
        hidden_BTD, self.memory = self.recorded(tokens_BT, memory, **arguments)
        self.lengths.append(tokens_BT.shape[1])
        return hidden_BTD, self.memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorded, name)


def full_pass(model: TokenModel, tokens: list[int], context_limits: ContextLimits) -> tuple[Tensor, Memory]:
    """Read all tokens in one call, from an empty memory; return the logits after each token, (T, V), and the memory."""
    with torch.no_grad():
        hidden_BTD, memory = model(torch.tensor([tokens]), model.initial_memory(1, context_limits))
        return model.logits(hidden_BTD)[0], memory


def assert_same_memory(memory: Memory, expected: Memory) -> None:
    assert (type(memory), memory.context_limits) == (type(expected), expected.context_limits)
    assert memory.tensors().keys() == expected.tensors().keys()
    for name, tensor in memory.tensors().items():
        torch.testing.assert_close(tensor, expected.tensors()[name], **CLOSE)
