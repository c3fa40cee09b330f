"""How much faster memory makes evaluation, with the same attention window (paper table 9 in appendix C).

`txl analyze speed` and `txl reproduce speed` measure it. A vanilla transformer that sees W tokens before each
prediction slides a window over the text token by token, and computes all W tokens again. Transformer-XL computes each
token once, with the keys and values of the W - 1 tokens before it in memory. Both models here have the same sizes,
dtype and threads, and random weights, which do not affect the time. They are timed in turns, in one process. The model
with memory is timed with several segment lengths, of which the fastest is reported.

Vanilla attention is timed in two ways: with all attention scores stored in memory, as in the paper, and with torch's
fused attention, which never stores them.

Shape suffixes: 1 batch size (one sequence), T new tokens, W attention window, D d_model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer_xl.apps.analyze.analysis_config import SpeedComparison
from transformer_xl.architectures import build_model
from transformer_xl.config import (
    AlRfouConfig,
    ModelConfig,
    TransformerXLConfig,
    UserError,
    load_recipe,
    merge_recipe,
    run_settings,
)
from transformer_xl.device import (
    choose_device,
    environment,
    require_memory,
    resolve_dtype,
    set_threads,
)
from transformer_xl.inference import prepare_inference
from transformer_xl.model.memory import ContextLimits
from transformer_xl.model.sizes import min_cache, min_parameters
from transformer_xl.progress import say
from transformer_xl.run_folder import RunFolder

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""How many times slower the paper's vanilla model is, on one GPU of 2018, by attention window."""

COLUMNS = ["window", "vanilla s/token", "memory ms/token", "segment", "factor", "paper's", "FLOPs ratio"]
"""Columns of the tables of `speed_tables`. window: attention window; segment: segment length of the model with memory;
factor: how many times slower the vanilla model is; paper's: that factor in the paper."""

_PAPER_COMPARISON = SpeedComparison()


def compare_speed(
    model: str, comparison: SpeedComparison = _PAPER_COMPARISON, *, device: str = "auto", threads: int | None = None
) -> dict[str, Any]:
    """Measure how much faster memory makes evaluation, with models of given sizes and random weights.

    Args:
        model: name of a recipe, or folder of a run, which sets the sizes of both models.
        comparison: attention windows, segment lengths and so on; by default the paper's.
        device: cuda, mps, cpu, or auto for the fastest of these that is available.
        threads: CPU threads of one operation, or None for torch's default.

    Returns:
        The settings, the environment, and in `rows` the results for each attention window (see
        `SpeedMeasurement.measure`), as plain values for JSON.

    Raises:
        UserError: the recipe or run does not exist, or is not of Transformer-XL.
    """
    if (Path(model) / "config.yaml").is_file():
        config = RunFolder.open(model).config
    else:
        config = run_settings(merge_recipe(load_recipe(model), {}), f"recipe {model}")
    # cutoffs auto are chosen from a corpus; without one, both models get a softmax over all tokens, without clusters
    sizes = config.model.model_copy(update={"cutoffs": ()}) if config.model.cutoffs == "auto" else config.model
    set_threads(threads)
    clamp_length = config.evaluation.clamp_length or config.model.limit("clamp_length")
    measurement = SpeedMeasurement(sizes, comparison, clamp_length, choose_device(device))
    return {
        "model": model,
        "parameters": measurement.num_parameters,
        "vanilla_parameters": measurement.num_vanilla_parameters,
        "clamp_length": clamp_length,
        "repeats": comparison.repeats,
        "dtype": measurement.dtype,
        **environment(measurement.device),
        "rows": [measurement.measure(window) for window in comparison.attention_windows],
    }


def speed_tables(results: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Return the rows of a table for each way of running the vanilla model, by title.

    Args:
        results: the return value of `compare_speed`.
    """
    titles = {
        "stored": "Vanilla as in the paper, attention scores stored",
        "fused": "Vanilla with fused causal attention",
    }
    return {
        title: [
            [
                f"{row['attention_window']:,}",
                f"{row[f'vanilla_{way}_seconds']:.3f}",
                f"{row['memory_seconds'] * 1e3:.2f}",
                f"{row['segment_length']:,}",
                f"{row[f'factor_{way}']:,.0f}",
                "-" if row["paper"] is None else f"{row['paper']:,.0f}",
                f"{row['flops_ratio']:,.0f}",
            ]
            for row in results["rows"]
        ]
        for way, title in titles.items()
    }


class SpeedMeasurement:
    """The model with memory and the vanilla model, built once, and their timing."""

    def __init__(
        self, config: ModelConfig, comparison: SpeedComparison, clamp_length: int | None, device: torch.device
    ) -> None:
        """Build both models with random weights.

        Args:
            config: settings of the model with memory, whose sizes the vanilla model shares.
            comparison: what is compared.
            clamp_length: the model with memory encodes larger distances as this one; None: no limit.
            device: the device of both models.

        Raises:
            UserError: `config` is not of Transformer-XL.
        """
        if not isinstance(config, TransformerXLConfig):
            raise UserError(
                f"the speed of evaluation is compared for Transformer-XL, not {config.architecture}; give a recipe or "
                "run of transformer-xl"
            )
        torch.manual_seed(1)
        self.comparison, self.clamp_length, self.device = comparison, clamp_length, device
        self.dtype = resolve_dtype(device, comparison.dtype)
        # no dropout; the vanilla model is Al-Rfou's, as in the paper, without its auxiliary training losses
        shared = {"dropout": 0.0, "attention_dropout": 0.0, "attention_window": None, "clamp_length": None}
        self.config = config.model_copy(update=shared)
        sizes = self.config.model_dump(include=AlRfouConfig.model_fields.keys() - {"architecture"})
        vanilla_config = AlRfouConfig(**sizes, max_position_embeddings=max(comparison.attention_windows))
        window, size = max(comparison.attention_windows), 2 if self.dtype == "bfloat16" else 4
        longest = max(comparison.segment_lengths)
        # the weights, the memory or the vanilla model's attention scores of a layer, and the activations of a layer
        numbers = min_parameters(self.config) + min_parameters(vanilla_config)
        numbers += max(self.config.n_heads * window**2, min_cache(self.config, window))
        numbers += longest * (self.config.d_model + self.config.d_ff)
        task = f"the comparison with windows of {window:,} tokens and segments of {longest:,}"
        require_memory(task, size * numbers, device, "lower attention_windows or segment_lengths")
        models = [build_model(one).eval().to(device) for one in (self.config, vanilla_config)]
        self.num_parameters, self.num_vanilla_parameters = (model.num_parameters() for model in models)
        self.memory_model, self.vanilla_model = (prepare_inference(model, comparison.dtype) for model in models)

    def measure(self, window: int) -> dict[str, Any]:
        """Time both models with one attention window.

        Returns:
            seconds per predicted token of the model with memory and the segment length that gave them; seconds per
            token of the vanilla model with attention scores stored, as in the paper, and with torch's fused causal
            attention; how many times faster memory is than each; the ratio of FLOPs; and the paper's factor for this
            window or None.
        """
        clamp_length, repeats = self.clamp_length, self.comparison.repeats
        times: dict[str | int, list[float]] = {}
        with torch.inference_mode():
            vanilla_text = self._random_tokens(window)
            predict_segment = self._with_full_memory(window, clamp_length)
            timed: dict[str | int, Callable[[], None]] = {
                "fused": lambda: self.predict_window(vanilla_text),
                "stored": lambda: self.predict_window_stored(vanilla_text),
                **{length: lambda length=length: predict_segment(length) for length in self.comparison.segment_lengths},
            }
            # run everything once at a short window, so that initialization and first allocations are not timed
            short_window = min(64, *self.comparison.attention_windows)
            self.predict_window(self._random_tokens(short_window))
            self.predict_window_stored(self._random_tokens(short_window))
            self._with_full_memory(short_window, None)(short_window)
            for index in range(repeats):
                say(f"attention window {window:,}, repeat {index + 1} of {repeats}")
                for name, function in timed.items():
                    times.setdefault(name, []).append(self._seconds(function))
        fused, stored = median(times["fused"]), median(times["stored"])
        memory, segment_length = min(
            (median(times[length]) / length, length) for length in self.comparison.segment_lengths
        )
        return {
            "attention_window": window,
            "memory_seconds": memory,
            "segment_length": segment_length,
            "vanilla_stored_seconds": stored,
            "vanilla_fused_seconds": fused,
            "factor_stored": stored / memory,
            "factor_fused": fused / memory,
            "flops_ratio": flops_ratio(self.config, window, clamp_length),
            "paper": PAPER.get(window),
        }

    def predict_window(self, text_1W: Tensor) -> None:
        """Compute one prediction of the vanilla model: all of the window, and the loss of the last token."""
        hidden_1WD, _ = self.vanilla_model(text_1W, self.vanilla_model.initial_memory(1))
        self.vanilla_model.nats(hidden_1WD[:, -1:], text_1W[:, -1:])

    def predict_window_stored(self, text_1W: Tensor) -> None:
        """Compute one prediction of the vanilla model with unfused attention, which stores all attention scores."""
        with sdpa_kernel(SDPBackend.MATH):
            self.predict_window(text_1W)

    def _with_full_memory(self, window: int, clamp_length: int | None) -> Callable[[int], None]:
        """Fill the memory with `window` - 1 tokens; return a function that predicts the next segment of some length."""
        memory = self.memory_model.initial_memory(1, ContextLimits(window - 1, window, clamp_length))
        for tokens_1T in self._random_tokens(window).split(1024, dim=1):  # 1024: bounds the memory of activations
            _, memory = self.memory_model(tokens_1T, memory)

        def predict_segment(length: int) -> None:
            nonlocal memory
            tokens_1T = self._random_tokens(length)
            hidden_1TD, memory = self.memory_model(tokens_1T, memory)
            self.memory_model.nats(hidden_1TD, tokens_1T)

        return predict_segment

    def _seconds(self, function: Callable[[], None]) -> float:
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        return time.perf_counter() - start

    def _random_tokens(self, length: int) -> Tensor:
        return torch.randint(self.config.vocab_size, (1, length), device=self.device)


def flops_ratio(config: TransformerXLConfig, window: int, clamp_length: int | None) -> float:
    """Return the multiplications for one window of W tokens over those for one token with memory.

    It is the factor by which memory would be faster if every multiplication took equally long. A layer's linear maps
    take 4 D N H + 2 D F multiplications for each token, with D d_model, N heads of width H, and F d_ff. Vanilla
    attention adds 2 N H for each pair of tokens, of which there are W (W + 1) / 2; attention with memory adds 2 N H for
    each of W keys, and N H for each distance that has a position key of its own.
    """
    inner = config.n_heads * config.head_dim
    linear = 4 * config.d_model * inner + 2 * config.d_model * config.d_ff
    distances = window if clamp_length is None else min(window, clamp_length + 1)
    vanilla = window * linear + window * (window + 1) * inner
    memory = linear + (2 * window + distances) * inner
    return vanilla / memory
