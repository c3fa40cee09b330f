"""Surprisal of words: what each word of sentences or documents costs, alone and after the text before them.

The surprisal of a word is minus the binary logarithm of its probability: the sum over its tokens. Words are what
whitespace separates, exactly as the text has them. Each item, such as a sentence, is a line: it ends with a newline
token if the tokenizer has one, and that token has a row of its own, without a word. So the rows of an item add up to
the loss of its line.

To which word the space between two words belongs:

- leading: to the word after it, as the tokens of most subword vocabularies have it.
- trailing: to the word before it. Otherwise the end of a word is paid for by the next one, and the probabilities of all
  words can add up to more than 1 (Pimentel and Meister 2024, arXiv 2406.14561; Oh and Schuler 2024, arXiv 2406.10851).
  With p(B | ...) as the probability that the next token begins with whitespace, so that the word has ended,

    p(word) = p(tokens of the word | ...) p(B | ... word) / p(B | ...)

  where the last factor is that of the word before; the first word of an item has none.

Word and integer tokenizers have no tokens for spaces, so both are the same.

Shape suffixes: K tokens of all items, T those of one item, I items, W words of one item and its end, R rows of the
result, B batch size, D model width, V vocabulary, P positions of whitespace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import Unpack

from transformer_xl.config import EvaluationConfig, UserError, check_type
from transformer_xl.evaluation.evaluate import check_token_ids, losses_in_order, override_config
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback, TokenizedText, check_progress
from transformer_xl.files import as_path, csv_text, write_text
from transformer_xl.inference import TokenModel
from transformer_xl.run import Run, check_run
from transformer_xl.text.sources.items import ItemColumns, TextItem, check_items, item_of
from transformer_xl.text.tokenizers import TokenArray, Tokenizer, document_errors, to_bytes
from transformer_xl.text.tokenizers.base import ByteLevelTokenizer

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import EvaluationSettings

Whitespace = Literal["leading", "trailing"]
_COLUMNS = ("word_number", "word", "tokens", "num_unknown")
_SPREAD = "_sd"
ALONE = "surprisal_bits_alone"
"""The column of surprisals without what came before the item."""
_MAX_LOGITS = 2**22  # computed at once: 16 MiB of float32


class SurprisalTable(list[dict[str, Any]]):
    """A row for each word: a list of dicts, which pandas.DataFrame takes as it is.

    Columns: the labels of the item; `word_number` from 1; `word` as the text has it, empty in the row of the item's
    end; `tokens` and `num_unknown`, the number of its tokens and how many of them are the unknown token;
    `surprisal_bits_alone`, and `surprisal_bits_memory_M` for each memory length M. With method both-sides,
    `surprisal_bits_both_sides_M`, and with several orders for each of them its standard deviation over these, `..._sd`.
    """

    label_columns: tuple[str, ...] = ()
    """Names of the columns that identify the item."""

    @property
    def column_names(self) -> list[str]:
        """Names of all columns, in order."""
        return list(self[0])

    @property
    def surprisal_columns(self) -> list[str]:
        """Names of the columns of surprisals."""
        columns = self.column_names[len(self.label_columns) + len(_COLUMNS) :]
        return [name for name in columns if not name.endswith(_SPREAD)]

    def by_item(self) -> Iterator[tuple[tuple[Any, ...], list[dict[str, Any]]]]:
        """Yield the labels and the rows of each item."""
        for labels, rows in groupby(self, key=lambda row: tuple(row[name] for name in self.label_columns)):
            yield labels, list(rows)

    def to_csv(self, file: Path | str | None = None) -> str:
        """Return the table as CSV, and write it to a file (UTF-8, without byte order mark) unless that is None.

        Raises:
            UserError: the file system refuses.
        """
        text = csv_text(self.column_names, self)
        if file is not None:
            write_text(as_path(file, "file", "give the path of a .csv file"), text)
        return text


def surprisal(
    run: Run,
    items: str | Mapping[str, str] | Iterable[str | Mapping[str, Any] | TextItem],
    config: EvaluationConfig | None = None,
    *,
    memory_lengths: Sequence[int] | None = None,
    whitespace: Whitespace = "leading",
    columns: ItemColumns | None = None,
    progress: ProgressCallback | None = None,
    **overrides: Unpack[EvaluationSettings],
) -> SurprisalTable:
    """Return the surprisal of each word in bits, alone and after the items before it.

        surprisal(run, ["The dog ran.", "It barked."], memory_lengths=[32, 256])
        surprisal(run, pandas.read_csv("items.csv").to_dict("records"))

    Each text is read twice or more: alone, with empty memory and the longest of the memory lengths, and once for each
    length in order, with memory that continues through a document and is empty at its start.

    Args:
        run: a loaded run.
        items: texts such as sentences, which are numbered from 1; a mapping from names to texts; or the rows of a
            table, each a mapping from columns to values.
        config: settings that override individual evaluation settings of the run, as for `score`. With
            `reset_memory=False` memory continues from document to document too.
        memory_lengths: memory lengths to compare, in tokens, or None for that of the run.
        whitespace: leading: the space between two words belongs to the second; trailing: to the first.
        columns: the columns of the text, of what identifies an item, and of its document, or None for `ItemColumns()`.
        progress: called with the number of tokens read since the last call.
        overrides: settings by name, which override those of `config`.

    Raises:
        UserError: there are no items, two have the same labels, a row lacks a column or its text, a text cannot be
            encoded, a token is a part of two words, `whitespace` is trailing with a tokenizer of another library, or
            one of the reasons that `evaluate` lists.
    """
    check_run(run)
    config = override_config(config, overrides, "items", "memory_lengths", "whitespace", "columns", "progress")
    check_whitespace(whitespace, run.tokenizer)
    check_progress(progress)
    plans = surprisal_plans(run, config, memory_lengths)
    checked = _checked_items(items, columns or ItemColumns())
    words = WordTokens.of_items(run.tokenizer, checked)
    check_token_ids(words.tokens_K, run.model.config.vocab_size)
    longest = max(plans.values(), key=lambda plan: plan.context_limits.memory_length)
    if longest.method == "both-sides" and whitespace == "trailing":
        raise UserError("method both-sides hides each word with the space before it; give whitespace leading")
    model, rows = longest.model_of(run), words.rows
    document_I = [item.document for item in checked]
    is_first_I = [index == 0 or document_I[index - 1] != document for index, document in enumerate(document_I)]
    readings = {ALONE: (replace(longest, reset_memory=True), words.start_I)}
    readings |= {f"surprisal_bits_{name}": (plan, words.start_I[is_first_I]) for name, plan in plans.items()}
    for name, (plan, starts_N) in readings.items():
        bits_R = words.surprisal_bits(model, plan, starts_N, whitespace=whitespace, progress=progress)
        found = {name: bits_R}
        if plan.keep_orders:
            found = {name: bits_R.mean(-1), f"{name}{_SPREAD}": bits_R.std(-1, ddof=1)}
        for column, values_R in found.items():
            for row, bits in zip(rows, values_R.tolist(), strict=True):
                row[column] = bits
    # an end without tokens: of a tokenizer that has no newline, or that joins it to the last word
    table = SurprisalTable(row for row in rows if row["word"] or row["tokens"])
    table.label_columns = tuple(checked[0].labels)
    return table


def check_whitespace(whitespace: Whitespace, tokenizer: Tokenizer) -> None:
    """Check to which word spaces belong.

    Raises:
        UserError: there is none of this name, or the tokenizer does not tell where its tokens have spaces.
    """
    if whitespace not in get_args(Whitespace):
        raise UserError(f"no whitespace {whitespace!r}; give one of {', '.join(get_args(Whitespace))}")
    if whitespace == "trailing" and tokenizer.kind == "library":
        raise UserError(
            "whitespace trailing needs the tokens that begin with a space, which are not known for a tokenizer of "
            "another library; give whitespace leading"
        )


def surprisal_plans(
    run: Run, config: EvaluationConfig | None, memory_lengths: Sequence[int] | None
) -> dict[str, EvaluationPlan]:
    """Return how `surprisal` reads the text in context, by the name of the memory: `memory_64`.

    Raises:
        UserError: settings contradict each other.
    """
    given = config or EvaluationConfig()
    if memory_lengths is not None and "memory_length" in given.model_fields_set:
        raise UserError("memory_length and memory_lengths were both given; use one of them")
    check_type(memory_lengths, (Sequence, type(None)), "memory_lengths", "give a list of integers")
    if memory_lengths is not None and not len(memory_lengths):
        raise UserError("memory_lengths is empty; give at least one, or None for that of the run")
    plans: dict[str, EvaluationPlan] = {}
    for length in [None] if memory_lengths is None else memory_lengths:
        one = given if length is None else override_config(given, {"memory_length": length})
        plan = EvaluationPlan.for_texts(run, one)
        if plan.method == "dynamic":
            raise UserError("method dynamic learns from the text, so it has no surprisal alone; give method memory")
        if "reset_memory" not in given.model_fields_set:
            plan = replace(plan, reset_memory=True)
        if plan.method == "both-sides":
            plans[f"both_sides_{plan.context_limits.memory_length}"] = replace(plan, keep_orders=plan.num_orders > 1)
            continue
        limits, is_window = plan.context_limits, plan.method == "sliding-window"
        plans[f"window_{limits.attention_window}" if is_window else f"memory_{limits.memory_length}"] = plan
    return plans


def _checked_items(items: object, columns: ItemColumns) -> list[TextItem]:
    if hasattr(items, "to_dict") and hasattr(items, "columns"):  # iterating over it gives the names of its columns
        raise UserError(f"items is a {type(items).__name__}; give its rows: items.to_dict('records')")
    check_type(items, Iterable, "items", "give a list of texts, or of the rows of a table")
    if isinstance(items, str):
        items = [items]
    elif isinstance(items, Mapping):
        items = [{"item": name, "text": text} for name, text in items.items()]
    checked: list[TextItem] = []
    for number, item in enumerate(cast(Iterable[Any], items), start=1):
        check_type(item, (str, Mapping, TextItem), f"item {number}", "give a text, or the row of a table by column")
        if isinstance(item, str):
            item = item_of({"item": number, "text": item}, ItemColumns(), f"item {number}")
        checked.append(item if isinstance(item, TextItem) else item_of(item, columns, f"item {number}"))
    if not checked:
        raise UserError("there is nothing to score; give at least one text")
    names = checked[0].labels.keys()
    if any(item.labels.keys() != names for item in checked):
        raise UserError("items are identified by different columns; use the same for all")
    if reserved := [name for name in names if name in _COLUMNS or name.startswith("surprisal_bits_")]:
        raise UserError(f"the result has a column '{reserved[0]}' of its own; rename that of the items")
    check_items(checked)
    return checked


@dataclass(frozen=True, eq=False)
class WordTokens:
    """The tokens of items, and the word that each belongs to."""

    tokenizer: Tokenizer
    rows: list[dict[str, Any]]
    """A row for each word and for the end of each item, without surprisals."""
    tokens_K: npt.NDArray[Any]
    row_K: npt.NDArray[np.int64]
    """Index of the row of each token."""
    start_I: npt.NDArray[np.int64]
    """Position of the first token of each item."""

    @staticmethod
    def of_items(tokenizer: Tokenizer, items: Sequence[TextItem]) -> WordTokens:
        """Encode items.

        Raises:
            UserError: the tokenizer cannot encode a text, or a token is a part of two words.
        """
        rows, ids, row_indices = list[dict[str, Any]](), list[TokenArray](), list[npt.NDArray[np.int64]]()
        for item in items:
            content, ids_T = encode_item(tokenizer, item)
            ids.append(ids_T)
            with document_errors(item.name):
                word_T = tokenizer.word_indices(content)
            row_indices.append(len(rows) + word_T)
            words = [*(word.decode("utf-8", errors="surrogateescape") for word in content.split()), ""]
            num_tokens_W = np.bincount(word_T, minlength=len(words)).tolist()
            num_unknown_W = np.bincount(word_T[ids_T == tokenizer.unk_token_id], minlength=len(words)).tolist()
            for number, values in enumerate(zip(words, num_tokens_W, num_unknown_W, strict=True), start=1):
                rows.append({**item.labels, **dict(zip(_COLUMNS, (number, *values), strict=True))})
        start_I = np.cumsum([0, *map(len, ids[:-1])])
        return WordTokens(tokenizer, rows, np.concatenate(ids), np.concatenate(row_indices), start_I)

    def surprisal_bits(
        self,
        model: TokenModel,
        plan: EvaluationPlan,
        starts_N: npt.NDArray[np.int64],
        *,
        whitespace: Whitespace = "leading",
        progress: ProgressCallback | None = None,
    ) -> npt.NDArray[np.float64]:
        """Return the surprisal of each row in bits, (R,), or (R, O) if the plan keeps orders.

        Args:
            model: the model, prepared with the plan's dtype.
            plan: how the tokens are read.
            starts_N: positions where documents start, at which the plan may empty the memory.
            whitespace: as for `surprisal`.
            progress: called with the number of tokens read since the last call.
        """
        text = TokenizedText(self.tokens_K, self.tokenizer.bos_token_id, starts_N, self.row_K)
        if plan.keep_orders:
            nats_KO = losses_in_order(model, text, plan, progress, columns=(plan.num_orders,))
            by_row = [np.bincount(self.row_K, nats_K, minlength=len(self.rows)) for nats_K in nats_KO.T]
            return np.stack(by_row, -1) / math.log(2)
        word_end_K = np.zeros(len(self.tokens_K))
        if whitespace == "trailing" and isinstance(self.tokenizer, ByteLevelTokenizer):
            model = cast(TokenModel, _WithWordEnds(model, self.tokenizer.starts_with_whitespace_V))
            nats_K, word_end_K = losses_in_order(model, text, plan, progress, columns=(2,)).T
            word_end_K[~_ends_word(self.tokenizer, self.tokens_K, self.start_I)] = 0
        else:
            nats_K = losses_in_order(model, text, plan, progress)
        nats_R = np.bincount(self.row_K, nats_K - word_end_K, minlength=len(self.rows))
        nats_R += np.bincount(self.row_K[:-1], word_end_K[1:], minlength=len(self.rows))  # to the word before
        return nats_R / math.log(2)


def encode_item(tokenizer: Tokenizer, item: TextItem) -> tuple[bytes, TokenArray]:
    """Return the text of an item with the end of its line, and its tokens.

    The line ends with a newline; if the tokenizer cannot encode that, with a space, else with nothing.

    Raises:
        UserError: the tokenizer cannot encode the text; the message has the labels of the item.
    """
    content = to_bytes(item.text)
    with document_errors(item.name):
        for ending in (b"\n", b" "):
            with suppress(UserError):
                tokenizer.encode_chunk(ending)
                content += ending
                break
        return content, tokenizer.encode_chunk(content).ids


def _ends_word(
    tokenizer: ByteLevelTokenizer, tokens_K: npt.NDArray[Any], start_I: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return at which tokens whitespace begins after a word of the same item, shape (K,)."""
    ends_V = np.array([content[-1:].isspace() for content in tokenizer.token_bytes])
    ends_word_K = tokenizer.starts_with_whitespace_V[tokens_K]
    ends_word_K[1:] &= ~ends_V[tokens_K[:-1]]
    ends_word_K[start_I] = False
    return ends_word_K


class _WithWordEnds:
    """A language model whose `nats` also has the loss of whitespace: of any token that begins with it.

    Args:
        model: the model.
        is_space_V: which tokens begin with whitespace.
    """

    def __init__(self, model: TokenModel, is_space_V: npt.NDArray[np.bool_]) -> None:
        self._model, self._is_space_V = model, torch.from_numpy(is_space_V)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        return self._model(*args, **arguments)

    def nats(self, hidden: Tensor, targets: Tensor, *, temperature: float) -> Tensor:
        """Return the loss of each target, and at the targets that begin with whitespace that of any such token.

        Returns:
            (B, T, 2), in nats; the second is never above the first, and 0 at other targets.
        """
        nats_BT = self._model.nats(hidden, targets, temperature=temperature)
        space_nats_BT, device = torch.zeros_like(nats_BT), nats_BT.device
        index_P2 = self._is_space_V[targets.cpu()].nonzero()  # on the CPU, where the targets are
        is_space_V = self._is_space_V.to(device)
        for part_P2 in index_P2.to(device).split(max(1, _MAX_LOGITS // len(is_space_V))) if len(index_P2) else ():
            index_P = tuple(part_P2.unbind(-1))
            logits_PV = self._model.logits(hidden[index_P][None])[0].to(nats_BT.dtype) / temperature
            nats_P = logits_PV.logsumexp(-1) - logits_PV[:, is_space_V].logsumexp(-1)
            space_nats_BT[index_P] = nats_P.clamp(min=0)
        return torch.stack([nats_BT, torch.minimum(space_nats_BT, nats_BT)], -1)
