"""What the tests of generation share: a logits processor that forces tokens, and a model that records its calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits, Memory

CLOSE = {"rtol": 0, "atol": 1e-10}
TEXT = [3, 19, 7, 7, 0, 22, 11, 5, 17, 2, 13, 1, 20, 9, 4, 16, 8, 21, 6, 14, 10, 18, 12, 15, 3, 19, 0, 7, 22]


class Scripted:
    """A logits processor that forces the tokens of a script in every sequence, and keeps the logits it was given."""

    def __init__(self, script: list[int] | bytes) -> None:
        self.script, self.seen = list(script), []

    def __call__(self, token_ids_BT: Tensor, logits_BV: Tensor) -> Tensor:
        self.seen.append(logits_BV.clone())
        return torch.full_like(logits_BV, -torch.inf).index_fill(-1, torch.tensor(self.script.pop(0)), 0.0)


class Watched:
    """A model that records the number of tokens of each call, and how many of each row were not padding."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.lengths, self.unpadded = model, [], []

    def __call__(self, tokens_BT: Tensor, memory: Memory, lengths_B: Tensor | None = None) -> tuple[Tensor, Memory]:
        hidden_BTD, self.memory = self.model(tokens_BT, memory, lengths_B=lengths_B)
        self.lengths.append(tokens_BT.shape[1])
        self.unpadded.append(None if lengths_B is None else lengths_B.tolist())
        return hidden_BTD, self.memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def full_pass(model: LanguageModel, tokens: list[int], context_limits: ContextLimits) -> tuple[Tensor, Memory]:
    """Return the logits after each token, (T, V), of one pass without anything before, and the memory it leaves."""
    with torch.no_grad():
        hidden_BTD, memory = model(torch.tensor([tokens]), model.inference_memory(1, context_limits))
        return model.logits(hidden_BTD)[0], memory


def assert_same_memory(found: Memory, wanted: Memory) -> None:
    assert (type(found), found.context_limits) == (type(wanted), wanted.context_limits)
    assert found.tensors().keys() == wanted.tensors().keys()
    for name, tensor in found.tensors().items():
        torch.testing.assert_close(tensor, wanted.tensors()[name], **CLOSE)
