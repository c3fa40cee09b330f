"""Evaluation with memory: every token is scored once, with the same loss for any segment length and batch size.

The first argument of EvaluationPlan is the segment length, the first of ContextLimits is the memory length. The fixture
make_model (tests/conftest.py) makes a small model with random weights and a vocabulary of 23, by default of 3 layers.

Shape suffixes: B batch size, T tokens, D d_model, K tokens of a text.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from model_configs import small_model
from token_losses import BOS, CLOSE, nats_of_documents, random_tokens, token_nats

from transformer_xl.config import DynamicConfig, EvaluationConfig, UserError, run_settings
from transformer_xl.evaluation import evaluate as evaluate_module
from transformer_xl.evaluation.evaluate import losses_in_order, stream_losses
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.evaluation.with_memory import receptive_field, warmup_length
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits


def losses_of_one_pass(
    model: LanguageModel, tokens_K: npt.NDArray[Any], context_limits: ContextLimits
) -> npt.NDArray[Any]:
    """Return the loss of every token when the text is read as one segment."""
    inputs_BT = torch.tensor([[BOS, *tokens_K[:-1].tolist()]])
    with torch.no_grad():
        hidden_BTD, _ = model(inputs_BT, model.initial_memory(1, context_limits))
        return model.nats(hidden_BTD, torch.tensor(tokens_K[None].astype(np.int64)))[0].numpy()


@pytest.mark.parametrize("memory_length", [0, 3, 11])
def test_short_memory_equals_calling_the_model_for_each_segment(make_model, memory_length) -> None:
    model, tokens_K = make_model(), random_tokens(37)
    inputs, targets = torch.tensor([[BOS, *tokens_K[:-1].tolist()]]), torch.tensor([tokens_K.tolist()])
    memory, expected = model.initial_memory(1, ContextLimits(memory_length)), []
    with torch.no_grad():
        for start in range(0, 37, 5):
            hidden_BTD, memory = model(inputs[:, start : start + 5], memory)
            expected.append(model.nats(hidden_BTD, targets[:, start : start + 5])[0])
    nats_K = token_nats(model, tokens_K, BOS, EvaluationPlan(5, ContextLimits(memory_length)))
    np.testing.assert_allclose(nats_K, torch.cat(expected).numpy(), **CLOSE)


@pytest.mark.parametrize("batch_size", [None, 2, 5])
@pytest.mark.parametrize("documents", [[0], [0, 3, 20]])
@pytest.mark.parametrize(("segment_length", "context_length"), [(5, 0), (5, 3), (5, 12), (1, 4), (40, 9)])
@pytest.mark.parametrize("key_offset", [False, True])
def test_extended_context_equals_calling_the_model_for_each_segment(
    make_model, segment_length, context_length, documents, batch_size, key_offset
) -> None:
    """The inputs are those of a segment of its document, after those of up to `context_length` tokens before it."""
    model, tokens_K, expected = make_model(key_offset=key_offset), random_tokens(37), []
    for begin, end in pairwise([*documents, 37]):
        inputs, targets = torch.tensor([[BOS, *tokens_K[begin : end - 1].tolist()]]), tokens_K[begin:end].tolist()
        for start in range(0, end - begin, segment_length):
            with torch.no_grad():
                first = max(0, start - context_length)
                hidden_BTD, _ = model(
                    inputs[:, first : start + segment_length], model.initial_memory(1, ContextLimits(0))
                )
                part = torch.tensor([targets[start : start + segment_length]])
                logits_BTV = model.logits(hidden_BTD[:, start - first :]) / 1.3
                expected += (-logits_BTV.log_softmax(-1).gather(-1, part[..., None])).flatten().tolist()
    plan = EvaluationPlan(
        segment_length,
        ContextLimits(0),
        extended_context_length=context_length,
        softmax_temperature=1.3,
        batch_size=batch_size,
        reset_memory=len(documents) > 1,
    )
    text = TokenizedText(tokens_K, BOS, np.array(documents))
    np.testing.assert_allclose(losses_in_order(model, text, plan), expected, **CLOSE)
    if batch_size is None and len(documents) == 1:  # with a learning rate of 0, dynamic evaluation is the same
        dynamic = replace(plan, method="dynamic", dynamic=DynamicConfig(optimizer="sgd", learning_rate=0))
        np.testing.assert_allclose(losses_in_order(model, text, dynamic), expected, **CLOSE)


def test_extended_context_is_that_of_the_run_unless_there_is_memory() -> None:
    settings = {"train": {"segment_length": 7, "memory_length": 0, "extended_context_length": 5}}
    run = run_settings(settings, "test")
    stated = run_settings(
        {**settings, "evaluation": {"extended_context_length": 9, "softmax_temperature": 1.2}}, "test"
    )
    for config, given, expected in (
        (run, {}, 5), (stated, {}, 9), (stated, {"extended_context_length": 2}, 2), (stated, {"memory_length": 3}, 0),
    ):  # fmt: skip
        plan = EvaluationPlan.resolve(config, EvaluationConfig(**given))
        assert plan.extended_context_length == expected
        assert plan.softmax_temperature == config.evaluation.softmax_temperature
    with pytest.raises(UserError, match=r"extended_context_length 4 .* memory_length is 3 \(given\); give one of them"):
        EvaluationPlan.resolve(run, EvaluationConfig(extended_context_length=4, memory_length=3))


@pytest.mark.parametrize("window", [1, 4, 9])
@pytest.mark.parametrize("segment_length", [1, 2, 3, 7, 37, 41])
@pytest.mark.parametrize("extra_slots", [0, 5])
def test_attention_window_makes_losses_independent_of_the_segment(
    make_model, window, segment_length, extra_slots
) -> None:
    """A memory of window - 1 slots is enough, and one slot less is not."""
    model, tokens_K = make_model(), random_tokens(37)
    expected_K = losses_of_one_pass(model, tokens_K, ContextLimits(0, attention_window=window))
    plan = EvaluationPlan(segment_length, ContextLimits(window - 1 + extra_slots, attention_window=window))
    np.testing.assert_allclose(token_nats(model, tokens_K, BOS, plan), expected_K, **CLOSE)
    if window > 1 and segment_length < 37 and not extra_slots:
        too_short = replace(plan, context_limits=ContextLimits(window - 2, attention_window=window))
        assert np.abs(token_nats(model, tokens_K, BOS, too_short) - expected_K).max() > 1e-6


@pytest.mark.parametrize(
    ("batch_size", "segment_length", "context_limits"),
    [
        (2, 5, ContextLimits(11)),
        (3, 7, ContextLimits(7)),
        (5, 3, ContextLimits(4)),
        (2, 7, ContextLimits(0)),
        (3, 5, ContextLimits(9, attention_window=8)),
        (2, 13, ContextLimits(5, attention_window=11)),
        (3, 3, ContextLimits(5, attention_window=7)),
        (97, 5, ContextLimits(3)),
        (3, 101, ContextLimits(11)),
        (8, 4, ContextLimits(1)),
    ],
)
@pytest.mark.parametrize(
    "settings", [{"n_layers": 1}, {"n_layers": 3}, {"n_layers": 1, "max_ngram": 6}, {"n_layers": 3, "key_offset": True}]
)
def test_batch_size_does_not_change_losses(make_model, batch_size, segment_length, context_limits, settings) -> None:
    model, tokens_K = make_model(**settings), random_tokens(229)
    plan = EvaluationPlan(segment_length, context_limits)
    nats_K = token_nats(model, tokens_K, BOS, replace(plan, batch_size=batch_size))
    np.testing.assert_allclose(nats_K, token_nats(model, tokens_K, BOS, plan), **CLOSE)


def test_without_warmup_sequences_start_with_empty_memory(make_model) -> None:
    """The first input of a later sequence is the token before it."""
    model, tokens_K, plan = make_model(), random_tokens(70), EvaluationPlan(5, ContextLimits(11))
    nats_K = token_nats(model, tokens_K, BOS, replace(plan, batch_size=2, warmup_tokens=0))
    for start, first_input in ((0, BOS), (35, int(tokens_K[34]))):
        alone_K = token_nats(model, tokens_K[start : start + 35], first_input, plan)
        np.testing.assert_allclose(nats_K[start : start + 35], alone_K, **CLOSE)


@pytest.mark.parametrize("length", [1, 6, 7, 8, 37])
@pytest.mark.parametrize("batch_size", [None, 2, 5, 50])
@pytest.mark.parametrize("steps_on_device", [1, 2, 512])
def test_every_token_is_scored_once(make_model, monkeypatch, length, batch_size, steps_on_device) -> None:
    """Including the last, short segment and sequence, whenever losses are copied from the device."""
    monkeypatch.setattr(evaluate_module, "_MAX_STEPS_ON_CPU", steps_on_device)
    model, tokens_K, progress = make_model(), random_tokens(length), []
    plan = EvaluationPlan(7, ContextLimits(11), batch_size=batch_size)
    chunks = list(stream_losses(model, TokenizedText(tokens_K, BOS), plan, progress.append))
    positions = np.concatenate([np.arange(chunk.position, chunk.position + len(chunk.nats_K)) for chunk in chunks])
    assert sorted(positions.tolist()) == list(range(length))
    assert sum(progress) == length
    expected = token_nats(model, tokens_K, BOS, plan).sum()
    assert sum(chunk.sum for chunk in chunks) == pytest.approx(expected, abs=1e-10)


# Documents

DOCUMENT_STARTS = [0, 3, 3, 4, 21, 22, 60, 61]  # the second document is empty


@pytest.mark.parametrize("batch_size", [None, 1, 2, 100])
@pytest.mark.parametrize(
    ("segment_length", "context_limits"),
    [(5, ContextLimits(11)), (7, ContextLimits(0)), (64, ContextLimits(11)), (3, ContextLimits(4, attention_window=5))],
)
def test_reset_memory_scores_each_document_as_a_text_of_its_own(
    make_model, batch_size, segment_length, context_limits
) -> None:
    """Each starts from the BOS token and an empty memory; long ones are divided into several sequences, too."""
    model, tokens_K, plan = make_model(), random_tokens(97), EvaluationPlan(segment_length, context_limits)
    text = TokenizedText(tokens_K, BOS, np.array(DOCUMENT_STARTS))
    nats_K = losses_in_order(model, text, replace(plan, batch_size=batch_size, reset_memory=True))
    np.testing.assert_allclose(nats_K, nats_of_documents(model, tokens_K, DOCUMENT_STARTS, plan), **CLOSE)


def test_documents_of_one_segment_are_one_batch_without_memory(make_model, monkeypatch) -> None:
    """No document is longer than a segment, so no memory slot would be filled, and the memory has length 0."""
    model = make_model(memory_length=11)
    shapes, run_layers = [], type(model).run_layers  # batch size, tokens and memory length of each call

    def recorded(self, x_BTD, memory, *options):
        shapes.append((*x_BTD.shape[:2], memory.length))
        return run_layers(self, x_BTD, memory, *options)

    monkeypatch.setattr(type(model), "run_layers", recorded)
    text = TokenizedText(random_tokens(997), BOS, np.arange(0, 997, 7))  # 143 documents of at most 7 tokens
    list(stream_losses(model, text, EvaluationPlan(64, ContextLimits(11), reset_memory=True)))
    assert shapes == [(143, 7, 0)]


def test_no_losses_wait_on_a_cpu(make_model) -> None:
    """Where they would leave holes in memory, of 2 GB for 300,000 tokens."""
    text, plan = TokenizedText(random_tokens(112), bos_token_id=BOS), EvaluationPlan(7, ContextLimits(11))
    progress: list[int] = []
    for number, _ in enumerate(stream_losses(make_model(), text, plan, progress.append)):
        assert len(progress) == number + 1


def test_memory_use_does_not_grow_with_the_text(make_model, monkeypatch) -> None:
    """In the second half of 16 segments, the tensors together are never larger than in the first half."""
    monkeypatch.setattr(evaluate_module, "_MAX_STEPS_ON_CPU", 4)
    text, plan = TokenizedText(random_tokens(112), bos_token_id=BOS), EvaluationPlan(7, ContextLimits(11))
    sizes: list[int] = []

    def look(num_tokens: int) -> None:
        sizes.append(sum(one.numel() for one in gc.get_objects() if issubclass(type(one), torch.Tensor)))

    assert sum(len(losses.nats_K) for losses in stream_losses(make_model(), text, plan, look)) == 112
    assert len(sizes) == 16
    assert max(sizes[8:]) <= max(sizes[:8])


def test_attended_empty_slots_are_kept(make_model) -> None:
    """With `attend_empty_memory` a document of any length sees all slots."""
    model, tokens_K = make_model(attend_empty_memory=True), random_tokens(17)
    expected_K = losses_of_one_pass(model, tokens_K, ContextLimits(29))
    nats_K = token_nats(model, tokens_K, BOS, EvaluationPlan(17, ContextLimits(29)))
    np.testing.assert_allclose(nats_K, expected_K, **CLOSE)
    without_memory_K = token_nats(model, tokens_K, BOS, EvaluationPlan(17, ContextLimits(0)))
    assert np.abs(without_memory_K - expected_K).max() > 1e-6


# Other architectures


@pytest.mark.parametrize(
    ("settings", "memory_length"),
    [
        ({"architecture": "lstm", "n_layers": 1}, 11),
        ({"architecture": "qrnn"}, 11),
        ({"architecture": "lstm"}, 0),
        ({"architecture": "vaswani"}, 0),
        ({"architecture": "shaw", "max_relative_positions": 5}, 11),
    ],
    ids=str,
)
def test_batches_of_other_architectures_are_exact_or_refused(settings: dict[str, Any], memory_length: int) -> None:
    """The state of a recurrent model depends on all earlier tokens, so it needs a warm-up over all of them."""
    model, tokens_K = small_model(**settings), random_tokens(97)
    plan = EvaluationPlan(5, ContextLimits(memory_length))
    batched = replace(plan, batch_size=3)
    if memory_length and settings["architecture"] in ("lstm", "qrnn"):
        with pytest.raises(UserError, match=r"batch_size 3: .* depends on all .* batch_size 1 or enough warmup_tokens"):
            token_nats(model, tokens_K, BOS, batched)
        batched = replace(batched, warmup_tokens=97)  # the whole text
    expected_K = token_nats(model, tokens_K, BOS, plan)
    np.testing.assert_allclose(token_nats(model, tokens_K, BOS, batched), expected_K, **CLOSE)
    text = TokenizedText(tokens_K, BOS, np.array(DOCUMENT_STARTS))
    nats_K = losses_in_order(model, text, replace(plan, batch_size=5, reset_memory=True))
    np.testing.assert_allclose(nats_K, nats_of_documents(model, tokens_K, DOCUMENT_STARTS, plan), **CLOSE)


# Side effects, weights and dtypes


@pytest.mark.parametrize("training", [True, False])
def test_the_training_mode_stays_as_it_is(make_model, training) -> None:
    """But while dynamic evaluation trains the weights, without dropout."""
    model, text = make_model(dropout=0.3).train(training), TokenizedText(random_tokens(37), BOS)
    for method in ("memory", "dynamic"):
        dynamic = DynamicConfig(optimizer="sgd")
        chunks = stream_losses(model, text, EvaluationPlan(5, ContextLimits(11), method=method, dynamic=dynamic))
        next(chunks)
        assert model.training is (training and method == "memory")
        chunks.close()
        assert all(module.training is training for module in model.modules())


def test_bfloat16_is_close_to_float32(make_model) -> None:
    model, tokens_K, plan = make_model().float(), random_tokens(101), EvaluationPlan(7, ContextLimits(11))
    float32_nats = token_nats(model, tokens_K, BOS, plan).mean()
    bfloat16_nats = token_nats(model, tokens_K, BOS, replace(plan, dtype="bfloat16")).mean()
    assert bfloat16_nats != float32_nats
    assert bfloat16_nats == pytest.approx(float32_nats, rel=0.02)


@pytest.mark.parametrize(
    ("segment_length", "context_limits", "n_layers", "num_tokens", "key_offset"),
    [
        (7, ContextLimits(0), 3, 0, False),
        (7, ContextLimits(0), 3, 0, True),
        (7, ContextLimits(14), 3, 15 + 21 + 21, True),  # each layer sees one token more
        (7, ContextLimits(4, attention_window=5), 3, 15, True),
        (7, ContextLimits(11), 1, 11, False),
        # the last layer sees 11 tokens before the segment, each other layer 11 rounded up to whole segments of 7
        (7, ContextLimits(11), 3, 11 + 14 + 14, False),
        (7, ContextLimits(14), 3, 14 + 14 + 14, False),
        (7, ContextLimits(4, attention_window=5), 3, 12, False),  # each layer sees four tokens back
        (7, ContextLimits(3, attention_window=5), 3, 12, False),  # also where memory is too short for the window
        (7, ContextLimits(3, attention_window=99), 3, 3 + 7 + 7, False),  # the window is longer than memory and segment
    ],
)
def test_receptive_field_and_warmup(
    make_model, segment_length: int, context_limits: ContextLimits, n_layers: int, num_tokens: int, key_offset: bool
) -> None:
    plan = EvaluationPlan(segment_length, context_limits)
    model = make_model(n_layers=n_layers, key_offset=key_offset)
    assert receptive_field(model, plan) == num_tokens
    assert warmup_length(model, plan) == -(-num_tokens // segment_length) * segment_length
    assert warmup_length(model, replace(plan, warmup_tokens=segment_length + 1)) == 2 * segment_length
