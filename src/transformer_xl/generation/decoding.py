"""Text in, text out: one text as a stream of pieces, many at once, or the likeliest by beam search.

    for piece in generate(run, "Once upon a time", tokens=300): ...
    texts = complete(run, ["Once", "The end"], samples=4, stop="\\n")
    best, *others = search(run, "Once upon a time", beams=4, tokens=30)

All three take the options of `Options`, by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal, Unpack

from typing_extensions import TypedDict, override

from transformer_xl.config import EvaluationConfig, UserError
from transformer_xl.device import Precision, autocast
from transformer_xl.evaluation.evaluate import EvaluationPlan
from transformer_xl.generation.beams import Beams, beam_search
from transformer_xl.generation.continuation import Continuation
from transformer_xl.generation.sampling import THE_PAPERS, Sampler
from transformer_xl.generation.writer import Adjust, BatchGenerator, GeneratedToken
from transformer_xl.model.memory import Memory
from transformer_xl.run_folder import Run
from transformer_xl.text.tokenizer import Tokenizer

Ended = Literal["tokens", "end", "stop"]
"""Why a text ends: as many tokens as wanted, a token that ends texts, or a stop string."""

Prompt = str | bytes | None
"""Text to go on from; none: the beginning of a text."""


class Options(TypedDict, total=False, closed=True):
    """What can be asked for by name."""

    tokens: int | None
    """Most tokens to make, 500 unless told; none: without end, and then nothing that was made is kept."""
    sampler: Sampler | None
    """How tokens are chosen; none: as for the paper's samples (the 40 likeliest)."""
    seed: int
    """Of the random choices, 0 unless told; text r of several is drawn with seed + r."""
    memory: int | Memory | None
    """Memory slots, in tokens (none: the run's evaluation memory; 0: what fills a segment of training, as else
    each token would follow from the one before alone); or a memory to go on from, a row for each prompt: then a
    prompt is read as what comes next, and not as the beginning of a text."""
    context: int | None
    """Only so many tokens are read, from the end of the prompt (the paper: 512); none: all."""
    min_tokens: int
    """Before so many no text ends, by a token or by a stop string."""
    end_ids: Collection[int]
    """Tokens that end a text; they are not shown, but for what a token that ends a line holds before the line end."""
    stop: str | Sequence[str]
    """Texts that end the text; they are not shown, but the memory has read the tokens they came in."""
    adjust: Adjust | None
    """Changes the scores before each choice."""
    logprobs: bool
    """Find the log-probability of each token too."""
    precision: Precision
    """Number format of matrix products, float32 unless told; for many texts round the weights to it once
    (`model/precision.py`), else that is done again for each token."""


@dataclass(frozen=True)
class Request:
    """The options, checked, with what stands for those not given."""

    tokens: int | None = 500
    sampler: Sampler | None = None
    seed: int = 0
    memory: int | Memory | None = None
    context: int | None = None
    min_tokens: int = 0
    end_ids: Collection[int] = ()
    stop: str | Sequence[str] = ()
    adjust: Adjust | None = None
    logprobs: bool = False
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise UserError(f"{self.tokens} tokens wanted; give 1 or more")
        if self.context is not None and self.context < 1:
            raise UserError(f"context {self.context}: wanted 1 or more tokens")
        if not 0 <= self.min_tokens <= (math.inf if self.tokens is None else self.tokens):
            raise UserError(f"min-tokens {self.min_tokens}: wanted from 0 to the {self.tokens} tokens to be made")
        if not all(self.stops):
            raise UserError("a stop string is empty; give some text, or leave it out")

    @property
    def stops(self) -> Sequence[str]:
        """The stop strings, however many were given."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    def token_ids(self, tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
        """What is read of a prompt.

        Raises:
            UserError: it is empty, cannot be written in this vocabulary, or there is neither prompt nor a new text.
        """
        goes_on = isinstance(self.memory, Memory)
        if prompt is None and goes_on:
            raise UserError("a memory was given without a prompt; give the text that comes next")
        if prompt is not None and not len(prompt):
            raise UserError("the prompt is empty; give some text, or no prompt at all to begin a new text")
        ids = [] if prompt is None else tokenizer.encode(prompt).tolist()
        whole = ids if goes_on else [tokenizer.bos_token_id, *ids]
        if not whole:
            raise UserError("the prompt holds no token of this vocabulary; give some text")
        return whole[-self.context :] if self.context else whole

    def resolve_dtype(self, run: Run) -> AbstractContextManager[object]:
        """The context in which the model is to be used."""
        return autocast(next(run.model.parameters()).device, self.precision)

    def memory_of(self, run: Run, num_prompts: int) -> Memory:
        """The memory to begin with."""
        if isinstance(self.memory, Memory):
            return self.memory
        context_limits = EvaluationPlan.resolve(
            run.config, EvaluationConfig() if self.memory is None else EvaluationConfig(memory_length=self.memory)
        ).context_limits
        return run.model.generation_memory(num_prompts, context_limits, segment=run.config.train.segment_length)

    def writer(self, run: Run, prompts: Sequence[Sequence[int]], samples: int) -> BatchGenerator:
        """What writes the tokens."""
        return BatchGenerator(
            run.model,
            prompts,
            self.sampler or THE_PAPERS,
            seed=self.seed,
            samples=samples,
            memory=self.memory_of(run, len(prompts)),
            end_ids=self.end_ids,
            min_tokens=self.min_tokens,
            adjust=self.adjust,
            scored=self.logprobs,
        )


@dataclass(frozen=True)
class Completion:
    """A text that was written."""

    text: str
    """What follows the prompt, without what ended it."""
    tokens: tuple[int, ...]
    """All that were made, with those that ended it."""
    logprobs: tuple[float, ...]
    """Of each token, as the model has it: natural logarithms; empty unless asked for."""
    ended: Ended
    """Why it ends."""

    @property
    def logprob(self) -> float | None:
        """Of all tokens together; none: not asked for."""
        return math.fsum(self.logprobs) if self.logprobs else None


class _Row:
    """One text while it is written."""

    def __init__(self, request: Request, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._request = request
        self._continuation = Continuation(tokenizer, prompt, request.stops)
        self.num_made = 0
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.ended: Ended | None = None

    def add(self, made: GeneratedToken) -> str:
        """Takes in one more token; gives the text that became certain."""
        self.num_made += 1
        if self._request.tokens is not None:  # of a text without end nothing is kept
            self.tokens.append(made.token)
            if made.logprob is not None:
                self.logprobs.append(made.logprob)
        stopping = self.num_made >= self._request.min_tokens
        if made.ended:
            self.ended = "end"
            text = self._continuation.end(made.token, stopping=stopping)
        else:
            text = self._continuation.push(made.token, stopping=stopping)
            if self.num_made == self._request.tokens:
                self.ended = "tokens"
                text += "" if self._continuation.stopped else self._continuation.finish(stopping=stopping)
        if self._continuation.stopped:
            self.ended = "stop"
        return text


class GenerationStream(Iterator[str]):
    """A text as it is written: iterate to get its pieces; a character is given once all its bytes are there."""

    def __init__(self, run: Run, prompt: Prompt, request: Request) -> None:
        ids = request.token_ids(run.tokenizer, prompt)
        self._row = _Row(request, run.tokenizer, ids)
        self._number_format = partial(request.resolve_dtype, run)
        with self._number_format():
            self._writer = request.writer(run, [ids], 1)

    @override
    def __next__(self) -> str:
        while self._row.ended is None:
            with self._number_format():
                (made,) = self._writer.step()
            if text := self._row.add(made):
                return text
        raise StopIteration

    @property
    def num_tokens(self) -> int:
        """How many tokens were made so far."""
        return self._row.num_made

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens made so far; empty where no end was set."""
        return tuple(self._row.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Of each token so far, natural logarithms; empty unless asked for, and where no end was set."""
        return tuple(self._row.logprobs)

    @property
    def ended(self) -> Ended | None:
        """Why it ended; none: it goes on."""
        return self._row.ended

    def memory(self) -> Memory:
        """The memory after all tokens made so far, to hand in as `memory` with what comes next; of one row."""
        with self._number_format():
            return self._writer.memory()


def generate(run: Run, prompt: Prompt = None, **options: Unpack[Options]) -> GenerationStream:
    """Writes one text; it is made while it is read.

    Args:
        run: a loaded run.
        prompt: text to go on from; none: the beginning of a text.
        options: see `Options`.

    Raises:
        UserError: an empty prompt, one that the vocabulary cannot write, or an option out of range.
    """
    return GenerationStream(run, prompt, Request(**options))


def complete(run: Run, prompts: Sequence[Prompt], *, samples: int = 1, **options: Unpack[Options]) -> list[Completion]:
    """Writes texts side by side, each as if it were alone.

    Args:
        run: a loaded run.
        prompts: texts to go on from, of any lengths.
        samples: texts written after each prompt, which is read once.
        options: see `Options`; each text has an end.

    Returns:
        the texts: all samples of the first prompt, then those of the next.

    Raises:
        UserError: as `generate`; no prompt, no samples, or no end.
    """
    if isinstance(prompts, (str, bytes)):
        raise UserError("prompts is one text; give a list of texts, such as [text], or use generate")
    request = Request(**options)
    if request.tokens is None:
        raise UserError("texts that are to be handed over whole need an end; give a number of tokens")
    ids = [request.token_ids(run.tokenizer, prompt) for prompt in prompts]
    rows = [_Row(request, run.tokenizer, prompt) for prompt in ids for _ in range(samples)]
    texts: list[list[str]] = [[] for _ in rows]
    with request.resolve_dtype(run):
        writer = request.writer(run, ids, samples)
        while writer.rows:
            for made in writer.step():
                texts[made.row].append(rows[made.row].add(made))
            writer.stop([row for row in writer.rows if rows[row].ended])
    return [_completion("".join(pieces), row) for pieces, row in zip(texts, rows, strict=True)]


def _completion(text: str, row: _Row) -> Completion:
    assert row.ended is not None
    return Completion(text, tuple(row.tokens), tuple(row.logprobs), row.ended)


def search(
    run: Run, prompt: Prompt = None, *, beams: int = 4, length_penalty: float = 1.0, **options: Unpack[Options]
) -> list[Completion]:
    """Finds the likeliest texts by beam search.

    Args:
        run: a loaded run.
        prompt: text to go on from; none: the beginning of a text.
        beams: how many continuations are kept side by side, and given back.
        length_penalty: they are ranked by log-probability / length ** length_penalty.
        options: see `Options`; those of drawing (sampler, seed) and stop strings do not go with it.

    Returns:
        the texts, best first, with log-probabilities.

    Raises:
        UserError: as `generate`; an option that does not go with beams, or no end.
    """
    odd = [name for name in ("sampler", "seed", "stop") if options.get(name)]
    if odd:
        raise UserError(f"beams find the likeliest text, nothing is drawn and no stop string read; leave out {odd[0]}")
    request = Request(**options)
    if request.tokens is None:
        raise UserError("beams need an end; give a number of tokens")
    ids = request.token_ids(run.tokenizer, prompt)
    settings = Beams(beams, request.tokens, length_penalty, tuple(request.end_ids), request.min_tokens, request.adjust)
    with request.resolve_dtype(run):
        found = beam_search(run.model, ids, settings, request.memory_of(run, 1))
    completions: list[Completion] = []
    for one in found:
        continuation = Continuation(run.tokenizer, ids)
        *first, last = one.tokens
        shown = [*map(continuation.push, first), continuation.end(last) if one.ended else continuation.push(last)]
        text = "".join([*shown, "" if one.ended else continuation.finish()])
        completions.append(Completion(text, one.tokens, one.logprobs, "end" if one.ended else "tokens"))
    return completions
