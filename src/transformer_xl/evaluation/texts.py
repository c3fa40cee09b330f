"""Scoring texts of one's own: log-probabilities of tokens, lines and texts.

Shape suffixes: K tokens of one text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.config import UserError
from transformer_xl.evaluation.evaluate import check_known
from transformer_xl.evaluation.metrics import Sums
from transformer_xl.evaluation.plan import EvaluationPlan, Progress, Text
from transformer_xl.evaluation.scoring import ordered, score_parts
from transformer_xl.run_folder import Run
from transformer_xl.text.tokenizer import EncodingError, TokenArray, Tokenizer, split_chunks, to_bytes, token_dtype

Texts = str | bytes | Iterable[str | bytes] | Mapping[str, str | bytes]
"""One text, several, or several by name."""


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a scored text; it ends with the token that ends it."""

    number: int
    """1 for the first."""
    ids_K: TokenArray
    nats_K: npt.NDArray[Any]
    """Loss of each token: minus its log-probability."""

    @property
    def nats(self) -> float:
        """Their sum, added up in float64."""
        return float(self.nats_K.sum(dtype=np.float64))


@dataclass(frozen=True, eq=False)
class TextScore:
    """The losses of one text."""

    name: str
    ids_K: TokenArray
    nats_K: npt.NDArray[Any]
    """Loss of each token in nats, in text order: minus its log-probability."""
    sums: Sums
    """Of the whole text."""
    tokenizer: Tokenizer

    def lines(self) -> Iterator[Line]:
        """Its lines, whose losses add up to the whole."""
        last_K = self.tokenizer.is_newline_V[self.ids_K]
        last_K[-1] = True
        ends = (np.flatnonzero(last_K) + 1).tolist()
        for number, (begin, end) in enumerate(pairwise([0, *ends]), start=1):
            yield Line(number, self.ids_K[begin:end], self.nats_K[begin:end])


def score(
    run: Run,
    texts: Texts,
    plan: EvaluationPlan | None = None,
    *,
    progress: Progress | None = None,
) -> list[TextScore]:
    """Log-probabilities of texts, token by token, in order.

    Args:
        run: a loaded run.
        texts: one text, several, or several by name.
        plan: lengths, rows, documents, method and precision; none: the run's evaluation settings, and each text is read
            as if it were the only one (`documents` "reset").
        progress: told how many tokens were scored.

    Raises:
        UserError: no text, an empty one, one that the vocabulary cannot write, or what `evaluate` raises.
    """
    plan = plan or replace(EvaluationPlan.of(run.config), documents="reset")
    named = _named(texts)
    encoded = {name: encode_text(run.tokenizer, name, content) for name, content in named.items()}
    if not encoded:
        raise UserError("there is nothing to score; give one text at least")
    starts_N = np.cumsum([0, *map(len, encoded.values())])
    whole_K = np.concatenate(list(encoded.values()))
    check_known(whole_K, run.model.config.vocab_size)
    parts = score_parts(run.model, Text(whole_K, run.tokenizer.bos_token_id, starts_N[:-1]), plan, progress)
    nats_K = np.empty(len(whole_K), dtype=np.float64)
    ordered(parts, nats_K)
    scores: list[TextScore] = []
    for (name, ids_K), (begin, end) in zip(encoded.items(), pairwise(starts_N.tolist()), strict=True):
        content = named[name]
        sums = Sums(
            nats=float(nats_K[begin:end].sum()),
            tokens=end - begin,
            bytes=len(content),
            characters=_characters(content),
            words=None if run.tokenizer.kind == "integers" else len(content.split()),
        )
        scores.append(TextScore(name, ids_K, nats_K[begin:end], sums, run.tokenizer))
    return scores


def _named(texts: Texts) -> dict[str, bytes]:
    if isinstance(texts, str | bytes):
        return {"text": to_bytes(texts)}
    if isinstance(texts, Mapping):
        return {str(name): to_bytes(text) for name, text in texts.items()}
    return {f"text {number}": to_bytes(text) for number, text in enumerate(texts, start=1)}


def encode_text(tokenizer: Tokenizer, name: str, content: bytes) -> TokenArray:
    """The tokens of a whole text, its last line ended where the vocabulary ends lines.

    Raises:
        UserError: it is empty, or the vocabulary cannot write it; the message has the text's name.
    """
    ids_K = np.concatenate([np.zeros(0, dtype=token_dtype(tokenizer.vocab_size)), *_pieces(tokenizer, name, content)])
    if not len(ids_K):
        raise UserError(f"{name}: there is no token in it; give some text")
    return ids_K


def _pieces(tokenizer: Tokenizer, name: str, content: bytes) -> Iterator[TokenArray]:
    place = 0
    try:
        for piece in split_chunks(tokenizer, [content]):
            try:
                yield tokenizer.encode_chunk(piece).ids
            except EncodingError as error:
                raise EncodingError(place + error.place, error.what) from None
            place += len(piece)
    except EncodingError as error:
        raise UserError(f"{name}: byte {error.place:,}: {error.what}") from None


def _characters(content: bytes) -> int | None:
    try:
        return len(content.decode("utf-8"))
    except UnicodeDecodeError:
        return None
