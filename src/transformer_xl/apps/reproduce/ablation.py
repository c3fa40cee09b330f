"""Results of the ablation: each system's best attention window next to the paper's, and verdicts on the paper's claims.

A system (such as Transformer-XL without recurrence) is scored with several attention windows, once for each seed. Its
initial result is that with the attention window of training; its best is the lowest mean over seeds, with the shortest
window that gives the same rounded value (paper section 4.2: "the shortest possible attention length during evaluation
to achieve the corresponding result"). "Half the loss" means that training computes the loss of the second half of each
segment only, where every token has a long context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any, Literal

from transformer_xl.apps.reproduce.systems import ABLATION, BY_NAME, System
from transformer_xl.plots import COLOURS, Line, draw

Metric = Literal["bits_per_byte", "perplexity", "token_perplexity"]
DIGITS: dict[Metric, int] = {"bits_per_byte": 3, "perplexity": 2, "token_perplexity": 2}
"""Decimal places in tables and comparisons."""
NAMES: dict[Metric, str] = {
    "bits_per_byte": "bits per byte",
    "perplexity": "perplexity per word",
    "token_perplexity": "perplexity per token",
}

COLUMNS = [
    *("system", "memory", "architecture", "loss"),
    *("initial", "best", "at window", "paper's initial", "best", "at window"),
]
"""Columns of the tables; the last three are the paper's. "at window" is the attention window of the best score."""

_HEADROOM = 0.5  # space in the chart above the worst initial result, as a fraction of its distance to the best result
# in the order of their colours; vaswani has sinusoidal absolute positions, al-rfou learned ones
_ARCHITECTURES = ("transformer-xl", "shaw", "vaswani", "al-rfou")


@dataclass(frozen=True)
class SystemResult:
    """Scores of one system, in bits per byte or perplexity; lower is better."""

    system: System
    segment_length: int
    """Segment length in training."""
    trained_window: int
    """Attention window in training, in tokens: segment and memory together."""
    by_window: Mapping[int, Sequence[float]]
    """Scores by attention window, one for each seed."""
    metric: Metric

    @property
    def initial(self) -> Sequence[float]:
        """Scores with the attention window of training, one for each seed."""
        return self.by_window[self.trained_window]

    @property
    def best_window(self) -> int:
        """The shortest attention window whose rounded mean score is the best."""
        rounded = {window: round(mean(scores), DIGITS[self.metric]) for window, scores in self.by_window.items()}
        return min(window for window, score in rounded.items() if score == min(rounded.values()))

    @property
    def best(self) -> Sequence[float]:
        """Scores with the best attention window, one for each seed."""
        return self.by_window[self.best_window]

    def cells(self) -> list[str]:
        """Return the system's table row, under COLUMNS."""
        system, published = self.system, self.system.published
        paper = ["-", "-", "-"]
        if published:
            paper[0] = "-" if published.initial is None else f"{published.initial:.2f}"
            paper[1] = f"{published.best:.2f}"
            paper[2] = "-" if published.attention_window is None else f"{published.attention_window}"
        return [
            *(system.name, "yes" if system.recurrence else "no", system.architecture, system.loss),
            *(self._with_spread(self.initial), self._with_spread(self.best), f"{self.best_window:,}"),
            *paper,
        ]

    def _with_spread(self, scores: Sequence[float]) -> str:
        """Return the mean over seeds, and the largest deviation from it."""
        digits, spread = DIGITS[self.metric], max(abs(score - mean(scores)) for score in scores)
        return f"{mean(scores):.{digits}f}" + (f" ±{spread:.{digits}f}" if len(scores) > 1 else "")

    def as_dict(self) -> dict[str, Any]:
        """Return system and scores as plain values, for JSON."""
        return {
            **asdict(self.system),
            "segment_length": self.segment_length,
            "by_window": {str(window): list(scores) for window, scores in self.by_window.items()},
            "trained_window": self.trained_window,
            "initial": list(self.initial),
            "best_window": self.best_window,
            "best": list(self.best),
        }


def system_results(results: Mapping[str, Any]) -> dict[str, SystemResult]:
    """Return the results of each system by its name, from those of `reproduce_ablation`."""
    return {
        name: SystemResult(
            BY_NAME[name],
            values["segment_length"],
            values["trained_window"],
            {int(window): scores for window, scores in values["by_window"].items()},
            results["metric"],
        )
        for name, values in results["systems"].items()
    }


SPREAD = (
    "A claim is judged only where the difference of the means is larger than the spread of the seeds: the largest "
    "distance between two seeds of a system, or, where one system is compared with itself, between the changes of two "
    "seeds. The choice of the test text adds uncertainty that the spread does not show."
)
"""How claims are judged, for the report."""

# claims of the paper, each with the names of two systems (see systems.py) of which the first is better.
# full and half: the loss in training; relative-: with Transformer-XL's encoding but without recurrence; -longer: with
# segments so long that training needs as much GPU memory as that with recurrence
_ORDERINGS = (
    ("recurrence helps", "xl-full", "relative-full"),
    ("recurrence helps with half the loss", "xl-half", "relative-half"),
    ("with recurrence, Transformer-XL's encoding is better than Shaw's", "xl-full", "shaw-recurrent"),
    ("without recurrence, Transformer-XL's encoding is better than Shaw's", "relative-full", "shaw-full"),
    ("with half the loss, Transformer-XL's encoding is better than Shaw's", "relative-half", "shaw-half"),
    ("Transformer-XL's encoding is better than sinusoidal absolute positions", "relative-half", "sinusoidal-half"),
    ("Transformer-XL's encoding is better than learned absolute positions", "relative-half", "learned-half"),
    ("with Transformer-XL's encoding, the full loss is better than half the loss", "xl-full", "xl-half"),
    ("a larger model is better", "xl-larger", "xl-full"),
    ("recurrence helps even where memory for training is equal", "xl-full", "relative-full-longer"),
    ("recurrence helps with half the loss even where memory for training is equal", "xl-half", "relative-half-longer"),
)
# pairs of systems with and without recurrence whose training steps need equally much device memory
_AT_EQUAL_MEMORY = (("xl-full", "relative-full-longer"), ("xl-half", "relative-half-longer"))


def verdicts(results: Mapping[str, SystemResult], *, smoke: bool = False) -> list[tuple[str, str]]:
    """Return the paper's claims about the systems in `results`, each with a verdict.

    A claim is judged only if the difference of the means is larger than the spread of the seeds. Otherwise, with one
    seed, and at smoke scale, nothing is concluded, and the verdict says which of these is the reason.

    Args:
        results: results by the name of the system.
        smoke: whether the models are tiny and were trained for a few steps only, so that differences are noise.
    """
    orderings = [
        (claim, _ordering_verdict(results[better], results[worse], smoke=smoke))
        for claim, better, worse in _ORDERINGS
        if {better, worse} <= results.keys()
    ]
    return orderings + [
        _window_verdict(result, smoke=smoke) for result in results.values() if not result.system.equal_memory
    ]


def _ordering_verdict(better: SystemResult, worse: SystemResult, *, smoke: bool) -> str:
    """Return the verdict on the claim that the first system is better than the second."""
    digits = DIGITS[better.metric]
    first, second = ([round(score, digits) for score in result.best] for result in (better, worse))
    spread = max(max(scores) - min(scores) for scores in (first, second))
    figures = f"{mean(better.best):.{digits}f} and {mean(worse.best):.{digits}f}"
    return _verdict(mean(second) - mean(first), spread, len(first), digits, figures, smoke=smoke)


def _verdict(gain: float, spread: float, num_seeds: int, digits: int, figures: str, *, smoke: bool) -> str:
    """Return what a comparison shows about a claim of the paper.

    Args:
        gain: mean over seeds of the difference that the claim predicts to be above 0.
        spread: largest distance between two seeds.
        num_seeds: number of seeds.
        digits: decimal places of the scores.
        figures: the scores that are compared.
        smoke: whether the scale is too small for any conclusion.
    """
    if smoke:
        conclusion = "nothing concluded at smoke scale"
    elif num_seeds == 1:
        conclusion = "nothing concluded from one seed"
    elif round(abs(gain) - spread, digits + 2) <= 0:  # rounded, because the subtraction is not exact
        conclusion = "nothing concluded, within the spread of the seeds"
    else:
        conclusion = "as in the paper" if gain > 0 else "the opposite of the paper"
    return f"{conclusion}: {figures}" + (f" (spread {spread:.{digits}f})" if num_seeds > 1 else "")


def _window_verdict(result: SystemResult, *, smoke: bool) -> tuple[str, str]:
    """Return the paper's claim about attention windows longer than in training, and the verdict.

    Seeds are compared in pairs: the spread is that of the change of each seed's score.
    """
    system, digits, initial, published = result.system, DIGITS[result.metric], result.initial, result.system.published
    should_help = published is not None and published.initial != published.best
    claim = f"{system.name}: attention windows longer than in training {'help' if should_help else 'do not help'}"
    longer = {window: mean(scores) for window, scores in result.by_window.items() if window > result.trained_window}
    if not longer:
        if system.architecture == "al-rfou":
            return claim, f"not measured: it has no positions beyond {result.trained_window}"
        return claim, "not measured"
    window = min(longer, key=longer.__getitem__)
    gains = [
        round(before, digits) - round(after, digits)
        for after, before in zip(result.by_window[window], initial, strict=True)
    ]
    spread = max(gains) - min(gains)
    figures = f"{mean(initial):.{digits}f} at {result.trained_window}, {longer[window]:.{digits}f} at {window}"
    gain = mean(gains) if should_help else -mean(gains)
    return claim, _verdict(gain, spread, len(gains), digits, figures, smoke=smoke)


def table_rows(results: Mapping[str, SystemResult]) -> list[list[str]]:
    """Return the rows of the paper's table 6, under COLUMNS."""
    return [results[system.name].cells() for system in ABLATION if system.name in results]


def equal_memory_title(results: Mapping[str, SystemResult]) -> str:
    """Return the title of the comparison of systems whose training needs equally much device memory."""
    lengths = [
        f"{results[recurrent].segment_length} with recurrence, {results[longer].segment_length} without"
        for recurrent, longer in _AT_EQUAL_MEMORY
        if {recurrent, longer} <= results.keys()
    ]
    return "At equal memory for training: segments of " + " (half the loss: ".join(lengths) + ")" * (len(lengths) - 1)


def equal_memory_rows(results: Mapping[str, SystemResult]) -> list[list[str]]:
    """Return the rows of table 10, under COLUMNS: with recurrence, and without it with longer segments."""
    return [results[name].cells() for pair in _AT_EQUAL_MEMORY for name in pair if name in results]


def chart(results: Mapping[str, SystemResult]) -> str:
    """Draw, as an SVG element, a chart of scores by attention window.

    Colours are architectures, dashed lines are trained with half the loss, and dots (not crosses) have recurrence.
    """
    lines = [
        Line(
            result.system.name,
            list(result.by_window),
            [mean(scores) for scores in result.by_window.values()],
            ("o" if result.system.recurrence else "x") + ("--" if result.system.loss == "half" else "-"),
            COLOURS[-1] if result.system.larger else COLOURS[_ARCHITECTURES.index(result.system.architecture)],
        )
        for result in (results[system.name] for system in ABLATION if system.name in results)
    ]
    metric = next(iter(results.values())).metric
    worst_initial = max(mean(result.initial) for result in results.values())
    # an encoding that fails beyond its training lengths would otherwise squeeze all other lines together
    max_y = worst_initial + _HEADROOM * (worst_initial - min(mean(result.best) for result in results.values()))
    is_clipped = any(mean(scores) > max_y for result in results.values() for scores in result.by_window.values())
    title = f"Test {NAMES[metric]} by attention window" + (" (some continue above)" if is_clipped else "")
    x_label, y_label = "attention window (tokens)", NAMES[metric]
    return draw(title, x_label, y_label, lines, log_x=True, max_y=max_y, legend_outside=True)
