"""The measurement of resident memory sees memory that grows, and scores every token."""

from __future__ import annotations

import mmap

import flat_memory
import pytest


def test_memory_is_sampled_over_the_whole_text() -> None:
    results = flat_memory.measure(5000, 1, num_samples=10)
    places = [place for place, _ in results["samples"]]
    assert places[0] == 0
    assert places[-1] == 5000
    assert places == sorted(set(places))
    assert 9 <= len(places) <= 12
    assert results["nats_per_token"] == pytest.approx(5.55, abs=0.3)  # about log 256: the model has learned nothing


def test_memory_that_grows_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that keeps a megabyte for good."""
    kept: list[mmap.mmap] = []  # not from the heap, which may have room left by what ran before
    stream_losses = flat_memory.stream_losses

    def leaks(model, text, plan, progress):
        def told(count: int) -> None:
            kept.append(mmap.mmap(-1, flat_memory.MIB))
            kept[-1].write(b"x" * flat_memory.MIB)
            progress(count)

        return stream_losses(model, text, plan, told)

    monkeypatch.setattr(flat_memory, "stream_losses", leaks)
    held = flat_memory.measure(256 * 40, 1, num_samples=10)["resident_bytes"]
    assert held["most_settled"] - held["least_settled"] > 25 * flat_memory.MIB
