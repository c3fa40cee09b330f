"""The paper's other systems train like Transformer-XL: stopped and resumed bit for bit, and reported without extras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensors import assert_same_tensors
from training_runs import letters, make_corpus, nats_of, reopened, start, train_until

from transformer_xl.config import UserError
from transformer_xl.generation.generate import generate
from transformer_xl.model.build import build_model
from transformer_xl.model.memory import Memory
from transformer_xl.run_folder import load

AUXILIARY = {"intermediate_layer_losses": True, "num_targets": 2}
ARCHITECTURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lstm, micro-batches": ({"architecture": "lstm"}, {"micro_batch_size": 2}),
    "qrnn, segment warm-up": (
        {"architecture": "qrnn", "zoneout": 0.2},
        {
            "segment_length": 8,
            "memory_length": 12,
            "initial_segment_length": 2,
            "segment_warmup_steps": 12,
            "optimizer": "muon",
        },
    ),
    "shaw": ({"architecture": "shaw"}, {"activation_checkpointing": True}),
    "vaswani, half the loss": ({"architecture": "vaswani"}, {"memory_length": 0, "loss": "half"}),
    "al-rfou, auxiliary losses": (
        {"architecture": "al-rfou", **AUXILIARY},
        {"memory_length": 0, "weight_average": "uniform"},
    ),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_stops_change_nothing(tmp_path: Path, name: str) -> None:
    corpus = make_corpus(tmp_path / "corpus", letters(70, seed=1), letters(41, seed=2))
    architecture, train = ARCHITECTURES[name]
    settings = {"model": {"dropout": 0.2, **architecture}, **train, "eval_interval": 5}
    straight = start(tmp_path / "straight", corpus, **settings)
    straight.run()
    training = start(tmp_path / "run", corpus, **settings)
    for stop in (3, 10):  # with two layers the losses of the first are there until a quarter of training
        train_until(training, stop)
        training = reopened(training)
        assert training.state.step == stop
    training.run()
    for weights in ("best", "last"):
        files = (run.folder.weights_file(weights) for run in (training, straight))
        assert next(files).read_bytes() == next(files).read_bytes()
    assert_same_tensors(*(Memory.concatenate(run.memories) for run in (training, straight)))
    assert nats_of(training) == nats_of(straight)
    loaded = load(tmp_path / "run", device="cpu")
    assert type(loaded.model) is type(straight.model)
    with pytest.raises(UserError, match=r"'first'.* best and last"):
        load(tmp_path / "run", device="cpu", checkpoint="first")  # pyrefly: ignore[bad-argument-type]


def test_auxiliary_losses_train_and_are_not_reported(tmp_path: Path) -> None:
    """The first figure is that of a model without them, and the second is not: they have moved the weights."""
    corpus = make_corpus(tmp_path / "corpus", letters(70, seed=1))
    without, along = (
        start(
            tmp_path / name,
            corpus,
            model={"architecture": "al-rfou", **extra},
            memory_length=0,
            max_steps=3,
            warmup_steps=0,
        )
        for name, extra in (("without", {}), ("along", AUXILIARY))
    )
    same = without.model.state_dict()
    along.model.load_state_dict({**along.model.state_dict(), **same})
    for training in (without, along):
        training.run()
    assert nats_of(along)[0] == nats_of(without)[0]
    assert nats_of(along)[1] != nats_of(without)[1]
    assert "next_heads.1.weight" in dict(build_model(along.folder.config.model).named_parameters())


def test_auxiliary_losses_follow_the_steps_of_the_whole_training(tmp_path: Path) -> None:
    """Of two layers the first predicts in the first quarter of training; its map then stands still."""
    corpus = make_corpus(tmp_path / "corpus", letters(70, seed=1))
    model = {"architecture": "al-rfou", "intermediate_layer_losses": True}
    training = start(tmp_path / "run", corpus, model=model, memory_length=0, max_steps=8, warmup_steps=0, beta1=0.0)
    weight = dict(training.model.named_parameters())["next_heads.1.weight"]
    moved = []
    for step in range(1, 6):
        before = weight.detach().clone()
        train_until(training, step)
        moved.append(not torch.equal(weight, before))
    assert moved == [True, True, False, False, False]


@pytest.mark.parametrize("architecture", ["vaswani", "al-rfou"])
def test_text_is_written_from_the_last_segment(tmp_path: Path, architecture: str) -> None:
    """Not from the last token alone, which is all that a model without memory would see."""
    corpus = make_corpus(tmp_path / "corpus", letters(70, seed=1))
    start(tmp_path / "run", corpus, model={"architecture": architecture}, memory_length=0, max_steps=1).run()
    run = load(tmp_path / "run", device="cpu")
    torch.manual_seed(5)
    for parameter in run.model.parameters():  # so that what is written varies
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    made = generate(run, "abcabcabcabc", max_new_tokens=9, greedy=True)
    text = list(b"abcabcabcabc")
    alone = []
    with torch.no_grad():
        for _ in range(9):
            text.append(int(run.model.logits(run.model(torch.tensor([text[-7:]]))[0])[0, -1].argmax()))
            alone.append(int(run.model.logits(run.model(torch.tensor([text[-2:-1]]))[0])[0, -1].argmax()))
    assert list(made.token_ids) == text[12:]
    assert list(made.token_ids) != alone
