"""`evaluate` on a split: metrics, counts, the file of losses, no side effects; and the resolved settings.

The first argument of EvaluationPlan is the segment length; those of ContextLimits are memory length, attention window
and clamp length. The fixture make_model (tests/conftest.py) makes a small model with random weights.

Shape suffixes: K tokens of a text.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tensors import assert_same_tensors, copied_tensors
from token_losses import BOS, nats_of_documents, random_tokens, token_nats

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
from transformer_xl.evaluation.metrics import Sums
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.evaluation.score import score
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run import Run
from transformer_xl.text.documents import Document
from transformer_xl.text.token_store import TokenSplit
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.tokenizer_config import TokenizerConfig
from transformer_xl.text.tokenizers.training import train_tokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

# the settings of CONFIG and of the fixture `run`, resolved
PLAN = EvaluationPlan(7, ContextLimits(11, clamp_length=17))
CONFIG = EvaluationConfig(segment_length=7, memory_length=11, clamp_length=17)


@pytest.fixture
def run(make_model) -> Run:
    model = make_model(vocab_size=256, memory_length=11, dropout=0.3)
    config = RunConfig(
        model=TransformerXLConfig(clamp_length=17), train=TrainConfig(segment_length=7, memory_length=11)
    )
    return Run(model, ByteTokenizer(), config)


def split_of(tokens: npt.NDArray[Any], num_bytes: int | None = None, words: int = 1) -> TokenSplit:
    """Return a split of one document; None as `num_bytes`: one byte per token."""
    starts = np.zeros(1, dtype=np.uint64)
    return TokenSplit("test", tokens, starts, len(tokens) if num_bytes is None else num_bytes, words)


def test_metrics_equal_those_computed_from_the_losses(run: Run) -> None:
    """Bytes are those of the text; here there are three per token."""
    tokens_K = random_tokens(101, 256)
    result = evaluate(run, split_of(tokens_K, num_bytes=303, words=29))
    nats_K = token_nats(run.model.eval(), tokens_K, BOS, PLAN)
    assert (result.tokens, result.bytes, result.words) == (101, 303, 29)
    assert result.nats_per_token == pytest.approx(nats_K.mean(), rel=1e-12)
    assert result.bits_per_byte == pytest.approx(nats_K.sum() / math.log(2) / 303, rel=1e-12)
    assert result.token_perplexity == pytest.approx(math.exp(nats_K.mean()), rel=1e-12)
    assert result.tokens_per_second == pytest.approx(101 / result.seconds)
    assert result.plan == PLAN
    settings = {"segment_length": 7, "memory_length": 11, "attention_window": None, "clamp_length": 17}
    settings |= {"method": "memory", "method_settings": {}, "reset_memory": False, "memory_length_reason": "as trained"}
    settings |= {"batch_size": None, "warmup_tokens": None, "dtype": "float32"}
    assert result.as_dict().items() >= settings.items()


def test_max_tokens_scores_the_start_of_the_split(run: Run) -> None:
    tokens_K, progress = random_tokens(101, 256), []
    result = evaluate(run, split_of(tokens_K, num_bytes=303), max_tokens=29, progress=progress.append)
    nats_K = token_nats(run.model.eval(), tokens_K, BOS, PLAN)
    assert (result.tokens, result.bytes, sum(progress)) == (29, 29, 29)  # each token of the tokenizer is a byte
    assert result.nats_per_token == pytest.approx(nats_K[:29].mean(), rel=1e-12)
    assert result.bits_per_byte == pytest.approx(nats_K[:29].mean() / math.log(2), rel=1e-12)
    whole = evaluate(run, split_of(tokens_K, num_bytes=303), max_tokens=9999)
    assert (whole.tokens, whole.bytes) == (101, 303)


# Characters and words

TEXT = "Ein Gr\u00fc\u00dfe-\u2603 und\nnoch einer\n" * 5


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("ein rud\n")], ids=lambda value: value.kind)
def test_bits_per_character_if_tokens_decode_exactly(make_model, tokenizer: Tokenizer, monkeypatch) -> None:
    """For any chunk size; an incomplete character at the end of the text is not counted."""
    monkeypatch.setattr("transformer_xl.evaluation.metrics._TOKENS_PER_CHUNK", 3)
    run = Run(make_model(vocab_size=tokenizer.vocab_size), tokenizer, RunConfig())
    split = split_of(tokenizer.encode(TEXT), num_bytes=len(TEXT.encode()), words=25)
    result = evaluate(run, split, CONFIG)
    assert (result.characters, result.bytes, result.words) == (len(TEXT), len(TEXT.encode()), 25)
    assert result.bits_per_character == pytest.approx(result.bits_per_byte * result.bytes / len(TEXT), rel=1e-12)
    # without the last of the snowman's 3 bytes: CharTokenizer encodes characters that it does not have as bytes
    max_tokens = len(tokenizer.encode("Ein Gr\u00fc\u00dfe-\u2603")) - 1
    part = evaluate(run, split, CONFIG, max_tokens=max_tokens)
    assert (part.characters, part.bytes) == (10, 14)


def test_characters_are_unknown_if_the_text_is_not_utf8(run: Run) -> None:
    # 0xFF occurs in no UTF-8 text
    result = evaluate(run, split_of(np.array([65, 0xFF, 66, 67], dtype=np.uint8)))
    assert (result.characters, result.bits_per_character) == (None, None)


def test_perplexity_is_per_word_and_line_end_for_every_tokenizer(make_model, monkeypatch) -> None:
    """So that a model of bytes or subwords is compared with the perplexities of papers, whose tokens are words."""
    monkeypatch.setattr("transformer_xl.evaluation.metrics._TOKENS_PER_CHUNK", 5)  # words span chunks
    text = "the  cat, \n\n sat"  # 3 words, 2 line ends; a word tokenizer also adds one at the end
    settings: dict[str, Any] = {"eos_token": "<eos>", "unk_token": "<unk>"}
    words = WordTokenizer(("<eos>", "<unk>", "the", ","), **settings)
    punctuation = WordTokenizer(words.words, pre_tokenizer=PreTokenizer("punctuation"), **settings)
    documents = [Document("text", [text.encode()])]
    bpe = train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=258), documents)
    for tokenizer, num_words, num_line_ends in (
        (ByteTokenizer(), 3, 2),
        (bpe, 3, 2),
        (words, 3, 3),
        (punctuation, 4, 3),  # the comma is a word of this tokenizer
    ):
        tokens_K = tokenizer.encode(text + "\n" * tokenizer.adds_final_newline)
        run = Run(make_model(vocab_size=tokenizer.vocab_size), tokenizer, RunConfig())
        result = evaluate(run, split_of(tokens_K, num_bytes=len(text), words=3), CONFIG)
        assert (result.words, result.line_ends) == (num_words, num_line_ends)
        assert result.perplexity == pytest.approx(math.exp(result.nats / (num_words + num_line_ends)), rel=1e-12)
        assert result.token_perplexity == pytest.approx(math.exp(result.nats_per_token), rel=1e-12)
        is_word_level = tokenizer.kind == "word"
        assert (result.perplexity == pytest.approx(result.token_perplexity)) == is_word_level
        part = evaluate(run, split_of(tokens_K, num_bytes=len(text), words=3), CONFIG, max_tokens=len(tokens_K) - 1)
        assert part.words == num_words
        (scored,) = score(run, text)
        assert (scored.sums.words, scored.sums.line_ends) == (num_words, num_line_ends)


def test_words_of_a_part_are_counted_by_a_word_tokenizer(make_model) -> None:
    """Newlines are not words. The bytes of a part are estimated from its share of the tokens."""
    tokenizer = WordTokenizer(("<eos>", "<unk>", "a", "b"), eos_token="<eos>", unk_token="<unk>")
    run = Run(make_model(vocab_size=4), tokenizer, RunConfig())
    tokens_K = tokenizer.encode("a b\nb c a\nb b\n")
    whole = evaluate(run, split_of(tokens_K, num_bytes=15, words=7), CONFIG)
    assert (whole.tokens, whole.words, whole.characters, whole.num_unknown) == (10, 7, None, 1)
    part = evaluate(run, split_of(tokens_K, num_bytes=15, words=7), CONFIG, max_tokens=7)  # up to the second newline
    assert (part.words, part.bytes) == (5, round(15 * 7 / 10))
    nats_K = token_nats(run.model, tokens_K, tokenizer.bos_token_id, PLAN)
    assert part.perplexity == pytest.approx(math.exp(nats_K[:7].mean()), rel=1e-12)


def test_words_of_a_part_end_with_their_document(make_model, monkeypatch) -> None:
    """Documents of rows have no newline at their end, and the first word of one does not continue the one before."""
    monkeypatch.setattr("transformer_xl.evaluation.metrics._TOKENS_PER_CHUNK", 5)  # words span chunks
    texts = [b"the cat", b"sat", b" down\n", b"again"]
    documents = [Document("text", [text]) for text in texts]
    for tokenizer in (ByteTokenizer(), train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=258), documents)):
        run = Run(make_model(vocab_size=tokenizer.vocab_size), tokenizer, RunConfig())
        ids = [tokenizer.encode(text) for text in texts]
        starts = np.cumsum([0, *map(len, ids[:-1])]).astype(np.uint64)
        split = TokenSplit("test", np.concatenate(ids), starts, num_bytes=len(b"".join(texts)), num_words=5)
        for max_tokens, words in ((int(starts[1]), 2), (int(starts[2]), 3), (int(starts[3]), 4), (None, 5)):
            assert evaluate(run, split, CONFIG, max_tokens=max_tokens).words == words


def test_overflowing_perplexity_is_infinite() -> None:
    sums = Sums(nats=800.0, tokens=1, bytes=1, words=1)
    assert (sums.perplexity, sums.token_perplexity) == (math.inf, math.inf)


# The file of losses


@pytest.mark.parametrize("batch_size", [1, 5])
def test_token_losses_file_is_in_text_order(run: Run, tmp_path: Path, batch_size: int) -> None:
    tokens_K, file, document_starts = random_tokens(101, 256), tmp_path / "losses.npy", [0, 17, 58]
    split = replace(split_of(tokens_K), document_starts=np.array(document_starts, dtype=np.uint64))
    config = EvaluationConfig(batch_size=batch_size, reset_memory=True)
    result = evaluate(run, split, config, token_losses=file)
    assert [item.name for item in tmp_path.iterdir()] == ["losses.npy"]
    nats_K = np.load(file, allow_pickle=False)
    assert nats_K.dtype == np.float32
    expected_K = nats_of_documents(run.model, tokens_K, document_starts, PLAN)
    np.testing.assert_allclose(nats_K, expected_K, rtol=1e-6)
    assert result.nats_per_token == pytest.approx(expected_K.mean(), rel=1e-12)


def test_interrupted_evaluation_leaves_no_losses_file(run: Run, tmp_path: Path) -> None:
    progress = []

    def interrupt(num_tokens: int) -> None:
        progress.append(num_tokens)
        if len(progress) == 3:
            raise KeyboardInterrupt

    split = split_of(random_tokens(101, 256))
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, split, token_losses=tmp_path / "losses.npy", progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="no such file or folder"):
        evaluate(run, split, token_losses=tmp_path / "none" / "losses.npy")


# Side effects and errors


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_has_no_side_effects(run: Run, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's training mode (also after an error), its weights and torch's random state are unchanged."""
    run.model.train(training)
    weights, random_state, split = copied_tensors(run.model), torch.get_rng_state(), split_of(random_tokens(37, 256))
    first = evaluate(run, split)
    assert all(module.training is training for module in run.model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert_same_tensors(run.model, weights)
    assert all(weight.grad is None and weight.requires_grad for weight in run.model.parameters())
    assert evaluate(run, split).nats_per_token == first.nats_per_token  # no dropout

    def interrupt(model: Any, *_: object) -> None:
        assert not model.training
        raise KeyboardInterrupt

    monkeypatch.setattr(type(run.model), "embed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        evaluate(run, split)
    assert run.model.training is training


def test_empty_splits_and_unknown_tokens_are_refused(run: Run, make_model) -> None:
    """Token id 113 is not in the vocabulary of 23."""
    with pytest.raises(UserError, match="nothing to score; the split is empty"):
        evaluate(run, split_of(random_tokens(0)))
    small_run = replace(run, model=make_model())
    with pytest.raises(UserError, match=r"token id 113 .* vocab_size 23; give a corpus"):
        evaluate(small_run, split_of(np.array([5, 113, 7], dtype=np.uint8)))


# Settings


def test_plan_takes_settings_from_the_run_unless_overridden() -> None:
    plain = RunConfig(
        train=TrainConfig(segment_length=7, memory_length=11),
        model=TransformerXLConfig(attention_window=13, clamp_length=17),
    )
    assert EvaluationPlan.resolve(plain) == EvaluationPlan(7, ContextLimits(11, attention_window=13, clamp_length=17))
    run_settings = EvaluationConfig(
        segment_length=2, memory_length=0, attention_window=3, clamp_length=5, batch_size=19, dtype="bfloat16"
    )
    run = plain.model_copy(update={"evaluation": run_settings})
    plan = EvaluationPlan.resolve(run)
    assert plan == EvaluationPlan(2, ContextLimits(0, 3, 5), batch_size=19, dtype="bfloat16")
    assert EvaluationPlan.resolve(run, EvaluationConfig()) == plan
    overrides = EvaluationConfig(memory_length=23, warmup_tokens=29, reset_memory=True)
    expected = replace(plan, context_limits=ContextLimits(23, 3, 5), warmup_tokens=29, reset_memory=True)
    assert EvaluationPlan.resolve(run, overrides) == expected
    # an explicit None removes a limit
    unlimited = EvaluationConfig(attention_window=None, clamp_length=None)
    assert EvaluationPlan.resolve(run, unlimited) == replace(plan, context_limits=ContextLimits(0))


def test_plan_has_the_method_and_its_settings() -> None:
    run = RunConfig(evaluation=EvaluationConfig(method="dynamic", dynamic=DynamicConfig(decay=0.3)))
    plan = EvaluationPlan.resolve(run, EvaluationConfig(dynamic=DynamicConfig(optimizer="sgd")))
    values = plan.as_dict()
    assert values["method"] == "dynamic"
    assert values["method_settings"] == {"optimizer": "sgd", "learning_rate": 0.01, "decay": 0.3}
    with pytest.raises(UserError, match="method dynamic were given, but the method is memory"):
        EvaluationPlan.resolve(RunConfig(), EvaluationConfig(dynamic=DynamicConfig()))


@pytest.mark.parametrize(
    "settings",
    [
        *({"segment_length": 0}, {"memory_length": -1}, {"attention_window": 0}, {"clamp_length": 0}),
        *({"batch_size": 0}, {"warmup_tokens": -1}, {"method": "window"}, {"dtype": "float16"}),
        *({"dynamic": {"learning_rate": math.nan}}, {"dynamic": {"decay": 1.5}}, {"dynamic": {"epsilon": 0.0}}),
        *({"dynamic": {"gradient_stats_tokens": 0}}, {"dynamic": {"optimizer": "sgd", "epsilon": 5.0}}),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        check_settings(EvaluationConfig, settings, "test")


def test_boundaries_of_documents_within_the_text() -> None:
    """Of six documents, one is empty, and two start at or after the end of the text of 10 tokens."""
    text = TokenizedText(np.zeros(10, dtype=np.uint8), 0, np.array([0, 3, 3, 8, 10, 12], dtype=np.uint64))
    assert text.boundaries(reset_memory=True).tolist() == [0, 3, 8, 10]
    assert text.boundaries(reset_memory=False).tolist() == [0, 10]
    assert TokenizedText(np.zeros(10, dtype=np.uint8), 0).boundaries(reset_memory=True).tolist() == [0, 10]
