"""The loop: each step against one by hand, what memory carries, what is validated and kept, and losses gone bad."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from transformer_xl.config import ModelConfig, RunConfig, TrainConfig, UserError
from transformer_xl.evaluation.scoring import Plan, sum_nats
from transformer_xl.model.memory import Reach
from transformer_xl.run_folder import RunFolder, config_text
from transformer_xl.tensor_file import load_tensors
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.segments import StreamPosition
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.vocabulary import ByteVocabulary
from transformer_xl.training import checkpoint, loop
from transformer_xl.training.loop import Training, training_stream

CPU = torch.device("cpu")
MODEL = {"layers": 2, "width": 14, "heads": 2, "head_width": 5, "feedforward": 19, "dropout": 0.0}
TRAIN = {
    "segment": 7, "memory": 11, "rows": 3, "steps": 17, "learning_rate": 0.01, "warmup": 5, "precision": "float32",
    "log_every": 1, "evaluate_every": 1000, "save_every": 1000,
}  # fmt: skip


def letters(length: int, seed: int) -> bytes:
    return bytes(np.random.default_rng(seed).integers(97, 123, length, dtype=np.uint8))


def make_corpus(place: Path, train: bytes, valid: bytes | None = None) -> Corpus:
    splits = {"train": [Document("train", [train])]} | ({"valid": [Document("valid", [valid])]} if valid else {})
    return write_corpus(place, splits, name="tiny", source="a test", vocabulary=ByteVocabulary())


def start(place: Path, corpus: Corpus, *, model: dict[str, Any] | None = None, **train: Any) -> Training:
    config = RunConfig(model=ModelConfig(**MODEL | (model or {})), train=TrainConfig(**TRAIN | train))
    return Training(RunFolder.create(place, config, corpus.vocabulary), corpus, CPU)


def train_until(training: Training, step: int) -> None:
    training.run(lambda: training.state.progress.step >= step)


def lines_of(training: Training, split: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (training.folder.path / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


def nats_of(training: Training) -> list[float]:
    return [line["nats_per_token"] for line in lines_of(training, "train")]


class ByHand:
    """Training written out: each row alone and without padding, clipping and Adam as formulas."""

    def __init__(self, training: Training, text: bytes) -> None:
        self.model = copy.deepcopy(training.state.model)
        self.text, self.config = text, training.config
        self.weights = list(self.model.parameters())
        self.first = [torch.zeros_like(weight) for weight in self.weights]
        self.second = [torch.zeros_like(weight) for weight in self.weights]

    def step(self, step: int, rate: float) -> tuple[float, float]:
        """Moves the weights; gives the loss in nats per counted token and the gradient's norm before clipping."""
        nats, count = self.loss(step)
        grads = torch.autograd.grad(nats / count, self.weights)
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        scale = min(1.0, self.config.clip / (norm + 1e-6))
        for place, (weight, grad) in enumerate(zip(self.weights, grads, strict=True)):
            self.first[place] = 0.9 * self.first[place] + 0.1 * grad * scale
            self.second[place] = 0.999 * self.second[place] + 0.001 * (grad * scale) ** 2
            mean, square = self.first[place] / (1 - 0.9 ** (step + 1)), self.second[place] / (1 - 0.999 ** (step + 1))
            weight.data -= rate * mean / (square.sqrt() + 1e-8)
        return float(nats.detach()) / count, norm

    def loss(self, step: int) -> tuple[Tensor, int]:
        rows, segment = self.config.rows, self.config.segment
        edges = [row * len(self.text) // rows for row in range(rows + 1)]
        longest = max(end - begin for begin, end in pairwise(edges))
        index = step % math.ceil(longest / segment)
        if index == 0:
            self.memories = [self.model.initial_memory(1) for _ in range(rows)]
        nats, count = torch.zeros((), dtype=torch.float64), 0
        for row in range(rows):
            first = edges[row] + index * segment
            targets = list(self.text[first : min(first + segment, edges[row + 1])])
            if not targets:
                continue
            inputs = [self.text[first - 1] if first else 10, *targets[:-1]]
            hidden_BTD, self.memories[row] = self.model(torch.tensor([inputs]), self.memories[row])
            begin = segment // 2 if self.config.loss == "half" else 0
            nats = nats + self.model.nats(hidden_BTD, torch.tensor([targets]))[0, begin:].sum()
            count += len(targets[begin:])
        return nats, count


@pytest.mark.parametrize(
    ("length", "settings"),
    [
        (127, {}),  # rows of 42, 42 and 43: in the last segment two rows are padding alone
        (139, {"loss": "half"}),  # rows of 46, 46 and 47: the last segment counts 1, 1 and 2 targets
        (139, {"clip": 100.0}),
        (139, {"clip": 0.003, "memory": 0, "warmup": 0}),
        (139, {"rows": 1, "segment": 31, "memory": 5}),
    ],
)
def test_every_step_equals_the_one_by_hand(tmp_path: Path, length: int, settings: dict[str, Any]) -> None:
    """In float64, over two epochs: loss, gradient norm, every weight; so padding and uncounted targets do nothing."""
    text = letters(length, seed=1)
    training = start(tmp_path / "run", make_corpus(tmp_path / "corpus", text), **settings)
    training.state.model.double()
    training.state.memories = (training.state.model.initial_memory(training.config.rows),)
    hand = ByHand(training, text)
    wanted = []
    for step in range(training.config.steps):
        train_until(training, step + 1)
        warmup = training.config.warmup
        share = (step - warmup) / (17 - warmup)
        rate = 0.01 * ((step + 1) / warmup if step < warmup else (1 + math.cos(math.pi * share)) / 2)
        wanted.append((*hand.step(step, rate), rate))
        for found, by_hand in zip(training.state.model.parameters(), hand.weights, strict=True):
            torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-9)
    lines = lines_of(training, "train")
    found = [(line["nats_per_token"], line["gradient_norm"], line["learning_rate"]) for line in lines]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    assert [line["step"] for line in lines] == [*range(1, 18)]
    assert all(math.isclose(line["bits_per_byte"], line["nats_per_token"] / math.log(2)) for line in lines)


def test_clip_limits_the_gradient_that_adam_sees(tmp_path: Path) -> None:
    corpus, seen = make_corpus(tmp_path / "corpus", letters(139, seed=1)), {}
    for clip in (0.01, 1000.0):
        training = start(tmp_path / f"{clip}", corpus, clip=clip)
        grads: list[Tensor] = []
        training.state.optimizers[0].register_step_pre_hook(
            lambda optimizer, _args, _kwargs, grads=grads: grads.append(
                torch.cat([parameter.grad.flatten() for parameter in optimizer.param_groups[0]["params"]])
            )
        )
        train_until(training, 1)
        seen[clip] = grads[0], lines_of(training, "train")[0]["gradient_norm"]
    (clipped, norm), (whole, same_norm) = seen[0.01], seen[1000.0]
    assert norm == same_norm == pytest.approx(whole.norm().item(), rel=1e-5)
    assert norm > 0.1
    assert clipped.norm().item() == pytest.approx(0.01, rel=1e-4)
    torch.testing.assert_close(clipped, whole * (0.01 / norm), rtol=1e-4, atol=1e-9)


def test_text_before_reaches_the_next_step_through_memory_alone(tmp_path: Path) -> None:
    """Two texts that differ in the first segments of the rows only, but for the last token; weights do not move."""
    one = bytearray(letters(126, seed=1))
    other = bytearray(one)
    for row in range(3):
        other[row * 42 : row * 42 + 6] = letters(6, seed=row + 5)
    corpora = [make_corpus(tmp_path / f"corpus {place}", bytes(text)) for place, text in enumerate((one, other))]
    for memory in (0, 11):
        first, second = (
            start(tmp_path / f"{memory} {place}", corpus, memory=memory, learning_rate=1e-30)
            for place, corpus in enumerate(corpora)
        )
        for training in (first, second):
            training.state.model.double()
            train_until(training, 8)
        differ = [a != b for a, b in zip(nats_of(first), nats_of(second), strict=True)]
        # an epoch is 6 segments. In the fifth (places 28 on) the second layer's memory holds place 17, which was read
        # with a memory of places 3 on; in the sixth it holds place 24, read with one of places 10 on
        assert differ == [True, *[memory > 0] * 4, False, True, memory > 0]


def test_an_epoch_begins_with_an_empty_memory(tmp_path: Path) -> None:
    """With weights that do not move, every epoch has the same losses."""
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1))
    training = start(tmp_path / "run", corpus, learning_rate=1e-30, steps=21)
    training.run()
    nats = nats_of(training)
    assert nats[:7] == nats[7:14] == nats[14:]
    assert len(set(nats[:7])) == 7


def test_lines_are_means_over_the_tokens_since_the_last_line(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1))
    each, some = (start(tmp_path / f"{every}", corpus, log_every=every) for every in (1, 5))
    each.run()
    some.run()
    counts = [
        training_stream(corpus, each.config).read(StreamPosition(segment=step % 7)).counted_BT.sum()
        for step in range(17)
    ]
    assert counts[:7] == [21] * 6 + [1]
    nats = nats_of(each)
    wanted = [np.average(nats[i : i + 5], weights=counts[i : i + 5]) for i in (0, 5, 10)]
    np.testing.assert_allclose(nats_of(some), wanted, rtol=1e-12)
    assert [line["step"] for line in lines_of(some, "train")] == [5, 10, 15]


# Validation.


def test_validation_is_a_score_of_the_validation_text(tmp_path: Path) -> None:
    """By its own memory and without dropout; training goes on as if there were none."""
    text, valid = letters(127, seed=1), letters(41, seed=2)
    corpus = make_corpus(tmp_path / "corpus", text, valid)
    without = start(tmp_path / "without", make_corpus(tmp_path / "alone", text), model={"dropout": 0.3})
    without.run()
    training = start(tmp_path / "run", corpus, evaluate_every=3, model={"dropout": 0.3})
    training.run()
    assert [line["step"] for line in lines_of(training, "valid")] == [3, 6, 9, 12, 15, 17]
    assert nats_of(training) == nats_of(without)
    assert training.state.model.training
    model = training.folder.load_model(CPU, "last")
    tokens = np.frombuffer(valid, dtype=np.uint8)
    last = lines_of(training, "valid")[-1]
    wanted = sum_nats(model, tokens, 10, Plan(segment=7, reach=Reach(11), rows=3)) / 41
    assert last["nats_per_token"] == pytest.approx(wanted, rel=1e-6)
    assert last["bits_per_byte"] == pytest.approx(wanted / math.log(2), rel=1e-6)


def test_evaluate_tokens_cuts_the_validation_text(tmp_path: Path) -> None:
    """A short one is read in as many rows as it fills, at least one."""
    text, valid = letters(127, seed=1), letters(41, seed=2)
    whole, cut = make_corpus(tmp_path / "whole", text, valid), make_corpus(tmp_path / "cut", text, valid[:5])
    one = start(tmp_path / "one", whole, evaluate_tokens=5, steps=2)
    other = start(tmp_path / "other", cut, steps=2)
    assert one.run().best_nats_per_token == other.run().best_nats_per_token


def best_and(folder: RunFolder, file: Path) -> list[bool]:
    best, _ = load_tensors(folder.weights_file("best"))
    other, _ = load_tensors(file)
    return [torch.equal(best[name], other[name]) for name in best]


def test_the_best_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation losses 5, 3, 4, 3, 6: the second's weights."""
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    losses = iter([5.0, 3.0, 4.0, 3.0, 6.0])
    monkeypatch.setattr(loop, "sum_nats", lambda _model, stream, *_: next(losses) * len(stream.tokens))
    training = start(tmp_path / "run", corpus, steps=15, evaluate_every=3)
    train_until(training, 6)
    state = training.folder.newest_state()
    assert state is not None
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "model.safetensors").write_bytes((state / "model.safetensors").read_bytes())
    outcome = training.run()
    assert outcome.best_nats_per_token == 3.0
    assert all(best_and(training.folder, tmp_path / "kept" / "model.safetensors"))
    assert not any(best_and(training.folder, training.folder.weights_file("last")))


def test_weights_wrecked_by_a_high_rate_are_not_the_best(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    training = start(tmp_path / "run", corpus, steps=8, evaluate_every=4)
    train_until(training, 5)
    good = lines_of(training, "valid")[0]["nats_per_token"]
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    wild = training.config.model_copy(update={"learning_rate": 30.0})
    (tmp_path / "run" / "config.yaml").write_text(
        config_text(training.folder.config.model_copy(update={"train": wild}))
    )
    training = Training(RunFolder.open(tmp_path / "run"), corpus, CPU)
    training.resume()
    outcome = training.run()
    first, second = (line["nats_per_token"] for line in lines_of(training, "valid"))
    assert (first, outcome.best_nats_per_token) == (good, good)
    assert second > good + 1
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before


def test_a_checkpoint_written_anew_replaces_the_old_one_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run stopped in a validation has one of that step; where the next cannot be written, it must still be there."""
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    training = start(tmp_path / "run", corpus, evaluate_every=4, save_every=4)
    train_until(training, 4)
    assert not lines_of(training, "valid")

    def refuse(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(checkpoint, "save_tensors", refuse)
    with pytest.raises(UserError, match=r"writing .*step-00000004.*: no room"):
        training.run()
    assert len(lines_of(training, "valid")) == 1
    Training(RunFolder.open(tmp_path / "run"), corpus, CPU).resume()
    assert [path.name for path in training.folder.states()] == ["step-00000000", "step-00000004"]


def test_without_validation_text_the_last_weights_are_the_best(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1))
    training = start(tmp_path / "run", corpus, evaluate_every=3)
    train_until(training, 5)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert training.folder.weights_file("best") == training.folder.weights_file("last")
    assert training.run().best_nats_per_token is None
    assert all(best_and(training.folder, training.folder.weights_file("last")))


# Losses that are no numbers.


def spoil(training: Training, step: int, change: Callable[[Tensor], Tensor]) -> None:
    """Lets the loss of one step be something else."""
    nats = training.state.model.nats

    def spoiled(hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        found = nats(hidden_BTD, targets_BT)
        return change(found) if training.state.progress.step + 1 == step else found

    training.state.model.nats = spoiled


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda nats: nats * torch.nan, "the loss became nan at step {step}; "),
        (lambda nats: nats + torch.inf, "the loss became inf at step {step}; "),
        (lambda nats: (nats - nats.detach()).sqrt() + 1, "the gradient's norm became (nan|inf) at step {step}; "),
    ],
)
@pytest.mark.parametrize(("step", "checkpoint"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (17, 16)])
def test_a_loss_that_is_no_number_stops(
    tmp_path: Path, change: Callable[[Tensor], Tensor], message: str, step: int, checkpoint: int
) -> None:
    """Also at the very step of a checkpoint, which must not be written; and one can go on from the one before."""
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1))
    training = start(tmp_path / "run", corpus, save_every=4)
    spoil(training, step, change)
    newest = rf".*run/state/step-{checkpoint:08} is the last good checkpoint\. Go on from it with a lower rate: "
    go_on = r"txl train --resume .*run --train.learning_rate 0\.005$"
    with pytest.raises(UserError, match=message.format(step=step) + newest + go_on):
        training.run()
    assert training.folder.states()[-1].name == f"step-{checkpoint:08}"
    assert all(torch.isfinite(weight).all() for weight in training.folder.load_model(CPU, "last").parameters())
    assert [line["step"] for line in lines_of(training, "train")] == [*range(1, step)] if step > 1 else True
    again = Training(RunFolder.open(tmp_path / "run"), corpus, CPU)
    again.resume()
    assert again.state.progress.step == checkpoint
    assert again.run().finished


def test_an_absurd_rate_stops(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    training = start(tmp_path / "run", corpus, learning_rate=1e30, warmup=0)
    with pytest.raises(UserError, match=r"^(the loss|the gradient's norm) became (nan|inf) at step 2; .*step-00000000"):
        training.run()
    training.folder.load_model(CPU, "last")
    validated = start(tmp_path / "validated", corpus, learning_rate=1e30, warmup=0, evaluate_every=1)
    with pytest.raises(UserError, match=r"^the validation loss became nan at step 1; lower --train.learning_rate"):
        validated.run()
    assert not (tmp_path / "validated" / "model.safetensors").exists()
    validated.folder.load_model(CPU, "last")


def test_too_short_a_text_is_refused(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(20, seed=1))
    with pytest.raises(
        UserError, match=r"the training text has 20 tokens, and 3 rows of a segment of 7 tokens need 21"
    ):
        start(tmp_path / "run", corpus)


def test_a_reporter_hears_every_step_and_line(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Ear:
        def step(self, step: int, tokens: int) -> None:
            heard.append((step, tokens))

        def validating(self, read: int, tokens: int) -> None:
            heard.append((read / tokens, "validation"))

        def figures(self, figures: dict[str, Any]) -> None:
            heard.append((figures["split"], figures["step"]))

    corpus = make_corpus(tmp_path / "corpus", letters(127, seed=1), letters(41, seed=2))
    training = start(tmp_path / "run", corpus, steps=8, log_every=4, evaluate_every=4)
    training.reporter = Ear()
    training.run()
    steps = [(step, 1 if step == 7 else 21) for step in range(1, 9)]
    assert [one for one in heard if isinstance(one[0], int)] == steps
    assert [one[0] for one in heard if one[1] == "validation"][-1] == 1
    assert [one for one in heard if isinstance(one[0], str)] == [
        ("train", 4),
        ("valid", 4),
        ("train", 8),
        ("valid", 8),
    ]
    assert heard.index(("train", 4)) < heard.index((5, 21))
