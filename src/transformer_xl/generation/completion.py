"""Decoding of generated tokens to text in whole characters, up to a stop string.

`generate`, `stream` and `beam_search` feed the tokens of each sequence to a `CompletionBuilder`. A stop string may span
several tokens, and a token may end inside a character. So text that could be the beginning of a stop string is held
back until later tokens decide. Of several stop strings, the first complete one ends the text.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from transformer_xl.display import Displayed, text_html
from transformer_xl.generation.batch import GeneratedToken
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.text.tokenizers import Tokenizer

Prompt = str | bytes | Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor | None
"""Text or token ids (one dimension) to continue, or None to begin a new text."""

FinishReason = Literal["length", "eos", "stop"]
"""Why a sequence ended: max_new_tokens, one of eos_token_ids, or a stop string."""


@dataclass(frozen=True, repr=False)
class Completion(Displayed):
    """A generated text."""

    prompt: str | bytes | None
    """The text that it continues (token ids are decoded), or None for a new text."""
    text: str
    """The text after the prompt, without the stop string or EOS token that ended it."""
    token_ids: tuple[int, ...]
    """All generated tokens, including those that ended the text."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each token under the model; empty if `logprobs` is off."""
    finish_reason: FinishReason
    seed: int | None = None
    """Seed that reproduces this completion alone, or None for beam search."""

    @override
    def summary(self) -> dict[str, Any]:
        return {"prompt": self.prompt, "text": self.text, **self.details()}

    @override
    def details(self) -> dict[str, Any]:
        logprob = {} if self.logprob is None else {"logprob": self.logprob}
        return {"num_tokens": len(self.token_ids), "finish_reason": self.finish_reason, "seed": self.seed, **logprob}

    @override
    def _repr_html_(self) -> str:
        prompt = self.as_dict(tokens=False)["prompt"] or ""
        return f"{text_html(prompt, self.text)}{super()._repr_html_()}"

    @property
    def logprob(self) -> float | None:
        """Log-probability of all tokens together, or None if `logprobs` is off."""
        return math.fsum(self.logprobs) if self.logprobs else None

    def as_dict(self, *, tokens: bool = True) -> dict[str, Any]:
        """Return the completion for JSON; with `tokens`, also the id and log-probability of each token."""
        prompt = self.prompt
        if isinstance(prompt, str):
            prompt = prompt.encode("utf-8", "surrogateescape")  # bytes of the command line that are not UTF-8
        shown = None if prompt is None else prompt.decode("utf-8", "replace")
        details = {name: value for name, value in self.details().items() if value is not None}
        of_tokens = {"token_ids": self.token_ids, "logprobs": self.logprobs} if tokens else {}
        return {"prompt": shown, "text": self.text, **details, **of_tokens}


class CompletionBuilder:
    """Builds a completion from its tokens as they are generated: decodes them and decides when it is finished."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], config: GenerationConfig) -> None:
        """The text continues `prompt_ids`: it begins, for example, with the space between two words."""
        self._tokenizer, self._decoder, self._config = tokenizer, tokenizer.stream_decoder(), config
        decoded = "".join(map(self._decoder.push, prompt_ids))
        # The decoder may hold back the end of the prompt and return it with the first new token. It is removed there,
        # except for an incomplete character (decoded as U+FFFD, the replacement character), which the new token
        # completes.
        self._rest_of_prompt = tokenizer.decode(prompt_ids).removeprefix(decoded).rstrip("\ufffd")
        self._held_back = ""
        self.num_tokens = 0
        self.token_ids: list[int] = []
        """All tokens so far; empty without max_new_tokens, so that an endless text needs no memory."""
        self.logprobs: list[float] = []
        self._text = ""
        self.finish_reason: FinishReason | None = None
        """Why the text ended, or None if it is not finished."""

    def copy(self) -> CompletionBuilder:
        """Return another builder in the same state, for another sample of the same prompt."""
        return deepcopy(self, {id(shared): shared for shared in (self._tokenizer, self._config)})

    def num_held_back(self, token_id: int) -> int:
        """Return how many characters are held back and would be before the text of the next token."""
        return len(self._held_back) + self._decoder.num_ended_by(token_id)

    def add(self, token: GeneratedToken) -> str:
        """Add the next token, and return the text that no later token can change or make part of a stop string."""
        self.num_tokens += 1
        if self._config.max_new_tokens is not None:
            self.token_ids.append(token.token_id)
            if token.logprob is not None:
                self.logprobs.append(token.logprob)
        if not token.is_eos:
            text = self._release(self._decoder.push(token.token_id))
        elif self._tokenizer.is_newline_V[token.token_id]:
            # BPE may merge the last characters of a line with its newline, as in ");\n"
            text = self._release(self._decoder.push(token.token_id).removesuffix("\n"))
        else:
            text = ""
        if self.finish_reason is None and (token.is_eos or self.num_tokens == self._config.max_new_tokens):
            text += self._release(self._decoder.finish())
            if self.finish_reason is None:
                self.finish_reason = "eos" if token.is_eos else "length"
                text += self._held_back
        if self._config.max_new_tokens is not None:
            self._text += text
        return text

    def completion(self, prompt: str | bytes | None, seed: int | None = None) -> Completion:
        """Return the finished text; `max_new_tokens` must be set."""
        assert self.finish_reason is not None
        token_ids, logprobs = tuple(self.token_ids), tuple(self.logprobs)
        return Completion(prompt, self._text, token_ids, logprobs, self.finish_reason, seed)

    def _release(self, text: str) -> str:
        """Return the text that cannot be part of a stop string; truncate at a complete one, which ends the text."""
        if not self._config.stop and not self._rest_of_prompt:
            return text  # as below, in a fraction of the time
        # the decoder of a word tokenizer holds back a dash until the next word shows whether a space precedes the dash
        is_unchanged = text.startswith(self._rest_of_prompt)
        text = text.removeprefix(self._rest_of_prompt if is_unchanged else self._rest_of_prompt.lstrip())
        if text:
            self._rest_of_prompt = ""
        text = self._held_back + text
        stops = self._config.stop if self.num_tokens >= self._config.min_new_tokens else ()
        if stop_positions := [text.find(stop) for stop in stops if stop in text]:
            self.finish_reason = "stop"
            return text[: min(stop_positions)]
        # hold back the longest end of the text that is the beginning of a stop string
        lengths = range(min(max(map(len, stops), default=1) - 1, len(text)), 0, -1)
        starts_stop = (length for length in lengths if any(stop.startswith(text[-length:]) for stop in stops))
        held_length = next(starts_stop, 0)
        self._held_back = text[len(text) - held_length :]
        return text[: len(text) - held_length]
