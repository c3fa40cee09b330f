"""Analyze what the heads of a run attend to, and how the loss falls from a document's start: `txl analyze attention`.

The results are plots, an interactive page and the plotted values, in one folder. The attention terms are the four
summands of an attention score; `attention_maps.py` defines them.

Shape suffixes: L layers, N heads, P distances between query and key, K tokens of the text, G groups of distances, X
document starts and the end of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from transformer_xl.apps.analyze import attention_plots as plots
from transformer_xl.apps.analyze.attention_maps import (
    AttentionMeans,
    TermMaps,
    num_visible_distances,
    pluralize,
    trace_attention,
)
from transformer_xl.apps.analyze.attention_page import attention_page, choose_page_tokens, token_texts
from transformer_xl.checkpoint_record import CheckpointName
from transformer_xl.cli.output import say_weights
from transformer_xl.config import INT32_MAX, EvaluationConfig, RunConfig, UserError
from transformer_xl.device import choose_device, set_threads
from transformer_xl.evaluation.attention_by_distance import require_attention_terms
from transformer_xl.evaluation.evaluate import check_token_ids, stream_losses
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback, TokenizedText
from transformer_xl.evaluation.score import encode_text
from transformer_xl.files import as_path, atomic_folder, check_is_new, npy_bytes, write_json
from transformer_xl.inference import TokenModel
from transformer_xl.progress import ProgressBar, note
from transformer_xl.run import load_run
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.tokenizers import to_bytes

DEFAULT_TOKENS = 8192
"""Default number of tokens to process."""
_PAPER_DISTANCE = 640  # the largest distance in the paper's plots
_MIN_CHUNKS = 8  # with fewer chunks of a text, the mean loss near a start would be too noisy
_MEMORY_LABELS = {"reset": "memory reset at the start", "continue": "memory continues"}


def analyze_attention(
    run: Path | str,
    text: str | bytes | None = None,
    *,
    corpus: Path | str | None = None,
    split: str = "test",
    max_tokens: int = DEFAULT_TOKENS,
    config: EvaluationConfig | None = None,
    max_distance: int | None = None,
    heads: Sequence[plots.Head] | None = None,
    page_tokens: int | None = None,
    out: Path | str | None = None,
    checkpoint: CheckpointName = "best",
    device: str = "auto",
    threads: int | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Measure and plot what heads attend to, term by term, and how the loss decreases from a document's start.

    Args:
        run: folder of a run whose architecture is transformer-xl or shaw (relative positions of Shaw et al. 2018).
        text: the text to process, or None for a split of a corpus.
        corpus: folder of a corpus with the run's tokenizer, or None for the corpus the run was trained on.
        split: train, valid or test, of the corpus.
        max_tokens: maximum number of tokens to process, from the start.
        config: evaluation settings that replace the run's; unless set here, the memory length is at least
            `max_distance`.
        max_distance: largest distance in the plots of mean attention probability by distance, or None for the memory
            length, at most 640.
        heads: (layer, head) of the heads to plot individually, both from 0, or None for the head with the largest mean
            distance in the first, middle and last layer.
        page_tokens: tokens on the page and in the plots of terms, from the start, or None for at most 192.
        out: new folder for the results, or None for the run's path with the suffix -attention.
        checkpoint: best for the weights with the lowest validation loss, or last for those of the last checkpoint.
        device: cuda, mps, cpu, or auto for the fastest of these that is available.
        threads: CPU threads of one operation, or None for torch's default.
        command: the command line of the user, stored in the results.

    Returns:
        Settings and results as plain values, as written to results.json in `out`, whose path is the value of `folder`.

    Raises:
        UserError: the model has no attention terms, a value is out of range, the text is empty, or the folder exists.
    """
    for name, number in (("max_tokens", max_tokens), ("max_distance", max_distance), ("page_tokens", page_tokens)):
        if number is not None and not 1 <= number <= INT32_MAX:
            raise UserError(f"{name} {number:,}: must be between 1 and {INT32_MAX:,}")
    set_threads(threads)
    torch_device, path = choose_device(device), as_path(run, "run", "give the folder of a run").resolve()
    folder = RunFolder.open(run)
    out = path.parent / f"{path.name}-attention" if out is None else Path(out)
    check_is_new(out)
    plan = _resolve_plan(folder.config, config or EvaluationConfig(), max_distance)
    loaded = load_run(folder, torch_device, checkpoint)
    model = require_attention_terms(loaded.model)
    say_weights(loaded.weights)
    shape = (model.config.n_layers, model.config.n_heads)
    _check_heads(heads or (), shape)
    if text is None:
        token_split = folder.open_corpus(corpus).split(split, verify=True)  # verify the checksums
        ids_K = token_split.first(max_tokens)
        check_token_ids(ids_K, folder.tokenizer.vocab_size)
        tokens = TokenizedText(ids_K, folder.tokenizer.bos_token_id, token_split.document_starts)
    else:
        ids_K = encode_text(folder.tokenizer, "the text", to_bytes(text))[:max_tokens]
        tokens = TokenizedText(ids_K, folder.tokenizer.bos_token_id)
    for warning in plan.warnings(torch_device):
        note(warning)
    num_tokens = len(tokens.tokens_K)
    distance = _max_distance(plan, max_distance, num_tokens)
    with atomic_folder(out) as temporary:
        maps = TermMaps(model, plan, choose_page_tokens(shape, num_tokens, page_tokens))
        means = AttentionMeans(model, plan, num_tokens)
        if not means.fills_memory:
            note(
                f"a text of {pluralize(num_tokens)} does not fill a memory of "
                f"{plan.context_limits.memory_length:,}, so the means include queries with little context; a longer "
                "text or a shorter memory length gives better means"
            )
        # one pass over the text fills the maps of its first tokens and the means over all of it
        with ProgressBar("attention", num_tokens, "tokens") as bar:
            trace_attention(model, tokens.tokens_K, plan, [means.add, maps.add], bar.advance)
        # a text that is a single document is split into chunks, and the loss is measured from the start of each
        documents, chunk_length = with_documents(tokens, plan)
        # the text is scored twice: with memory reset at each document's start, and with memory that continues
        reading = plan.model_of(loaded)
        with ProgressBar("loss", 2 * num_tokens, "tokens") as bar:
            losses = {
                name: loss_by_distance(reading, documents, plan, reset_memory=name == "reset", progress=bar.advance)
                for name in _MEMORY_LABELS
            }
        distance_LN, entropy_LN = means.distance_LN, means.entropy_LN
        values: dict[str, Any] = {
            "command": command,
            "run": str(run),
            **loaded.weights_values,
            "folder": str(out),
            "tokens": num_tokens,
            "documents": len(tokens.boundaries(reset_memory=True)) - 1,
            "segment_length": plan.segment_length,
            **asdict(plan.context_limits),
            "num_queries": means.num_queries,  # those averaged: with a full memory, unless the text does not fill it
            "max_distance": distance,
            "page_tokens": maps.num_tokens,
            "plotted_heads": [list(head) for head in heads or _farthest_heads(means)],
            "heads": [
                {
                    "layer": layer,
                    "head": head,
                    "mean_distance": float(distance_LN[layer, head]),
                    "entropy_nats": float(entropy_LN[layer, head]),
                }
                for layer, head in np.ndindex(maps.shape)
            ],
            "chunk_length": chunk_length,
            "loss": losses,
        }
        _write(temporary, values, folder, tokens, means.mean_LNP(distance), maps)
    return values


def with_documents(text: TokenizedText, plan: EvaluationPlan) -> tuple[TokenizedText, int | None]:
    """Split a text that is a single document into chunks of equal length, and treat each chunk as a document.

    A chunk is twice as long as memory and a segment together, so that the plot extends beyond the tokens that see the
    start of the chunk. It is shorter if there would be fewer than eight chunks.

    Returns:
        The text with its document starts, and the chunk length in tokens; or the text unchanged and None if it has
        several documents.
    """
    if len(text.boundaries(reset_memory=True)) > 2:
        return text, None
    num_tokens, max_length = len(text.tokens_K), 2 * (plan.context_limits.memory_length + plan.segment_length)
    chunk_length = max(1, min(max_length, num_tokens // _MIN_CHUNKS))
    return TokenizedText(text.tokens_K, text.bos_token_id, np.arange(0, num_tokens, chunk_length)), chunk_length


def loss_by_distance(
    model: TokenModel,
    text: TokenizedText,
    plan: EvaluationPlan,
    *,
    reset_memory: bool,
    progress: ProgressCallback | None = None,
) -> list[dict[str, Any]]:
    """Score a text, and group the losses by distance from the start of their document.

    Args:
        model: as for `stream_losses`.
        text: the text, with the positions where its documents start.
        plan: how the text is scored; its `reset_memory` is replaced.
        reset_memory: whether memory is reset at the start of each document, or continues; the groups are the same.
        progress: called with the number of tokens scored since the last call.

    Returns:
        A dictionary for each group, for JSON: the largest distance, the number of tokens, the mean loss in nats per
        token, and its standard error, which takes tokens as independent and is None for a group of one token. The
        groups are distances 1, 2, 3 to 4, 5 to 8 and so on; the first token of a document is at distance 1.

    Raises:
        UserError: weights are not finite.
    """
    boundaries_X = text.boundaries(reset_memory=True)
    max_distance_G = 2 ** np.arange((int(np.diff(boundaries_X).max()) - 1).bit_length() + 1)
    count_G, sum_G, square_sum_G = (np.zeros(len(max_distance_G)) for _ in range(3))
    for part in stream_losses(model, text, replace(plan, reset_memory=reset_memory), progress):
        position_K = np.arange(part.position, part.position + len(part.nats_K))
        start_K = boundaries_X[np.searchsorted(boundaries_X, position_K, side="right") - 1]
        group_K = np.searchsorted(max_distance_G, position_K - start_K + 1)
        losses_K = part.nats_K.astype(np.float64)
        for total_G, weight_K in ((count_G, None), (sum_G, losses_K), (square_sum_G, losses_K**2)):
            total_G += np.bincount(group_K, weight_K, minlength=len(total_G))
    mean_G = sum_G / count_G
    variance_G = np.maximum(square_sum_G / count_G - mean_G**2, 0)
    error_G = np.sqrt(variance_G / np.where(count_G > 1, count_G - 1, np.nan))  # with count - 1 degrees of freedom
    return [
        {
            "up_to_distance": distance,
            "tokens": int(count),
            "nats_per_token": mean,
            "standard_error": None if np.isnan(error) else error,
        }
        for distance, count, mean, error in zip(
            *(column_G.tolist() for column_G in (max_distance_G, count_G, mean_G, error_G)), strict=True
        )
    ]


def _check_heads(heads: Sequence[plots.Head], shape: tuple[int, int]) -> None:
    """Check that the heads exist in a model of this many layers and heads."""
    for head in heads:
        for name, number, count in zip(("layer", "head"), head, shape, strict=True):
            if not 0 <= number < count:
                raise UserError(
                    f"heads {head[0]}:{head[1]}: {name} {number} does not exist; valid are 0 to {count - 1}"
                )


def _resolve_plan(run: RunConfig, config: EvaluationConfig, max_distance: int | None) -> EvaluationPlan:
    """Resolve the settings, with memory for `max_distance` tokens unless its length is set."""
    plan = EvaluationPlan.resolve(run, config)
    if max_distance is None:
        plan.refuse_extended_context("an analysis of attention")
        return plan
    if config.memory_length is None and plan.context_limits.memory_length < max_distance:
        plan = EvaluationPlan.resolve(run, config.model_copy(update={"memory_length": max_distance}))
    farthest = num_visible_distances(plan) - 1
    if max_distance > farthest:
        raise UserError(
            f"max_distance {max_distance:,}: no token sees farther than {farthest:,} back; raise memory_length or "
            "attention_window"
        )
    return plan


def _max_distance(plan: EvaluationPlan, requested: int | None, num_tokens: int) -> int:
    """Return the largest distance in the plots of mean attention probability by distance."""
    if requested is None:
        farthest = num_visible_distances(plan) - 1
        # with memory length 0, the last token of a segment sees as far back as the segment's first
        return min(_PAPER_DISTANCE, farthest, num_tokens - 1, plan.context_limits.memory_length or farthest)
    if requested >= num_tokens:
        raise UserError(
            f"max_distance {requested:,}: the text has {pluralize(num_tokens)}; use a longer text or a smaller distance"
        )
    return requested


def _farthest_heads(means: AttentionMeans) -> list[plots.Head]:
    """Return the head with the largest mean distance of the first, middle and last layer."""
    n_layers = len(means.distance_LN)
    return [(layer, int(means.distance_LN[layer].argmax())) for layer in sorted({0, n_layers // 2, n_layers - 1})]


def _write(
    out: Path,
    values: dict[str, Any],
    folder: RunFolder,
    text: TokenizedText,
    mean_LNP: npt.NDArray[np.float64],
    maps: TermMaps,
) -> None:
    """Write plots, page and values to the folder `out`, and add the file names to the values."""
    heads = [(layer, head) for layer, head in values["plotted_heads"]]
    chunk_length = values["chunk_length"]
    subject = "a document" if chunk_length is None else f"a chunk of {pluralize(chunk_length)}"
    loss_plot = plots.draw_losses({_MEMORY_LABELS[name]: loss for name, loss in values["loss"].items()}, subject)
    tokens = token_texts(folder.tokenizer, text.tokens_K[: maps.num_tokens])
    term_files: list[str] = []
    for layer, head in heads:
        figure = plots.draw_terms(maps, (layer, head), [token.name for token in tokens])
        term_files += plots.save(figure, out / f"terms-layer-{layer}-head-{head}")
    values["files"] = {
        "mean_attention": plots.save(plots.draw_means(mean_LNP), out / "mean-attention"),
        "heads": plots.save(plots.draw_heads(mean_LNP, heads), out / "heads"),
        "terms": term_files,
        "loss": plots.save(loss_plot, out / "loss"),
        "page": ["attention.html"],
        "results": ["results.json", "mean-attention.npy"],
    }
    window = "" if values["attention_window"] is None else f", with attention window {values['attention_window']:,}"
    has_sinks = folder.config.model.has_attention_sinks
    rest = " What a query leaves of its probability is its head's attention sink." if has_sinks else ""
    about = (
        f"The first {pluralize(maps.num_tokens)} of a text, processed in segments of {values['segment_length']:,} "
        f"with memory length {values['memory_length']:,}, empty at the start{window}. Layers and heads are numbered "
        f"from 0.{rest}"
    )
    title = f"What the heads of {Path(values['run']).resolve().name} attend to"
    # tokenizers that are not lossless drop the whitespace between tokens, so the page inserts spaces
    page = attention_page(maps, tokens, title, about, spaced=not folder.tokenizer.is_lossless)
    (out / "attention.html").write_text(page, encoding="utf-8", errors="replace")
    write_json(out / "results.json", values)
    (out / "mean-attention.npy").write_bytes(npy_bytes(mean_LNP))
