"""What an ablation found: each system's best attention length, beside the paper's figures, and which orderings hold.

A system is scored at several attention lengths, once for each seed. Its initial figure is the one at the attention
length of training; its best is the lowest mean over seeds, at the shortest length that gives it to the digits shown
(paper section 4.2: "the shortest possible attention length during evaluation to achieve the corresponding result").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, Literal

from transformer_xl.analysis.plots import COLOURS, Chart, Line
from transformer_xl.reproduction.systems import ABLATION, BY_NAME, System

Measure = Literal["bits_per_byte", "perplexity"]
DIGITS: dict[Measure, int] = {"bits_per_byte": 3, "perplexity": 2}
NAMES: dict[Measure, str] = {"bits_per_byte": "bits per byte", "perplexity": "perplexity"}

_ABOVE = 0.5  # of the distance from the best to the worst at training length: what a picture shows above the worst

COLUMNS = [
    *("system", "memory", "architecture", "loss"),
    *("initial", "best", "at length", "paper's initial", "best", "at length"),
]


@dataclass(frozen=True)
class Findings:
    """Of one system."""

    system: System
    segment: int
    """T of its training."""
    initial_length: int
    """Attention length of its training: segment and memory."""
    by_length: Mapping[int, Sequence[float]]
    """Attention length to one figure for each seed, lower is better."""
    measure: Measure

    @property
    def initial(self) -> Sequence[float]:
        """At the attention length of training, for each seed."""
        return self.by_length[self.initial_length]

    @property
    def best_length(self) -> int:
        """The shortest attention length whose mean is the best to the digits shown."""
        shown = {length: round(mean(values), DIGITS[self.measure]) for length, values in self.by_length.items()}
        return min(length for length, value in shown.items() if value == min(shown.values()))

    @property
    def best(self) -> Sequence[float]:
        """At the best attention length, for each seed."""
        return self.by_length[self.best_length]

    def cells(self) -> list[str]:
        """Its row, under COLUMNS."""
        system, digits = self.system, DIGITS[self.measure]
        published = system.published
        paper = ["-", "-", "-"]
        if published:
            paper[0] = "-" if published.initial is None else f"{published.initial:.2f}"
            paper[1:] = [f"{published.best:.2f}", "-" if published.length is None else f"{published.length}"]
        return [
            *(system.name, "yes" if system.recurrence else "no", system.architecture, system.loss),
            *(_with_spread(self.initial, digits), _with_spread(self.best, digits), f"{self.best_length:,}"),
            *paper,
        ]

    def as_dict(self) -> dict[str, Any]:
        """By name, for JSON."""
        return {
            **asdict(self.system),
            "segment": self.segment,
            "by_length": {str(length): list(values) for length, values in self.by_length.items()},
            "initial_length": self.initial_length,
            "initial": list(self.initial),
            "best_length": self.best_length,
            "best": list(self.best),
        }

    @staticmethod
    def of_dict(found: Mapping[str, Any], measure: Measure) -> Findings:
        """What `as_dict` gave."""
        by_length = {int(length): values for length, values in found["by_length"].items()}
        return Findings(BY_NAME[found["name"]], found["segment"], found["initial_length"], by_length, measure)


@dataclass(frozen=True)
class Ordering:
    """One thing the paper's table says."""

    says: str
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


def verdicts(found: Mapping[str, Findings]) -> list[tuple[str, str]]:
    """Each thing the paper says of orderings and lengths, and whether it is so here; only of systems that are there.

    An ordering holds where every seed of the one is better than every seed of the other, to the digits shown; where
    the seeds overlap, the verdict says that. One seed on each side tells nothing of the spread, and is named.
    """
    said = [
        (ordering.says, _compared(found[ordering.better], found[ordering.worse]))
        for ordering in ORDERINGS
        if ordering.better in found and ordering.worse in found
    ]
    for findings in found.values():
        system = findings.system
        if not system.equal_memory:
            said.append((_says_of_length(system), _length_verdict(findings)))
    return said


def _compared(better: Findings, worse: Findings) -> str:
    digits = DIGITS[better.measure]
    first, second = ([round(value, digits) for value in findings.best] for findings in (better, worse))
    figures = f"{mean(better.best):.{digits}f} and {mean(worse.best):.{digits}f}{_few(first)}"
    if max(first) < min(second):
        return f"as in the paper: {figures}"
    if max(second) < min(first):
        return f"the other way round here: {figures}"
    return f"{'seeds overlap' if len(first) > 1 else 'no difference'}: {figures}"


def _few(values: Sequence[float]) -> str:
    return " (one seed each)" if len(values) == 1 else ""


def _says_of_length(system: System) -> str:
    what = "longer attention than in training helps" if _longer_helps(system) else "longer attention is no help"
    return f"{system.name}: {what}"


def _longer_helps(system: System) -> bool:
    """In the paper."""
    return system.published is not None and system.published.initial != system.published.best


def _length_verdict(findings: Findings) -> str:
    system, digits, initial = findings.system, DIGITS[findings.measure], findings.initial
    longer = {length: values for length, values in findings.by_length.items() if length > findings.initial_length}
    if not longer:
        learned = system.architecture == "al-rfou"
        return f"as in the paper: it has no positions beyond {findings.initial_length}" if learned else "not tried here"
    length = min(longer, key=lambda length: mean(longer[length]))
    pairs = zip(longer[length], initial, strict=True)
    each = {round(after, digits) < round(before, digits) for after, before in pairs}
    figures = (
        f"{mean(initial):.{digits}f} at {findings.initial_length}, {mean(longer[length]):.{digits}f} at {length}"
        f"{_few(initial)}"
    )
    if len(each) == 2:
        return f"seeds differ: {figures}"
    return f"{'as in the paper' if each == {_longer_helps(system)} else 'otherwise here'}: {figures}"


def table_rows(found: Mapping[str, Findings]) -> list[list[str]]:
    """The rows of the paper's table, under COLUMNS."""
    return [found[system.name].cells() for system in ABLATION if system.name in found]


def equal_memory_title(found: Mapping[str, Findings]) -> str:
    """What the comparison at equal memory compares."""
    lengths = [
        f"{found[with_memory].segment} with recurrence, {found[without].segment} without"
        for with_memory, without in _AT_EQUAL_MEMORY
        if with_memory in found and without in found
    ]
    return "At equal memory for training: segments of " + " (half the loss: ".join(lengths) + ")" * (len(lengths) - 1)


def equal_memory_rows(found: Mapping[str, Findings]) -> list[list[str]]:
    """The comparison at equal memory, under COLUMNS: with recurrence, and without it with longer segments."""
    return [found[name].cells() for pair in _AT_EQUAL_MEMORY for name in pair if name in found]


def chart(found: Mapping[str, Findings]) -> Chart:
    """Each system by attention length: colours are architectures, broken lines half the loss, dots recurrence."""
    architectures = ("transformer-xl", "shaw", "vaswani", "al-rfou")
    lines = [
        Line(
            findings.system.name,
            list(findings.by_length),
            [mean(values) for values in findings.by_length.values()],
            ("o" if findings.system.recurrence else "x") + ("--" if findings.system.loss == "half" else "-"),
            COLOURS[architectures.index(findings.system.architecture)] if not findings.system.larger else COLOURS[-1],
        )
        for findings in (found[system.name] for system in ABLATION if system.name in found)
    ]
    measure = next(iter(found.values())).measure
    initial, best = ([mean(getattr(one, name)) for one in found.values()] for name in ("initial", "best"))
    # where an encoding fails beyond its training, its line would press all others together
    top = max(initial) + _ABOVE * (max(initial) - min(best))
    beyond = any(mean(values) > top for one in found.values() for values in one.by_length.values())
    title = f"Test {NAMES[measure]} by attention length" + (" (some go on above)" if beyond else "")
    return Chart(
        title, "attention length (tokens)", NAMES[measure], lines, logarithmic=True, top=top, legend_beside=True
    )


def _with_spread(values: Sequence[float], digits: int) -> str:
    """Mean over seeds, and how far the farthest is from it."""
    middle = mean(values)
    spread = max(abs(value - middle) for value in values)
    return f"{middle:.{digits}f}" + (f" ±{spread:.{digits}f}" if len(values) > 1 else "")
