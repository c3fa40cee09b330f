"""Speculative decoding without a second model: a draft is what followed the latest tokens where they occurred before.

    model = SpeculativeModel(inference, prompt_ids, memory, max_draft)
    hidden_B1D, memory = model(newest_B1, memory)       the same results as of the model, up to rounding

A call reads the newest token and a draft of those after it in one segment, in which each sees M memory positions, as if
it were read alone. While the tokens that the caller chooses are those of the draft, the next calls only return the next
hidden states; at the first other one, the rest is dropped. So the caller chooses each token from the distribution, and
with the random numbers, that it has without drafts. That is the rejection sampling of Leviathan et al. 2023 (arXiv
2211.17192, section 2.3) for a draft that gives its token x probability 1: x is accepted with probability p(x), and
otherwise the token is sampled from p without x, renormalized.

How many tokens are drafted follows from the share of right drafts so far and from the measured seconds of a segment:
none where a draft would not pay.

Shape suffixes: B batch size (1), T tokens of a segment, D model width, R recent tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from transformer_xl.config import UserError
from transformer_xl.inference import TokenModel
from transformer_xl.model.key_values import KeyValueMemory
from transformer_xl.model.memory import Memory

_NGRAM_SIZES = (16, 8, 4, 2)  # of the latest tokens that are looked up, the longest first
_LONGEST_MATCH = 32  # matches of at least so many tokens share one rate
_TEXT_LENGTH = 2**14  # tokens in which drafts are looked for: so many at least, twice as many at most
_RATE_WEIGHT = 1 / 32  # of a new observation in a rate
_FIRST_RATIO, _TOKEN_RATIO = 1.4, 1 / 10  # a segment is first supposed to take so many times as long as one token
_MIN_GAIN = 1.2  # a draft is read where it promises to be so many times as fast
_SECONDS_DECAY = 0.9995  # per segment: what was not measured for long is tried again


class PromptLookup:
    """Predicts the next tokens of a text: those after the latest earlier occurrence of its last n-gram."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._rates = [0.5] * (_LONGEST_MATCH + 1)  # the share of right predictions, by the length of the match
        self._begin(token_ids[-_TEXT_LENGTH:])

    def _begin(self, token_ids: Sequence[int]) -> None:
        self._tokens, self._after = list[int](), dict[tuple[int, ...], int]()
        self._source: int | None = None  # index of the token that is predicted
        self._match_length = 0
        for token in token_ids:
            self.add(token)

    def add(self, token: int) -> None:
        """Continue the text, and learn from it how often predictions are right."""
        if len(self._tokens) == 2 * _TEXT_LENGTH:
            self._begin(self._tokens[_TEXT_LENGTH:])
        is_right = self._source is not None and self._tokens[self._source] == token
        if self._source is not None:
            index = min(self._match_length, _LONGEST_MATCH)
            self._rates[index] += (is_right - self._rates[index]) * _RATE_WEIGHT
        self._tokens.append(token)
        ngrams = [tuple(self._tokens[-size:]) for size in _NGRAM_SIZES]
        if self._source is not None and is_right:
            self._source, self._match_length = self._source + 1, self._match_length + 1
        else:
            found = next((ngram for ngram in ngrams if ngram in self._after), ())
            self._source, self._match_length = self._after.get(found), len(found)
        self._after.update(dict.fromkeys(ngrams, len(self._tokens)))

    def rates(self, number: int) -> list[float]:
        """Return the probability of each of the next tokens to be the predicted one, if those before it are."""
        if self._source is None:
            return []
        return [self._rates[min(self._match_length + index, _LONGEST_MATCH)] for index in range(number)]

    def predict(self, number: int) -> list[int]:
        """Return the next tokens; those after the end of the text are a repetition of its end."""
        if self._source is None:
            return []
        period = len(self._tokens) - self._source
        return [self._tokens[self._source + index % period] for index in range(number)]


class SpeculativeModel:
    """A model for generating one text, which reads drafts ahead."""

    def __init__(self, model: TokenModel, prompts: Sequence[Sequence[int]], memory: Memory, max_draft: int) -> None:
        """Look for drafts in the prompt and in the tokens of later calls.

        Args:
            model: a prepared model.
            prompts: the prompt, in a list.
            memory: the memory after it.
            max_draft: the largest number of tokens in a draft.

        Raises:
            UserError: there are several prompts or samples, or the model has no KV cache, or a memory with fewer slots
                than its n-gram embeddings reach back.
        """
        if memory.batch_size > 1:
            raise UserError(
                f"prompt_lookup_num_tokens is for one text at a time, not {memory.batch_size}; leave it out, "
                "or generate them one after another"
            )
        if not isinstance(memory, KeyValueMemory):
            raise UserError(
                "prompt_lookup_num_tokens needs a KV cache, as Transformer-XL has after run.inference() and with a "
                "memory; leave it out"
            )
        if memory.length < (least := model.config.max_ngram - 1):
            raise UserError(
                f"prompt_lookup_num_tokens needs a memory_length of {least} or more with this model's n-gram "
                f"embeddings, not {memory.length}; raise it, or leave prompt_lookup_num_tokens out"
            )
        self._model, self._lookup, self._max_draft = model, PromptLookup(prompts[0]), max_draft
        self._segment: list[int] = []
        self._num_used = 0  # tokens of the segment that the text has
        self._memory: Memory = memory  # after these
        self._seconds: dict[int, float] = {}  # of a segment, by the number of drafted tokens

    def __call__(self, newest_B1: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """Return the hidden state of the newest token (1, 1, D), and the memory after it."""
        token = int(newest_B1)
        self._lookup.add(token)
        if memory is not self._memory or self._segment[self._num_used : self._num_used + 1] != [token]:
            self._read(token, memory)
        self._num_used += 1
        self._memory = self._after if len(self._segment) == 1 else self._memory_after(self._num_used)
        return self._hidden_BTD[:, self._num_used - 1 : self._num_used], self._memory

    def _memory_after(self, number: int) -> Memory:
        """Return the memory after the first tokens of the segment."""
        before, num_later = self._before, len(self._segment) - number
        if before.recent_BR is not None:
            new_BT = torch.tensor([self._segment[:number]], device=before.recent_BR.device) + 1
            before = replace(before, recent_BR=torch.cat([before.recent_BR, new_BT], 1))
        return before.advance([cache.without_newest(num_later) for cache in self._after.layers], number)

    def _read(self, token: int, memory: Memory) -> None:
        """Read a token and a draft of those after it."""
        assert isinstance(memory, KeyValueMemory)
        if memory is self._memory and self._num_used < len(self._segment):  # nobody else has seen the rest
            for cache in memory.layers:
                cache.release_later()
        segment = [token, *self._lookup.predict(self._num_drafted())]
        num_drafted, before = len(segment) - 1, memory
        if num_drafted:  # the window is what a token alone sees
            limits, num_visible = memory.context_limits, memory.length + 1
            limits = replace(limits, attention_window=min(num_visible, limits.attention_window or num_visible))
            memory = replace(memory, context_limits=limits)
        start = time.perf_counter()
        hidden_BTD, after = self._model(torch.tensor([segment]), memory)
        hidden_BTD[0, 0, 0].item()  # waits for a GPU
        seconds = time.perf_counter() - start
        assert isinstance(after, KeyValueMemory)
        self._segment, self._hidden_BTD, self._before, self._after, self._num_used = (
            segment,
            hidden_BTD,
            before,
            after,
            0,
        )
        self._seconds = {number: value * _SECONDS_DECAY for number, value in self._seconds.items()}
        old = self._seconds.get(num_drafted, seconds)
        # interruptions only add to the time, so it rises slowly and falls at once
        self._seconds[num_drafted] = min(seconds, old + (seconds - old) / 4, 2 * old)

    def _num_drafted(self) -> int:
        """Return the number of drafted tokens with which most tokens a second are expected, 0 where drafts do not pay.

        Segments have 1, 2, 4, ... tokens or the largest number, so that the time of each is soon known.
        """
        if not self._seconds:  # a token alone is measured first
            return 0
        seconds = alone = self._seconds[0]
        best, speed, expected, probability = 0, _MIN_GAIN / alone, 1.0, 1.0
        for number, rate in enumerate(self._lookup.rates(self._max_draft), start=1):
            probability *= rate
            expected += probability
            if number == self._max_draft or not number & (number + 1):
                supposed = max(seconds, alone * (_FIRST_RATIO + _TOKEN_RATIO * number))
                seconds = self._seconds.get(number, supposed)
                if expected / seconds > speed:
                    best, speed = number, expected / seconds
        return best
