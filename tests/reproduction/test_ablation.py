"""What an ablation says follows from the figures, and says no more than they do."""

import pytest

from transformer_xl.analysis.plots import draw
from transformer_xl.reproduction.ablation import (
    COLUMNS,
    SystemResult,
    chart,
    equal_memory_rows,
    equal_memory_title,
    table_rows,
    verdicts,
)
from transformer_xl.reproduction.systems import BY_NAME


def result_of(name, by_window, trained=16, metric="bits_per_byte"):
    return SystemResult(BY_NAME[name], 8, trained, by_window, metric)


def test_best_is_the_shortest_length_that_gives_the_figure_shown():
    found = result_of("xl-full", {8: (2.5, 2.7), 16: (2.3, 2.5), 32: (2.2004, 2.4), 64: (2.2001, 2.4), 128: (2.3, 2.4)})
    assert found.initial == (2.3, 2.5)
    assert (found.best_window, found.best) == (32, (2.2004, 2.4))


def test_a_mean_decides_over_seeds_not_the_luckiest():
    assert result_of("xl-full", {16: (2.0, 2.6), 32: (2.2, 2.3)}).best_window == 32


def test_cells_stand_under_their_columns():
    cells = result_of("xl-half", {16: (2.0, 2.2), 32: (1.9, 2.1)}).cells()
    assert len(cells) == len(COLUMNS)
    assert cells == [
        "xl-half",
        "yes",
        "transformer-xl",
        "half",
        "2.100 ±0.100",
        "2.000 ±0.100",
        "32",
        "28.69",
        "28.33",
        "460",
    ]
    alone = result_of("relative-full-longer", {16: (30.125,)}, metric="perplexity").cells()
    assert alone[0] == "relative-full-longer"
    assert alone[4:] == ["30.12", "30.12", "16", "-", "27.98", "-"]


@pytest.mark.parametrize(
    ("with_recurrence", "without", "said"),
    [
        ((2.0, 2.1), (2.2, 2.3), "as in the paper: 2.050 and 2.250"),
        ((2.0, 2.25), (2.2, 2.3), "seeds overlap"),
        ((2.4, 2.5), (2.2, 2.3), "the other way round here"),
        ((2.0,), (2.2,), "as in the paper: 2.000 and 2.200 (one seed each)"),
        ((2.2,), (2.0,), "the other way round here: 2.200 and 2.000 (one seed each)"),
        ((2.2001,), (2.2004,), "no difference: 2.200 and 2.200 (one seed each)"),
        ((2.2001, 2.1001), (2.2004, 2.3), "seeds overlap"),
    ],
)
def test_orderings(with_recurrence, without, said):
    found = {
        "xl-full": result_of("xl-full", {16: with_recurrence}),
        "relative-full": result_of("relative-full", {16: without}),
    }
    assert dict(verdicts(found))["recurrence helps"].startswith(said)


@pytest.mark.parametrize(
    ("name", "longer", "said"),
    [
        ("xl-full", (2.0, 2.1), "as in the paper"),
        ("xl-full", (2.3, 2.4), "otherwise here"),
        ("xl-full", (2.1999, 2.2999), "otherwise here"),  # not to the digits shown
        ("xl-full", (2.0, 2.4), "seeds differ"),
        ("shaw-full", (2.3, 2.4), "as in the paper"),
        ("shaw-full", (2.0, 2.1), "otherwise here"),
    ],
)
def test_lengths(name, longer, said):
    found = {name: result_of(name, {16: (2.2, 2.3), 64: longer})}
    ((_, verdict),) = verdicts(found)
    assert verdict.startswith(said)


def test_what_was_not_tried_is_not_claimed():
    assert verdicts({"xl-full": result_of("xl-full", {8: (2.4,), 16: (2.2,)})})[0][1] == "not tried here"


def test_learned_positions_end_where_training_does():
    found = {"learned-half": result_of("learned-half", {8: (2.4,), 16: (2.2,)})}
    assert verdicts(found)[0][1] == "as in the paper: it has no positions beyond 16"


def test_figures_come_back_from_json():
    found = result_of("xl-larger", {16: [2.2, 2.3], 64: [2.1, 2.2]})
    assert SystemResult.from_dict(found.as_dict(), "bits_per_byte") == found


def test_tables_and_picture_have_every_system():
    names = ["learned-half", "xl-full", "relative-full-longer", "xl-half"]
    found = {name: result_of(name, {8: (2.4,), 16: (2.2,)}) for name in names}
    assert [row[0] for row in table_rows(found)] == ["xl-full", "xl-half", "learned-half"]
    assert [row[0] for row in equal_memory_rows(found)] == ["xl-full", "relative-full-longer", "xl-half"]
    assert equal_memory_title(found) == "At equal memory for training: segments of 8 with recurrence, 8 without"
    svg = draw(chart(found))
    assert all(f"<!-- {name} -->" in svg for name in ("xl-full", "xl-half", "learned-half"))
