"""Evaluation of a run on a split of a corpus: metrics of the whole split, and optionally the loss of every token.

`evaluate` resolves the settings to an `EvaluationPlan`. The plan's method (`with_memory.py`, `sliding_window.py`,
`dynamic.py` or `both_sides.py`) computes the loss of every token; the losses are summed in float64, and `metrics.py`
divides the sum by the number of tokens, bytes or words.

Shape suffixes: B batch size, T new tokens of a step, K tokens of the text.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Unpack, override

from transformer_xl.config import (
    WITH_PLAIN_WEIGHTS,
    EvaluationConfig,
    UserError,
    check_overrides,
    check_settings,
    check_type,
)
from transformer_xl.display import Displayed
from transformer_xl.evaluation import both_sides, dynamic, sliding_window
from transformer_xl.evaluation import with_memory as memory
from transformer_xl.evaluation.metrics import Sums, chunks
from transformer_xl.evaluation.plan import EvaluationPlan, ProgressCallback, StepLosses, TokenizedText, check_progress
from transformer_xl.files import as_path, atomic_file
from transformer_xl.inference import TokenModel, prepare_inference
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.run import Run, check_run
from transformer_xl.text.token_store import Tokens, TokenSplit

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import EvaluationSettings

# losses are copied from the device after this many steps or losses, because each copy synchronizes with the device
_MAX_STEPS_ON_DEVICE = 512
_MAX_LOSSES_ON_DEVICE = 2**20
# small tensors that are kept leave holes between the large ones of each step, which were 8 KB for each token
_MAX_STEPS_ON_CPU = 1

_METHODS = {"memory": memory, "sliding-window": sliding_window, "dynamic": dynamic, "both-sides": both_sides}


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationResult(Displayed, Sums):
    """Loss, counts and metrics of a scored text, and the settings they were measured with.

    `perplexity` is per word, line ends included, whatever the tokenizer: the figure that papers report for word-level
    data sets. `token_perplexity` is per token. For bytes and characters papers report `bits_per_byte` (enwik8, text8).
    """

    seconds: float
    """Time that the evaluation took."""
    tokens_per_second: float
    plan: EvaluationPlan
    """How the text was read."""

    @override
    def summary(self) -> dict[str, Any]:
        shown = ("bits_per_byte", "perplexity", "nats_per_token", "tokens", "method", "segment_length", "memory_length")
        return {name: value for name, value in self.as_dict().items() if name in shown}

    @override
    def details(self) -> dict[str, Any]:
        return {name: value for name, value in self.as_dict().items() if value not in (None, {})}

    @override
    def as_dict(self) -> dict[str, Any]:
        """Return counts, metrics and settings by name, for JSON."""
        speed = {"seconds": self.seconds, "tokens_per_second": self.tokens_per_second}
        return {**super().as_dict(), **speed, **self.plan.as_dict()}


def evaluate(
    run: Run,
    split: str | TokenSplit = "test",
    config: EvaluationConfig | None = None,
    *,
    max_tokens: int | None = None,
    train_split: TokenSplit | None = None,
    progress: ProgressCallback | None = None,
    token_losses: Path | str | None = None,
    **overrides: Unpack[EvaluationSettings],
) -> EvaluationResult:
    """Score every token of a split once and return loss, perplexity per word and per token, and bits per byte.

        evaluate(run)
        evaluate(run, "valid", memory_length=512, max_tokens=100_000)

    Args:
        run: a loaded run.
        split: name of a split of the corpus the run was trained on, whose checksum is verified; or the split of another
            corpus made with the run's tokenizer, such as `Corpus.open(DIR).split("test")`.
        config: settings that override individual evaluation settings of the run.
        max_tokens: number of tokens to score from the start of the split, or None for all.
        train_split: the training text, required by method dynamic with the optimizer rms; None means that of the run's
            corpus if `split` is a name.
        progress: called with the number of tokens scored since the last call.
        token_losses: path of a .npy file to write atomically, with the loss of every token in nats, in text order, as
            float32.
        overrides: settings by name, which override those of `config`.

    Raises:
        UserError: settings contradict each other, the corpus of the run is missing or has no such split, the split is
            empty, a token id is not below the model's vocab_size, `max_tokens` is below 1, or weights are not finite.
    """
    check_run(run)
    config = override_config(config, overrides, "split", "max_tokens", "train_split", "progress", "token_losses")
    check_progress(progress)
    check_max_tokens(max_tokens)
    file = None if token_losses is None else as_path(token_losses, "token_losses", "give the path of a .npy file")
    plan = EvaluationPlan.of_run(run, config)
    if isinstance(split, str):
        corpus = run.open_corpus()
        if train_split is None and plan.needs_train_split:
            train_split = corpus.split("train", verify=True)
        split = corpus.split(split, verify=True)
    check_type(split, TokenSplit, "split", "give a name, such as 'test', or Corpus.open(DIR).split('test')")
    check_type(train_split, (TokenSplit, type(None)), "train_split", "give Corpus.open(DIR).split('train')")
    plan = replace(plan, train_tokens_K=train_split.tokens if train_split else None)
    tokens_K = split.first(max_tokens)
    if not len(tokens_K):
        raise UserError("there is nothing to score; the split is empty")
    check_token_ids(tokens_K, run.model.config.vocab_size)
    text = TokenizedText(tokens_K, run.tokenizer.bos_token_id, split.document_starts)
    start = time.perf_counter()
    losses = stream_losses(plan.model_of(run), text, plan, progress)
    if file is not None:
        losses = _write_losses(losses, file, len(tokens_K))
    nats = sum((chunk.sum for chunk in losses), 0.0)
    seconds = time.perf_counter() - start
    return EvaluationResult(
        **asdict(Sums.of_split(nats, run.tokenizer, split, tokens_K)),
        seconds=seconds,
        tokens_per_second=len(tokens_K) / seconds,
        plan=plan,
    )


def override_config(
    config: EvaluationConfig | None, overrides: Mapping[str, Any], *arguments: str
) -> EvaluationConfig | None:
    """Return settings given as an object and by name as one object, or None if there are none.

    Args:
        config: the settings as an object.
        overrides: settings by name, which take precedence.
        arguments: names of the function's own arguments, for error messages.

    Raises:
        UserError: an unknown name, a wrong type or a value out of range.
    """
    check_overrides(EvaluationConfig, config, overrides, arguments)
    if not overrides:
        return config
    base = {} if config is None else config.model_dump(exclude_unset=True)
    return check_settings(EvaluationConfig, {**base, **overrides}, "evaluation settings")


def check_max_tokens(max_tokens: int | None) -> None:
    """Check a number of tokens from the start of a split.

    Raises:
        UserError: it is neither None nor an integer of 1 or more.
    """
    check_type(max_tokens, (int, type(None)), "max_tokens", "give an integer or None")
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"max_tokens {max_tokens}: must be 1 or more")


def check_token_ids(tokens_K: Tokens, vocab_size: int) -> None:
    """Check that all token ids of a text are below the model's vocabulary size.

    Raises:
        UserError: a token id is not; the message contains the largest one.
    """
    if np.iinfo(tokens_K.dtype).max < vocab_size:
        return
    largest = max(int(chunk_K.max()) for chunk_K, _ in chunks(tokens_K))
    if largest >= vocab_size:
        raise UserError(
            f"token id {largest} is not below the model's vocab_size {vocab_size}; give a corpus prepared with the "
            "model's tokenizer"
        )


def check_weights(model: LanguageModel) -> None:
    """Check that all weights are finite.

    Raises:
        UserError: a weight is not; the message names its tensor.
    """
    # only plain tensors: a quantized weight is a subclass, which may not support the check
    weights = [(name, weight) for name, weight in model.named_parameters() if type(weight.data) is torch.Tensor]
    non_finite = [name for name, weight in weights if not weight.isfinite().all()]
    if non_finite:
        more = f" and {len(non_finite) - 1} more tensors" if non_finite[1:] else ""
        raise UserError(
            f"the weights {non_finite[0]}{more} are not finite; train again with a lower learning rate, or use another "
            "checkpoint (checkpoint=best or checkpoint=last)"
        )


@dataclass(frozen=True, eq=False)
class TokenLosses:
    """Losses of consecutive tokens of a text."""

    position: int
    """Position of the first token in the text."""
    nats_K: npt.NDArray[Any]
    """Loss of each token in nats, in the dtype of the model's losses."""

    @property
    def sum(self) -> float:
        """Sum of the losses, accumulated in float64."""
        return float(self.nats_K.sum(dtype=np.float64))


def stream_losses(
    model: TokenModel, text: TokenizedText, plan: EvaluationPlan, progress: ProgressCallback | None = None
) -> Generator[TokenLosses, None, None]:
    """Yield the loss of every token of a text once, by the plan's method, in chunks that need not be in text order.

    The model is in evaluation mode until the generator ends or is closed.

    Args:
        model: that of `EvaluationPlan.model_of`; or any language model, which is prepared here where nothing trains it.
        text: the text.
        plan: how the text is read.
        progress: called with the number of tokens scored since the last call.

    Raises:
        UserError: the method does not support a setting of the plan, or weights are not finite.
    """
    if isinstance(model, LanguageModel) and plan.method not in WITH_PLAIN_WEIGHTS:
        model = prepare_inference(model, plan.dtype)
    weights = model if isinstance(model, LanguageModel) else model.model
    check_weights(weights)
    with ExitStack() as stack:
        stack.callback(weights.train, weights.training)
        weights.eval()
        steps = stack.enter_context(closing(_METHODS[plan.method].losses(model, text, plan)))
        pending: list[StepLosses] = []
        for nats_BT, scored in steps:
            pending.append((nats_BT, scored))
            if progress:
                progress(sum(span.length for span in scored))
            num_pending = sum(nats_BT.numel() for nats_BT, _ in pending)
            max_steps = _MAX_STEPS_ON_CPU if nats_BT.device.type == "cpu" else _MAX_STEPS_ON_DEVICE
            if len(pending) == max_steps or num_pending >= _MAX_LOSSES_ON_DEVICE:
                yield from _fetch(pending)
                pending.clear()
        if pending:
            yield from _fetch(pending)


def _fetch(steps: list[StepLosses]) -> Iterator[TokenLosses]:
    """Copy the losses of several steps from the device in one transfer, and yield those of scored tokens."""
    all_K = torch.cat([nats_BT.flatten() for nats_BT, _ in steps]).cpu()
    for step_K, (nats_BT, scored) in zip(all_K.split([nats_BT.numel() for nats_BT, _ in steps]), steps, strict=True):
        step_BT = step_K.view(nats_BT.shape).numpy()
        for span in scored:
            yield TokenLosses(span.position, step_BT[span.row, : span.length])


def losses_in_order(
    model: TokenModel,
    text: TokenizedText,
    plan: EvaluationPlan,
    progress: ProgressCallback | None = None,
    columns: tuple[int, ...] = (),
) -> npt.NDArray[np.float64]:
    """Return the loss of every token of a text in nats, in text order, shape (K, *columns).

    Args:
        model: as for `stream_losses`, like the next three.
        text: the text.
        plan: how it is read.
        progress: called with the number of tokens scored since the last call.
        columns: what the model's `nats` returns for each token: by default one number.
    """
    nats_K = np.full((len(text.tokens_K), *columns), np.nan)
    for chunk in stream_losses(model, text, plan, progress):
        nats_K[chunk.position : chunk.position + len(chunk.nats_K)] = chunk.nats_K
    return nats_K


def _write_losses(losses: Iterator[TokenLosses], file: Path, length: int) -> Iterator[TokenLosses]:
    """Yield the losses unchanged, and write them to a .npy file that is moved to its path once it is complete."""
    # not memory-mapped: on a full disk, writing to a mapped file kills the process (SIGBUS)
    with atomic_file(file) as temporary, temporary.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, {"descr": "<f4", "fortran_order": False, "shape": (length,)})
        begin = out.tell()
        for chunk in losses:
            out.seek(begin + 4 * chunk.position)  # 4 bytes per float32
            out.write(chunk.nats_K.astype("<f4").tobytes())
            yield chunk
