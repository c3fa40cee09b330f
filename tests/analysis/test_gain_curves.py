"""The picture of effective context: its lines are the figures, and its files are what their names say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from transformer_xl.analysis.effective_context import ContextSweep, EffectiveContext, GroupModel
from transformer_xl.analysis.gain_curves import draw_gains, write_plot
from transformer_xl.config import TransformerXLConfig, UserError
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.model.build import build_model
from transformer_xl.model.memory import ContextLimits

SWEEP = ContextSweep(
    min_context=5, context_step=7, max_context=30, num_positions=13, fractions=(0.3, 1.0), threshold=0.02
)


@pytest.fixture(scope="module")
def found() -> EffectiveContext:
    model = build_model(TransformerXLConfig(vocab_size=5, n_layers=1, d_model=2, n_heads=1, d_ff=3))
    models = tuple(GroupModel(name, model, EvaluationPlan(3, ContextLimits(1))) for name in ("first", "second"))
    nats_ICP = np.random.default_rng(3).gamma(2.0, 1.0, (2, 4, 13))
    return EffectiveContext(SWEEP, models, np.arange(13), nats_ICP, (1.0, 2.0))


def test_lines_are_the_gains(found: EffectiveContext) -> None:
    panels = draw_gains(found.as_dict()).axes
    assert len(panels) == 2
    for axes, fraction in zip(panels, SWEEP.fractions, strict=True):
        gains = found.gains(fraction)
        first, second, threshold = axes.get_lines()
        for line, name, gains_C in zip((first, second), ("first", "second"), gains.gains_IC, strict=True):
            assert line.get_label() == name
            assert line.get_xdata().tolist() == [5, 12, 19]
            np.testing.assert_allclose(line.get_ydata(), 100 * gains_C)
        assert set(threshold.get_ydata()) == {2.0}
        assert f"r = {fraction:g}" in axes.get_title()
        assert "tokens" in axes.get_xlabel()
        looks = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in (first, second)}
        assert all(len(set(kind)) == 2 for kind in zip(*looks, strict=True))  # colour alone tells some models nothing
    assert "7 tokens more (%)" in panels[0].get_ylabel()


def test_files_are_what_their_names_say(found: EffectiveContext, tmp_path: Path) -> None:
    figure = draw_gains(found.as_dict())
    write_plot(tmp_path / "a.svg", figure)
    write_plot(tmp_path / "a.PNG", figure)
    assert "<svg" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert (tmp_path / "a.PNG").read_bytes().startswith(b"\x89PNG")


def test_another_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.jpg: wanted a file name that ends in \.svg or \.png"):
        write_plot(tmp_path / "a.jpg", Figure())
    assert not list(tmp_path.iterdir())
