"""`embed`: a vector for each document, which is read with memory, segment by segment, whatever its length.

Hidden states are pooled while a document is read: no more than those of one step are held, so the memory that is needed
depends on the lengths of segment and memory, and not on the length of the documents.

Shape suffixes: N documents, B batch rows, T new tokens, D model width, K tokens of a document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import Unpack

from transformer_xl.config import BaseModelConfig, EvaluationConfig, UserError, check_type
from transformer_xl.device import autocast
from transformer_xl.evaluation.evaluate import check_token_ids, override_config
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback, check_progress
from transformer_xl.evaluation.pooling import PooledStates, Pooling
from transformer_xl.evaluation.score import Texts, encode_text, texts_by_name
from transformer_xl.evaluation.with_memory import memory_slots, rows_at_once
from transformer_xl.inference import TokenModel, require_reading_memory
from transformer_xl.model.memory import Memory
from transformer_xl.reader import STRIDE, Reader
from transformer_xl.run import Run, check_run
from transformer_xl.text.tokenizers import TokenArray, Tokenizer

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import EvaluationSettings


def embed(
    run: Run,
    documents: Texts,
    *,
    pooling: Pooling = "last",
    layer: int | None = None,
    config: EvaluationConfig | None = None,
    progress: ProgressCallback | None = None,
    **overrides: Unpack[EvaluationSettings],
) -> npt.NDArray[np.float32]:
    """Return a vector for each document, read from its first token to its last with memory.

        embed(run, ["A first document.", "Another, of any length."], pooling="mean", memory_length=1600)

    A document is its tokens alone, without a BOS token before them, as in transformers. Documents of similar length are
    read at once.

    Args:
        run: a loaded run.
        documents: one text, several texts, or a mapping from names to texts, of which messages have the names.
        pooling: the hidden state of the last token (last), or the mean of those of all tokens (mean).
        layer: which hidden states: 0 for the input of the first layer, up to the number of layers for the output of
            the last one; None: the last, after the final norm, from which tokens are predicted.
        config: settings of evaluation that override individual ones of the run: the lengths of segment and memory, the
            window, the batch size and the dtype.
        progress: called with the number of tokens read since the last call.
        overrides: settings by name, which override those of `config`.

    Returns:
        vectors (N, D), in the order of the documents.

    Raises:
        UserError: there is no document, one is empty or cannot be encoded, there is no such layer, or settings are
            invalid or of a method without memory.
    """
    check_run(run)
    check_progress(progress)
    config = override_config(config, overrides, "documents", "pooling", "layer", "progress")
    plan, reader = check_plan(EvaluationPlan.for_reading(run, config), run.config.model), run.model.for_documents()
    if reader is run.model:
        reader = plan.model_of(run)
    model, tokens = cast(TokenModel, _OneLayer(reader, checked_layer(run, layer))), encode_documents(run, documents)
    with torch.no_grad(), autocast(run.model.device, plan.dtype):
        return read_pooled(model, tokens, check_pooling(pooling), plan, progress)


def check_plan(plan: EvaluationPlan, model: BaseModelConfig) -> EvaluationPlan:
    """Return the settings that documents are read with.

    Raises:
        UserError: they are of a method without memory, or have an extended context.
    """
    plan.refuse_extended_context("the reading of documents")
    if plan.method != "memory":
        raise UserError(f"documents are read with memory, and the method is {plan.method}; give method memory")
    return replace(plan, segment_length=segment_of_documents(model, plan.segment_length))


def segment_of_documents(model: BaseModelConfig, segment_length: int) -> int:
    """Return the tokens of a document that are read at once: a block at most, if the model reads to both sides."""
    return min(segment_length, model.limit("perm_size") or segment_length)


def check_pooling(pooling: Pooling) -> Pooling:
    """Return the pooling.

    Raises:
        UserError: there is none of this name.
    """
    if pooling not in get_args(Pooling):
        raise UserError(f"no pooling {pooling!r}; give {' or '.join(get_args(Pooling))}")
    return pooling


def checked_layer(run: Run, layer: int | None) -> int:
    """Return the index of a layer among all hidden states.

    Raises:
        UserError: the model has no such layer.
    """
    num_layers = run.config.model.n_layers
    check_type(layer, (int, type(None)), "layer", "give an integer")
    if layer is not None and not 0 <= layer <= num_layers:
        raise UserError(f"layer {layer}: must be 0 (the input of the first layer) to {num_layers} (the last output)")
    return num_layers if layer is None else layer


def encode_documents(run: Run, documents: Texts) -> list[TokenArray]:
    """Return the tokens of each document.

    A last line without a newline gets no token for its end, as in transformers: it would be the one that `last` pools.

    Raises:
        UserError: there is no document, or one is empty or cannot be encoded.
    """
    tokenizer: Tokenizer = run.tokenizer
    encoded = [
        encode_text(tokenizer, name, content, ends_last_line=False)
        for name, content in texts_by_name(documents).items()
    ]
    if not encoded:
        raise UserError("there is no document; give at least one")
    for ids_K in encoded:
        check_token_ids(ids_K, run.model.config.vocab_size)
    return encoded


def read_pooled(
    model: TokenModel,
    documents: Sequence[TokenArray],
    pooling: Pooling,
    plan: EvaluationPlan,
    progress: ProgressCallback | None = None,
) -> npt.NDArray[np.float32]:
    """Return the pooled hidden states of each document (N, D); arguments are those of `embed`."""
    vectors_ND = np.empty((len(documents), model.config.d_model), dtype=np.float32)
    for rows_B in _batches(model, documents, plan):
        tokens = [documents[row].tolist() for row in rows_B]
        reader = Reader.begin(
            model,
            len(rows_B),
            plan.context_limits,
            segment_length=plan.segment_length,
            max_tokens=max(map(len, tokens)),
        )
        states, pooled_BD = PooledStates(pooling), None
        for hidden_BTD, lengths in reader.read(tokens):
            pooled_BD = states.add(hidden_BTD, lengths)
            if progress is not None:
                progress(sum(lengths))
        assert pooled_BD is not None  # no document is empty
        vectors_ND[rows_B] = pooled_BD.cpu().numpy()
    return vectors_ND


def _batches(model: TokenModel, documents: Sequence[TokenArray], plan: EvaluationPlan) -> Iterator[list[int]]:
    """Yield the indices of documents that are read at once, the longest documents first."""
    lengths_N = np.array([len(ids_K) for ids_K in documents])
    longest_first_N, begin = np.argsort(-lengths_N, kind="stable"), 0
    while begin < len(lengths_N):
        longest = int(lengths_N[longest_first_N[begin]])
        rows_B = longest_first_N[begin : begin + rows_at_once(longest, plan)].tolist()
        if begin == 0:
            num_new, num_slots = min(longest, max(STRIDE, plan.segment_length)), memory_slots(model, longest, plan)
            advice = "lower memory_length, segment_length or batch_size"
            sizes = {"num_rows": len(rows_B), "num_new": num_new, "num_slots": num_slots}
            require_reading_memory(model, "the reading of documents", **sizes, advice=advice)
        yield rows_B
        begin += len(rows_B)


class _OneLayer:
    """A model whose hidden states are those of one layer."""

    def __init__(self, model: TokenModel, layer: int) -> None:
        self._model, self._layer = model, layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Memory]:
        if self._layer == self._model.config.n_layers:
            return self._model(*args, **kwargs)
        states_BTD, memory = self._model.hidden_states(*args, **kwargs)
        return states_BTD[self._layer], memory
