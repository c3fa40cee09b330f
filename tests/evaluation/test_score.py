"""`score`: the losses of tokens, lines and texts add up, for any tokenizer.

The fixture make_model (tests/conftest.py) makes a small model with random weights.

Shape suffixes: K tokens of a text.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from token_losses import BOS, CLOSE, token_nats

from transformer_xl.config import EvaluationConfig, UserError
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.evaluation.score import score
from transformer_xl.model.memory import ContextLimits
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

PLAN = EvaluationPlan(segment_length=7, context_limits=ContextLimits(memory_length=11))
# words and characters that the tokenizers below do not have, an empty line, a text with and one without a last newline
FIRST, SECOND = "Gr\u00fc\u00dfe\nan b\n\nb", "\u2603 b an\nb\n"
WORDS = WordTokenizer(("<eos>", "<unk>", "an", "b"), eos_token="<eos>", unk_token="<unk>")
TOKENIZERS = [ByteTokenizer(), CharTokenizer("an b\n"), WORDS]


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda tokenizer: tokenizer.kind)
@pytest.mark.parametrize("batch_size", [None, 3])
def test_each_text_is_scored_independently(run_of, tokenizer: Tokenizer, batch_size) -> None:
    """Losses are in text order; a word tokenizer adds a final newline token."""
    run, progress = run_of(tokenizer), []
    config = EvaluationConfig(batch_size=batch_size)
    scores = score(run, {"first": FIRST, "second": SECOND.encode()}, config, progress=progress.append)
    assert [text.name for text in scores] == ["first", "second"]
    assert sum(progress) == sum(len(text.ids_K) for text in scores)
    for text, content in zip(scores, (FIRST, SECOND), strict=True):
        encoded = content + "\n" * (tokenizer.adds_final_newline and not content.endswith("\n"))
        assert text.ids_K.tolist() == tokenizer.encode(encoded).tolist()
        expected_K = token_nats(run.model, text.ids_K, tokenizer.bos_token_id, PLAN)
        np.testing.assert_allclose(text.nats_K, expected_K, **CLOSE)
        assert text.sums.nats == pytest.approx(expected_K.sum(), abs=1e-10)
        assert (text.sums.tokens, text.sums.bytes) == (len(text.ids_K), len(content.encode()))
        assert (text.sums.characters, text.sums.words) == (len(content), len(content.split()))


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda tokenizer: tokenizer.kind)
def test_lines_add_up_to_the_text(run_of, tokenizer: Tokenizer) -> None:
    """Every token is in one line, and a line includes its newline token."""
    (text,) = score(run_of(tokenizer), FIRST)
    lines = list(text.lines())
    assert [line.number for line in lines] == [1, 2, 3, 4]
    assert np.concatenate([line.ids_K for line in lines]).tolist() == text.ids_K.tolist()
    assert np.concatenate([line.nats_K for line in lines]).tolist() == text.nats_K.tolist()
    assert math.fsum(line.nats for line in lines) == pytest.approx(text.sums.nats, abs=1e-10)
    decoded = [tokenizer.decode(line.ids_K).removesuffix("\n") for line in lines]
    assert decoded == (["<unk>", "an b", "", "b"] if tokenizer is WORDS else FIRST.split("\n"))


def test_texts_are_one_text_if_memory_is_not_reset(run_of) -> None:
    run = run_of(ByteTokenizer())
    scores = score(run, [FIRST, SECOND], EvaluationConfig(reset_memory=False))
    assert [text.name for text in scores] == ["text 1", "text 2"]
    expected_K = token_nats(run.model, run.tokenizer.encode(FIRST + SECOND), BOS, PLAN)
    np.testing.assert_allclose(np.concatenate([text.nats_K for text in scores]), expected_K, **CLOSE)


def test_text_that_is_not_utf8(run_of) -> None:
    """Two lines of bytes that no UTF-8 text contains, or that begin a character which is not complete."""
    (text,) = score(run_of(ByteTokenizer()), b"\xff\x00\n\xc3")
    assert text.ids_K.tolist() == [255, 0, 10, 195]
    assert (text.sums.characters, text.sums.bytes, len(list(text.lines()))) == (None, 4, 2)


@pytest.mark.parametrize(
    ("tokenizer", "texts", "message"),
    [
        (TOKENIZERS[0], {"a.txt": "a", "b.txt": ""}, "b.txt: the text is empty"),
        (TOKENIZERS[0], [], "there is nothing to score; give at least one text"),
        (TOKENIZERS[1], {"a.txt": b"abc\xff"}, "a.txt: byte 3: not UTF-8"),
        (CharTokenizer("ab", byte_fallback=False), {"a.txt": "ab" * 4 + "c"}, "a.txt: byte 8: the character 'c'"),
    ],
)
def test_empty_or_unencodable_texts_are_refused(run_of, tokenizer: Tokenizer, texts, message: str) -> None:
    with pytest.raises(UserError, match=message):
        score(run_of(tokenizer), texts)


def test_position_of_an_encoding_error_counts_from_the_start_of_the_text(run_of, monkeypatch) -> None:
    """Also in a later chunk of a long text: chunks, which are encoded separately, have only 4 bytes in this test."""
    monkeypatch.setattr("transformer_xl.text.documents.ENCODE_CHUNK_BYTES", 4)
    with pytest.raises(UserError, match=r"a.txt: byte 9: the character 'c'"):
        score(run_of(CharTokenizer("ab", byte_fallback=False)), {"a.txt": "abababab" + "ac"})
