"""equal_time.py scores every token once, chooses settings by validation loss, and goes on after an interruption."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import equal_time
import numpy as np
import pytest
import torch
from equal_time import compare
from implementations.competitor import Assignment, RandomBlocks, mean_of_tens, overlapping_windows, window_nats
from implementations.hashed_ngrams import EmbeddingWithNgrams

from transformer_xl import Corpus, prepare
from transformer_xl.config import TransformerXLConfig, UserError
from transformer_xl.model.ngrams import NgramEmbedding


@pytest.mark.parametrize("length", [3, 16, 17, 40, 41])
def test_windows_score_every_token_once_with_almost_a_whole_context(length: int) -> None:
    context, stride = 16, 2
    scored: list[int] = []
    for start, first, stop in overlapping_windows(length, context, stride):
        assert stop - start <= context
        assert start == 0 or first - start >= context - stride
        scored += range(first, stop)
    assert scored == list(range(length))


def test_losses_of_windows_are_those_of_the_last_tokens() -> None:
    """A model whose logits are the sums of the inputs so far shows where each window begins."""
    inputs_K, targets_K = torch.arange(1, 42) % 5, torch.arange(41) % 3

    def logits(inputs_BT: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(inputs_BT.cumsum(1) % 3, 3).float()

    nats_K = torch.cat(list(window_nats(inputs_K, targets_K, 16, logits)))
    for start, first, stop in overlapping_windows(41, 16, 2):
        expected = torch.nn.functional.cross_entropy(
            logits(inputs_K[None, start:stop])[0, first - start :], targets_K[first:stop], reduction="none"
        )
        torch.testing.assert_close(nats_K[first:stop], expected)


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Arguments of a comparison of a tiny corpus."""
    prepare(documents=["some text\n" * 500], out=tmp_path / "corpus")
    words = ["--corpus", str(tmp_path / "corpus"), "--seconds", "1", "--seeds", "1,2", "--contestants", "ours,gpt2"]
    words += ["--peers", sys.executable, "--rounds", "3", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["equal_time.py", *words])
    return equal_time.parse_arguments()


class Processes:
    """Stands in for the processes: steps of 0.1 s, and test losses that are lowest where validation losses are not."""

    def __init__(self) -> None:
        self.assignments: list[dict[str, Any]] = []
        self.interrupt_at: int | None = None

    def run(self, command: list[str], name: str, threads: int) -> dict[str, Any]:
        assignment = json.loads(command[-1])
        self.assignments.append(assignment)
        if len(self.assignments) == self.interrupt_at:
            raise KeyboardInterrupt
        if assignment["steps"] is None:
            return {"step_seconds": 0.1 if len(self.assignments) > 4 else 7.0}  # a disturbed first round
        settings = assignment["settings"]
        layers = settings.get("n_layer") or settings["model"]["n_layers"]
        good = settings.get("train", settings)["learning_rate"] in (1e-2, 2e-3)
        valid = (1.0 if good else 2.0) - layers / 100
        losses = {"valid_nats_per_token": valid, "test_nats_per_token": 1.5 if good else 0.5}
        return {**losses, "parameters": 7, "steps": assignment["steps"], "context": 64}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    processes = Processes()
    monkeypatch.setattr(equal_time, "run_process", processes.run)
    monkeypatch.setattr(equal_time, "commit", lambda: "abc")
    return processes


@pytest.mark.parametrize("once", [False, True])
def test_blocks_are_drawn_from_anywhere_or_each_once(tmp_path: Path, once: bool) -> None:
    np.save(tmp_path / "train.npy", np.arange(53))
    given = {"implementation": "", "steps": 1, "seconds": 1.0, "seed": 1, "corpus": "", "vocab_size": 9}
    settings = {"batch_size": 5, "block_size": 4}
    assignment = Assignment(**given, settings=settings, folder=str(tmp_path), first_token=0, dtype="", once=once)
    blocks, starts = RandomBlocks(assignment), list[int]()
    for _ in range(4):
        inputs_BT, targets_BT = blocks.next()
        assert torch.equal(inputs_BT + 1, targets_BT)
        assert torch.equal(inputs_BT, inputs_BT[:, :1] + torch.arange(4))
        starts += inputs_BT[:, 0].tolist()
    first, then = starts[:10], starts[10:]
    if once:
        assert all(len(set(part)) == 10 and set(part) < set(range(0, 49, 4)) for part in (first, then))
        assert first != then
    else:
        assert any(start % 4 for start in starts)


def test_a_step_that_is_longer_each_tenth_time_counts() -> None:
    assert mean_of_tens([*[1.0] * 4, 11.0, *[1.0] * 9, 11.0, *[1.0] * 3]) == 2.0


def test_settings_are_chosen_by_validation_loss_and_nothing_is_trained_twice(
    args: argparse.Namespace, processes: Processes
) -> None:
    # 3 rounds of the steps of 4 models; 6 choices of ours and 6 of gpt2 with the first seed; both with the second
    processes.interrupt_at = 12 + 4
    with pytest.raises(KeyboardInterrupt):
        compare(args)
    table = compare(args)
    assert len(processes.assignments) == 12 + 4 + 9 + 2
    assert {assignment["steps"] for assignment in processes.assignments} == {None, 10}
    assert len(json.loads(args.out.read_text())["trainings"]) == 14
    rows = {row["contestant"]: row for row in table}
    assert rows["ours"]["settings"]["train"]["learning_rate"] == 1e-2
    assert rows["ours"]["settings"]["model"]["n_layers"] == rows["gpt2"]["settings"]["n_layer"] == 4
    assert rows["gpt2"]["settings"]["learning_rate"] == 2e-3
    assert {row["seeds"] for row in table} == {2}
    assert [row["test_bits_per_token"] for row in table] == pytest.approx([1.5 / math.log(2)] * len(table), rel=1e-9)
    args.layers, args.seeds = 7, [1]
    assert [row["settings"].get("n_layer", 7) for row in compare(args)] == [7, 7]
    assert {row["choices_tried"] for row in compare(args)} == {9}
    args.dtype = "float64"
    with pytest.raises(UserError, match="has results with another dtype; choose another --out"):
        compare(args)


def test_another_machine_trains_for_the_steps_of_the_first(
    args: argparse.Namespace, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.interrupt_at = 12 + 4
    with pytest.raises(KeyboardInterrupt):
        compare(args)
    monkeypatch.setattr(equal_time, "cpu_features", lambda: ["another"])
    compare(args)
    results = json.loads(args.out.read_text())
    assert "another" not in results["machine"]["features"]
    trained_by = [entry.get("machine", {}).get("features") for entry in results["trainings"]]
    assert trained_by[:3] == [None] * 3
    assert trained_by[-2:] == [["another"]] * 2
    args.contestants = "ours-ngrams"
    with pytest.raises(UserError, match="lacks steps that its machine must measure; choose another --out"):
        compare(args)


def test_a_longer_time_tries_the_best_choices_of_a_shorter_one(args: argparse.Namespace, processes: Processes) -> None:
    args.best = 1
    with pytest.raises(UserError, match="--best needs all choices of ours at a shorter time"):
        compare(args)
    args.best = None
    compare(args)
    processes.assignments.clear()
    args.best, args.seconds = 1, 3.0
    compare(args)
    assert [(of["steps"], of["seed"]) for of in processes.assignments] == [(30, 1), (30, 1), (30, 2), (30, 2)]
    tables = json.loads(args.out.read_text())["tables"]
    assert {name: {row["seeds"] for row in table} for name, table in tables.items()} == {"1": {2}, "3": {2}}


def test_a_longer_time_tries_the_best_rate_of_each_size_and_reads_ngrams_once(
    args: argparse.Namespace, processes: Processes
) -> None:
    args.contestants, args.seeds = "gpt2,gpt2-ngrams", [1]
    compare(args)
    processes.assignments.clear()
    args.best, args.best_of, args.out = 2, args.out, args.out.with_name("longer.json")
    args.seconds = 3.0
    compare(args)
    epoch = -(-Corpus.open(args.corpus).split("train").num_tokens // equal_time.STEP_TOKENS)
    assert epoch < 30
    trained = [(of["steps"], of["settings"]) for of in processes.assignments if of["steps"]]
    assert [(steps, settings["n_layer"], settings["learning_rate"]) for steps, settings in trained] == [
        (30, 4, 2e-3),
        (epoch, 2, 2e-3),
        (30, 2, 2e-3),
        (epoch, 1, 2e-3),
    ]


def test_a_process_trains_and_scores(args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = equal_time.Contestant("ours", "competitor_ours", [{"recipe": "tiny", "train": {"batch_size": 2}}])
    monkeypatch.setattr(equal_time, "all_contestants", lambda _: [ours])
    args.contestants, args.seconds, args.seeds = "ours", 0.05, [1]
    args.rounds, args.round_seconds, args.valid_tokens, args.test_tokens = 1, 0.05, 200, 300
    (row,) = compare(args)
    assert row["steps"] >= 2
    assert 0 < row["test_bits_per_token"] < 8.1


def test_ngrams_of_others_are_those_of_this_package() -> None:
    """In a segment after another one too."""
    config = TransformerXLConfig(
        vocab_size=50, n_layers=1, d_model=8, n_heads=2, max_ngram=4, ngram_buckets=64, d_ngram=3
    )
    own = NgramEmbedding(config)
    own.init_weights()
    other = EmbeddingWithNgrams(torch.nn.Embedding(50, 8), max_ngram=4, ngram_buckets=64, d_ngram=3)
    for theirs, ours in ((other.tables, own.tables), (other.projections, own.projections)):
        for theirs_parameter, ours_parameter in zip(theirs, ours, strict=True):
            theirs_parameter.data = ours_parameter.data
    ids_BT = torch.randint(50, (2, 12))
    ids_BS = torch.cat([ids_BT.new_zeros(2, 3), ids_BT + 1], 1)
    expected_BTD = own(ids_BS, 12) + other.embedding(ids_BT)
    first_BTD = other(ids_BT[:, :5])
    other.before_BR = ids_BT[:, :5]
    torch.testing.assert_close(torch.cat([first_BTD, other(ids_BT[:, 5:])], 1), expected_BTD)


def test_as_many_settings_of_all_are_tried(args: argparse.Namespace, tmp_path: Path) -> None:
    args.nanogpt = tmp_path
    args.contestants = None
    with pytest.raises(UserError, match="nanochat needs --nanochat DIR, a checkout of it"):
        equal_time.contestants(args)
    args.nanochat = tmp_path
    found = equal_time.contestants(args)
    assert len(found) == 12
    assert {len(contestant.choices) for contestant in found} == {6}
    assert len({json.dumps(choice) for contestant in found for choice in contestant.choices}) == 72


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--rates", "abc"], "no number above 0"),
        (["--rates=-1e-3"], "no number above 0"),
        (["--rates", "inf"], "no number above 0"),
        (["--seeds", "1,x"], "no integer of at least 0"),
        (["--seconds", "nan"], "no number above 0"),
        (["--round-seconds=-5"], "no number above 0"),
        (["--contestants", "nanochat", "--nanochat", "nowhere"], "nanochat needs --nanochat DIR"),
        (["--out", "{tmp}"], "cannot be read as results"),
        (["--out", "{tmp}/cut.json"], "cannot be read as results"),
        (["--out", "{tmp}/list.json"], "has no results"),
        (["--best", "1", "--best-of", "{tmp}/none.json"], "cannot be read as results"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    args, processes, words, wanted, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "cut.json").write_text('{"text": ')
    (tmp_path / "list.json").write_text("[]")
    monkeypatch.setattr(sys, "argv", [*sys.argv, *(word.format(tmp=tmp_path) for word in words)])
    with pytest.raises(SystemExit, match="2"):
        equal_time.main()
    assert wanted in capsys.readouterr().err
    assert not processes.assignments
    assert not (tmp_path / "out.json").exists()
