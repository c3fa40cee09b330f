"""`txl score` and `txl evaluate`: what they print is what the library computes."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import CommandResult, txl

from transformer_xl.config import DynamicConfig, EvaluationConfig
from transformer_xl.evaluation.evaluate import evaluate
from transformer_xl.evaluation.score import score
from transformer_xl.run_folder import Run, load
from transformer_xl.text.token_store import Corpus

MODEL = ["--model.n-layers=2", "--model.d-model=14", "--model.n-heads=2", "--model.d-head=5", "--model.d-ff=19"]
TRAIN = [
    "--train.segment-length=7",
    "--train.memory-length=11",
    "--train.batch-size=3",
    "--train.max-steps=11",
    "--train.dtype=float32",
]
ODD = 'caf\u00e9 \u2603\tb [red]x[/red]\n\n"quoted" \\ line'.encode() + b"\xff\x00 end\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three documents as a corpus, a run, and two texts."""
    place = tmp_path_factory.mktemp("score")
    words = ["the", "cat", "sat", "on", "mat", "and", "dog", "ran", "after", "it", "then", "all", "of", "them"]
    for number in range(3):
        text = " ".join(words[step * step % 17 % len(words)] for step in range(60 + number))
        (place / f"part{number}.txt").write_text(text + "\n")
    parts = [place / f"part{number}.txt" for number in range(3)]
    assert txl("prepare", "--train", *parts, "--test", *parts, "--out", place / "corpus").status == 0
    assert txl("train", "--corpus", place / "corpus", "--run", place / "run", *MODEL, *TRAIN).status == 0
    (place / "odd.txt").write_bytes(ODD)
    (place / "plain.txt").write_bytes(b"the cat\nsat")
    return place


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    return load(place / "run", device="cpu")


def lines(said: CommandResult) -> list[dict[str, Any]]:
    """Parse JSON lines; they must be ASCII and must not hold NaN or Infinity."""
    assert said.status == 0, said.err
    assert said.out.isascii()
    return [json.loads(line, parse_constant=pytest.fail) for line in said.out.splitlines()]


def test_score_by_token_line_and_file(place: Path, run: Run) -> None:
    """They add up and equal the library's; bytes that are not whole characters are valid JSON, too."""
    names = [str(place / "odd.txt"), str(place / "plain.txt")]
    wanted = score(run, {names[0]: ODD, names[1]: "the cat\nsat"})
    by = {per: lines(txl("score", place / "run", *names, "--per", per, "--json")) for per in ("token", "line", "file")}
    assert [found["file"] for found in by["file"]] == names
    for one, whole in zip(wanted, by["file"], strict=True):
        assert whole["logprob"] == pytest.approx(-one.sums.nats, rel=1e-6)
        assert whole["perplexity"] == pytest.approx(one.sums.perplexity, rel=1e-6)
        assert (whole["tokens"], whole["bytes"]) == (one.sums.tokens, one.sums.bytes)
        for per in ("token", "line"):
            parts = [found["logprob"] for found in by[per] if found["file"] == one.name]
            assert math.fsum(parts) == pytest.approx(whole["logprob"], rel=1e-12)
    tokens = [found for found in by["token"] if found["file"] == names[0]]
    assert bytes(found["token"] for found in tokens) == ODD
    assert (
        b"".join(bytes.fromhex(found["hex"]) if "hex" in found else found["text"].encode() for found in tokens) == ODD
    )
    np.testing.assert_allclose([-found["logprob"] for found in tokens], wanted[0].nats_K, rtol=1e-5)
    texts = [found["text"] for found in by["line"] if found["file"] == names[0]]
    assert texts == ODD.decode("utf-8", "replace").removesuffix("\n").split("\n")
    assert [found["line"] for found in by["line"]] == [1, 2, 3, 1, 2]
    assert {found["line"] for found in tokens} == {1, 2, 3}


def test_score_for_people(place: Path) -> None:
    """One line of output for each, for any characters in the text, and the sum."""
    for per in ("token", "line", "file"):
        said = txl("score", place / "run", place / "odd.txt", place / "plain.txt", "--per", per)
        whole = sum(found["logprob"] for found in lines(
            txl("score", place / "run", place / "odd.txt", place / "plain.txt", "--per", per, "--json")
        ))  # fmt: skip
        assert (said.status, said.err) == (0, "")
        assert f"{whole:.4f}" in said.out
    said = txl("score", place / "run", place / "odd.txt")
    assert "caf\u00e9 \u2603\\tb [red]x[/red]" in said.out


def test_score_reads_standard_input(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(ODD)))
    piped, of_file = (
        lines(txl("score", place / "run", file, "--per", "file", "--json")) for file in ("-", place / "odd.txt")
    )
    assert piped == [{**of_file[0], "file": "-"}]


def test_files_as_one_text(place: Path, run: Run) -> None:
    """--no-reset-memory: the second file continues the first; batch size and segment length change nothing."""
    files = [place / "odd.txt", place / "plain.txt"]
    said = txl("score", place / "run", *files, "--no-reset-memory", "--per", "file", "--json")
    wanted = score(run, [ODD, "the cat\nsat"], EvaluationConfig(reset_memory=False))
    found = [one["logprob"] for one in lines(said)]
    np.testing.assert_allclose(found, [-one.sums.nats for one in wanted], rtol=1e-6)
    lengths = ["--attention-window", "9", "--memory-length", "8", "--per", "file", "--json"]
    several = [
        lines(txl("score", place / "run", *files, *lengths, *more))
        for more in (["--batch-size", "1"], ["--batch-size", "4", "--segment-length", "3"], ["--segment-length", "64"])
    ]
    for one in several[1:]:
        np.testing.assert_allclose(
            [found["logprob"] for found in one],
            [found["logprob"] for found in several[0]],
            rtol=1e-5,
        )


# Other ways to evaluate.


def evaluated(place: Path, *words: str | Path) -> dict[str, Any]:
    said = txl("evaluate", place / "run", "--json", *words)
    assert said.status == 0, said.err
    return said.object


def test_evaluate_in_batches_and_by_documents(place: Path, run: Run) -> None:
    split = Corpus.open(place / "corpus").split("test")
    assert split.num_documents == 3
    one, several = evaluated(place), evaluated(place, "--batch-size", "5")
    assert several["nats_per_token"] == pytest.approx(one["nats_per_token"], rel=1e-6)
    assert (several["batch_size"], several["warmup_tokens"], several["reset_memory"]) == (5, None, False)
    hasty = evaluated(place, "--batch-size", "5", "--warmup-tokens", "0")
    assert abs(hasty["nats_per_token"] - one["nats_per_token"]) > 1e-7
    apart = evaluated(place, "--reset-memory")
    wanted = evaluate(run, split, EvaluationConfig(reset_memory=True))
    assert apart["nats_per_token"] == pytest.approx(wanted.nats_per_token, rel=1e-6)
    assert abs(apart["nats_per_token"] - one["nats_per_token"]) > 1e-7


def test_evaluate_by_a_sliding_window(place: Path, run: Run) -> None:
    found = evaluated(place, "--method=sliding-window", "--attention-window=13", "--memory-length=0", "--max-tokens=59")
    split = Corpus.open(place / "corpus").split("test")
    wanted = evaluate(
        run, split, EvaluationConfig(method="sliding-window", attention_window=13, memory_length=0), max_tokens=59
    )
    assert (found["method"], found["attention_window"], found["memory_length"]) == ("sliding-window", 13, 0)
    assert found["nats_per_token"] == pytest.approx(wanted.nats_per_token, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["rms", "sgd"])
def test_evaluate_dynamically(place: Path, run: Run, optimizer: str) -> None:
    """The run on disk stays as it is."""
    weights = (place / "run" / "model.safetensors").read_bytes()
    settings: dict[str, Any] = {"optimizer": optimizer, "learning_rate": 0.001, "decay": 0.1}
    if optimizer == "rms":
        settings |= {"epsilon": 0.01, "gradient_stats_tokens": 50}
    flags = [f"--dynamic.{name.replace('_', '-')}={value}" for name, value in settings.items()]
    found = evaluated(place, "--method", "dynamic", *flags)
    corpus = Corpus.open(place / "corpus")
    config = EvaluationConfig(method="dynamic", dynamic=DynamicConfig(**settings))
    wanted = evaluate(run, corpus.split("test"), config, train_split=corpus.split("train"))
    assert (found["method"], found["method_settings"]) == ("dynamic", settings)
    assert found["nats_per_token"] == pytest.approx(wanted.nats_per_token, rel=1e-6)
    assert found["nats_per_token"] != evaluated(place)["nats_per_token"]
    assert (place / "run" / "model.safetensors").read_bytes() == weights


def test_windows_are_swept_with_the_memory_that_fills_them(place: Path) -> None:
    windows = evaluated(place, "--sweep-attention-window=4,9", "--max-tokens=59")["sweep"]
    assert [(each["attention_window"], each["memory_length"]) for each in windows] == [(4, 3), (9, 8)]


def test_losses_of_every_token_in_a_file(place: Path, tmp_path: Path) -> None:
    found = evaluated(place, "--token-losses", tmp_path / "losses.npy", "--batch-size", "3")
    nats_K = np.load(tmp_path / "losses.npy", allow_pickle=False)
    assert len(nats_K) == found["tokens"]
    assert nats_K.mean(dtype=np.float64) == pytest.approx(found["nats_per_token"], rel=1e-6)


def test_warnings_go_to_standard_error(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that are probably not intended cause a warning, and the result is printed as usual."""
    said = txl("evaluate", place / "run", "--json", "--attention-window", "64")
    assert said.err.startswith("warning: memory-length 11 is too short for attention-window 64")
    assert said.err.endswith("memory-length 63 to fill the window\n")
    assert said.object["attention_window"] == 64
    assert txl("evaluate", place / "run", "--json", "--attention-window", "12").err == ""
    monkeypatch.setattr("transformer_xl.evaluation.plan.has_bfloat16", lambda _: False)
    said = txl("evaluate", place / "run", "--json", "--dtype", "bfloat16", "--max-tokens", "2")
    assert said.err.startswith("warning: this device has no bfloat16 instructions")
    assert said.object["dtype"] == "bfloat16"


def test_evaluate_for_people(place: Path) -> None:
    words = [
        "--method=sliding-window",
        "--attention-window=5",
        "--memory-length=0",
        "--reset-memory",
        "--max-tokens=31",
    ]
    said = txl("evaluate", place / "run", *words)
    assert (said.status, said.err) == (0, "")
    assert "method sliding-window, memory reset at each document" in said.out
    assert "method memory" in txl("evaluate", place / "run", "--max-tokens=31").out
