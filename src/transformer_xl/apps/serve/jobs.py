"""A prompt with the samples that continue it: what the engine runs, and what it returns.

Shape suffixes: L layers, N heads, P distances.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
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
    """Natural log-probability under the model, of a generated token before temperature and the like, of one of a prompt
    with the run's softmax temperature; None if unknown or not asked for."""
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
            self.append(token)

    def append(self, token: ScoredToken) -> None:
        """Add a token, of whose alternatives the first ones are kept."""
        self._ids.append(token.token_id)
        self._logprobs.append(math.nan if token.logprob is None else token.logprob)
        rest = [(-1, 0.0)] * (self._num_top - len(token.top))
        for token_id, logprob in (*token.top[: self._num_top], *rest):
            self._top_ids.append(token_id)
            self._top_logprobs.append(logprob)


@dataclass(frozen=True)
class Delta:
    """What one sample got since the listener was told of it."""

    sample: int
    text: str
    tokens: TokenLogprobs
    """The tokens whose text begins in the text so far, if log-probabilities are asked for."""
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
    """Whether the listener is told while the samples are generated, not only at the end."""

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
        self.prompt_tokens = TokenLogprobs(self.num_logprobs or 0)
        # of each sample, what the listener was not told yet
        self._news: dict[int, tuple[list[str], TokenLogprobs, array[int], list[FinishReason]]] = {}
        self.told = -math.inf
        """When (`time.monotonic`) the listener of a stream was told something last."""
        config = self.config
        self.num_candidates = config.num_candidates
        self.sampling = config.is_greedy, config.temperature, config.top_k, config.top_p, config.min_p
        """The settings that samples share which are drawn together."""
        self.sample_logprobs = [0.0] * self.num_samples
        """Log-probability of each sample with all its tokens, those of a stop string too, if they are asked for."""
        self.sample_lengths = [0] * self.num_samples
        """Number of these tokens of each sample."""

    def add(
        self, sample: int, text: str, tokens: Sequence[tuple[int, ScoredToken]], finish_reason: FinishReason | None
    ) -> None:
        """Take what a sample got, which the listener will be told; tokens come with where they begin in its text."""
        if not (text or tokens or finish_reason):
            return
        if sample not in self._news:
            self._news[sample] = [], TokenLogprobs(self.num_logprobs or 0), array("q"), []
        texts, all_tokens, offsets, reasons = self._news[sample]
        texts.append(text)
        for offset, token in tokens:
            offsets.append(offset)
            all_tokens.append(token)
        if finish_reason is not None:
            reasons.append(finish_reason)

    def take_news(self) -> list[Event]:
        """Return what the listener was not told yet, of each sample together."""
        news = self._news
        self._news = {}
        return [
            Delta(sample, "".join(texts), tokens, offsets, reasons[0] if reasons else None)
            for sample, (texts, tokens, offsets, reasons) in news.items()
        ]

    @property
    def has_news(self) -> bool:
        """Whether there is something that the listener was not told yet."""
        return bool(self._news)

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
    generator: np.random.Generator
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
        generator = np.random.default_rng((job.config.seed + index) % 2**63)
        builder = job.builder if job.num_samples == 1 else job.builder.copy()
        return Sample(job, index, generator, builder, memory)

    def add(self, token_id: int, scored: ScoredToken | None) -> FinishReason | None:
        """Add a token, and give the job the text and tokens that no later one can change.

        Args:
            token_id: the token.
            scored: the same with its log-probability, if the job asks for them.

        Returns:
            why the sample has ended, or None if it goes on.
        """
        builder, job = self.builder, self.job
        begin = self.num_characters + builder.num_held_back(token_id)
        self.newest = token_id
        is_eos = token_id in job.config.eos_token_ids
        text = builder.add(GeneratedToken(self.index, token_id, None, is_eos=is_eos))
        self.num_characters += len(text)
        reason, released = builder.finish_reason, list[tuple[int, ScoredToken]]()
        if scored is not None:
            job.sample_logprobs[self.index] += scored.logprob or 0.0
            job.sample_lengths[self.index] += 1
            self.held.append((begin, scored))
            # a stop string and what follows it belong to no text
            is_whole = reason is not None and reason != "stop"
            released = [entry for entry in self.held if is_whole or entry[0] < self.num_characters]
            self.held = [] if reason else self.held[len(released) :]
        job.add(self.index, text, released, reason)
        return reason
