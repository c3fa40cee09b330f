"""Training steps compared with a simple implementation of each formula; micro-batches and activation checkpointing.

A micro-batch is a part of the batch rows whose gradients are computed at once. Activation checkpointing recomputes
activations in the backward pass instead of storing them. With `loss: half`, only the second half of a segment's targets
is in the loss.

Shape suffixes: B batch rows, T tokens of a segment, M memory slots, D model width.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensors import assert_same_tensors
from torch import Tensor
from training_runs import CPU, letters, lines_of, make_corpus, start
from typing_extensions import override

from transformer_xl.config import TrainConfig
from transformer_xl.model.memory import Memory
from transformer_xl.text.segments import Batch, SegmentDataset
from transformer_xl.training.callbacks import Callback
from transformer_xl.training.schedules import random_length
from transformer_xl.training.stepper import ModelWithLoss, Stepper, micro_batches
from transformer_xl.training.trainer import Trainer


def as_double(trainer: Trainer) -> Trainer:
    """Convert the model and the memories of a trainer to float64."""
    trainer.model.double()
    trainer.stepper.memories = trainer.stepper.initial_memories()
    return trainer


class SimpleTraining:
    """Training in simple code: each batch row separately and without padding; clipping and Adam are written out.

    `lengths` contains for each step the number of tokens that each batch row reads.
    """

    def __init__(self, trainer: Trainer, text: bytes, lengths: list[int]) -> None:
        self.model = copy.deepcopy(trainer.model)
        self.text, self.config = text, trainer.config
        self.weights = list(self.model.parameters())
        self.means = [torch.zeros_like(weight) for weight in self.weights]
        self.squares = [torch.zeros_like(weight) for weight in self.weights]
        self.spans = self.all_spans(lengths)

    def all_spans(self, lengths: list[int]) -> Iterator[tuple[int, int]]:
        """Yield the position in the rows where each step begins, and its number of tokens."""
        longest, position = math.ceil(len(self.text) / self.config.batch_size), 0
        for length in lengths:
            yield position, length
            position = position + length if position + length < longest else 0

    def step(self, step: int, rate: float) -> tuple[float, float]:
        """Update the weights; return the loss in nats per target and the gradient norm before clipping.

        Args:
            step: index of the step, from 0.
            rate: learning rate of the step.
        """
        position, length = next(self.spans)
        self.rate_scale = length / self.config.segment_length if self.config.random_segment_lengths else 1.0
        nats, count = self.loss(position, length)
        grads = torch.autograd.grad((nats + self.penalties) / count, self.weights)
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))
        for index, (weight, grad) in enumerate(zip(self.weights, grads, strict=True)):
            # Adam with beta1 0.9 and beta2 0.999, and L2 regularization after clipping
            grad = grad * scale + self.config.weight_decay * weight.data
            self.means[index] = 0.9 * self.means[index] + 0.1 * grad
            self.squares[index] = 0.999 * self.squares[index] + 0.001 * grad**2
            mean, square = self.means[index] / (1 - 0.9 ** (step + 1)), self.squares[index] / (1 - 0.999 ** (step + 1))
            is_embedding = weight is self.model.embedding.tables[0]
            ratio = self.config.embedding_learning_rate_ratio if is_embedding else 1.0
            weight.data -= self.rate_scale * ratio * rate * mean / (square.sqrt() + 1e-8)
        return float(nats.detach()) / count, norm

    def loss(self, position: int, length: int) -> tuple[Tensor, int]:
        """Return the total loss and the number of targets of the tokens at a position of every row."""
        rows = self.config.batch_size
        edges = list(pairwise(row * len(self.text) // rows for row in range(rows + 1)))
        if position == 0:
            self.memories = [self.model.initial_memory(1) for _ in range(rows)]
        nats, count = torch.zeros((), dtype=torch.float64), 0
        self.penalties = torch.zeros((), dtype=torch.float64)
        context = min(self.config.extended_context_length, position)
        for row, (begin, end) in enumerate(edges):
            first = begin + position
            targets = list(self.text[first : min(first + length, end)])
            if not targets:
                continue
            # 10: the newline before the text
            inputs = [
                *([] if first - context else [10]),
                *self.text[max(0, first - context - 1) : first],
                *targets[:-1],
            ]
            hidden_BXD, self.memories[row] = self.model(torch.tensor([inputs]), self.memories[row])
            assert hidden_BXD.shape[1] == context + len(targets)
            hidden_BTD = hidden_BXD[:, context:]
            self.penalties = self.penalties + penalty_by_hand(hidden_BTD[0], self.model.config, length)
            skipped = length // 2 if self.config.loss == "half" else 0
            nats = nats + self.model.nats(hidden_BTD, torch.tensor([targets]))[0, skipped:].sum()
            count += len(targets[skipped:])
        return nats, count


def penalty_by_hand(hidden_TD: Tensor, config: Any, length: int) -> Tensor:
    """Return the penalties of the activations of one row, times the number of its tokens, in a step of some length."""
    penalty = config.regularization.activation_penalty * hidden_TD.square().mean(1).sum()
    changes = [(after - before).square().mean() for before, after in pairwise(hidden_TD)]
    if changes:
        change = config.regularization.temporal_activation_penalty * torch.stack(changes).sum()
        penalty = penalty + change * length / (length - 1)
    return penalty


@pytest.mark.parametrize(
    (
        "length",
        "settings",
    ),  # number of tokens of the text; settings that differ from TRAIN (3 batch rows, segments of 7)
    [
        (127, {}),  # rows of 42, 42 and 43: in the last segment, two rows are only padding
        (139, {"loss": "half"}),  # rows of 46, 46 and 47: the last segment has 1, 1 and 2 targets in the loss
        (139, {"max_grad_norm": 100.0}),
        (139, {"max_grad_norm": 0.003, "memory_length": 0, "warmup_steps": 0}),
        (139, {"batch_size": 1, "segment_length": 31, "memory_length": 5}),
        (139, {"micro_batch_size": 2, "loss": "half"}),
        (127, {"micro_batch_size": 1, "activation_checkpointing": True}),
    ],
)
def test_steps_equal_simple_training(tmp_path: Path, length: int, settings: dict[str, Any]) -> None:
    """In float64, into the second epoch: loss, gradient norm and every weight."""
    trainer = start(
        tmp_path / "run", make_corpus(tmp_path / "corpus", letters(length, seed=1)), **settings, max_steps=11
    )
    compare_with_simple_training(trainer, letters(length, seed=1), [trainer.config.segment_length] * 11)


@pytest.mark.parametrize("is_random", [False, True])
def test_regularised_training_equals_simple_training(tmp_path: Path, *, is_random: bool) -> None:
    """With an extended context of 5 tokens, penalties, L2 regularization, twice the rate for the embedding, and with
    segments of 7 tokens or random lengths. The rows have 42, 42 and 43 tokens."""
    text = letters(127, seed=1)
    model = {"activation_penalty": 0.3, "temporal_activation_penalty": 0.7}
    model |= {"tie_key_projections": True, "learned_attention_biases": False}
    trainer = start(
        tmp_path / "run", make_corpus(tmp_path / "corpus", text), model=model, memory_length=0, max_steps=13,
        extended_context_length=5, random_segment_lengths=is_random, weight_decay=0.02, max_grad_norm=0.5,
        embedding_learning_rate_ratio=2.0,
    )  # fmt: skip
    lengths, position = [], 0
    for step in range(13):
        lengths.append(min(random_length(step, trainer.config), 43 - position) if is_random else 7)
        position = (position + lengths[-1]) % 43
    assert not is_random or len(set(lengths)) > 3
    compare_with_simple_training(trainer, text, lengths)


def compare_with_simple_training(trainer: Trainer, text: bytes, lengths: list[int]) -> None:
    """Train to the end, and compare each step with SimpleTraining: weights, loss, gradient norm and learning rate."""
    simple = SimpleTraining(as_double(trainer), text, lengths)
    config, expected = trainer.config, []

    class Compare(Callback):
        @override
        def on_step(self, trainer: Trainer, num_tokens: int) -> None:
            step = trainer.state.step - 1
            # the learning rate: linear warm-up to 0.01, then a cosine to 0
            progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
            factor = (1 + math.cos(math.pi * progress)) / 2
            if step < config.warmup_steps:
                factor = (step + 1) / config.warmup_steps
            expected.append((*simple.step(step, 0.01 * factor), 0.01 * factor))
            assert_same_tensors(trainer.model.parameters(), simple.weights, atol=1e-9)

    trainer.callbacks.append(Compare())
    assert trainer.run()
    assert len(expected) == config.max_steps
    lines = lines_of(trainer, "train")
    actual = [(line["nats_per_token"], line["grad_norm"], line["learning_rate"]) for line in lines]
    np.testing.assert_allclose(actual, expected, rtol=1e-9)
    assert [line["step"] for line in lines] == [*range(1, config.max_steps + 1)]
    assert all(math.isclose(line["bits_per_byte"], line["nats_per_token"] / math.log(2)) for line in lines)
    assert all(line["tokens_per_second"] > 0 for line in lines)


# The remaining tests use a model without a run.


def random_batch(rows: int, length: int, seed: int) -> Batch:
    """Return random tokens; the number of targets in the loss differs between batch rows."""
    draw = np.random.default_rng(seed)
    tokens = draw.integers(0, 23, (rows, length + 1))
    loss_mask_BT = np.arange(length) < draw.integers(0, length + 1, (rows, 1))
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), loss_mask_BT, is_first=False)


def stepper_of(model: Any, **settings: Any) -> Stepper:
    """Return the training steps of a model, on a text that is not read; `settings` are those of TrainConfig."""
    config = TrainConfig(
        **{"segment_length": 5, "memory_length": 7, "max_grad_norm": 0.1, "dtype": "float32", **settings}
    )
    text = np.zeros(config.batch_size, np.int64)
    dataset = SegmentDataset(text, batch_size=config.batch_size, segment_length=5, bos_token_id=0)
    return Stepper(model, dataset, config, CPU)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"cutoffs": (5, 11), "div_val": 2}])
def test_micro_batches_equal_one_large_batch(make_model, settings: dict[str, Any], size: int) -> None:
    actual = {}
    for micro_batch_size in (None, size):
        model = make_model(memory_length=7, **settings)
        stepper = stepper_of(model, batch_size=7, micro_batch_size=micro_batch_size)
        assert len(stepper.memories) == math.ceil(7 / (micro_batch_size or 7))
        # sum of losses, number of targets, gradient norm and number of tokens of each step
        numbers = [stepper.train_on(random_batch(7, 5, step)) for step in range(4)]
        memory = Memory.concatenate(stepper.memories)
        actual[micro_batch_size] = {"numbers": torch.stack(numbers), **model.state_dict(), **memory.tensors()}
    assert_same_tensors(actual[size], actual[None], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [None, 3])
def test_sparse_gradients_of_tables_equal_whole_ones(make_model, size: int | None) -> None:
    """Where the tables have a rate of their own; outside these steps the model has whole gradients."""
    actual = {}
    for is_sparse in (True, False):
        model = make_model(memory_length=7, max_ngram=3, ngram_buckets=29, d_ngram=3)
        stepper = stepper_of(model, batch_size=7, micro_batch_size=size, ngram_learning_rate_ratio=0.5)
        kinds = set[bool]()
        stepper.table_gradients = stepper.table_gradients if is_sparse else nullcontext
        for table in model.ngrams.tables:
            table.register_hook(lambda grad, kinds=kinds: kinds.add(grad.is_sparse))
        numbers = [stepper.train_on(random_batch(7, 5, step)) for step in range(4)]
        assert kinds == {is_sparse}
        tensors = {name: tensor for name, tensor in stepper.state_dict().items() if "/ngrams.tables." in name}
        assert len(tensors) == 2
        actual[is_sparse] = {"numbers": torch.stack(numbers), **model.state_dict(), **tensors}
    assert_same_tensors(actual[True], actual[False], rtol=1e-10, atol=1e-10)
    hidden_BTD, _ = model.train()(torch.ones(2, 3, dtype=torch.int64))
    assert not torch.autograd.grad(hidden_BTD.sum(), model.ngrams.tables[0])[0].is_sparse


def test_micro_batches_are_even_and_equally_many_in_all_processes() -> None:
    """The process with the fewest rows limits their number, because all processes take part in each pass."""
    config = TrainConfig(batch_size=7, micro_batch_size=3)
    assert micro_batches(7, config, 1) == [range(2), range(2, 4), range(4, 7)]
    shared = TrainConfig(batch_size=8, micro_batch_size=1)  # 4 rows in each of 2 processes
    assert micro_batches(4, shared, 2) == [range(row, row + 1) for row in range(4)]
    # 3, 3 and 1 rows: one micro-batch, as the last process has only one row
    assert micro_batches(3, TrainConfig(batch_size=7, micro_batch_size=1), 3) == [range(3)]
    assert micro_batches(7, TrainConfig(batch_size=7), 1) == [range(7)]


def gradients(model: Any, activation_checkpointing: bool) -> tuple[dict[str, Tensor], int]:
    """Return the gradients of a step with dropout, and the bytes that the forward pass saved for the backward pass."""
    model.activation_checkpointing = activation_checkpointing
    saved: dict[int, int] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(5)
    batch = random_batch(7, 5, 1)
    inputs_BT = torch.from_numpy(batch.inputs_BX)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        nats, _, _ = ModelWithLoss(model)(inputs_BT, batch.targets_BT, model.initial_memory(7))
    model.zero_grad()
    nats.sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}, sum(saved.values())


@pytest.mark.parametrize("norm_first", [True, False])
def test_activation_checkpointing_saves_memory_and_keeps_gradients(make_model, *, norm_first: bool) -> None:
    """The gradients are equal bit for bit, with dropout everywhere; less than half of the bytes are saved."""
    model = make_model(dropout=0.3, attention_dropout=0.2, norm_first=norm_first, n_layers=5, d_ff=97).train()
    (plain, plain_bytes), (again, fewer_bytes) = gradients(model, False), gradients(model, True)
    assert_same_tensors(again, plain)
    assert fewer_bytes < 0.5 * plain_bytes
    model.eval()
    assert_same_tensors(gradients(model, True)[0], gradients(model, False)[0])
