"""benchmarks/flat_memory.py scores every token, samples memory over the whole text, and notices memory that grows."""

from __future__ import annotations

import mmap

import flat_memory
import pytest


def test_memory_is_sampled_over_the_whole_text() -> None:
    results = flat_memory.measure(5000, batch_size=1, num_samples=10)
    positions = [position for position, _ in results["samples"]]
    assert positions[0] == 0
    assert positions[-1] == 5000
    assert positions == sorted(set(positions))
    assert 9 <= len(positions) <= 12
    assert results["nats_per_token"] == pytest.approx(5.55, abs=0.3)  # log 256, as the model is untrained


def test_growing_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the 40 scored segments (of 256 tokens) leaks a mebibyte.

    `most_settled` and `least_settled` are the extremes after the first tenth of the text; 36 MiB leak after it, and 25
    leave room for memory that the process frees.
    """
    leaked: list[mmap.mmap] = []  # mapped, because the heap may have free memory left by earlier tests
    stream_losses = flat_memory.stream_losses

    def leak(model, text, plan, progress):
        def leak_and_count(count: int) -> None:
            leaked.append(mmap.mmap(-1, flat_memory.MIB))
            leaked[-1].write(b"x" * flat_memory.MIB)
            progress(count)

        return stream_losses(model, text, plan, leak_and_count)

    monkeypatch.setattr(flat_memory, "stream_losses", leak)
    resident = flat_memory.measure(256 * 40, batch_size=1, num_samples=10)["resident_bytes"]
    assert resident["most_settled"] - resident["least_settled"] > 25 * flat_memory.MIB
