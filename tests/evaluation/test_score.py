"""Scoring texts: tokens, lines and texts add up, in any language and for any tokenizer."""

from __future__ import annotations

import math
from importlib import import_module

import numpy as np
import pytest
from token_losses import token_nats

from transformer_xl.config import EvaluationConfig, RunConfig, TrainConfig, UserError
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.evaluation.score import score
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run_folder import Run
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

PLAN = EvaluationPlan(7, ContextLimits(11))
CLOSE = {"rtol": 0, "atol": 1e-10}
FIRST, SECOND = "Gr\u00fc\u00dfe\nan b\n\nb", "\u2603 b an\nb\n"
WORDS = WordTokenizer(("<eos>", "<unk>", "an", "b"), None, "<eos>", "<unk>")
KINDS = [ByteTokenizer(), CharTokenizer("an b\n", None), WORDS]


@pytest.fixture
def run_of(make_model):
    def make(tokenizer: Tokenizer) -> Run:
        config = RunConfig(train=TrainConfig(segment_length=7, memory_length=11))
        return Run(make_model(vocab_size=tokenizer.vocab_size), tokenizer, config)

    return make


@pytest.mark.parametrize("tokenizer", KINDS, ids=lambda of: of.kind)
@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_each_text_is_scored_as_if_alone(run_of, tokenizer: Tokenizer, batch_size) -> None:
    """With the losses of `token_nats`, in text order; a word tokenizer adds the final line end."""
    run, told = run_of(tokenizer), []
    config = EvaluationConfig(batch_size=batch_size)
    found = score(run, {"first": FIRST, "second": SECOND.encode()}, config, progress=told.append)
    assert [one.name for one in found] == ["first", "second"]
    assert sum(told) == sum(len(one.ids_K) for one in found)
    for one, text in zip(found, (FIRST, SECOND), strict=True):
        written = text + "\n" * (tokenizer.adds_final_newline and not text.endswith("\n"))
        assert one.ids_K.tolist() == tokenizer.encode(written).tolist()
        wanted_K = token_nats(run.model, one.ids_K, tokenizer.bos_token_id, PLAN)
        np.testing.assert_allclose(one.nats_K, wanted_K, **CLOSE)
        assert one.sums.nats == pytest.approx(wanted_K.sum(), abs=1e-10)
        assert (one.sums.tokens, one.sums.bytes) == (len(one.ids_K), len(text.encode()))
        assert (one.sums.characters, one.sums.words) == (len(text), len(text.split()))


@pytest.mark.parametrize("tokenizer", KINDS, ids=lambda of: of.kind)
def test_lines_add_up_to_the_text(run_of, tokenizer: Tokenizer) -> None:
    """Every token is in one line, and a line includes the token that ends it."""
    (found,) = score(run_of(tokenizer), FIRST)
    lines = list(found.lines())
    assert [line.number for line in lines] == [1, 2, 3, 4]
    assert np.concatenate([line.ids_K for line in lines]).tolist() == found.ids_K.tolist()
    assert np.concatenate([line.nats_K for line in lines]).tolist() == found.nats_K.tolist()
    assert math.fsum(line.nats for line in lines) == pytest.approx(found.sums.nats, abs=1e-10)
    shown = [tokenizer.decode(line.ids_K).removesuffix("\n") for line in lines]
    assert shown == (["<unk>", "an b", "", "b"] if tokenizer is WORDS else FIRST.split("\n"))


def test_texts_in_a_row_are_one_text(run_of) -> None:
    """When memory continues from one to the next."""
    run = run_of(ByteTokenizer())
    found = score(run, [FIRST, SECOND], EvaluationConfig(reset_memory=False))
    joined_K = np.concatenate([one.nats_K for one in found])
    wanted_K = token_nats(run.model, run.tokenizer.encode(FIRST + SECOND), 10, PLAN)
    np.testing.assert_allclose(joined_K, wanted_K, **CLOSE)
    apart = score(run, [FIRST, SECOND])
    assert [one.name for one in apart] == ["text 1", "text 2"]
    assert np.abs(apart[1].nats_K - found[1].nats_K).max() > 1e-6
    np.testing.assert_allclose(apart[1].nats_K, score(run, SECOND)[0].nats_K, **CLOSE)


def test_the_order_of_texts_does_not_matter(run_of) -> None:
    """Nor how many other texts are scored."""
    run = run_of(ByteTokenizer())
    texts_of = {"a": FIRST, "b": SECOND, "c": "an " * 30, "d": "b"}
    wanted = {one.name: one.nats_K for one in score(run, texts_of)}
    for order in ("dcba", "bd", "acbd", "c"):
        for batch_size in (None, 2):
            found = score(run, {name: texts_of[name] for name in order}, EvaluationConfig(batch_size=batch_size))
            assert [one.name for one in found] == list(order)
            for one in found:
                np.testing.assert_allclose(one.nats_K, wanted[one.name], **CLOSE)


def test_bytes_that_are_not_utf8(run_of) -> None:
    (found,) = score(run_of(ByteTokenizer()), b"\xff\x00\n\xc3")
    assert found.ids_K.tolist() == [255, 0, 10, 195]
    assert (found.sums.characters, found.sums.bytes, len(list(found.lines()))) == (None, 4, 2)


@pytest.mark.parametrize(
    ("tokenizer", "given", "message"),
    [
        (KINDS[0], {"a.txt": "a", "b.txt": ""}, "b.txt: the text is empty"),
        (KINDS[0], [], "there is nothing to score; give at least one text"),
        (KINDS[1], {"a.txt": b"abc\xff"}, "a.txt: byte 3: not UTF-8"),
        (CharTokenizer("ab", byte_fallback=False), {"a.txt": "ab" * 4 + "c"}, "a.txt: byte 8: the character 'c'"),
    ],
)
def test_what_cannot_be_scored_is_refused(run_of, tokenizer: Tokenizer, given, message: str) -> None:
    with pytest.raises(UserError, match=message):
        score(run_of(tokenizer), given)


def test_the_position_of_an_encoding_error_counts_from_the_start(run_of, monkeypatch) -> None:
    """Also where a long text is split into chunks before."""
    module = import_module("transformer_xl.evaluation.score")
    split = module.split_chunks
    monkeypatch.setattr(module, "split_chunks", lambda tokenizer, content: split(tokenizer, content, size=4))
    with pytest.raises(UserError, match=r"a.txt: byte 9: the character 'c'"):
        score(run_of(CharTokenizer("ab", byte_fallback=False)), {"a.txt": "abababab" + "ac"})
