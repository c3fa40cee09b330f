"""Verdicts and tables of the ablation follow from the scores.

Systems are the models that the ablation compares, such as xl-full (Transformer-XL, trained with the loss of all tokens)
and relative-full (the same without recurrence); `systems.py` defines them.
"""

import pytest

from transformer_xl.reproduction.ablation import (
    COLUMNS,
    SystemResult,
    chart,
    equal_memory_rows,
    equal_memory_title,
    system_results,
    table_rows,
    verdicts,
)
from transformer_xl.reproduction.systems import BY_NAME


def result_of(name, by_window, metric="bits_per_byte"):
    """Results of a system that was trained with attention window 16.

    `by_window` maps an attention window to the scores with it, one for each seed; lower is better.
    """
    return SystemResult(BY_NAME[name], segment_length=8, trained_window=16, by_window=by_window, metric=metric)


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
        ((2.0, 2.1), (2.2, 2.3), "as in the paper: 2.050 and 2.250"),
        ((2.0, 2.25), (2.2, 2.3), "seeds overlap"),
        ((2.4, 2.5), (2.2, 2.3), "the opposite of the paper"),
        ((2.0,), (2.2,), "as in the paper: 2.000 and 2.200 (one seed each)"),
        ((2.2001,), (2.2004,), "no difference: 2.200 and 2.200 (one seed each)"),
        ((2.2001, 2.1001), (2.2004, 2.3), "seeds overlap"),
    ],
)
def test_verdict_on_an_ordering(with_recurrence, without, verdict):
    scores = {"xl-full": with_recurrence, "relative-full": without}
    results = {name: result_of(name, {16: values}) for name, values in scores.items()}
    assert dict(verdicts(results))["recurrence helps"].startswith(verdict)


@pytest.mark.parametrize(
    ("name", "by_window", "verdict"),
    [
        ("xl-full", {16: (2.2, 2.3), 64: (2.0, 2.1)}, "as in the paper"),
        ("xl-full", {16: (2.2, 2.3), 64: (2.3, 2.4)}, "unlike the paper"),
        ("xl-full", {16: (2.2, 2.3), 64: (2.1999, 2.2999)}, "unlike the paper"),  # equal after rounding
        ("xl-full", {16: (2.2, 2.3), 64: (2.0, 2.4)}, "seeds differ"),
        ("xl-full", {8: (2.4,), 16: (2.2,)}, "not measured"),
        ("shaw-full", {16: (2.2, 2.3), 64: (2.3, 2.4)}, "as in the paper"),
        ("shaw-full", {16: (2.2, 2.3), 64: (2.0, 2.1)}, "unlike the paper"),
        ("learned-half", {8: (2.4,), 16: (2.2,)}, "as in the paper: it has no positions beyond 16"),
    ],
)
def test_verdict_on_longer_attention(name, by_window, verdict):
    """In the paper, windows longer than in training help xl-full and do not help shaw-full."""
    ((_, actual),) = verdicts({name: result_of(name, by_window)})
    assert actual.startswith(verdict)


def test_results_survive_json():
    result = result_of("xl-larger", {16: [2.2, 2.3], 64: [2.1, 2.2]})
    assert system_results({"systems": {"xl-larger": result.as_dict()}, "metric": "bits_per_byte"}) == {
        "xl-larger": result
    }


def test_tables_and_chart_have_every_system():
    names = ["learned-half", "xl-full", "relative-full-longer", "xl-half"]
    results = {name: result_of(name, {8: (2.4,), 16: (2.2,)}) for name in names}
    assert [row[0] for row in table_rows(results)] == ["xl-full", "xl-half", "learned-half"]
    assert [row[0] for row in equal_memory_rows(results)] == ["xl-full", "relative-full-longer", "xl-half"]
    assert equal_memory_title(results) == "At equal memory for training: segments of 8 with recurrence, 8 without"
    svg = chart(results)
    assert all(f"<!-- {name} -->" in svg for name in ("xl-full", "xl-half", "learned-half"))
