"""Evaluating a split: settings, metrics by hand, what is counted, the file of losses, and no side effects."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tensors import assert_same_tensors, copied_tensors
from token_losses import token_nats

from transformer_xl.config import (
    DynamicConfig,
    EvaluationConfig,
    RunConfig,
    TrainConfig,
    TransformerXLConfig,
    UserError,
    check_settings,
)
from transformer_xl.evaluation.evaluate import evaluate
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run_folder import Run
from transformer_xl.text.token_store import TokenSplit
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

START = 10
PLAN = EvaluationPlan(7, ContextLimits(11, None, 17))
CONFIG = EvaluationConfig(segment_length=7, memory_length=11, clamp_length=17)


def draw(length: int, vocab_size: int = 256, seed: int = 3) -> npt.NDArray[Any]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).astype(np.uint8)


@pytest.fixture
def run(make_model) -> Run:
    model = make_model(vocab_size=256, memory_length=11, dropout=0.3)
    config = RunConfig(
        model=TransformerXLConfig(clamp_length=17), train=TrainConfig(segment_length=7, memory_length=11)
    )
    return Run(model, ByteTokenizer(), config)


def split_of(tokens: npt.NDArray[Any], num_bytes: int | None = None, words: int = 1) -> TokenSplit:
    starts = np.zeros(1, dtype=np.uint64)
    return TokenSplit("test", tokens, starts, len(tokens) if num_bytes is None else num_bytes, words)


def test_metrics_of_an_evaluation(run: Run) -> None:
    """Computed here from the losses; bytes are those of the text, here three per token."""
    tokens_K = draw(101)
    result = evaluate(run, split_of(tokens_K, num_bytes=303, words=29))
    nats_K = token_nats(run.model.eval(), tokens_K, START, PLAN)
    assert (result.tokens, result.bytes, result.words) == (101, 303, 29)
    assert result.nats_per_token == pytest.approx(nats_K.mean(), rel=1e-12)
    assert result.bits_per_byte == pytest.approx(nats_K.sum() / math.log(2) / 303, rel=1e-12)
    assert result.perplexity == pytest.approx(math.exp(nats_K.mean()), rel=1e-12)
    assert result.word_perplexity == pytest.approx(math.exp(nats_K.sum() / 29), rel=1e-12)
    assert result.tokens_per_second == pytest.approx(101 / result.seconds)
    assert (result.segment_length, result.memory_length) == (7, 11)
    assert (result.attention_window, result.clamp_length) == (None, 17)
    assert (result.method, result.method_settings, result.reset_memory) == ("memory", {}, False)
    assert (result.batch_size, result.warmup_tokens, result.dtype) == (None, None, "float32")


def test_max_tokens_scores_the_start_alone(run: Run) -> None:
    tokens_K, told = draw(101), []
    result = evaluate(run, split_of(tokens_K, num_bytes=303), max_tokens=29, progress=told.append)
    nats_K = token_nats(run.model.eval(), tokens_K, START, PLAN)
    assert (result.tokens, result.bytes, sum(told)) == (29, 29, 29)  # a token of the vocabulary is a byte
    assert (result.words, result.word_perplexity) == (None, None)  # how many words is known of the whole alone
    assert result.nats_per_token == pytest.approx(nats_K[:29].mean(), rel=1e-12)
    assert result.bits_per_byte == pytest.approx(nats_K[:29].mean() / math.log(2), rel=1e-12)
    whole = evaluate(run, split_of(tokens_K, num_bytes=303), max_tokens=9999)
    assert (whole.tokens, whole.bytes) == (101, 303)


@pytest.mark.parametrize("reset_memory", [False, True])
def test_batch_size_and_documents_of_the_split(run: Run, reset_memory) -> None:
    tokens_K = draw(101)
    split = replace(split_of(tokens_K), document_starts=np.array([0, 17, 58], dtype=np.uint64))
    result = evaluate(run, split, EvaluationConfig(batch_size=5, reset_memory=reset_memory))
    edges = [0, 17, 58, 101] if reset_memory else [0, 101]
    alone = [token_nats(run.model, tokens_K[begin:end], START, PLAN) for begin, end in pairwise(edges)]
    assert result.nats_per_token == pytest.approx(np.concatenate(alone).mean(), rel=1e-12)


# Characters and words.

TEXT = "Ein Gr\u00fc\u00dfe-\u2603 und\nnoch einer\n" * 5


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("ein rud\n", None)], ids=lambda of: of.kind)
def test_bits_per_character_where_tokens_give_the_text_back(make_model, tokenizer: Tokenizer, monkeypatch) -> None:
    """For any chunk size; a character that the end of the text cuts does not count."""
    monkeypatch.setattr("transformer_xl.evaluation.metrics._TOKENS_PER_CHUNK", 3)
    run = Run(make_model(vocab_size=tokenizer.vocab_size), tokenizer, RunConfig())
    tokens_K = tokenizer.encode(TEXT)
    result = evaluate(run, split_of(tokens_K, len(TEXT.encode()), 25), CONFIG)
    assert (result.characters, result.bytes, result.words) == (len(TEXT), len(TEXT.encode()), 25)
    assert result.bits_per_character == pytest.approx(result.bits_per_byte * result.bytes / len(TEXT), rel=1e-12)
    cut = tokenizer.encode("Ein Gr\u00fc\u00dfe-\u2603").tolist()[:-1]
    part = evaluate(run, split_of(tokens_K, len(TEXT.encode()), 25), CONFIG, max_tokens=len(cut))
    assert (part.characters, part.bytes) == (10, 14)


def test_no_characters_where_the_text_is_not_utf8(run: Run) -> None:
    result = evaluate(run, split_of(np.array([65, 0xFF, 66, 67], dtype=np.uint8)))
    assert (result.characters, result.bits_per_character) == (None, None)


def test_words_are_counted_where_they_are_the_tokens(make_model) -> None:
    """Also in part of a text; line ends are not words. With other tokenizers only the whole text has a count."""
    words = WordTokenizer(("<eos>", "<unk>", "a", "b"), None, "<eos>", "<unk>")
    run = Run(make_model(vocab_size=4), words, RunConfig())
    tokens_K = words.encode("a b\nb c a\nb b\n")
    whole = evaluate(run, split_of(tokens_K, 15, 7), CONFIG)
    assert (whole.tokens, whole.words, whole.characters, whole.num_unknown) == (10, 7, None, 1)
    part = evaluate(run, split_of(tokens_K, 15, 7), CONFIG, max_tokens=7)
    assert (part.words, part.bytes) == (5, round(15 * 7 / 10))
    nats_K = token_nats(run.model, tokens_K, words.bos_token_id, PLAN)
    assert part.word_perplexity == pytest.approx(math.exp(nats_K[:7].sum() / 5), rel=1e-12)


# The file of losses.


@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_file_holds_all_losses_in_text_order(run: Run, tmp_path: Path, batch_size: int) -> None:
    tokens_K, file = draw(101), tmp_path / "losses.npy"
    split = replace(split_of(tokens_K), document_starts=np.array([0, 17, 58], dtype=np.uint64))
    config = EvaluationConfig(batch_size=batch_size, reset_memory=True)
    result = evaluate(run, split, config, token_losses=file)
    assert [item.name for item in tmp_path.iterdir()] == ["losses.npy"]
    nats_K = np.load(file, allow_pickle=False)
    assert (nats_K.dtype, nats_K.shape) == (np.float32, (101,))
    assert nats_K.mean(dtype=np.float64) == pytest.approx(result.nats_per_token, rel=1e-6)
    assert result.nats_per_token == evaluate(run, split, config).nats_per_token
    assert nats_K[17] == pytest.approx(token_nats(run.model, tokens_K[17:18], START, PLAN)[0], rel=1e-6)


def test_the_file_is_whole_or_not_there(run: Run, tmp_path: Path) -> None:
    file, told = tmp_path / "losses.npy", []

    def stop(count: int) -> None:
        told.append(count)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(run, split_of(draw(101)), token_losses=file, progress=stop)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="no such file or folder"):
        evaluate(run, split_of(draw(101)), token_losses=tmp_path / "none" / "losses.npy")


# What is left behind, and what is refused.


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_has_no_side_effects(run: Run, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's mode (also after an error), its weights and torch's random state are unchanged."""
    run.model.train(training)
    weights = copied_tensors(run.model)
    random_state = torch.get_rng_state()
    first = evaluate(run, split_of(draw(37)))
    assert run.model.training is training
    assert all(module.training is training for module in run.model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same_tensors(run.model, weights)
    assert all(weight.grad is None and weight.requires_grad for weight in run.model.parameters())
    assert evaluate(run, split_of(draw(37))).nats_per_token == first.nats_per_token  # no dropout

    def fails(*_: object) -> float:
        assert not run.model.training
        raise KeyboardInterrupt

    monkeypatch.setattr(type(run.model), "forward", fails)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, split_of(draw(37)))
    assert run.model.training is training


def test_nothing_to_score_is_refused(run: Run) -> None:
    with pytest.raises(UserError, match="nothing to score; the split is empty"):
        evaluate(run, split_of(draw(0)))
    with pytest.raises(UserError, match="max-tokens 0: must be 1 or more"):
        evaluate(run, split_of(draw(7)), max_tokens=0)


def test_tokens_the_model_does_not_know_are_refused(make_model) -> None:
    run = Run(make_model(), ByteTokenizer(), RunConfig(train=TrainConfig(segment_length=7, memory_length=11)))
    with pytest.raises(UserError, match=r"token id 113 .* vocab_size 23; give a corpus"):
        evaluate(run, split_of(np.array([5, 113, 7], dtype=np.uint8)))


# Settings.


def test_settings_are_the_runs_unless_given() -> None:
    plain = RunConfig(
        train=TrainConfig(segment_length=7, memory_length=11),
        model=TransformerXLConfig(attention_window=13, clamp_length=17),
    )
    assert EvaluationPlan.resolve(plain) == EvaluationPlan(7, ContextLimits(11, 13, 17))
    own = EvaluationConfig(
        segment_length=2, memory_length=0, attention_window=3, clamp_length=5, batch_size=19, dtype="bfloat16"
    )
    run = plain.model_copy(update={"evaluation": own})
    plan = EvaluationPlan.resolve(run)
    assert plan == EvaluationPlan(2, ContextLimits(0, 3, 5), batch_size=19, dtype="bfloat16")
    assert EvaluationPlan.resolve(run, EvaluationConfig()) == plan
    given = EvaluationConfig(memory_length=23, warmup_tokens=29, reset_memory=True)
    wanted = replace(plan, context_limits=ContextLimits(23, 3, 5), warmup_tokens=29, reset_memory=True)
    assert EvaluationPlan.resolve(run, given) == wanted
    # None that the caller gives takes a limit away
    unlimited = EvaluationConfig(attention_window=None, clamp_length=None)
    assert EvaluationPlan.resolve(run, unlimited) == replace(plan, context_limits=ContextLimits(0))


def test_the_method_and_its_settings_are_resolved() -> None:
    run = RunConfig(evaluation=EvaluationConfig(method="dynamic", dynamic=DynamicConfig(decay=0.3)))
    plan = EvaluationPlan.resolve(run, EvaluationConfig(dynamic=DynamicConfig(optimizer="sgd")))
    values = plan.as_dict(torch.device("cpu"))
    assert values["method"] == "dynamic"
    assert values["method_settings"] == {"optimizer": "sgd", "learning_rate": 0.01, "decay": 0.3}
    assert EvaluationPlan.resolve(RunConfig(), EvaluationConfig(method="sliding-window")).method == "sliding-window"
    with pytest.raises(UserError, match="method dynamic were given, but the method is memory"):
        EvaluationPlan.resolve(RunConfig(), EvaluationConfig(dynamic=DynamicConfig()))
    with pytest.raises(UserError, match="segment-length was given, but method sliding-window"):
        EvaluationPlan.resolve(RunConfig(), EvaluationConfig(method="sliding-window", segment_length=3))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"segment_length": 0}, {"memory_length": -1}, {"attention_window": 0}, {"clamp_length": 0}),
        *({"batch_size": 0}, {"warmup_tokens": -1}, {"method": "window"}, {"dtype": "float16"}),
        *({"dynamic": {"learning_rate": math.nan}}, {"dynamic": {"decay": 1.5}}, {"dynamic": {"epsilon": 0.0}}),
        *({"dynamic": {"gradient_stats_tokens": 0}}, {"dynamic": {"optimizer": "sgd", "epsilon": 5.0}}),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        check_settings(EvaluationConfig, wrong, "test")


def test_documents_are_bounded_where_memory_is_reset() -> None:
    text = TokenizedText(np.zeros(10, dtype=np.uint8), 0, np.array([0, 3, 3, 8, 10, 12], dtype=np.uint64))
    assert text.boundaries(reset_memory=True).tolist() == [0, 3, 8, 10]
    assert text.boundaries(reset_memory=False).tolist() == [0, 10]
    assert TokenizedText(np.zeros(10, dtype=np.uint8), 0).boundaries(reset_memory=True).tolist() == [0, 10]
