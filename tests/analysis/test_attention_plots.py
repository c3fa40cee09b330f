"""The pictures show the numbers they are given, with labels that fit."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from transformer_xl.analysis.attention_maps import TermMaps, read_attention
from transformer_xl.analysis.attention_plots import draw_heads, draw_losses, draw_means, draw_terms, save
from transformer_xl.analysis.loss_by_distance import LossByDistance
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.model.memory import ContextLimits

FAR = np.random.default_rng(1).random((16, 10, 641)) / np.arange(1, 642) ** 2


def boxes(figure, axes, axis):
    """Of the labels of an axis that are drawn."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    labels = [label for label in getattr(axes, f"get_{axis}ticklabels")() if label.get_text()]
    return [label.get_window_extent(canvas.get_renderer()) for label in labels]


@pytest.mark.parametrize("shape", [(16, 10), (1, 1), (64, 3)])
def test_means(shape):
    means = FAR[:1, :1].repeat(shape[0], 0).repeat(shape[1], 1) if shape != (16, 10) else FAR
    figure = draw_means(means)
    axes = figure.axes[0]
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), means.reshape(-1, 641))
    left, right, bottom, top = image.get_extent()
    assert (left, right, bottom, top) == (-0.5, 640.5, shape[0] * shape[1], 0)  # distance d stands over tick d
    for axis in ("x", "y"):
        found = boxes(figure, axes, axis)
        assert found
        assert not any(one.overlaps(other) for one, other in itertools.combinations(found, 2))
    assert axes.get_xlabel().startswith("distance in tokens")
    assert figure.axes[1].get_ylabel() == "mean probability (logarithmic)"


def test_single_heads():
    figure = draw_heads(FAR, [(0, 3), (15, 9)])
    for line, (layer, head) in zip(figure.axes[0].lines, [(0, 3), (15, 9)], strict=True):
        np.testing.assert_array_equal(line.get_ydata(), FAR[layer, head])
        np.testing.assert_array_equal(line.get_xdata(), np.arange(641))
        assert line.get_label() == f"layer {layer}, head {head}"
    many = draw_heads(FAR, [(layer, head) for layer in range(3) for head in range(8)])
    looks = {(line.get_color(), line.get_linestyle()) for line in many.axes[0].lines}
    assert len(looks) == 24


@pytest.mark.parametrize("length", [1, 13, 53])
def test_terms(make_model, tokens, length, tmp_path):
    model, plan = make_model(n_layers=1), EvaluationPlan(5, ContextLimits(11))
    maps = TermMaps(model, length)
    read_attention(model, tokens(1, length)[0].numpy(), plan, [maps.callback(plan)])
    # a formula's sign, a letter that fonts lack, a line end
    labels = ["$", "\u4e2d", "\u21b5", "\u00b7", "antidisestablishment", *"abcdefghij" * 6][:length]
    figure = draw_terms(maps, (0, 1), labels)
    shown = [axes for axes in figure.axes if axes.images]
    titles = ["(a)", "(b)", "(c)", "(d)", "score", "attention"]
    names = ["content", "position", "content_bias", "position_bias", "score", "probability"]
    for axes, title, name in zip(shown, titles, names, strict=True):
        assert axes.get_title().startswith(title)
        wanted = np.ma.masked_invalid(maps.map_QQ(name, 0, 1))
        assert np.ma.allequal(axes.images[0].get_array(), wanted)
    assert [axes.get_xlabel()[:3] for axes in shown] == ["", "", "", "key", "key", "key"]
    if length != 13:
        return
    named = [label.get_text() for label in shown[0].get_yticklabels()]
    assert named[:6] == ["$", "\\u4e2d", "\u21b5", "\u00b7", "antidisesta...", "a"]
    assert save(figure, tmp_path / "terms") == ["terms.png", "terms.svg"]
    assert (tmp_path / "terms.png").read_bytes().startswith(b"\x89PNG")
    assert ET.parse(tmp_path / "terms.svg").getroot().tag.endswith("svg")


def test_tokens_of_other_scripts_leave_room_for_the_maps(make_model, tokens, recwarn):
    model, plan = make_model(n_layers=1), EvaluationPlan(5, ContextLimits(43))
    maps = TermMaps(model, 48)
    read_attention(model, tokens(1, 48)[0].numpy(), plan, [maps.callback(plan)])
    figure = draw_terms(maps, (0, 0), ["\u4e2d" * 14, "\U0001f600" * 3, "ab\u05d0\u05d1c"] * 16)
    FigureCanvasAgg(figure).draw()
    assert [str(each.message) for each in recwarn] == []
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names[:3] == ["\\u4e2d...", "\\U0001f600...", "ab\\u05d0..."]


def test_one_of_each():
    means = np.ones((1, 1, 1))
    assert draw_means(means).axes[0].get_title() == "Mean attention by distance: 1 layer x 1 head, a row each"


def test_losses():
    loss = LossByDistance(
        2 ** np.arange(12), np.arange(12) + 1, np.linspace(3, 2, 12), np.array([np.nan, *np.full(11, 0.1)])
    )
    figure = draw_losses({"one": loss, "other": loss}, "a document")
    top, below = figure.axes
    names = [label.get_text() for label in below.get_xticklabels()]
    assert names[:4] == ["1", "2", "3-4", "5-8"]
    assert names[-1] == "1,025-\n2,048"
    found = boxes(figure, below, "x")
    assert not any(one.overlaps(other) for one, other in itertools.combinations(found, 2))
    assert [text.get_text() for text in top.get_legend().get_texts()] == ["one", "other"]
    np.testing.assert_array_equal([bar.get_height() for bar in below.patches], loss.count_G)
