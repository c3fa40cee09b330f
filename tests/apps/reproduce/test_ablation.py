"""Verdicts and tables of the ablation follow from the scores.

Systems are the models that the ablation compares, such as xl-full (Transformer-XL, trained with the loss of all tokens)
and relative-full (the same without recurrence); `systems.py` defines them.
"""

import pytest

from transformer_xl.apps.reproduce.ablation import (
    COLUMNS,
    SystemResult,
    chart,
    equal_memory_rows,
    equal_memory_title,
    table_rows,
    verdicts,
)
from transformer_xl.apps.reproduce.systems import BY_NAME


def result_of(name, by_window, metric="bits_per_byte"):
    """Results of a system that was trained with attention window 16.

    `by_window` maps an attention window to the scores with it, one for each seed; lower is better.
    """
    return SystemResult(BY_NAME[name], segment_length=8, trained_window=16, by_window=by_window, metric=metric)


# scores of two systems that differ much more than their seeds
SEEDS = {"xl-full": (2.0, 2.0), "relative-full": (3.0, 3.0)}


def test_best_window_is_the_shortest_with_the_best_rounded_mean():
    result = result_of(
        "xl-full", {8: (2.5, 2.7), 16: (2.3, 2.5), 32: (2.2004, 2.4), 64: (2.2001, 2.4), 128: (2.3, 2.4)}
    )
    assert result.initial == (2.3, 2.5)
    assert (result.best_window, result.best) == (32, (2.2004, 2.4))
    # window 16 has the best single seed, window 32 the best mean
    assert result_of("xl-full", {16: (2.0, 2.6), 32: (2.2, 2.3)}).best_window == 32


def test_cells_of_a_row_match_the_columns():
    cells = result_of("xl-half", {16: (2.0, 2.2), 32: (1.9, 2.1)}).cells()
    assert len(cells) == len(COLUMNS)
    assert cells[:4] == ["xl-half", "yes", "transformer-xl", "half"]
    # the last three are the paper's: word perplexity with the window of training and with the best one, and that window
    assert cells[4:] == ["2.100 ±0.100", "2.000 ±0.100", "32", "28.69", "28.33", "460"]
    cells = result_of("relative-full-longer", {16: (30.125,)}, metric="perplexity").cells()
    assert cells[0] == "relative-full-longer"
    # one seed, so no spread; 30.125 is rounded to even
    assert cells[4:] == ["30.12", "30.12", "16", "-", "27.98", "-"]


@pytest.mark.parametrize(
    ("with_recurrence", "without", "verdict"),
    [
        ((2.0, 2.1), (2.2, 2.3), "as in the paper: 2.050 and 2.250 (spread 0.100)"),
        ((2.4, 2.5), (2.2, 2.3), "the opposite of the paper: 2.450 and 2.250 (spread 0.100)"),
        # every seed of the first is better, but a third seed may well not be
        ((2.0, 2.2), (2.201, 2.201), "nothing concluded, within the spread of the seeds: 2.100 and 2.201 (spread 0.2"),
        ((2.0, 2.1), (2.1, 2.2), "nothing concluded, within"),  # the difference equals the spread
        ((2.0, 2.25), (2.2, 2.3), "nothing concluded, within"),
        ((2.2001, 2.2002), (2.2004, 2.2003), "nothing concluded, within"),  # equal after rounding
        ((2.0,), (2.2,), "nothing concluded from one seed: 2.000 and 2.200"),
    ],
)
def test_verdict_on_an_ordering(with_recurrence, without, verdict):
    scores = {"xl-full": with_recurrence, "relative-full": without}
    results = {name: result_of(name, {16: values}) for name, values in scores.items()}
    assert dict(verdicts(results))["recurrence helps"].startswith(verdict)


def test_nothing_is_concluded_at_smoke_scale():
    """Whatever the seeds show: tiny models after a few steps differ by chance."""
    results = {name: result_of(name, {16: scores}) for name, scores in SEEDS.items()}
    results["shaw-full"] = result_of("shaw-full", {16: (2.0, 2.0), 32: (3.0, 3.0)})
    shown = [verdict for _, verdict in verdicts(results, smoke=True)]
    assert shown[0] == "nothing concluded at smoke scale: 2.000 and 3.000 (spread 0.000)"
    assert all(verdict.startswith(("nothing concluded", "not measured")) for verdict in shown)
    assert any(verdict.startswith("as in the paper") for _, verdict in verdicts(results))


@pytest.mark.parametrize(
    ("name", "by_window", "verdict"),
    [
        ("xl-full", {16: (2.2, 2.3), 64: (2.0, 2.1)}, "as in the paper: 2.250 at 16, 2.050 at 64 (spread 0.000)"),
        ("xl-full", {16: (2.2, 2.3), 64: (2.3, 2.4)}, "the opposite of the paper"),
        ("xl-full", {16: (2.2, 2.3), 64: (2.1999, 2.2999)}, "nothing concluded, within"),  # equal after rounding
        ("xl-full", {16: (2.2, 2.3), 64: (2.0, 2.29)}, "nothing concluded, within"),  # 0.2 and 0.01 better
        ("xl-full", {16: (2.2, 2.3), 64: (2.0, 2.4)}, "nothing concluded, within"),
        ("xl-full", {16: (2.2,), 64: (2.0,)}, "nothing concluded from one seed: 2.200 at 16, 2.000 at 64"),
        ("xl-full", {8: (2.4,), 16: (2.2,)}, "not measured"),
        ("shaw-full", {16: (2.2, 2.3), 64: (2.3, 2.4)}, "as in the paper"),
        ("shaw-full", {16: (2.2, 2.3), 64: (2.0, 2.1)}, "the opposite of the paper"),
        ("learned-half", {8: (2.4,), 16: (2.2,)}, "not measured: it has no positions beyond 16"),
    ],
)
def test_verdict_on_longer_attention(name, by_window, verdict):
    """In the paper, windows longer than in training help xl-full and do not help shaw-full.

    Seeds are compared in pairs: that they differ from each other does not matter if they change alike.
    """
    ((_, actual),) = verdicts({name: result_of(name, by_window)})
    assert actual.startswith(verdict)


def test_tables_and_chart_have_every_system():
    names = ["learned-half", "xl-full", "relative-full-longer", "xl-half"]
    results = {name: result_of(name, {8: (2.4,), 16: (2.2,)}) for name in names}
    assert [row[0] for row in table_rows(results)] == ["xl-full", "xl-half", "learned-half"]
    assert [row[0] for row in equal_memory_rows(results)] == ["xl-full", "relative-full-longer", "xl-half"]
    assert equal_memory_title(results) == "At equal memory for training: segments of 8 with recurrence, 8 without"
    svg = chart(results)
    assert all(f"<!-- {name} -->" in svg for name in ("xl-full", "xl-half", "learned-half"))
