"""A prompt with the samples that continue it: what the engine runs, and what it returns.

Shape suffixes: L layers, N heads, P distances.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from transformer_xl.apps.serve.rows import MemoryState
from transformer_xl.apps.serve.served_model import ServedModel
from transformer_xl.generation.batch import GeneratedToken
from transformer_xl.generation.completion import CompletionBuilder, FinishReason
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.model.memory import Memory


@dataclass(frozen=True)
class ScoredToken:
    """A token, with log-probabilities where they were asked for."""

    token_id: int
    logprob: float | None = None
    """Natural log-probability under the model, before temperature and the like; None if unknown or not asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens at its position, best first, with the same log-probabilities."""


class TokenLogprobs:
    """Tokens in arrays, of 8 bytes each and 8 for each alternative."""

    def __init__(self, num_top: int = 0, tokens: Iterable[ScoredToken] = ()) -> None:
        """Keep tokens with up to `num_top` alternatives each."""
        self._num_top = num_top
        self._ids, self._logprobs = array("i"), array("f")
        self._top_ids, self._top_logprobs = array("i"), array("f")  # -1 where a token has fewer alternatives
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[ScoredToken]:
        for index, (token_id, logprob) in enumerate(zip(self._ids, self._logprobs, strict=True)):
            part = slice(index * self._num_top, (index + 1) * self._num_top)
            top = zip(self._top_ids[part], self._top_logprobs[part], strict=True)
            known = None if math.isnan(logprob) else logprob
            yield ScoredToken(token_id, known, tuple(pair for pair in top if pair[0] >= 0))

    def extend(self, tokens: Iterable[ScoredToken]) -> None:
        """Add tokens."""
        for token in tokens:
            self._ids.append(token.token_id)
            self._logprobs.append(math.nan if token.logprob is None else token.logprob)
            rest = [(-1, 0.0)] * (self._num_top - len(token.top))
            for token_id, logprob in (*token.top, *rest) if self._num_top else ():
                self._top_ids.append(token_id)
                self._top_logprobs.append(logprob)


@dataclass(frozen=True)
class Delta:
    """What one sample got in a step, or in all of them."""

    sample: int
    text: str
    tokens: tuple[ScoredToken, ...] | TokenLogprobs
    """The tokens whose text begins in the text so far."""
    offsets: Sequence[int]
    """The index of the character of the sample's text where each of these tokens begins."""
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Finished:
    """The job is done."""

    state: MemoryState | None
    """The memory after prompt and sample, if the job keeps it."""


@dataclass(frozen=True)
class Failed:
    """The job cannot be finished."""

    message: str
    status: int = 500


Event = Delta | Finished | Failed


@dataclass(eq=False)
class AnswerSize:
    """The size that the answer of a request may reach, for which there is room before any of its jobs begins."""

    owner: str
    num_values: int
    """Tokens and their alternatives, or probabilities."""


@dataclass(eq=False)
class TextJob:
    """A prompt, and how its samples are generated; the fields do not change after it was submitted."""

    served: ServedModel
    prompt_ids: list[int]
    """Tokens of the prompt, without the BOS token."""
    config: GenerationConfig
    """Sampling, stop strings and seed: sample i is sampled with seed + i."""
    max_tokens: int
    """Number of tokens to generate at most; 0 only reads the prompt."""
    listener: Callable[[list[Event]], object]
    """Called in the thread of the engine with what is new."""
    num_samples: int = 1
    add_bos: bool = True
    num_logprobs: int | None = None
    """Number of most likely tokens to return at each position; None: no log-probabilities at all."""
    score_prompt: bool = False
    """Whether the tokens of the prompt get log-probabilities."""
    memory_length: int = 0
    state: MemoryState | None = None
    """The memory that the prompt continues."""
    keep_state: bool = False
    """Whether the memory at the end is returned."""
    owner: str = ""
    """Whose job it is; waiting jobs of several owners take turns."""
    shows_attention: bool = False
    """Whether the attention of the last token of the prompt is returned; nothing is generated then."""
    streams: bool = False
    """Whether each step is told to the listener, not only the end."""

    answer_size: AnswerSize | None = None
    """That of the whole request; None: it needs no room."""

    prompt_tokens: TokenLogprobs = field(init=False)
    """The prompt's tokens with log-probabilities, once it is read, if they are asked for."""
    attention_LNP: Tensor | None = None
    """The attention of the last token of the prompt by layer, head and distance, once it is computed."""
    is_cancelled: threading.Event = field(default_factory=threading.Event)

    num_generated: int = 0
    """Number of tokens that were generated for all samples."""
    kept_ids: list[int] = field(default_factory=list)
    """The tokens that were generated, those of a stop string too, once the job that keeps its state has finished."""

    def __post_init__(self) -> None:
        self.pending: list[Event] = []
        """What the listener was not told yet."""
        self.prompt_tokens = TokenLogprobs(self.num_logprobs or 0)
        self._gathered: dict[int, tuple[list[str], TokenLogprobs, array[int]]] = {}
        self.sample_logprobs = [0.0] * self.num_samples
        """Log-probability of each sample with all its tokens, those of a stop string too, if they are asked for."""
        self.sample_lengths = [0] * self.num_samples
        """Number of these tokens of each sample."""

    def add(self, delta: Delta) -> None:
        """Let the listener be told what a sample got: all of it when it is finished, if the job does not stream."""
        if not self.streams:
            new = list[str](), TokenLogprobs(self.num_logprobs or 0), array("q")
            texts, tokens, offsets = self._gathered.setdefault(delta.sample, new)
            texts.append(delta.text)
            tokens.extend(delta.tokens)
            offsets.extend(delta.offsets)
            if delta.finish_reason is None:
                return
            delta = Delta(delta.sample, "".join(texts), tokens, offsets, delta.finish_reason)
        elif self.num_logprobs:
            delta = replace(delta, tokens=TokenLogprobs(self.num_logprobs, delta.tokens))
        self.pending.append(delta)

    def mean_logprob(self, sample: int) -> float:
        """Return the mean log-probability of the tokens of a sample, those of a stop string too."""
        return self.sample_logprobs[sample] / max(1, self.sample_lengths[sample])

    @cached_property
    def input_ids(self) -> list[int]:
        """The tokens to read: the BOS token where there is one, the newest token of the state, and the prompt."""
        if self.state is not None:
            return [self.state.newest, *self.prompt_ids]
        return [self.served.run.tokenizer.bos_token_id, *self.prompt_ids] if self.add_bos else self.prompt_ids

    @cached_property
    def builder(self) -> CompletionBuilder:
        """A builder without tokens, of which each sample has a copy: to decode a long prompt takes time."""
        return CompletionBuilder(self.served.run.tokenizer, self.input_ids, self.config)


@dataclass(eq=False)
class Sample:
    """A sequence that is being generated."""

    job: TextJob
    index: int
    generator: torch.Generator
    builder: CompletionBuilder
    memory: Memory | None
    """Its memory while it has no row, which samples that have not begun share; None while it has one."""
    newest: int = 0
    """The newest token, which its memory has not read yet."""
    num_characters: int = 0
    """Number of characters that were released so far."""
    turn_begin: int = 0
    """Number of its tokens when it got its row."""
    held: list[tuple[int, ScoredToken]] = field(default_factory=list)
    """Tokens whose text is held back, each with the index of the character where it begins."""

    @staticmethod
    def create(job: TextJob, index: int, memory: Memory) -> Sample:
        """Return sample `index` of a job, without tokens, after the memory of the prompt."""
        generator = torch.Generator().manual_seed((job.config.seed + index) % 2**63)
        return Sample(job, index, generator, job.builder.copy(), memory)

    def add(self, token: ScoredToken) -> Delta:
        """Add a token, and return the text and tokens that no later one can change."""
        builder = self.builder
        self.job.sample_logprobs[self.index] += token.logprob or 0.0
        self.job.sample_lengths[self.index] += 1
        begin = self.num_characters + builder.num_held_back
        self.newest = token.token_id
        is_eos = token.token_id in self.job.config.eos_token_ids
        text = builder.add(GeneratedToken(self.index, token.token_id, None, is_eos=is_eos))
        self.num_characters += len(text)
        self.held.append((begin, token))
        # a stop string and what follows it belong to no text
        is_cut = builder.finish_reason == "stop"
        released = [
            entry
            for entry in self.held
            if entry[0] < self.num_characters or (builder.finish_reason is not None and not is_cut)
        ]
        self.held = [] if builder.finish_reason else self.held[len(released) :]
        offsets = tuple(entry[0] for entry in released)
        tokens = tuple(entry[1] for entry in released)
        return Delta(self.index, text, tokens, offsets, builder.finish_reason)
