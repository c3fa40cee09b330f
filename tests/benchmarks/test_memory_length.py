"""The picture of README shows the means and ranges of the committed results, and refuses another text."""

from __future__ import annotations

import json
import statistics

import memory_length
import pytest


def test_picture_is_of_the_results() -> None:
    results, peers = (json.loads(path.read_text()) for path in (memory_length.RESULTS, memory_length.PEERS))
    (axes,) = memory_length.draw(results, peers).axes
    values = results["bits_per_byte"].values()
    means, drawn = [statistics.mean(seeds) for seeds in values], list(axes.lines[0].get_ydata())
    # the last point is of all lengths that are left, as their values are equal
    assert drawn + drawn[-1:] * (len(means) - len(drawn)) == pytest.approx(means)
    spread = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (spread.min(), spread.max()) == (min(map(min, values)), max(map(max, values)))
    with pytest.raises(AssertionError, match="not the same text"):
        memory_length.draw(results | {"train_sha256": ""}, peers)
