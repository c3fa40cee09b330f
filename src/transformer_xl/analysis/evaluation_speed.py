"""How much faster memory makes evaluation, with the same attention window (paper table 9 in appendix C).

A vanilla transformer that is to see W tokens before each prediction slides a window over the text token by token, and
computes all W tokens again. Transformer-XL computes each token once, with the keys and values of the W - 1 before it in
memory. Both models here have the same sizes, dtype and threads, and random weights, which do not change the time. They
take turns in one process. The model with memory reads in the fastest of several segment lengths.

Shape suffixes: T new tokens, W attention window, D d_model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer_xl.config import (
    AlRfouConfig,
    BaseModelConfig,
    ModelConfig,
    RunConfig,
    TransformerXLConfig,
    UserError,
    load_recipe,
    merge_recipe,
    run_settings,
)
from transformer_xl.device import (
    Precision,
    autocast,
    choose_device,
    environment,
    resolve_dtype,
    set_threads,
)
from transformer_xl.model.build import build_model
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits
from transformer_xl.model.precision import with_matrices_in
from transformer_xl.progress import say
from transformer_xl.run_folder import RunFolder

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Attention window to how many times slower the paper's vanilla model is, on one GPU of 2018."""


@dataclass(frozen=True)
class SpeedComparison:
    """What is compared."""

    attention_windows: tuple[int, ...] = tuple(PAPER)
    """W: in tokens, for both models."""
    segment_lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    """T: segments in which the model with memory reads; the fastest counts."""
    repeats: int = 3
    """How often each is timed, in turns; the median counts."""
    clamp_length: int | Literal["auto"] | None = "auto"
    """Distances above this count as this one for the model with memory; None: all differ; auto: as the recipe or run is
    evaluated."""
    dtype: Precision = "auto"
    """Type of matrix products, for both models."""

    def __post_init__(self) -> None:
        for name in ("attention_windows", "segment_lengths", "repeats", "clamp_length"):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else () if value in (None, "auto") else (value,)
            if min(numbers, default=1) < 1 or value == ():
                given = ",".join(map(str, numbers)) or "(none)"
                raise UserError(f"{name} {given}: wanted 1 or more")


@dataclass(frozen=True)
class SpeedRow:
    """Results with one attention window; seconds are for one predicted token, medians."""

    attention_window: int
    memory_seconds: float
    segment_length: int
    """T of that figure, the fastest."""
    vanilla_stored_seconds: float
    """With attention scores stored, nothing fused: as the paper's vanilla model ran."""
    vanilla_fused_seconds: float
    """With fused causal attention, the fastest of torch."""
    factor_stored: float
    factor_fused: float
    limit: float
    """The factor if every multiplication took equally long."""
    paper: float | None
    """The paper's factor."""


_PAPER_COMPARISON = SpeedComparison()


def compare_speed(
    model: str,
    comparison: SpeedComparison = _PAPER_COMPARISON,
    *,
    device: str = "auto",
    threads: int | None = None,
) -> dict[str, Any]:
    """Measure how much faster memory makes evaluation, with models of given sizes and random weights.

    Args:
        model: name of a recipe, or folder of a run: the sizes of both models.
        comparison: attention windows and the like; the default has those of the paper.
        device: auto, cuda, mps or cpu.
        threads: CPU threads of one operation; None: torch's choice.

    Returns:
        The settings, the environment, and as `rows` each `SpeedRow` by name; plain values, for JSON.

    Raises:
        UserError: no such recipe or run, or it is not of Transformer-XL.
    """
    config = _settings(model)
    if comparison.clamp_length == "auto":
        clamp_length = config.evaluation.clamp_length or config.model.limit("clamp_length")
        comparison = replace(comparison, clamp_length=clamp_length)
    # cutoffs to be found from a corpus are left out: the softmax is not compared
    sizes = config.model.model_copy(update={"cutoffs": ()}) if config.model.cutoffs == "auto" else config.model
    set_threads(threads)
    measurement = SpeedMeasurement(sizes, comparison, choose_device(device))
    rows = [asdict(row) for row in measurement.rows(say)]
    with_memory, vanilla = measurement.num_parameters
    return {
        "model": model,
        "parameters": with_memory,
        "vanilla_parameters": vanilla,
        "clamp_length": comparison.clamp_length,
        "repeats": comparison.repeats,
        "dtype": measurement.dtype,
        **environment(measurement.device),
        "rows": rows,
    }


def _settings(model: str) -> RunConfig:
    if (Path(model) / "config.yaml").is_file():
        return RunFolder.open(model).config
    return run_settings(merge_recipe(load_recipe(model), {}), f"recipe {model}")


COLUMNS = ["window", "vanilla s/token", "memory ms/token", "segment", "factor", "paper's", "arithmetic allows"]


def speed_tables(measured: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Return a table for each vanilla model by its title, as rows under COLUMNS.

    Args:
        measured: what `compare_speed` returned.
    """
    return {
        "Vanilla as in the paper, attention scores stored": _rows(measured, "stored"),
        "Vanilla with fused causal attention": _rows(measured, "fused"),
    }


def _rows(measured: Mapping[str, Any], vanilla: str) -> list[list[str]]:
    return [
        [
            f"{row['attention_window']:,}",
            f"{row[f'vanilla_{vanilla}_seconds']:.3f}",
            f"{row['memory_seconds'] * 1e3:.2f}",
            f"{row['segment_length']:,}",
            f"{row[f'factor_{vanilla}']:,.0f}",
            "-" if row["paper"] is None else f"{row['paper']:,.0f}",
            f"{row['limit']:,.0f}",
        ]
        for row in measured["rows"]
    ]


class SpeedMeasurement:
    """The two models, built once, and their timing."""

    def __init__(self, config: ModelConfig, comparison: SpeedComparison, device: torch.device) -> None:
        """Build both models with random weights.

        Args:
            config: settings of the model with memory, whose sizes the vanilla model takes.
            comparison: what is compared.
            device: where both run.

        Raises:
            UserError: `config` is not of Transformer-XL.
        """
        if not isinstance(config, TransformerXLConfig):
            raise UserError(
                f"the speed of evaluation is compared for Transformer-XL, not {config.architecture}; give a recipe or "
                "run of transformer-xl"
            )
        torch.manual_seed(1)
        self.comparison, self.device = comparison, device
        self.dtype = resolve_dtype(device, comparison.dtype)
        self._vocab_size = config.vocab_size
        self._clamp_length = None if comparison.clamp_length == "auto" else comparison.clamp_length
        # without dropout; the vanilla model is Al-Rfou's, as in the paper, without its training losses
        shared = {"dropout": 0.0, "attention_dropout": 0.0, "attention_window": None, "clamp_length": None}
        memory_config: ModelConfig = config.model_copy(update=shared)
        sizes = memory_config.model_dump(include=AlRfouConfig.model_fields.keys() - {"architecture"})
        self._memory_model = self._built(memory_config)
        longest = max(comparison.attention_windows)
        self._vanilla_model = self._built(AlRfouConfig(**sizes, max_position_embeddings=longest))

    def _built(self, config: ModelConfig) -> LanguageModel:
        model = build_model(config).eval().to(self.device)
        return with_matrices_in(model, torch.bfloat16) if self.dtype == "bfloat16" else model

    @property
    def num_parameters(self) -> tuple[int, int]:
        """Numbers of parameters of the model with memory and of the vanilla model."""
        return self._memory_model.num_parameters(), self._vanilla_model.num_parameters()

    def rows(self, report: Callable[[str], None] = lambda _: None) -> Iterator[SpeedRow]:
        """Yield the results of one attention window after another; `report` is called with lines of progress."""
        with torch.inference_mode(), autocast(self.device, self.comparison.dtype):
            self._warm_up()
            for window in self.comparison.attention_windows:
                yield self._row(window, report)

    def _row(self, window: int, report: Callable[[str], None]) -> SpeedRow:
        segment_lengths, repeats = self.comparison.segment_lengths, self.comparison.repeats
        vanilla_text = self._random_tokens(window)
        memory = _MemoryReader(self._memory_model, window, self._clamp_length, self._random_tokens)
        timed: dict[str, Callable[[], None]] = {
            "fused": lambda: self._predict_window(vanilla_text),
            "stored": lambda: self._predict_window_stored(vanilla_text),
            **{str(length): lambda length=length: memory.predict_segment(length) for length in segment_lengths},
        }
        times: dict[str, list[float]] = {name: [] for name in timed}
        for index in range(repeats):
            report(f"attention window {window:,}, repeat {index + 1} of {repeats}")
            for name, function in timed.items():
                times[name].append(self._seconds(function))
        fused, stored = (median(times.pop(name)) for name in ("fused", "stored"))
        each = {int(length): median(seconds) / int(length) for length, seconds in times.items()}
        best = min(each, key=each.__getitem__)
        return SpeedRow(
            attention_window=window,
            memory_seconds=each[best],
            segment_length=best,
            vanilla_stored_seconds=stored,
            vanilla_fused_seconds=fused,
            factor_stored=stored / each[best],
            factor_fused=fused / each[best],
            limit=arithmetic_limit(self._memory_model.config, window, self._clamp_length),
            paper=PAPER.get(window),
        )

    def _warm_up(self) -> None:
        """Pay for one-time work of libraries, and for buffers."""
        window = min(64, *self.comparison.attention_windows)
        self._predict_window(self._random_tokens(window))
        self._predict_window_stored(self._random_tokens(window))
        _MemoryReader(self._memory_model, window, None, self._random_tokens).predict_segment(window)

    def _predict_window(self, text_1W: Tensor) -> None:
        """Compute one prediction of the vanilla model: all of the window, and the loss of the last token."""
        hidden_1WD, _ = self._vanilla_model(text_1W, self._vanilla_model.inference_memory(1))
        self._vanilla_model.nats(hidden_1WD[:, -1:], text_1W[:, -1:])

    def _predict_window_stored(self, text_1W: Tensor) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            self._predict_window(text_1W)

    def _seconds(self, function: Callable[[], None]) -> float:
        self._synchronize()
        start = time.perf_counter()
        function()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _random_tokens(self, number: int) -> Tensor:
        return torch.randint(self._vocab_size, (1, number), device=self.device)


class _MemoryReader:
    """The model with memory, reading a text segment by segment with its memory full."""

    def __init__(
        self, model: LanguageModel, window: int, clamp_length: int | None, random_tokens: Callable[[int], Tensor]
    ) -> None:
        self._model, self._random_tokens = model, random_tokens
        self._memory = model.inference_memory(1, ContextLimits(window - 1, window, clamp_length))
        for part_1T in random_tokens(window).split(1024, dim=1):
            _, self._memory = model(part_1T, self._memory)

    def predict_segment(self, length: int) -> None:
        """Predict the next `length` tokens."""
        text_1T = self._random_tokens(length)
        hidden_1TD, self._memory = self._model(text_1T, self._memory)
        self._model.nats(hidden_1TD, text_1T)


def arithmetic_limit(config: BaseModelConfig, window: int, clamp_length: int | None) -> float:
    """Return the multiplications of one window over those of one token with memory, for an attention window W.

    A layer's linear maps take 4 D N H + 2 D F for each token. Vanilla attention adds 2 N H for each pair of tokens, of
    which there are W (W + 1) / 2; memory adds 2 N H for each of W keys, and N H for each distance that has a position
    key of its own.
    """
    assert isinstance(config, TransformerXLConfig)
    inner = config.n_heads * config.head_dim
    linear = 4 * config.d_model * inner + 2 * config.d_model * config.d_ff
    distances = window if clamp_length is None else min(window, clamp_length + 1)
    vanilla = window * linear + window * (window + 1) * inner
    memory = linear + (2 * window + distances) * inner
    return vanilla / memory
