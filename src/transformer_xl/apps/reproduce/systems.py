"""The systems that the paper compares (tables 6, 8 and 10), each defined by its changes to the settings of a recipe.

A system is an architecture with or without recurrence (memory in training), trained with one of two losses: the full
loss (of all tokens of a segment) or half the loss (of the second half of each segment). Each becomes an ordinary run,
which `txl train` trains and `txl evaluate` scores. The settings that all systems share are called the base.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch

from transformer_xl.architectures import build_model
from transformer_xl.config import ARCHITECTURES, RunConfig, merge, run_settings
from transformer_xl.training.cost import step_cost

Groups = dict[str, dict[str, Any]]
"""Settings by group: model, train, evaluation."""


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
    architecture: str
    """A key of `config.ARCHITECTURES`."""
    recurrence: bool
    """Whether it is trained with memory."""
    loss: Literal["full", "half"] = "full"
    """Whether training computes the loss of all tokens of a segment, or of its second half only."""
    published: Published | None = None
    """The paper's result, or None if table 6 or 10 does not have the system."""
    larger: bool = False
    """Whether it has a quarter more layers, like the paper's model of 151M parameters compared with that of 128M."""
    equal_memory: bool = False
    """Whether its segments are as long as possible without a training step needing more device memory than one of the
    base settings, which have recurrence; it trains for fewer steps, so that it processes as much text."""

    @property
    def attends(self) -> bool:
        """Whether it has attention."""
        return self.architecture not in ("lstm", "qrnn")

    @property
    def has_memory(self) -> bool:
        """Whether it can be evaluated with memory; if not, evaluation needs a sliding window."""
        return ARCHITECTURES[self.architecture].has_memory

    def settings(self, base: Mapping[str, Mapping[str, Any]], vocab_size: int) -> Groups:
        """Return the system's settings: those of the base, changed where the system differs.

        Args:
            base: settings by group.
            vocab_size: size of the corpus's vocabulary.

        Raises:
            UserError: the base does not allow this system.
        """
        settings: Groups = merge({"model": {}, "train": {}, "evaluation": {}}, base)
        base_config = _checked(settings, vocab_size)
        known = ARCHITECTURES[self.architecture].model_fields
        model = settings["model"] = {name: value for name, value in settings["model"].items() if name in known}
        model["architecture"] = self.architecture
        train, base_train = settings["train"], base_config.train
        train |= {"loss": self.loss, "memory_length": base_train.memory_length if self.recurrence else 0}
        if self.architecture not in ("transformer-xl", "shaw"):
            settings["evaluation"].clear()  # its settings are lengths of a memory, which the other systems do not have
        if self.larger:
            model["n_layers"] = base_config.model.n_layers + max(1, base_config.model.n_layers // 4)
        if not self.attends:
            model["d_model"] = _matching_width(settings, vocab_size, num_parameters(base_config))
        if self.equal_memory:
            train["segment_length"] = _longest_segment(settings, vocab_size, _step_bytes(base_config))
            train["max_steps"] = round(base_train.max_steps * base_train.segment_length / train["segment_length"])
        _checked(settings, vocab_size)
        return settings


# columns: name, architecture, recurrence, loss, published (initial, best, window of the best: from the paper's table
# 6); in the names, xl is Transformer-XL, relative is the same without recurrence, sinusoidal and learned are absolute
# position encodings, and full or half is the loss
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
"""The rows of table 10 without recurrence: their segments are so long that a training step needs as much device memory
as with recurrence."""

RECURRENT = (System("qrnn", "qrnn", True), System("lstm", "lstm", True))
"""The recurrent models whose effective context length is measured too (table 8)."""

BY_NAME = {system.name: system for system in (*ABLATION, *EQUAL_MEMORY, *RECURRENT)}

CONTEXT_GROUPS = (("xl-larger", "qrnn", "lstm"), ("xl-full", "shaw-recurrent", "relative-full", "learned-half"))
"""Names of the systems in each group whose effective context lengths are measured (table 8); each is compared with the
best of its own group."""


def num_parameters(config: RunConfig) -> int:
    """Return the number of parameters of a model, without allocating it."""
    with torch.device("meta"):
        return build_model(config.model).num_parameters()


def _checked(settings: Groups, vocab_size: int) -> RunConfig:
    """Check the settings and return them; cutoffs auto, which need a corpus, become one softmax over all tokens."""
    model: dict[str, Any] = {"vocab_size": vocab_size}
    if settings["model"].get("cutoffs") == "auto":
        model["cutoffs"] = ()
    return run_settings(merge(settings, {"model": model}), "settings")


def _step_bytes(config: RunConfig) -> int:
    """Return the device memory in bytes that a training step needs, weights and optimizer state included."""
    lengths = {"segment_length": config.train.segment_length, "memory_length": config.train.memory_length}
    return step_cost(config.model, batch_size=config.train.batch_size, **lengths).bytes


def _matching_width(settings: Groups, vocab_size: int, target: int) -> int:
    """Return the d_model, a multiple of 8, whose number of parameters is closest to `target`."""

    def parameters(eighths: int) -> int:
        return num_parameters(_checked(merge(settings, {"model": {"d_model": 8 * eighths}}), vocab_size))

    below = _largest(lambda eighths: parameters(eighths) <= target)
    return 8 * min((below, below + 1), key=lambda eighths: abs(parameters(eighths) - target))


def _longest_segment(settings: Groups, vocab_size: int, max_bytes: int) -> int:
    """Return the longest segment with which a training step needs at most `max_bytes` of device memory."""

    def fits(length: int) -> bool:
        return _step_bytes(_checked(merge(settings, {"train": {"segment_length": length}}), vocab_size)) <= max_bytes

    return _largest(fits)


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest integer that fits, given that 1 and all integers below it fit: by doubling, then bisecting."""
    too_large = next(2**power for power in count(1) if not fits(2**power))
    return bisect_left(range(too_large), True, lo=too_large // 2 + 1, key=lambda number: not fits(number)) - 1
