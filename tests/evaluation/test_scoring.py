"""Scoring: every token once, in text order, the same however the text is cut; and nothing changed behind one's back."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from transformer_xl.config import EvaluationConfig, ModelConfig, RunConfig, TrainConfig, UserError
from transformer_xl.evaluation import scoring
from transformer_xl.evaluation.scoring import Plan, evaluate, score_segments, sum_nats, token_nats
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Reach
from transformer_xl.run_folder import Run
from transformer_xl.text.segments import SegmentStream
from transformer_xl.text.token_store import TokenSplit
from transformer_xl.text.vocabulary import ByteVocabulary

START = 10
CLOSE = {"rtol": 0, "atol": 1e-10}


def draw(length: int, vocabulary_size: int = 23, seed: int = 3) -> npt.NDArray[Any]:
    return np.random.default_rng(seed).integers(0, vocabulary_size, length).astype(np.uint8)


def one_pass(model: LanguageModel, tokens_K: npt.NDArray[Any], reach: Reach, before: int = START) -> npt.NDArray[Any]:
    """The loss of every token, the text read at once with no memory at all."""
    inputs_1K = torch.tensor([[before, *tokens_K[:-1].tolist()]])
    with torch.no_grad():
        hidden_BTD, _ = model(inputs_1K, model.initial_memory(1, replace(reach, memory=0)))
        return model.nats(hidden_BTD, torch.tensor(tokens_K[None].astype(np.int64)))[0].numpy()


@pytest.mark.parametrize("style", [{}, {"norm": "pre"}, {"kernel": "reference"}])
@pytest.mark.parametrize("segment", [1, 2, 7, 36, 37, 38, 101])
@pytest.mark.parametrize(("extra", "clamp"), [(0, None), (13, 5)])
def test_any_segment_equals_one_pass(make_model, style, segment, extra, clamp) -> None:
    """With a memory for the whole text, or more."""
    model, tokens_K = make_model(**style), draw(37)
    reach = Reach(37 + extra, None, clamp)
    nats_K = token_nats(model, tokens_K, START, Plan(segment, reach))
    assert nats_K.dtype == np.float64
    np.testing.assert_allclose(nats_K, one_pass(model, tokens_K, reach), **CLOSE)


def test_each_loss_is_that_of_its_token_after_those_before(make_model) -> None:
    """The definition, token by token: minus the log of the probability that the text so far gives to the next."""
    model, tokens_K = make_model(), draw(17)
    nats_K = token_nats(model, tokens_K, START, Plan(5, Reach(17)))
    for place in range(17):
        hidden_BTD, _ = model(torch.tensor([[START, *tokens_K[:place].tolist()]]), model.initial_memory(1, Reach(0)))
        probability = model.logits(hidden_BTD)[0, -1].softmax(-1)[tokens_K[place]].item()
        assert nats_K[place] == pytest.approx(-math.log(probability), abs=1e-10)


@pytest.mark.parametrize("memory", [0, 3, 11, 37])
def test_memory_carries_what_the_segments_before_left(make_model, memory) -> None:
    """Also shorter than the text: the same as calling the model by hand, segment after segment."""
    model, tokens_K = make_model(), draw(37)
    inputs, targets = torch.tensor([[START, *tokens_K[:-1].tolist()]]), torch.tensor([tokens_K.tolist()])
    state, wanted = model.initial_memory(1, Reach(memory)), []
    with torch.no_grad():
        for first in range(0, 37, 5):
            hidden_BTD, state = model(inputs[:, first : first + 5], state)
            wanted.append(model.nats(hidden_BTD, targets[:, first : first + 5])[0])
    found = token_nats(model, tokens_K, START, Plan(5, Reach(memory)))
    np.testing.assert_allclose(found, torch.cat(wanted).numpy(), **CLOSE)
    blind = token_nats(model, tokens_K, START, Plan(5, Reach(0)))
    assert (np.abs(found - blind)[:5] < 1e-10).all()
    assert bool((np.abs(found - blind)[5:] > 1e-6).any()) == (memory > 0)


@pytest.mark.parametrize("window", [1, 4, 9])
@pytest.mark.parametrize("segment", [1, 2, 3, 7, 37, 41])
@pytest.mark.parametrize("extra", [0, 5])
def test_with_a_window_the_segment_does_not_matter(make_model, window, segment, extra) -> None:
    """A memory of window - 1 slots is enough, and one slot less is not."""
    model, tokens_K = make_model(), draw(37)
    wanted_K = one_pass(model, tokens_K, Reach(0, window))
    reach = Reach(window - 1 + extra, window)
    np.testing.assert_allclose(token_nats(model, tokens_K, START, Plan(segment, reach)), wanted_K, **CLOSE)
    if window > 1 and segment < 37 and not extra:
        short_K = token_nats(model, tokens_K, START, Plan(segment, Reach(window - 2, window)))
        assert np.abs(short_K - wanted_K).max() > 1e-6


@pytest.mark.parametrize("length", [1, 6, 7, 8, 13, 14, 37])
def test_every_token_counts_once(make_model, length) -> None:
    """The last, short segment included; with several rows too."""
    model, tokens_K = make_model(), draw(length)
    for rows in (1, 2, 3, 5):
        if rows > length:
            continue
        stream = SegmentStream(tokens_K, rows=rows, segment=7, start_id=START)
        parts = list(score_segments(model, stream, Plan(7, Reach(11), rows)))
        assert sum(int(counted_BT.sum()) for _, counted_BT in parts) == length
        assert len(parts) == math.ceil(math.ceil(length / rows) / 7)
        assert all(nats_BT.shape == counted_BT.shape for nats_BT, counted_BT in parts)
        assert all(bool(counted_BT.any(0).all()) for _, counted_BT in parts)
    assert len(token_nats(model, tokens_K, START, Plan(7, Reach(11)))) == length


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("at_once", [1, 2, 512])
def test_the_sum_is_that_of_the_rows_alone(make_model, monkeypatch, rows, at_once) -> None:
    """Each row begins with an empty memory, after the token that stands before it in the text."""
    monkeypatch.setattr(scoring, "_PARTS_AT_ONCE", at_once)
    model, tokens_K, told = make_model(), draw(38), []
    found = sum_nats(model, tokens_K, START, Plan(5, Reach(11), rows), told.append)
    edges = [row * 38 // rows for row in range(rows + 1)]
    wanted = 0.0
    for begin, end in pairwise(edges):
        before = int(tokens_K[begin - 1]) if begin else START
        wanted += token_nats(model, tokens_K[begin:end], before, Plan(5, Reach(11))).sum()
    assert found == pytest.approx(wanted, abs=1e-10)
    assert sum(told) == 38
    assert len(told) == math.ceil(math.ceil(38 / rows) / 5)


def test_bfloat16_is_near(make_model) -> None:
    model, tokens_K = make_model().float(), draw(101)
    exact = sum_nats(model, tokens_K, START, Plan(7, Reach(11)))
    low = sum_nats(model, tokens_K, START, Plan(7, Reach(11), precision="bfloat16"))
    assert low != exact
    assert low == pytest.approx(exact, rel=0.02)


# evaluate: a run and a split.


@pytest.fixture
def run(make_model) -> Run:
    model = make_model(vocabulary_size=256, memory=11, dropout=0.3)
    config = RunConfig(model=ModelConfig(clamp_length=17), train=TrainConfig(segment=7, memory=11))
    return Run(model, ByteVocabulary(), config)


def split_of(tokens: npt.NDArray[Any], num_bytes: int | None = None) -> TokenSplit:
    starts = np.zeros(1, dtype=np.uint64)
    return TokenSplit("test", tokens, starts, len(tokens) if num_bytes is None else num_bytes, 1)


def test_figures_of_an_evaluation(run: Run) -> None:
    """By hand from the losses; bytes are those of the text, here three a token."""
    tokens_K = draw(101, 256)
    result = evaluate(run, split_of(tokens_K, num_bytes=303))
    nats_K = token_nats(run.model.eval(), tokens_K, START, Plan(7, Reach(11, None, 17)))
    assert (result.tokens, result.bytes) == (101, 303)
    assert result.nats_per_token == pytest.approx(nats_K.mean(), rel=1e-12)
    assert result.bits_per_byte == pytest.approx(nats_K.sum() / math.log(2) / 303, rel=1e-12)
    assert result.perplexity == pytest.approx(math.exp(nats_K.mean()), rel=1e-12)
    assert result.tokens_per_second == pytest.approx(101 / result.seconds)
    assert (result.segment, result.memory, result.window, result.clamp) == (7, 11, None, 17)
    assert result.precision == "float32"
    assert result.as_dict() == asdict(result)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(run: Run, limit: int) -> None:
    with pytest.raises(UserError, match=rf"limit {limit}: wanted 1 or more tokens"):
        evaluate(run, split_of(np.zeros(7, dtype=np.uint8), num_bytes=7), limit=limit)


def test_limit_scores_the_start_alone(run: Run) -> None:
    tokens_K, told = draw(101, 256), []
    result = evaluate(run, split_of(tokens_K, num_bytes=303), limit=29, progress=told.append)
    nats_K = token_nats(run.model.eval(), tokens_K, START, Plan(7, Reach(11, None, 17)))
    assert (result.tokens, result.bytes, sum(told)) == (29, 29, 29)  # a token of the vocabulary is a byte
    assert result.nats_per_token == pytest.approx(nats_K[:29].mean(), rel=1e-12)
    assert result.bits_per_byte == pytest.approx(nats_K[:29].mean() / math.log(2), rel=1e-12)
    whole = evaluate(run, split_of(tokens_K, num_bytes=303), limit=9999)
    assert (whole.tokens, whole.bytes) == (101, 303)


def test_several_rows_count_every_token_once(run: Run) -> None:
    tokens_K = draw(101, 256)
    plan = Plan(7, Reach(11), rows=5)
    result = evaluate(run, split_of(tokens_K), plan)
    assert result.tokens == 101
    assert result.nats_per_token * 101 == pytest.approx(sum_nats(run.model, tokens_K, START, plan), rel=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_leaves_no_trace(run: Run, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the model's mode, also after an error, nor its weights, nor torch's random state."""
    run.model.train(training)
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    random_state = torch.get_rng_state()
    first = evaluate(run, split_of(draw(37, 256)))
    assert run.model.training is training
    assert all(module.training is training for module in run.model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in run.model.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in run.model.parameters())
    assert evaluate(run, split_of(draw(37, 256))).nats_per_token == first.nats_per_token  # no dropout

    def fails(*_: object) -> float:
        assert not run.model.training
        raise KeyboardInterrupt

    monkeypatch.setattr(scoring, "sum_nats", fails)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, split_of(draw(37, 256)))
    assert run.model.training is training


def test_nothing_to_score_is_refused(run: Run) -> None:
    with pytest.raises(UserError, match="there is nothing to score; the split is empty"):
        evaluate(run, split_of(draw(0)))


def test_tokens_the_model_does_not_know_are_refused(make_model) -> None:
    run = Run(make_model(), ByteVocabulary(), RunConfig(train=TrainConfig(segment=7, memory=11)))
    with pytest.raises(UserError, match="token 113 is not one of the 23 the model knows; give a corpus"):
        evaluate(run, split_of(np.array([5, 113, 7], dtype=np.uint8)))


# Plans.


def test_a_plan_is_the_runs_unless_told_otherwise() -> None:
    plain = RunConfig(train=TrainConfig(segment=7, memory=11), model=ModelConfig(window=13, clamp_length=17))
    assert Plan.of(plain) == Plan(7, Reach(11, 13, 17), rows=1, precision="float32")
    own = plain.model_copy(update={"evaluation": EvaluationConfig(segment=2, memory=0, window=3, clamp=5)})
    assert Plan.of(own) == Plan(2, Reach(0, 3, 5))
    assert Plan.of(own, segment=19, memory=23, window=29, clamp=31) == Plan(19, Reach(23, 29, 31))
    assert Plan.of(own, memory=None, window=29) == Plan(2, Reach(0, 29, 5))
    assert Plan.of(own, window="none", clamp="none") == Plan(2, Reach(0))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"segment": 0}, "segment 0: wanted 1 or more"),
        ({"segment": -3}, "segment -3: wanted 1 or more"),
        ({"memory": -1}, "memory -1 is too small; give 0 or more"),
        ({"memory": "none"}, "memory none: wanted a number of tokens, 0 or more"),
        ({"window": 0}, "window 0 is too small; give 1 or more"),
        ({"clamp": 0}, "clamp_length 0 is too small; give 1 or more"),
    ],
)
def test_a_plan_out_of_range_is_refused(wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Plan.of(RunConfig(), **wanted)
