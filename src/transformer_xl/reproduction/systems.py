"""The systems that the paper compares (tables 6, 8 and 10), each as the settings in which it differs from a base.

Each becomes an ordinary run, which `txl train` trains and `txl evaluate` scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from transformer_xl.config import ARCHITECTURES, RunConfig, merge, run_settings
from transformer_xl.model.build import build_model
from transformer_xl.model.cost import step_cost

Groups = dict[str, dict[str, Any]]
"""Settings by group: model, train, evaluation."""

Architecture = Literal["transformer-xl", "shaw", "vaswani", "al-rfou", "lstm", "qrnn"]


@dataclass(frozen=True)
class Published:
    """The paper's result of a system: word perplexity on the test split of WikiText-103."""

    initial: float | None
    """With the attention window of training."""
    best: float
    """With the best attention window."""
    attention_window: int | None = None
    """The best attention window, in tokens."""


@dataclass(frozen=True)
class System:
    """One row of a table of the paper."""

    name: str
    """Its runs are called NAME-seedN."""
    architecture: Architecture
    recurrence: bool
    loss: Literal["full", "half"] = "full"
    published: Published | None = None
    larger: bool = False
    """Whether it has a quarter more layers, as the paper's model of 151M parameters beside that of 128M."""
    equal_memory: bool = False
    """Whether its segments are as long as they can be without a training step needing more bytes than one with
    recurrence; it trains for fewer steps, so that it reads as much text."""

    @property
    def attends(self) -> bool:
        """Whether it has attention."""
        return self.architecture not in ("lstm", "qrnn")

    @property
    def has_memory(self) -> bool:
        """Whether it can be evaluated with memory; without, evaluation needs a sliding window."""
        return ARCHITECTURES[self.architecture].has_memory

    def settings(self, base: Mapping[str, Mapping[str, Any]], vocab_size: int) -> Groups:
        """Return its settings: those of the base, with what makes it this system.

        Args:
            base: settings by group.
            vocab_size: size of the corpus's vocabulary.

        Raises:
            UserError: the system cannot be made from the base.
        """
        settings: Groups = merge({"model": {}, "train": {}, "evaluation": {}}, base)
        model, train = settings["model"], settings["train"]
        with_memory = _checked(settings, vocab_size)
        fields = ARCHITECTURES[self.architecture].model_fields
        model = settings["model"] = {name: value for name, value in model.items() if name in fields}
        model["architecture"] = self.architecture
        train |= {"loss": self.loss, "memory_length": with_memory.train.memory_length if self.recurrence else 0}
        if self.architecture not in ("transformer-xl", "shaw"):
            settings["evaluation"].clear()  # lengths of a memory that it does not have
        if self.larger:
            model["n_layers"] = with_memory.model.n_layers + max(1, with_memory.model.n_layers // 4)
        if not self.attends:
            model["d_model"] = _fitting_width(settings, vocab_size, num_parameters(with_memory))
        if self.equal_memory:
            train["segment_length"] = _fitting_segment(settings, vocab_size, _step_bytes(with_memory))
            base_train = with_memory.train
            train["max_steps"] = round(base_train.max_steps * base_train.segment_length / train["segment_length"])
        _checked(settings, vocab_size)
        return settings


ABLATION = (
    System("xl-full", "transformer-xl", True, "full", Published(27.02, 26.77, 500)),
    System("shaw-recurrent", "shaw", True, "full", Published(27.94, 27.94, 256)),
    System("xl-half", "transformer-xl", True, "half", Published(28.69, 28.33, 460)),
    System("relative-full", "transformer-xl", False, "full", Published(29.59, 29.02, 260)),
    System("relative-half", "transformer-xl", False, "half", Published(30.10, 30.10, 120)),
    System("shaw-full", "shaw", False, "full", Published(29.75, 29.75, 120)),
    System("shaw-half", "shaw", False, "half", Published(30.50, 30.50, 120)),
    System("sinusoidal-half", "vaswani", False, "half", Published(30.97, 30.97, 120)),
    System("learned-half", "al-rfou", False, "half", Published(31.16, 31.16, 120)),
    System("xl-larger", "transformer-xl", True, "full", Published(23.43, 23.09, 640), larger=True),
)
"""The ten rows of the ablation, in the paper's order (table 6)."""

EQUAL_MEMORY = (
    System("relative-full-longer", "transformer-xl", False, "full", Published(None, 27.98), equal_memory=True),
    System("relative-half-longer", "transformer-xl", False, "half", Published(None, 28.83), equal_memory=True),
)
"""The rows without recurrence at the same memory (table 10): their segments may be longer."""

RECURRENT = (System("qrnn", "qrnn", True), System("lstm", "lstm", True))
"""The recurrent models whose effective context length is measured too (table 8)."""

BY_NAME = {system.name: system for system in (*ABLATION, *EQUAL_MEMORY, *RECURRENT)}


def num_parameters(config: RunConfig) -> int:
    """Return the number of parameters of a model, without allocating it."""
    with torch.device("meta"):
        return build_model(config.model).num_parameters()


def _checked(settings: Groups, vocab_size: int) -> RunConfig:
    """Return the settings as those of a run; cutoffs to be found from the corpus are left out."""
    known: dict[str, Any] = {"vocab_size": vocab_size}
    if settings["model"].get("cutoffs") == "auto":
        known["cutoffs"] = ()
    return run_settings(merge(settings, {"model": known}), "settings")


def _step_bytes(config: RunConfig) -> int:
    """Return the bytes of memory that a training step needs."""
    train = config.train
    return step_cost(
        config.model,
        batch_size=train.batch_size,
        segment_length=train.segment_length,
        memory_length=train.memory_length,
    ).bytes


def _fitting_width(settings: Groups, vocab_size: int, parameters: int) -> int:
    """Return the d_model, a multiple of 8, whose number of parameters is closest to `parameters`."""

    def at(width: int) -> int:
        return num_parameters(_checked(merge(settings, {"model": {"d_model": width}}), vocab_size))

    most = _largest(lambda count: at(8 * count) <= parameters)
    return 8 * min((most, most + 1), key=lambda count: abs(at(8 * count) - parameters))


def _fitting_segment(settings: Groups, vocab_size: int, num_bytes: int) -> int:
    """Return the longest segment with which a training step needs at most `num_bytes`."""

    def fits(segment: int) -> bool:
        given = {"train": {"segment_length": segment}}
        return _step_bytes(_checked(merge(settings, given), vocab_size)) <= num_bytes

    return _largest(fits)


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, if 1 and all numbers below it do: by doubling, then halving."""
    most = 1
    while fits(2 * most):
        most *= 2
    step = most
    while step := step // 2:
        if fits(most + step):
            most += step
    return most
