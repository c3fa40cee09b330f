"""Metrics computed by hand."""

from __future__ import annotations

import math

import pytest

from transformer_xl.evaluation.metrics import Sums


def test_metrics_by_hand() -> None:
    """Eight tokens of 1.5 nats each that stand for 24 bytes: half a nat a byte."""
    sums = Sums(nats=12.0, tokens=8, bytes=24)
    assert sums.nats_per_token == 1.5
    assert sums.bits_per_byte == pytest.approx(0.5 / math.log(2), rel=1e-15)
    assert sums.perplexity == pytest.approx(math.e**1.5, rel=1e-15)


def test_a_perplexity_beyond_all_numbers_is_infinite() -> None:
    assert Sums(nats=800.0, tokens=1, bytes=1).perplexity == math.inf
