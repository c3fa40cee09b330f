"""equal_time.py scores every token once, chooses settings by validation loss, and goes on after an interruption."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equal_time
import pytest
import torch
from equal_time import compare, in_turns, ours_choice
from implementations.competitor import ConsecutiveSegments, overlapping_windows, rate_factor, window_nats

from transformer_xl import prepare
from transformer_xl.config import UserError


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


def test_segments_continue_those_before_them() -> None:
    segments = ConsecutiveSegments(torch.arange(31), batch_size=3, segment_length=4)
    (inputs_BT, targets_BT), (next_BT, _) = segments.next(), segments.next()
    assert inputs_BT[:, 0].tolist() == [0, 10, 20]
    assert (targets_BT - inputs_BT).unique().tolist() == [1]
    assert next_BT[:, 0].tolist() == [4, 14, 24]
    assert segments.next()[0][:, 0].tolist() == [0, 10, 20]  # the rest of a row is shorter than a segment


def test_learning_rate_warms_up_and_decays() -> None:
    assert rate_factor(0.0, 0.1) < rate_factor(0.04, 0.1) < rate_factor(0.05, 0.1) == 1.0
    assert rate_factor(1.3, 0.1) == pytest.approx(0.1)


def test_recipes_with_settings() -> None:
    choice = ours_choice("small:train.optimizer=muon:train.learning_rate=4e-3:model.norm_first=true")
    assert choice == {
        "recipe": "small",
        "model": {"norm_first": True},
        "train": {"optimizer": "muon", "learning_rate": 4e-3},
    }
    with pytest.raises(UserError, match=r"'optimizer=muon' is not a setting; give model.NAME=VALUE"):
        ours_choice("small:optimizer=muon")


@pytest.fixture
def args(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Arguments of a comparison of a tiny corpus."""
    prepare(documents=["some text\n" * 500], out=tmp_path / "corpus")
    words = ["--corpus", str(tmp_path / "corpus"), "--seconds", "1", "--seeds", "1,2", "--contestants", "ours,gpt2"]
    words += ["--ours", "small,tiny", "--peers", sys.executable, "--rest", "0", "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["equal_time.py", *words])
    return equal_time.parse_arguments()


def test_settings_are_chosen_by_validation_loss_and_nothing_is_trained_twice(
    args: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[dict[str, Any]] = []

    def train(command: list[str], **_: Any) -> SimpleNamespace:
        """Return losses in which the test loss is lowest where the validation loss is not."""
        assignment = json.loads(command[-1])
        trained.append(assignment)
        settings = assignment["settings"]
        good = settings.get("recipe") == "tiny" or settings.get("learning_rate") == 2e-3
        losses = {"valid_nats_per_token": 1.0 if good else 2.0, "test_nats_per_token": 1.5 if good else 0.5}
        result = {**losses, "parameters": 7, "steps": 3, "train_seconds": 1.0, "context": 64}
        if len(trained) == 5 and interrupted:
            raise KeyboardInterrupt
        return SimpleNamespace(returncode=0, stdout=f"a library prints\n{json.dumps(result)}\n")

    monkeypatch.setattr(equal_time.subprocess, "run", train)
    monkeypatch.setattr(equal_time, "commit", lambda: "abc")
    interrupted = True
    with pytest.raises(KeyboardInterrupt):
        compare(args)
    interrupted = False
    table = compare(args)
    # 2 choices of ours and 6 of gpt2 with the first seed, both with the second; the fifth was interrupted
    assert len(trained) == 2 + 6 + 2 + 1
    assert len(json.loads(args.out.read_text())["trainings"]) == 10
    rows = {row["contestant"]: row for row in table}
    assert rows["ours"]["settings"]["recipe"] == "tiny"
    assert rows["gpt2"]["settings"]["learning_rate"] == 2e-3
    assert {row["seeds"] for row in table} == {2}
    assert {row["test_bits_per_token"] for row in table} == {round(1.5 / math.log(2), 4)}
    args.seconds = 2.0
    with pytest.raises(UserError, match="has results with another seconds; choose another --out"):
        compare(args)


def test_contestants_take_turns(args: argparse.Namespace) -> None:
    names = [contestant.name for contestant, _ in in_turns(equal_time.contestants(args))]
    assert names == ["ours", "gpt2", "ours", "gpt2", "gpt2", "gpt2", "gpt2", "gpt2"]
    args.contestants = "ours,nanogpt"
    with pytest.raises(UserError, match="nanogpt needs --nanogpt DIR"):
        equal_time.contestants(args)
