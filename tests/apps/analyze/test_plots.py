"""The plot of `txl analyze context`: its lines are the gains, and its files have the format of their suffix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformer_xl.plots import draw_gains, to_svg, write_plot


@pytest.fixture
def results() -> dict[str, Any]:
    """What `draw_gains` reads of the results of two models, at the fractions r = 0.3 and 1."""
    # for each model and fraction, the gains of the three contexts that have a longer one
    gains = np.random.default_rng(3).random((2, 2, 3)).tolist()
    models = [
        {"name": name, "fractions": {"0.3": {"gains": hardest}, "1": {"gains": everywhere}}}
        for name, (hardest, everywhere) in zip(("first", "second"), gains, strict=True)
    ]
    contexts = {"contexts": [5, 12, 19, 26], "context_step": 7, "threshold": 0.02}
    return {**contexts, "baseline": {"0.3": {}, "1": {}}, "models": models}


def test_lines_are_the_gains_in_percent(results: dict[str, Any]) -> None:
    panels = draw_gains(results).axes
    for axes, fraction in zip(panels, ("0.3", "1"), strict=True):
        *lines, threshold = axes.get_lines()
        for line, model in zip(lines, results["models"], strict=True):
            assert line.get_label() == model["name"]
            assert line.get_xdata().tolist() == [5, 12, 19]
            np.testing.assert_allclose(line.get_ydata(), 100 * np.array(model["fractions"][fraction]["gains"]))
        assert set(threshold.get_ydata()) == {2.0}
        assert f"r = {fraction}" in axes.get_title()
        for look in ("get_color", "get_linestyle", "get_marker"):  # not only colours tell models apart
            assert len({getattr(line, look)() for line in lines}) == 2
    assert "7 tokens more (%)" in panels[0].get_ylabel()


@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_equal_plots_give_equal_files(results: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    """So that a command which is repeated changes no file."""
    for name in ("one", "two"):
        write_plot(tmp_path / f"{name}.{suffix}", draw_gains(results))
    assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()
    assert to_svg(draw_gains(results)) == to_svg(draw_gains(results))
