"""What the tests of generation share: a sampler that is told what to choose, and a model that is watched."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_xl.generation.sampling import Sampler
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits, Memory

CLOSE = {"rtol": 0, "atol": 1e-10}
TEXT = [3, 19, 7, 7, 0, 22, 11, 5, 17, 2, 13, 1, 20, 9, 4, 16, 8, 21, 6, 14, 10, 18, 12, 15, 3, 19, 0, 7, 22]


class Scripted(Sampler):
    """Chooses what it was told to, the same in every row, and keeps the scores it was shown."""

    def __init__(self, script: list[int]) -> None:
        object.__setattr__(self, "script", list(script))
        object.__setattr__(self, "seen", [])

    def choose(self, logits_BV: Tensor, *generators: torch.Generator) -> Tensor:
        self.seen.append(logits_BV.clone())
        return torch.tensor([self.script.pop(0)] * len(logits_BV))


class Watched:
    """A model that keeps how many tokens it was given each time, and of each row how many were its own."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.lengths, self.own = model, [], []

    def __call__(self, tokens_BT: Tensor, memory: Memory, lengths_B: Tensor | None = None) -> tuple[Tensor, Memory]:
        hidden_BTD, self.memory = self.model(tokens_BT, memory, lengths_B=lengths_B)
        self.lengths.append(tokens_BT.shape[1])
        self.own.append(None if lengths_B is None else lengths_B.tolist())
        return hidden_BTD, self.memory

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def whole(model: LanguageModel, tokens: list[int], context_limits: ContextLimits) -> tuple[Tensor, Memory]:
    """The scores after each token, (T, V), from one pass without anything before; and the memory it leaves."""
    with torch.no_grad():
        hidden_BTD, memory = model(torch.tensor([tokens]), model.inference_memory(1, context_limits))
        return model.logits(hidden_BTD)[0], memory


def assert_same_memory(found: Memory, wanted: Memory) -> None:
    assert (type(found), found.context_limits) == (type(wanted), wanted.context_limits)
    assert found.tensors().keys() == wanted.tensors().keys()
    for name, tensor in found.tensors().items():
        torch.testing.assert_close(tensor, wanted.tensors()[name], **CLOSE)
