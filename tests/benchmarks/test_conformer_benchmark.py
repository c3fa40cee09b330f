"""benchmarks/conformer.py measures in processes of their own, leaves out what is too large, and prints tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import conformer
import pytest


def test_a_process_measures_the_operator() -> None:
    what = {"causal": False, "length": 24, "sizes": (2, 4), "kernel": "reference", "threads": 1}
    found = conformer.measure({"ours": what | {"passes": ["training"]}, "none": what | {"passes": []}}, 0.01)
    assert found["none"] == {}
    assert found["ours"].keys() == {"training"}
    assert 0 < found["ours"]["training"]["seconds"] < 60
    assert found["ours"]["training"]["peak_bytes"] >= 0


def test_what_is_too_large_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    measured = []

    def measure(whats: dict[str, dict[str, Any]], seconds: float) -> dict[str, Any]:
        """Say that memory grows with the square of the length, beside ours, without measuring."""
        found: dict[str, Any] = {}
        for name, what in whats.items():
            passes = what.pop("passes")
            make = conformer.passes_of_layer if "model" in what else conformer.passes_of_operator
            del what["threads"]
            if measured.append((name, passes)) is None and "length" in what:
                for work in make(**what | {"length": 3}).values():
                    work()
            size = what.get("frames", what.get("length"))
            bytes_of = {"ours": size * 1e6}.get(name, size**2 * 1e6)
            found[name] = {one: {"seconds": size / 1e3, "peak_bytes": bytes_of} for one in passes}
        return found

    monkeypatch.setattr(conformer, "measure", measure)
    out = tmp_path / "results.json"
    words = (
        "--audio 10,20,40 --lengths 16,32,256 --models parakeet --n-heads 2 --d-head 4 --kernel sdpa --max-memory 50"
    )
    monkeypatch.setattr(sys, "argv", ["conformer.py", *words.split(), "--out", str(out)])
    conformer.main()
    results = json.loads(out.read_text())
    layers = results["layers"][0]["lines"]
    assert [line["length"] for line in layers] == [125, 250, 500]
    assert layers[2]["results"]["ours"]["training"] == {"seconds": 0.5, "peak_bytes": 5e8}
    # from 125 frames on: 15.6, 62.5 (expected) and 250 GB
    assert layers[1]["results"]["eager"]["forward"]["expected_bytes"] == 62.5e9
    assert layers[2]["results"]["eager"]["forward"]["expected_bytes"] == 250e9
    assert ("eager", []) in measured
    table = capsys.readouterr().out
    assert "| 40 s | 500 | forward | 500.0 ms, 500 MB | (about 250 GB, 2 s) | (about 250 GB, 2 s) |" in table
    assert "| two-sided | 32 | training | 32.0 ms, 32 MB | 32.0 ms, 1,024 MB | 0.52 |" in table
