"""Scoring of texts: log-probabilities of tokens, lines and whole texts.

Shape suffixes: K tokens of one text or of all texts, V vocabulary, N texts (`starts_N` also has the end of the last).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Unpack, override

from transformer_xl.config import EvaluationConfig, UserError, check_type
from transformer_xl.display import MAX_COLORED_TOKENS, Displayed, tokens_html
from transformer_xl.evaluation.evaluate import check_token_ids, losses_in_order, override_config
from transformer_xl.evaluation.metrics import Sums, count
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback, TokenizedText, check_progress
from transformer_xl.run import Run, check_run
from transformer_xl.text.corpus_writer import count_words
from transformer_xl.text.documents import Document, text_chunks
from transformer_xl.text.sources.rows import rows_in_memory
from transformer_xl.text.token_store import TokenSplit
from transformer_xl.text.tokenizers import TokenArray, Tokenizer, document_errors, to_bytes, token_dtype

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import EvaluationSettings

Texts = str | bytes | Iterable[str | bytes] | Mapping[str, str | bytes]
"""One text, several texts, or a mapping from names to texts."""

_MAX_SHOWN = 5  # texts that a notebook shows


@dataclass(frozen=True, eq=False, repr=False)
class LineScore(Displayed):
    """Losses of one line of a text, including its newline token."""

    number: int
    """Line number, starting at 1."""
    ids_K: TokenArray
    """Token ids of the line."""
    nats_K: npt.NDArray[np.float64]
    """Loss of each token in nats: minus its log-probability."""

    @property
    def nats(self) -> float:
        """Loss of the line in nats."""
        return float(self.nats_K.sum())


@dataclass(frozen=True, eq=False, repr=False)
class TextScore(Displayed):
    """Losses of one text."""

    name: str
    """Its name in the mapping; without a mapping, "text" or "text 1", "text 2" and so on."""
    ids_K: TokenArray
    """Token ids of the text."""
    nats_K: npt.NDArray[np.float64]
    """Loss of each token in nats, in text order: minus its log-probability."""
    sums: Sums
    """Loss and counts of the whole text."""
    tokenizer: Tokenizer

    @override
    def summary(self) -> dict[str, Any]:
        sums = self.sums
        start = self.tokenizer.decode(self.ids_K[:MAX_COLORED_TOKENS])
        metrics = {name: value for name, value in sums.as_dict().items() if name in ("nats_per_token", "bits_per_byte")}
        return {"name": self.name, "text": start, "tokens": sums.tokens, "nats": sums.nats, **metrics}

    @override
    def details(self) -> dict[str, Any]:
        values = {"name": self.name, **self.sums.as_dict()}
        return {name: value for name, value in values.items() if value is not None}

    @override
    def _repr_html_(self) -> str:
        return self.to_html()

    def to_html(self, max_tokens: int = MAX_COLORED_TOKENS) -> str:
        """Return a table and the first tokens, colored by their losses, as HTML."""
        shown = self._texts_of_tokens(max_tokens)
        return f"{super()._repr_html_()}{tokens_html(shown, max(0, len(self.ids_K) - max_tokens))}"

    def _texts_of_tokens(self, max_tokens: int) -> Iterator[tuple[str, str, float]]:
        """Yield for the first tokens the text, a description and the loss; tokens that share a character are one."""
        decoder, held_K = self.tokenizer.stream_decoder(), list[float]()
        first_K = self.ids_K[:max_tokens].tolist()
        for index, token_id in enumerate(first_K):
            held_K.append(float(self.nats_K[index]))
            text = decoder.push(token_id) + (decoder.finish() if index == len(first_K) - 1 else "")
            if text:
                nats = sum(held_K)
                note = f"{len(held_K)} tokens, " if len(held_K) > 1 else ""
                yield text, f"{note}{nats:.2f} nats, probability {math.exp(-nats):.3g}", nats
                held_K.clear()

    def lines(self) -> Iterator[LineScore]:
        """Yield the lines of the text, whose losses add up to the loss of the text."""
        is_newline_K = self.tokenizer.is_newline_V[self.ids_K]
        is_newline_K[-1] = True  # the last line ends with the text, even without a newline
        ends = (np.flatnonzero(is_newline_K) + 1).tolist()
        for number, (start, end) in enumerate(pairwise([0, *ends]), start=1):
            yield LineScore(number, self.ids_K[start:end], self.nats_K[start:end])


class TextScores(list[TextScore]):
    """The scores of several texts: a list, which a notebook shows as tables and colored tokens."""

    def _repr_html_(self) -> str:
        more = f"<i>and {len(self) - _MAX_SHOWN:,} more texts</i>" if len(self) > _MAX_SHOWN else ""
        shown = self[:_MAX_SHOWN]  # which share the tokens that are shown
        return "".join(item.to_html(MAX_COLORED_TOKENS // len(shown)) for item in shown) + more


def score(
    run: Run,
    texts: Texts,
    config: EvaluationConfig | None = None,
    *,
    train_split: TokenSplit | None = None,
    progress: ProgressCallback | None = None,
    **overrides: Unpack[EvaluationSettings],
) -> TextScores:
    """Return the log-probability of every token of texts, in order.

        score(run, "The cat sat on the mat.")
        score(run, ["A first text.", "Another."], memory_length=512)

    Args:
        run: a loaded run.
        texts: one text, several texts, or a mapping from names to texts.
        config: settings that override individual evaluation settings of the run. Unless it sets `reset_memory`, each
            text is scored independently of the others.
        train_split: the training text, required by method dynamic with the optimizer rms; without it, a run of that
            method reads with memory.
        progress: called with the number of tokens scored since the last call.
        overrides: settings by name, which override those of `config`.

    Raises:
        UserError: there is no text, a text is empty or cannot be encoded, or one of the reasons that `evaluate` lists.
    """
    check_run(run)
    check_progress(progress)
    config = override_config(config, overrides, "texts", "train_split", "progress")
    plan = (EvaluationPlan.of_run if train_split else EvaluationPlan.for_texts)(run, config)
    plan = replace(plan, train_tokens_K=train_split.tokens if train_split else None)
    if config is None or "reset_memory" not in config.model_fields_set:
        plan = replace(plan, reset_memory=True)
    contents = texts_by_name(texts)
    encoded = {name: encode_text(run.tokenizer, name, content) for name, content in contents.items()}
    if not encoded:
        raise UserError("there is nothing to score; give at least one text")
    starts_N = np.cumsum([0, *map(len, encoded.values())])
    tokens_K = np.concatenate(list(encoded.values()))
    check_token_ids(tokens_K, run.model.config.vocab_size)
    text = TokenizedText(tokens_K, run.tokenizer.bos_token_id, starts_N[:-1])
    nats_K = losses_in_order(plan.model_of(run), text, plan, progress)
    scores = TextScores()
    for (name, ids_K), (start, end) in zip(encoded.items(), pairwise(starts_N.tolist()), strict=True):
        content = contents[name]
        counts = count(run.tokenizer, ids_K) | {"bytes": len(content), "characters": _count_characters(content)}
        if not run.tokenizer.counts_words:
            counts["words"] = count_words(content)
        sums = Sums(float(nats_K[start:end].sum()), **counts)
        scores.append(TextScore(name, ids_K, nats_K[start:end], sums, run.tokenizer))
    return scores


def texts_by_name(texts: Texts) -> dict[str, bytes]:
    """Return texts by their names: those of a mapping, else "text" or "text 1", "text 2" and so on.

    Of a DataFrame, a data set of `datasets` and mappings in a list, the texts are those of the column text, or of the
    only one with texts.

    Raises:
        UserError: they are of another type, or the column is not clear.
    """
    if isinstance(texts, str | bytes):
        return {"text": to_bytes(texts)}
    if isinstance(texts, Mapping):
        return {str(name): to_bytes(text) for name, text in texts.items()}
    check_type(texts, Iterable, "texts", "give a text, a list of texts, or a mapping from names to texts")
    texts = list(texts) if isinstance(texts, Iterator) else texts
    if rows := rows_in_memory(texts):
        texts = [text for batch in rows.batches() for _, text in batch.texts()]
    return {f"text {number}": to_bytes(text) for number, text in enumerate(texts, start=1)}


def encode_text(tokenizer: Tokenizer, name: str, content: bytes, *, ends_last_line: bool = True) -> TokenArray:
    """Return the tokens of a whole text.

    Args:
        tokenizer: encodes it.
        name: the text's name in messages.
        content: the text.
        ends_last_line: a tokenizer that ends each line with an EOS token also ends the last line with it, if that has
            no newline.

    Raises:
        UserError: the text is empty, or the tokenizer cannot encode it; the message contains the text's name.
    """
    ids_K = encode_part(tokenizer, name, content)
    if tokenizer.adds_final_newline and not ends_last_line and not content.endswith(b"\n"):
        ids_K = ids_K[:-1]
    if not len(ids_K):
        raise UserError(f"{name}: the text is empty; give one with at least one token")
    return ids_K


def encode_part(tokenizer: Tokenizer, name: str, content: bytes) -> TokenArray:
    """Return the tokens of a part of a text, such as a line; white space may have none.

    Raises:
        UserError: the tokenizer cannot encode it; the message contains the text's name.
    """
    chunks = [np.zeros(0, dtype=token_dtype(tokenizer.vocab_size))]
    for chunk in text_chunks(tokenizer, [Document(name, [content])]):
        with document_errors(name, chunk.position):
            chunks.append(tokenizer.encode_chunk(chunk.text).ids)
    return np.concatenate(chunks)


def _count_characters(content: bytes) -> int | None:
    try:
        return len(content.decode("utf-8"))
    except UnicodeDecodeError:
        return None
