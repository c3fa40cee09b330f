"""The picture of README shows the means and ranges of the committed results."""

from __future__ import annotations

import json
import statistics

import memory_length
import pytest


def test_picture_is_of_the_results() -> None:
    results = json.loads(memory_length.RESULTS.read_text())
    (axes,) = memory_length.draw(results).axes
    values = results["bits_per_byte"].values()
    means, drawn = [statistics.mean(seeds) for seeds in values], list(axes.lines[0].get_ydata())
    # the last point is of all lengths that are left, as their values are equal
    assert drawn + drawn[-1:] * (len(means) - len(drawn)) == pytest.approx(means)
    spread = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (spread.min(), spread.max()) == (min(map(min, values)), max(map(max, values)))
