"""serving.py measures a server, and notices texts that are not those of the same requests alone."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import count
from pathlib import Path

import chart
import pytest
import serving
from servers import make_run, running

FLAGS = "--clients 3 --seconds 1 --tokens 8 --prompt-tokens 6 --drop 0.3 --check 4 --threads 1"


def test_load_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "tiny")
    words = [str(tmp_path / "tiny"), *FLAGS.split(), f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr(sys, "argv", ["serving.py", *words])
    monkeypatch.setattr(serving, "bandwidth", lambda threads: 1e9)
    serving.main()
    results = json.loads((tmp_path / "out").read_text())
    (row,) = results["results"]
    assert row["requests"] > 0
    assert row["dropped"] > 0
    assert row["errors"] == row["wrong"] == 0
    assert row["checked"] > 0
    assert row["first_token_seconds_p50"] <= row["request_seconds_p50"] <= row["request_seconds_p99"]
    assert 0 < row["tokens_per_second"] < 8 * (row["requests"] + row["dropped"] + 3)
    assert row["resident_bytes_peak"] > 2**26
    assert "| 3 |" in chart.serving_table("tiny", results)


def test_wrong_texts_and_failed_requests_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "tiny")
    words = ["tiny", "--prompt-tokens=6", "--tokens=8", "--check=3", "--seconds=0.5"]
    args = serving.arguments().parse_args(words)
    with running({"tiny": run}) as (client, _):
        url = str(client.base_url).rstrip("/")
        load = asyncio.run(serving.run_load(url, "tiny", 2, args))
        assert len(load.texts) in (2, 3)  # one of each client at least, and 3 of all are kept
        assert not load.errors
        assert asyncio.run(serving.count_wrong(url, load)) == 0
        whole = asyncio.run(serving.run_load(url, "tiny", 2, serving.arguments().parse_args([*words, "--whole"])))
        assert not whole.errors
        assert whole.num_tokens >= 4 * len(whole.texts) > 0
        assert asyncio.run(serving.count_wrong(url, whole)) == 0
        load.texts[1] = (load.texts[1][0], load.texts[1][1] + "x")
        assert asyncio.run(serving.count_wrong(url, load)) == 1
        failed = asyncio.run(serving.run_load(url, "no-such-model", 1, args))
        assert "status 404" in failed.errors
        assert failed.num_tokens == failed.num_dropped == 0
        # a client that stops reading has not got the rest of its tokens
        given_up = serving.Load()
        args.drop, args.tokens = 1.0, 60
        end = serving.time.perf_counter() + 0.2
        asyncio.run(serving.client(url, "tiny", count(5), end, given_up, args))
        assert given_up.num_dropped > 0
        assert not given_up.texts
