"""Stop strings of `generate`, found in the decoded text.

Shape suffixes: B batch rows, T columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from typing_extensions import override


class StopStrings(StoppingCriteria):
    """Ends a row whose newest token completes one of some strings, the prompt's end included as in transformers.

    The criterion of transformers looks at tokens one by one, and finds out what each adds to a text by encoding one. So
    it fails where words have no token for that text, and misses characters of several bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: str | Iterable[str]) -> None:
        """Keep what to look for; arguments are those of `generate`."""
        self._tokenizer = tokenizer
        self._strings = [strings] if isinstance(strings, str) else list(strings)
        self._num_tokens = 1 + max(len(string.encode()) for string in self._strings)  # a token has a byte at least

    @override
    def __call__(self, input_ids: Tensor, scores: object, **kwargs: Any) -> Tensor:
        """Return which rows (B,) end here; `input_ids` are prompts and new tokens (B, T)."""
        rows = input_ids[:, -self._num_tokens :].tolist()
        return torch.tensor([self._is_complete(ids) for ids in rows], device=input_ids.device)

    def _is_complete(self, ids: list[int]) -> bool:
        text, before = (str(self._tokenizer.decode(one, skip_special_tokens=True)) for one in (ids, ids[:-1]))
        return any(text.rfind(string) > before.rfind(string) for string in self._strings)
