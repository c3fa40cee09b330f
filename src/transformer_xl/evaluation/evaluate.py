"""Evaluating a run on a split of a corpus: figures for the whole, and the loss of every token where wanted.

Shape suffixes: K tokens of the text.
"""

from __future__ import annotations

import codecs
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError
from transformer_xl.device import resolve_dtype
from transformer_xl.evaluation.metrics import Sums
from transformer_xl.evaluation.plan import Documents, EvaluationPlan, Parts, Progress, Text
from transformer_xl.evaluation.scoring import RECURRENCE, score_parts
from transformer_xl.files import atomic_file
from transformer_xl.run_folder import Run
from transformer_xl.text.token_store import Tokens, TokenSplit
from transformer_xl.text.tokenizer import Tokenizer
from transformer_xl.text.tokenizers.words import WordTokenizer

_TOKENS_AT_ONCE = 2**20  # tokens looked through at once


@dataclass(frozen=True)
class Evaluation:
    """The figures of a scored text, with how they were obtained."""

    tokens: int
    unknown: int
    """How many of them are the vocabulary's word for unknown words; 0 where it has none."""
    bytes: int
    """Of the text. Of part of a text of words or numbers, whose white space is not kept: its share of the whole."""
    characters: int | None
    """Unicode characters; none: of words or numbers, where white space is not kept, or of text that is not UTF-8."""
    words: int | None
    """Stretches between white space; none: of part of a text whose tokens are not words."""
    nats_per_token: float
    bits_per_byte: float
    bits_per_character: float | None
    perplexity: float
    """Per token."""
    word_perplexity: float | None
    """Per word of the text: line ends do not count as words, but their loss does."""
    seconds: float
    tokens_per_second: float
    method: str
    method_settings: dict[str, Any]
    documents: Documents
    rows: int | None
    warmup: int | None
    segment: int
    memory: int
    window: int | None
    clamp: int | None
    precision: str

    def as_dict(self) -> dict[str, Any]:
        """By name, for JSON."""
        return asdict(self)


def evaluate(
    run: Run,
    split: TokenSplit,
    plan: EvaluationPlan | None = None,
    *,
    limit: int | None = None,
    progress: Progress | None = None,
    per_token: Path | None = None,
) -> Evaluation:
    """Scores a split of a corpus.

    Args:
        run: a loaded run.
        split: the text, as `Corpus.open(DIR).split("test")` gives it; its vocabulary must be the run's.
        plan: lengths, rows, documents, method and precision; none: the run's evaluation settings, as one stream.
        limit: number of tokens scored, from the start; none: all.
        progress: told how many tokens were scored.
        per_token: a file to write, whole or not at all: the loss of every token in nats, in text order, as a numpy
            array of float32.

    Raises:
        UserError: an empty split, unknown tokens, a limit below 1, odd weights, or what the method cannot do.
    """
    plan = plan or EvaluationPlan.of(run.config)
    method = plan.method or RECURRENCE
    if limit is not None and limit < 1:
        raise UserError(f"limit {limit}: wanted 1 or more tokens")
    tokens_K = split.first(limit)
    if not len(tokens_K):
        raise UserError("there is nothing to score; the split is empty")
    check_known(tokens_K, run.model.config.vocab_size)
    text = Text(tokens_K, run.tokenizer.bos_token_id, split.document_starts)
    start = time.perf_counter()
    nats = _summed(score_parts(run.model, text, plan, progress), per_token, len(tokens_K))
    seconds = time.perf_counter() - start
    sums = _counted(run.tokenizer, split, tokens_K, nats)
    return Evaluation(
        tokens=sums.tokens,
        unknown=_count_unknown(run.tokenizer, tokens_K),
        bytes=round(sums.bytes),
        characters=sums.characters,
        words=sums.words,
        nats_per_token=sums.nats_per_token,
        bits_per_byte=sums.bits_per_byte,
        bits_per_character=sums.bits_per_character,
        perplexity=sums.perplexity,
        word_perplexity=sums.word_perplexity,
        seconds=seconds,
        tokens_per_second=sums.tokens / seconds,
        method=method.name,
        method_settings=method.settings,
        documents=plan.documents,
        rows=plan.rows,
        warmup=plan.warmup,
        segment=plan.segment,
        memory=plan.context_limits.memory_length,
        window=plan.context_limits.attention_window,
        clamp=plan.context_limits.clamp_length,
        precision=resolve_dtype(next(run.model.parameters()).device, plan.precision),
    )


def _summed(parts: Parts, file: Path | None, length: int) -> float:
    """The sum of all losses; on the way they go into the file, which appears when all of them are there."""
    if file is None:
        return sum((part.sum for part in parts), 0.0)
    nats = 0.0
    # written, not mapped into memory: there a full disk would end the process
    with atomic_file(file) as aside, aside.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, {"descr": "<f4", "fortran_order": False, "shape": (length,)})
        begin = out.tell()
        for part in parts:
            out.seek(begin + 4 * part.begin)
            out.write(part.nats_K.astype("<f4").tobytes())
            nats += part.sum
    return nats


def _parts(tokens_K: Tokens) -> Iterator[npt.NDArray[Any]]:
    """A text piece by piece, so that a large one is never in memory whole."""
    for start in range(0, len(tokens_K), _TOKENS_AT_ONCE):
        yield tokens_K[start : start + _TOKENS_AT_ONCE]


def check_known(tokens_K: Tokens, num_known: int) -> None:
    """Looks whether a model knows all tokens of a text.

    Raises:
        UserError: it does not; the message names one.
    """
    if np.iinfo(tokens_K.dtype).max < num_known:
        return
    largest = max(int(part_K.max()) for part_K in _parts(tokens_K))
    if largest >= num_known:
        raise UserError(
            f"token {largest} is not one of the {num_known} the model knows; give a corpus of its vocabulary"
        )


def _counted(tokenizer: Tokenizer, split: TokenSplit, tokens_K: Tokens, nats: float) -> Sums:
    """What there is to divide by: bytes, characters and words, as far as they are known."""
    whole = len(tokens_K) == split.num_tokens
    words = split.num_words if whole and tokenizer.kind != "integers" else _count_words(tokenizer, tokens_K)
    if tokenizer.kind in ("words", "integers"):  # decoded, it would be another text: unknown words, white space
        share = split.num_bytes if whole else max(1, round(split.bytes_per_token * len(tokens_K)))
        return Sums(nats, len(tokens_K), share, words=words)
    num_bytes, characters = count_text(tokenizer, tokens_K)
    return Sums(nats, len(tokens_K), split.num_bytes if whole else num_bytes, characters, words)


def count_text(tokenizer: Tokenizer, tokens_K: Tokens) -> tuple[int, int | None]:
    """Bytes and Unicode characters of a text that its tokens give back exactly; no characters where it is not UTF-8.

    A character that the end of the text cuts does not count.
    """
    decoder, num_bytes = codecs.getincrementaldecoder("utf-8")(), 0
    characters: int | None = 0
    for part_K in _parts(tokens_K):
        content = tokenizer.decode_bytes(part_K)
        num_bytes += len(content)
        if characters is not None:
            try:
                characters += len(decoder.decode(content))
            except UnicodeDecodeError:
                characters = None
    return num_bytes, characters


def _count_words(tokenizer: Tokenizer, tokens_K: Tokens) -> int | None:
    if not isinstance(tokenizer, WordTokenizer) or tokenizer.splitting.pre_tokenizer != "spaces":
        return None
    is_newline_V = tokenizer.is_newline_V
    return sum(len(part_K) - int(np.count_nonzero(is_newline_V[part_K])) for part_K in _parts(tokens_K))


def _count_unknown(tokenizer: Tokenizer, tokens_K: Tokens) -> int:
    if not isinstance(tokenizer, WordTokenizer) or tokenizer.unk_token is None:
        return 0
    unknown = tokenizer.words.index(tokenizer.unk_token)
    return sum(int(np.count_nonzero(part_K == unknown)) for part_K in _parts(tokens_K))
