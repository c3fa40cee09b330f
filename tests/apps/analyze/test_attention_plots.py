"""The plots show the values passed to them, with labels that do not overlap.

The fixtures make_model and tokens (tests/conftest.py) make a small model with random weights and random token ids.

Shape suffixes: Q tokens as queries and as keys, G groups of distances.
"""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from transformer_xl.apps.analyze.attention_maps import TermMaps, trace_attention
from transformer_xl.apps.analyze.attention_plots import draw_heads, draw_losses, draw_means, draw_terms, save
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.model.memory import ContextLimits

# mean attention of 16 layers and 10 heads at distances 0 to 640, as in the paper's plot; it decreases with the distance
MEANS = np.random.default_rng(1).random((16, 10, 641)) / np.arange(1, 642) ** 2


def check_labels(figure, axes, axis):
    """The labels of an axis that are drawn do not overlap."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    labels = [label for label in getattr(axes, f"get_{axis}ticklabels")() if label.get_text()]
    boxes = [label.get_window_extent(canvas.get_renderer()) for label in labels]
    assert boxes
    assert not any(first.overlaps(second) for first, second in itertools.combinations(boxes, 2))


@pytest.mark.parametrize("shape", [(16, 10), (1, 1), (64, 3)])
def test_means_plot_shows_every_head(shape):
    means = np.resize(MEANS, (*shape, 641))
    figure = draw_means(means)
    axes = figure.axes[0]
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), means.reshape(-1, 641))
    # the column of distance d is centred at d on the x axis
    assert tuple(image.get_extent()) == (-0.5, 640.5, shape[0] * shape[1], 0)
    for axis in ("x", "y"):
        check_labels(figure, axes, axis)
    assert axes.get_xlabel().startswith("distance in tokens")
    assert figure.axes[1].get_ylabel() == "mean probability (logarithmic)"


def test_heads_plot_has_a_distinct_line_for_each_head():
    heads = [(layer, head) for layer in range(3) for head in range(8)]
    lines = draw_heads(MEANS, heads).axes[0].lines
    for line, (layer, head) in zip(lines, heads, strict=True):
        np.testing.assert_array_equal(line.get_ydata(), MEANS[layer, head])
        np.testing.assert_array_equal(line.get_xdata(), np.arange(641))
        assert line.get_label() == f"layer {layer}, head {head}"
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 24


def maps_of(model, ids, memory_length):
    plan = EvaluationPlan(segment_length=5, context_limits=ContextLimits(memory_length))
    maps = TermMaps(model, plan, len(ids))
    trace_attention(model, ids.numpy(), plan, [maps.add])
    return maps


@pytest.mark.parametrize("length", [1, 13, 53])
def test_terms_plot_shows_every_map(make_model, tokens, length, tmp_path):
    maps = maps_of(make_model(n_layers=1), tokens(1, length)[0], memory_length=11)
    # a $, which starts a formula in matplotlib, a character that fonts lack, two symbols for whitespace, a long word
    labels = ["$", "\u4e2d", "\u21b5", "\u00b7", "antidisestablishment", *"abcdefghij" * 6][:length]
    figure = draw_terms(maps, (0, 1), labels)
    panels = [axes for axes in figure.axes if axes.images]
    names = ("content", "position", "content_bias", "position_bias", "score", "probability")
    titles = ("(a)", "(b)", "(c)", "(d)", "score", "attention")
    for axes, name, title in zip(panels, names, titles, strict=True):
        assert axes.get_title().startswith(title)
        assert np.ma.allequal(axes.images[0].get_array(), np.ma.masked_invalid(maps.map_QQ(name, 0, 1)))
    assert [axes.get_xlabel()[:3] for axes in panels] == ["", "", "", "key", "key", "key"]
    if length == 13:
        names = [label.get_text() for label in panels[0].get_yticklabels()]
        assert names[:6] == ["$", "\\u4e2d", "\u21b5", "\u00b7", "antidisesta...", "a"]
        assert save(figure, tmp_path / "terms") == ["terms.png", "terms.svg"]
        assert (tmp_path / "terms.png").read_bytes().startswith(b"\x89PNG")
        assert ET.parse(tmp_path / "terms.svg").getroot().tag.endswith("svg")


def test_loss_plot_shows_losses_and_counts():
    # groups of tokens by distance from the start of their document: largest distance, number of tokens, mean loss and
    # its standard error
    loss = [
        {"up_to_distance": 2**g, "tokens": g + 1, "nats_per_token": 3 - g / 11, "standard_error": 0.1 if g else None}
        for g in range(12)
    ]
    figure = draw_losses({"one": loss, "other": loss}, "a document")
    upper, lower = figure.axes
    names = [label.get_text() for label in lower.get_xticklabels()]
    assert names[:4] == ["1", "2", "3-4", "5-8"]
    assert names[-1] == "1,025-\n2,048"
    check_labels(figure, lower, "x")
    assert [text.get_text() for text in upper.get_legend().get_texts()] == ["one", "other"]
    np.testing.assert_array_equal([bar.get_height() for bar in lower.patches], [row["tokens"] for row in loss])
