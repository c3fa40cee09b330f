"""How much faster memory makes evaluation, at the same attention length (paper table 9 in appendix C).

A vanilla transformer that shall see W tokens before each prediction moves a window over the text token by token, and
computes all W of it again. Transformer-XL computes a token once, beside the keys and values of the W - 1 before it.
Both models here have the same sizes, number format and threads; weights are random, which changes no time. They take
turns in one process. Memory reads its text in whichever of several segment lengths is quickest.

Letters: T new tokens, W attention length, D width, F feed-forward width, N heads, H head width, L layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from transformer_xl.config import AlRfouConfig, BaseModelConfig, ModelConfig, TransformerXLConfig, UserError
from transformer_xl.device import Precision, autocast, resolve_dtype
from transformer_xl.model.build import build_model
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits
from transformer_xl.model.precision import with_matrices_in

PAPER = {800: 363, 1800: 773, 2800: 1409, 3800: 1874}
"""Attention length to how many times slower the paper's vanilla model is, on one GPU of 2018."""
SEGMENTS = (128, 256, 512, 1024, 2048)
"""Lengths in which memory reads its text; the quickest counts."""


@dataclass(frozen=True)
class Task:
    """What is compared."""

    model: ModelConfig
    """Settings of the model with memory, whose sizes the vanilla model takes."""
    lengths: tuple[int, ...] = tuple(PAPER)
    """W: attention lengths, in tokens."""
    clamp: int | None = None
    """Distances above this count as this one for the memory; none: all differ."""
    segments: tuple[int, ...] = SEGMENTS
    rounds: int = 3
    """How often each is timed; the median counts."""
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        for what, numbers in (("length", self.lengths), ("segment", self.segments), ("rounds", (self.rounds,))):
            if not numbers or min(numbers) < 1:
                given = ", ".join(map(str, numbers)) or "nothing"
                raise UserError(f"{what} {given}: wanted 1 or more")
        if not isinstance(self.model, TransformerXLConfig):
            raise UserError("the speed of evaluation is compared for Transformer-XL; give a recipe or run of that kind")


@dataclass(frozen=True)
class SpeedRow:
    """One attention length; seconds are for one predicted token, medians."""

    attention_length: int
    memory_seconds: float
    segment: int
    """T of that figure, the quickest."""
    vanilla_stored_seconds: float
    """Scores stored, nothing fused: as the paper's vanilla model ran."""
    vanilla_fused_seconds: float
    """Fused causal attention, torch's best."""
    factor_stored: float
    factor_fused: float
    limit: float
    """The factor if every multiplication took equally long."""
    paper: float | None
    """The paper's factor at this length."""

    def as_dict(self) -> dict[str, Any]:
        """By name, for JSON."""
        return asdict(self)


COLUMNS = ["attention", "vanilla s/token", "memory ms/token", "segment", "factor", "paper's", "arithmetic allows"]


def table_rows(figures: Mapping[str, Any], vanilla: Literal["stored", "fused"]) -> list[list[str]]:
    """Rows of a table, under COLUMNS, beside one of the two vanilla models.

    Args:
        figures: with `rows`, as `SpeedRow.as_dict` gives them.
        vanilla: with its scores stored, as the paper ran it, or with fused attention.
    """
    return [
        [
            f"{row['attention_length']:,}",
            f"{row[f'vanilla_{vanilla}_seconds']:.3f}",
            f"{row['memory_seconds'] * 1e3:.2f}",
            f"{row['segment']:,}",
            f"{row[f'factor_{vanilla}']:,.0f}",
            "-" if row["paper"] is None else f"{row['paper']:,.0f}",
            f"{row['limit']:,.0f}",
        ]
        for row in figures["rows"]
    ]


class Contest:
    """The two models, made once."""

    def __init__(self, task: Task, device: torch.device) -> None:
        torch.manual_seed(1)
        self.task, self.device = task, device
        self.format = resolve_dtype(device, task.precision)
        longest = max(task.lengths)
        # dropout plays no part; the vanilla model is Al-Rfou's, as in the paper, without its training losses
        shared = {"dropout": 0.0, "attention_dropout": 0.0, "attention_window": None, "clamp_length": None}
        memory: ModelConfig = task.model.model_copy(update=shared)
        sizes = memory.model_dump(include=AlRfouConfig.model_fields.keys() - {"architecture"})
        self._memory_model = self._ready(memory)
        self._vanilla_model = self._ready(AlRfouConfig(**sizes, max_position_embeddings=longest))

    def _ready(self, config: ModelConfig) -> LanguageModel:
        model = build_model(config).eval().to(self.device)
        return with_matrices_in(model, torch.bfloat16) if self.format == "bfloat16" else model

    @property
    def parameters(self) -> tuple[int, int]:
        """Of the model with memory, and of the vanilla one."""
        return self._memory_model.num_parameters(), self._vanilla_model.num_parameters()

    def rows(self, tell: Callable[[str], None] = lambda _: None) -> Iterator[SpeedRow]:
        """Measures one attention length after the other; `tell` hears what is being done."""
        with torch.inference_mode(), autocast(self.device, self.task.precision):
            self._warm()
            for length in self.task.lengths:
                yield self._row(length, tell)

    def _row(self, length: int, tell: Callable[[str], None]) -> SpeedRow:
        vanilla_text = self._tokens(length)
        memory = _Reading(self._memory_model, length, self.task.clamp, self._tokens)
        ways: dict[str, Callable[[], None]] = {
            "fused": lambda: self._window(vanilla_text),
            "stored": lambda: self._stored(vanilla_text),
            **{str(segment): lambda segment=segment: memory.segment(segment) for segment in self.task.segments},
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(self.task.rounds):
            tell(f"attention length {length:,}, round {number + 1} of {self.task.rounds}")
            for name, work in ways.items():
                times[name].append(self._seconds(work))
        fused, stored = (median(times.pop(name)) for name in ("fused", "stored"))
        each = {int(segment): median(seconds) / int(segment) for segment, seconds in times.items()}
        best = min(each, key=each.__getitem__)
        return SpeedRow(
            attention_length=length,
            memory_seconds=each[best],
            segment=best,
            vanilla_stored_seconds=stored,
            vanilla_fused_seconds=fused,
            factor_stored=stored / each[best],
            factor_fused=fused / each[best],
            limit=arithmetic_limit(self._memory_model.config, length, self.task.clamp),
            paper=PAPER.get(length),
        )

    def _warm(self) -> None:
        """What libraries do once, and buffers."""
        length = min(64, *self.task.lengths)
        self._window(self._tokens(length))
        self._stored(self._tokens(length))
        _Reading(self._memory_model, length, None, self._tokens).segment(length)

    def _window(self, text_1W: Tensor) -> None:
        """One prediction of the vanilla model: all of the window, and the loss of the last token."""
        hidden_1WD, _ = self._vanilla_model(text_1W, self._vanilla_model.inference_memory(1))
        self._vanilla_model.nats(hidden_1WD[:, -1:], text_1W[:, -1:])

    def _stored(self, text_1W: Tensor) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            self._window(text_1W)

    def _seconds(self, work: Callable[[], None]) -> float:
        self._wait()
        began = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _tokens(self, number: int) -> Tensor:
        return torch.randint(self.task.model.vocab_size, (1, number), device=self.device)


class _Reading:
    """The model with memory going on through a text, from a full memory on."""

    def __init__(self, model: LanguageModel, length: int, clamp: int | None, tokens: Callable[[int], Tensor]) -> None:
        self._model, self._tokens = model, tokens
        self._memory = model.inference_memory(1, ContextLimits(length - 1, length, clamp))
        for part_1T in tokens(length).split(1024, dim=1):
            _, self._memory = model(part_1T, self._memory)

    def segment(self, num_new: int) -> None:
        """Predicts the next tokens."""
        text_1T = self._tokens(num_new)
        hidden_1TD, self._memory = self._model(text_1T, self._memory)
        self._model.nats(hidden_1TD, text_1T)


def arithmetic_limit(config: BaseModelConfig, length: int, clamp: int | None) -> float:
    """Multiplications of one window over those of one token beside a memory, at attention length W.

    A layer's linear maps take 4 D N H + 2 D F for each token. Vanilla attention adds 2 N H for each pair of tokens, of
    which there are W (W + 1) / 2; memory adds 2 N H for each of W keys, and N H for each distance that has a position
    key of its own.
    """
    assert isinstance(config, TransformerXLConfig)
    inner = config.n_heads * config.head_dim
    linear = 4 * config.d_model * inner + 2 * config.d_model * config.d_ff
    distances = length if clamp is None else min(length, clamp + 1)
    vanilla = length * linear + length * (length + 1) * inner
    memory = linear + (2 * length + distances) * inner
    return vanilla / memory
