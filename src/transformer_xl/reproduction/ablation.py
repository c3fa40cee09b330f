"""The results of the ablation: each system's best attention window beside the paper's, and which of its claims hold.

A system is scored with several attention windows, once for each seed. Its initial result is that with the attention
window of training; its best is the lowest mean over seeds, with the shortest window that gives it to the digits shown
(paper section 4.2: "the shortest possible attention length during evaluation to achieve the corresponding result").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, Literal

from transformer_xl.analysis.plots import COLOURS, Chart, Line
from transformer_xl.reproduction.systems import ABLATION, BY_NAME, System

Metric = Literal["bits_per_byte", "perplexity"]
DIGITS: dict[Metric, int] = {"bits_per_byte": 3, "perplexity": 2}
NAMES: dict[Metric, str] = {"bits_per_byte": "bits per byte", "perplexity": "perplexity"}

_HEADROOM = 0.5  # how far above the worst initial result a chart reaches, as a share of the range below it

COLUMNS = [
    *("system", "memory", "architecture", "loss"),
    *("initial", "best", "at window", "paper's initial", "best", "at window"),
]


@dataclass(frozen=True)
class SystemResult:
    """Scores of one system, lower is better."""

    system: System
    segment_length: int
    """T of its training."""
    trained_window: int
    """Attention window of its training: segment and memory together."""
    by_window: Mapping[int, Sequence[float]]
    """Scores by attention window, one for each seed."""
    metric: Metric

    @property
    def initial(self) -> Sequence[float]:
        """Scores with the attention window of training, one for each seed."""
        return self.by_window[self.trained_window]

    @property
    def best_window(self) -> int:
        """The shortest attention window whose mean score is the best to the digits shown."""
        shown = {window: round(mean(values), DIGITS[self.metric]) for window, values in self.by_window.items()}
        return min(window for window, value in shown.items() if value == min(shown.values()))

    @property
    def best(self) -> Sequence[float]:
        """Scores with the best attention window, one for each seed."""
        return self.by_window[self.best_window]

    def cells(self) -> list[str]:
        """Return its table row, under COLUMNS."""
        system, digits = self.system, DIGITS[self.metric]
        published = system.published
        paper = ["-", "-", "-"]
        if published:
            paper[0] = "-" if published.initial is None else f"{published.initial:.2f}"
            window = published.attention_window
            paper[1:] = [f"{published.best:.2f}", "-" if window is None else f"{window}"]
        return [
            *(system.name, "yes" if system.recurrence else "no", system.architecture, system.loss),
            *(_with_spread(self.initial, digits), _with_spread(self.best, digits), f"{self.best_window:,}"),
            *paper,
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain values, for JSON."""
        return {
            **asdict(self.system),
            "segment_length": self.segment_length,
            "by_window": {str(window): list(values) for window, values in self.by_window.items()},
            "trained_window": self.trained_window,
            "initial": list(self.initial),
            "best_window": self.best_window,
            "best": list(self.best),
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any], metric: Metric) -> SystemResult:
        """Return the result that `as_dict` gave."""
        by_window = {int(window): scores for window, scores in values["by_window"].items()}
        system = BY_NAME[values["name"]]
        return SystemResult(system, values["segment_length"], values["trained_window"], by_window, metric)


@dataclass(frozen=True)
class Ordering:
    """A claim of the paper: one system is better than another."""

    claim: str
    better: str
    worse: str


ORDERINGS = (
    Ordering("recurrence helps", "xl-full", "relative-full"),
    Ordering("recurrence helps with half the loss", "xl-half", "relative-half"),
    Ordering("with recurrence, this encoding is better than Shaw's", "xl-full", "shaw-recurrent"),
    Ordering("without recurrence, this encoding is better than Shaw's", "relative-full", "shaw-full"),
    Ordering("the same with half the loss", "relative-half", "shaw-half"),
    Ordering("this encoding is better than sinusoids of the position", "relative-half", "sinusoidal-half"),
    Ordering("this encoding is better than learned positions", "relative-half", "learned-half"),
    Ordering("with this encoding the full loss is better than half of it", "xl-full", "xl-half"),
    Ordering("a larger model is better", "xl-larger", "xl-full"),
    Ordering("recurrence helps even where memory for training is equal", "xl-full", "relative-full-longer"),
    Ordering("the same with half the loss and equal memory", "xl-half", "relative-half-longer"),
)


_AT_EQUAL_MEMORY = (("xl-full", "relative-full-longer"), ("xl-half", "relative-half-longer"))


def verdicts(found: Mapping[str, SystemResult]) -> list[tuple[str, str]]:
    """Return the paper's claims about the systems found, each with a verdict.

    One system is better than another if each of its seeds is better than each of the other's, to the digits shown;
    where seeds overlap, the verdict says so. It also says where there is only one seed, which has no spread.

    Args:
        found: results by the name of the system.
    """
    verdicts = [
        (ordering.claim, _compared(found[ordering.better], found[ordering.worse]))
        for ordering in ORDERINGS
        if ordering.better in found and ordering.worse in found
    ]
    for result in found.values():
        if not result.system.equal_memory:
            verdicts.append((_window_claim(result.system), _window_verdict(result)))
    return verdicts


def _compared(better: SystemResult, worse: SystemResult) -> str:
    digits = DIGITS[better.metric]
    first, second = ([round(value, digits) for value in result.best] for result in (better, worse))
    metrics = f"{mean(better.best):.{digits}f} and {mean(worse.best):.{digits}f}{_seeds_note(first)}"
    if max(first) < min(second):
        return f"as in the paper: {metrics}"
    if max(second) < min(first):
        return f"the other way round here: {metrics}"
    return f"{'seeds overlap' if len(first) > 1 else 'no difference'}: {metrics}"


def _seeds_note(values: Sequence[float]) -> str:
    return " (one seed each)" if len(values) == 1 else ""


def _window_claim(system: System) -> str:
    what = "longer attention than in training helps" if _longer_helps(system) else "longer attention is no help"
    return f"{system.name}: {what}"


def _longer_helps(system: System) -> bool:
    """Whether a longer attention window than in training helps, in the paper."""
    return system.published is not None and system.published.initial != system.published.best


def _window_verdict(result: SystemResult) -> str:
    system, digits, initial = result.system, DIGITS[result.metric], result.initial
    longer = {window: values for window, values in result.by_window.items() if window > result.trained_window}
    if not longer:
        learned = system.architecture == "al-rfou"
        return f"as in the paper: it has no positions beyond {result.trained_window}" if learned else "not tried here"
    window = min(longer, key=lambda window: mean(longer[window]))
    helps = {
        round(after, digits) < round(before, digits) for after, before in zip(longer[window], initial, strict=True)
    }
    metrics = (
        f"{mean(initial):.{digits}f} at {result.trained_window}, {mean(longer[window]):.{digits}f} at {window}"
        f"{_seeds_note(initial)}"
    )
    if len(helps) == 2:
        return f"seeds differ: {metrics}"
    return f"{'as in the paper' if helps == {_longer_helps(system)} else 'otherwise here'}: {metrics}"


def table_rows(found: Mapping[str, SystemResult]) -> list[list[str]]:
    """Return the rows of the paper's table 6, under COLUMNS."""
    return [found[system.name].cells() for system in ABLATION if system.name in found]


def equal_memory_title(found: Mapping[str, SystemResult]) -> str:
    """Return the title of the comparison at equal memory."""
    lengths = [
        f"{found[with_memory].segment_length} with recurrence, {found[without].segment_length} without"
        for with_memory, without in _AT_EQUAL_MEMORY
        if with_memory in found and without in found
    ]
    return "At equal memory for training: segments of " + " (half the loss: ".join(lengths) + ")" * (len(lengths) - 1)


def equal_memory_rows(found: Mapping[str, SystemResult]) -> list[list[str]]:
    """Return the rows of table 10, under COLUMNS: with recurrence, and without it with longer segments."""
    return [found[name].cells() for pair in _AT_EQUAL_MEMORY for name in pair if name in found]


def chart(found: Mapping[str, SystemResult]) -> Chart:
    """Return a chart of scores by attention window.

    Colours are architectures, broken lines half the loss, and dots recurrence.
    """
    architectures = ("transformer-xl", "shaw", "vaswani", "al-rfou")
    lines = [
        Line(
            result.system.name,
            list(result.by_window),
            [mean(values) for values in result.by_window.values()],
            ("o" if result.system.recurrence else "x") + ("--" if result.system.loss == "half" else "-"),
            COLOURS[architectures.index(result.system.architecture)] if not result.system.larger else COLOURS[-1],
        )
        for result in (found[system.name] for system in ABLATION if system.name in found)
    ]
    metric = next(iter(found.values())).metric
    initial, best = ([mean(getattr(one, name)) for one in found.values()] for name in ("initial", "best"))
    # where an encoding fails beyond its training, its line would press all others together
    top = max(initial) + _HEADROOM * (max(initial) - min(best))
    beyond = any(mean(values) > top for one in found.values() for values in one.by_window.values())
    title = f"Test {NAMES[metric]} by attention window" + (" (some continue above)" if beyond else "")
    return Chart(
        title, "attention window (tokens)", NAMES[metric], lines, logarithmic=True, top=top, legend_beside=True
    )


def _with_spread(values: Sequence[float], digits: int) -> str:
    """Return the mean over seeds, and the largest deviation from it."""
    middle = mean(values)
    spread = max(abs(value - middle) for value in values)
    return f"{middle:.{digits}f}" + (f" ±{spread:.{digits}f}" if len(values) > 1 else "")
