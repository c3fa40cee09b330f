"""The systems that the paper compares (tables 6 to 8), as settings that differ from a base in what they are about.

Each becomes an ordinary run: `txl train` trains its settings, `txl evaluate` scores it.
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
    """What the paper says of a system: perplexity of WikiText-103's test text."""

    initial: float | None
    """At the attention length of training."""
    best: float
    length: int | None = None
    """Attention length of the best, in tokens."""


@dataclass(frozen=True)
class System:
    """One row of a table."""

    name: str
    """Of its runs: NAME-seedN."""
    architecture: Architecture
    recurrence: bool
    loss: Literal["full", "half"] = "full"
    published: Published | None = None
    larger: bool = False
    """A layer more in four, as the paper has its 151M model beside that of 128M."""
    equal_memory: bool = False
    """Its segments are as long as a step can have that needs no more memory than one with recurrence; so many fewer
    steps are done, that the text read is as much."""

    @property
    def attends(self) -> bool:
        """Whether it has an attention length."""
        return self.architecture not in ("lstm", "qrnn")

    @property
    def has_memory(self) -> bool:
        """Whether memory can be given it when it is scored; without, a window must move token by token."""
        return ARCHITECTURES[self.architecture].has_memory

    def settings(self, base: Mapping[str, Mapping[str, Any]], vocab_size: int) -> Groups:
        """Its settings: the base's, with what makes it this system.

        Raises:
            UserError: it cannot be made of the base.
        """
        settings: Groups = merge({"model": {}, "train": {}, "evaluation": {}}, base)
        model, train = settings["model"], settings["train"]
        with_memory = _checked(settings, vocab_size)
        fields = ARCHITECTURES[self.architecture].model_fields
        model = settings["model"] = {name: value for name, value in model.items() if name in fields}
        model["architecture"] = self.architecture
        train |= {"loss": self.loss, "memory_length": with_memory.train.memory_length if self.recurrence else 0}
        if self.architecture not in ("transformer-xl", "shaw"):
            settings["evaluation"].clear()  # lengths of a memory
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
"""What else the effective context length is measured of (table 8)."""

BY_NAME = {system.name: system for system in (*ABLATION, *EQUAL_MEMORY, *RECURRENT)}


def num_parameters(config: RunConfig) -> int:
    """Trained numbers of a model, which is not built."""
    with torch.device("meta"):
        return build_model(config.model).num_parameters()


def _checked(settings: Groups, vocab_size: int) -> RunConfig:
    """The settings as a run has them; clusters are left out, which are found from the corpus later."""
    known: dict[str, Any] = {"vocab_size": vocab_size}
    if settings["model"].get("cutoffs") == "auto":
        known["cutoffs"] = ()
    return run_settings(merge(settings, {"model": known}), "settings")


def _step_bytes(config: RunConfig) -> int:
    train = config.train
    return step_cost(
        config.model,
        batch_size=train.batch_size,
        segment_length=train.segment_length,
        memory_length=train.memory_length,
    ).bytes


def _fitting_width(settings: Groups, vocab_size: int, parameters: int) -> int:
    """The width, a multiple of 8, at which a model has about so many parameters."""

    def at(width: int) -> int:
        given = {"model": {"d_model": width}}
        return num_parameters(_checked(merge(settings, given), vocab_size))

    most = _largest(lambda count: at(8 * count) <= parameters)
    return 8 * min((most, most + 1), key=lambda count: abs(at(8 * count) - parameters))


def _fitting_segment(settings: Groups, vocab_size: int, num_bytes: int) -> int:
    """The longest segment with which a step needs no more than so many bytes."""

    def fits(segment: int) -> bool:
        given = {"train": {"segment_length": segment}}
        return _step_bytes(_checked(merge(settings, given), vocab_size)) <= num_bytes

    return _largest(fits)


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number from 1 on that fits, where all below it do: by doubling, then halving."""
    most = 1
    while fits(2 * most):
        most *= 2
    step = most
    while step := step // 2:
        if fits(most + step):
            most += step
    return most
