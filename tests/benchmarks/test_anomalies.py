"""The synthetic log and its anomalies are what benchmarks/anomalies.py says, and average precision is right."""

from __future__ import annotations

from collections import Counter

import anomalies
import numpy as np
import pytest
import streams
from service_log import KINDS, as_bytes, service_log, with_anomalies


def test_logs_are_repeatable_and_anomalies_are_marked() -> None:
    lines = service_log(2000, seed=4)
    assert lines == service_log(2000, seed=4) != service_log(2000, seed=5)
    changed = with_anomalies(lines, 0.02)
    assert changed == with_anomalies(lines, 0.02)
    counts = Counter(line.kind for line in changed if line.kind)
    assert counts == {kind: 16 if kind == "wrong order" else 8 for kind in KINDS}
    different = [old.text != new.text for old, new in zip(lines, changed, strict=True)]
    assert different == [bool(line.kind) for line in changed]
    assert as_bytes(changed).count(b"\n") == 2000


def test_replies_name_the_shard_of_their_request() -> None:
    """So that a changed parameter can be told only with the memory of the request."""
    sent: dict[tuple[str, str], str] = {}
    num_replies = 0
    for line in service_log(2000, seed=4):
        words = line.text.split()
        if "sent to" in line.text:
            sent[line.session, words[4]] = words[-1]
        elif " from shard" in line.text:
            assert sent[line.session, words[4]] == words[7]
            num_replies += 1
    assert num_replies > 500


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([4, 3, 2, 1], (1 + 2 / 3) / 2), ([1, 2, 3, 4], (1 / 2 + 2 / 4) / 2), ([1, 1, 1, 1], 1 / 2)],
)
def test_average_precision(scores: list[int], expected: float) -> None:
    is_anomalous = np.array([True, False, True, False])
    assert anomalies.average_precision(is_anomalous, np.array(scores, dtype=float)) == pytest.approx(expected)


def test_baselines_find_what_they_have_not_seen() -> None:
    lines = service_log(500, seed=1)
    odd = [lines[0], type(lines[0])("xqz jk 17", "s")]
    for system in (anomalies.word_frequency(lines), anomalies.character_trigram(lines)):
        assert system(odd)["mean"][1] > system(odd)["mean"][0]


def test_streams_are_measured() -> None:
    results = streams.measure(streams.tiny_run(), 40_000, None, num_latencies=3)
    assert results["bytes"] == 40_000 == results["samples"][-1][0]
    assert results["lines"] == pytest.approx(40_000 / 67, rel=0.1)
    assert results["bits_per_line"] / 67 == pytest.approx(8, rel=0.05)  # log2 256, as the model is untrained
