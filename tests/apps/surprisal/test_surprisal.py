"""`surprisal`: words add up to their lines, and each has the probability that the model gives it, for any tokenizer.

The fixture make_model (tests/conftest.py) makes a small float64 model with random weights.

Shape suffixes: K tokens of an item, V vocabulary.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bpe_tokenizers import bpe_across_spaces
from library_tokenizers import prefix_space, unigram, word_piece

from transformer_xl import ItemColumns, surprisal
from transformer_xl.apps.surprisal.surprisal import SurprisalTable
from transformer_xl.config import EvaluationConfig, UserError
from transformer_xl.evaluation.score import score
from transformer_xl.run import Run
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from transformer_xl.text.tokenizers.bpe import train_bpe
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

# two spaces, a tab, characters of several bytes, a word that no tokenizer below has, spaces at both ends of an item
TEXTS = ["the cat  sat.", " a caf\u00e9\tsat \u2603 ", "the dog isn't on the mat, the cat sat"]
BPE = train_bpe([["the cat sat on the mat\n", "  the dog sat\n"] * 20], 290)
WORDS = ("<eos>", "<unk>", "the", "cat", "sat", ".", "isn", "'t", "on", ",")
SPECIAL: dict[str, Any] = {"eos_token": "<eos>", "unk_token": "<unk>"}
TOKENIZERS = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer("the catsdogi.'\n"),
    "bpe": BPE,
    "word": WordTokenizer(WORDS, **SPECIAL),
    "word moses": WordTokenizer(WORDS, **SPECIAL, pre_tokenizer=PreTokenizer("moses")),
    "word punctuation": WordTokenizer(WORDS, **SPECIAL, pre_tokenizer=PreTokenizer("punctuation")),
}
LOSSLESS = [TOKENIZERS[name] for name in ("byte", "char", "bpe")]
for_each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
for_each_whitespace = pytest.mark.parametrize("whitespace", ["leading", "trailing"])


def sums(table: SurprisalTable, column: str) -> list[float]:
    return [math.fsum(row[column] for row in rows) for _, rows in table.by_item()]


@for_each_tokenizer
@for_each_whitespace
def test_words_add_up_to_their_line(run_of, tokenizer: Tokenizer, whitespace) -> None:
    """In context to the lines of the text, at each memory length; alone to each line as a text of its own."""
    run = run_of(tokenizer)
    table = surprisal(run, TEXTS, memory_lengths=[3, 11], whitespace=whitespace)
    assert table.surprisal_columns == [f"surprisal_bits_{name}" for name in ("alone", "memory_3", "memory_11")]
    lines = [f"{text}\n" for text in TEXTS]
    for length in (3, 11):
        (text,) = score(run, "".join(lines), memory_length=length)
        bits = [line.nats / math.log(2) for line in text.lines()]
        np.testing.assert_allclose(sums(table, f"surprisal_bits_memory_{length}"), bits, rtol=0, atol=1e-9)
    alone = [text.sums.nats / math.log(2) for text in score(run, lines, memory_length=11)]
    np.testing.assert_allclose(sums(table, "surprisal_bits_alone"), alone, rtol=0, atol=1e-9)
    assert all(row[name] >= 0 for row in table for name in table.surprisal_columns)


@for_each_tokenizer
def test_rows_are_the_words_of_the_text(run_of, tokenizer: Tokenizer) -> None:
    """In order and unchanged, and then the end of the line; their tokens are all tokens."""
    table = surprisal(run_of(tokenizer), TEXTS)
    for (labels, rows), (number, text) in zip(table.by_item(), enumerate(TEXTS, start=1), strict=True):
        assert labels == (number,)
        assert [row["word"] for row in rows] == [*text.split(), ""]
        assert [row["word_number"] for row in rows] == [*range(1, len(rows) + 1)]
        assert sum(row["tokens"] for row in rows) == len(tokenizer.encode(f"{text}\n"))
    unknown = [row["word"] for row in table if row["num_unknown"]]
    expected = {
        "word": ["sat.", "a", "caf\u00e9", "\u2603", "dog", "isn't", "mat,"],
        "word moses": ["a", "caf\u00e9", "\u2603", "dog", "mat,"],
    }
    expected["word punctuation"] = expected["word moses"]
    name = next(name for name, one in TOKENIZERS.items() if one is tokenizer)
    assert unknown == expected.get(name, [])


def log2_probabilities(run: Run, content: str) -> tuple[list[int], np.ndarray]:
    """Return the tokens of a text and the binary log-probabilities (K, V) where each is predicted, from one pass."""
    ids = run.tokenizer.encode(content).tolist()
    inputs = torch.tensor([[run.tokenizer.bos_token_id, *ids[:-1]]])
    with torch.inference_mode():
        hidden_BTD, _ = run.model(inputs, run.model.initial_memory(1))
        return ids, run.model.logits(hidden_BTD)[0].log_softmax(-1).numpy() / math.log(2)


JOINED = bpe_across_spaces(".|\n", " |s", " |c", "a|t")  # a full stop and a newline can be one token


@pytest.mark.parametrize("tokenizer", [*LOSSLESS, JOINED], ids=["byte", "char", "bpe", "joined"])
@pytest.mark.parametrize("settings", [{}, {"cutoffs": (19, 23)}], ids=["dense", "adaptive"])
def test_trailing_whitespace_is_that_of_pimentel_and_meister(run_of, tokenizer, settings) -> None:
    """p(word) = p(its tokens) p(whitespace after it) / p(whitespace before it), whitespace being any token of it.

    Whitespace at the end of a word's own token is not counted again.
    """
    run = run_of(tokenizer, **settings)
    is_space_V = [content[:1].isspace() for content in tokenizer.token_bytes]
    for text in [*TEXTS, "a cat sat.\n the cat.\nsat"]:
        ids, log2_KV = log2_probabilities(run, f"{text}\n")
        space_K = np.log2(np.exp2(log2_KV[:, is_space_V]).sum(-1))
        expected, word = [0.0], b""
        for position, token in enumerate(ids):
            content = tokenizer.token_bytes[token]
            if word.strip() and (content[:1].isspace() or word[-1:].isspace()):  # the word before has ended
                moved = 0.0 if word[-1:].isspace() else space_K[position]
                expected[-1] -= moved
                expected.append(moved)
                word = b""
            expected[-1] -= log2_KV[position, token]
            word += content
        (_, rows), *_ = surprisal(run, text, segment_length=97, whitespace="trailing").by_item()
        np.testing.assert_allclose([row["surprisal_bits_alone"] for row in rows], expected, rtol=0, atol=1e-9)


def test_leading_whitespace_belongs_to_the_next_word(run_of) -> None:
    run = run_of(ByteTokenizer())
    ids, log2_KV = log2_probabilities(run, "the cat  sat.\n")
    bits_K = [-log2_KV[position, token] for position, token in enumerate(ids)]
    expected = [sum(bits_K[:3]), sum(bits_K[3:7]), sum(bits_K[7:13]), bits_K[13]]
    table = surprisal(run, "the cat  sat.", segment_length=97)
    np.testing.assert_allclose([row["surprisal_bits_alone"] for row in table], expected, rtol=0, atol=1e-9)


def test_documents_start_with_empty_memory(run_of) -> None:
    """The first item of a document has the same surprisal alone and in context, which its labels and order decide."""
    rows = [{"id": f"s{number}", "cond": "x", "text": text, "doc": number // 2} for number, text in enumerate(TEXTS)]
    columns = ItemColumns(labels=("id", "cond"), document="doc")
    table = surprisal(run_of(ByteTokenizer()), rows, columns=columns, memory_length=50)
    assert table.column_names[:4] == ["id", "cond", "word_number", "word"]
    assert [labels for labels, _ in table.by_item()] == [("s0", "x"), ("s1", "x"), ("s2", "x")]
    same = [
        np.allclose([row["surprisal_bits_alone"] for row in rows], [row["surprisal_bits_memory_50"] for row in rows])
        for _, rows in table.by_item()
    ]
    assert same == [True, False, True]
    joined = surprisal(run_of(ByteTokenizer()), rows, columns=columns, memory_length=50, reset_memory=False)
    assert sums(joined, "surprisal_bits_alone") == sums(table, "surprisal_bits_alone")
    assert sums(joined, "surprisal_bits_memory_50")[2] != sums(table, "surprisal_bits_memory_50")[2]


def test_each_memory_length_reads_the_text_once(run_of) -> None:
    run, progress = run_of(ByteTokenizer()), list[int]()
    surprisal(run, TEXTS, memory_lengths=[3, 11], whitespace="trailing", progress=progress.append)
    assert sum(progress) == 3 * sum(len(f"{text}\n".encode()) for text in TEXTS)


def test_sliding_window_gives_each_word_the_same_context(run_of) -> None:
    run = run_of(ByteTokenizer())
    config = EvaluationConfig(method="sliding-window", attention_window=5, memory_length=0)
    for whitespace in ("leading", "trailing"):
        table = surprisal(run, TEXTS[:2], config, whitespace=whitespace)
        assert table.surprisal_columns[1:] == ["surprisal_bits_window_5"]
        (text,) = score(run, "".join(f"{text}\n" for text in TEXTS[:2]), config)
        bits = [line.nats / math.log(2) for line in text.lines()]
        np.testing.assert_allclose(sums(table, "surprisal_bits_window_5"), bits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [word_piece, unigram, prefix_space])
def test_spaces_of_other_libraries_belong_to_the_next_word(run_of, make, tmp_path: Path) -> None:
    """What their tokens begin with is known only to the library, so trailing is refused, not computed as leading."""
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(make()))
    run = run_of(load_tokenizer(file))
    assert [row["word"] for row in surprisal(run, "the cat sat")][:3] == ["the", "cat", "sat"]
    with pytest.raises(UserError, match=r"whitespace trailing .* of another library; give whitespace leading"):
        surprisal(run, "the cat sat", whitespace="trailing")


def test_tokenizers_without_a_newline(run_of) -> None:
    """The line ends with a space, or with nothing if words are the only tokens."""
    chars = surprisal(run_of(CharTokenizer("acet h", byte_fallback=False)), ["the cat", "the"])
    assert [(row["word"], row["tokens"]) for row in chars] == [("the", 3), ("cat", 4), ("", 1), ("the", 3), ("", 1)]
    words = surprisal(run_of(WordTokenizer(("the", "cat"))), ["the cat", "the"])
    assert [row["word"] for row in words] == ["the", "cat", "the"]


@pytest.mark.parametrize(
    ("items", "settings", "message"),
    [
        ([], {}, "there is nothing to score; give at least one text"),
        (["a", " "], {}, r"item 2: the text \(column 'text'\) is empty or no text; give it, or leave"),
        ([{"text": "a"}], {}, "item 1: no column 'item'; the columns are text; name yours with item_columns"),
        ([{"item": 1.5, "text": "a"}], {}, "item 1: column 'item' holds 1.5; expected text or an integer"),
        ([{"word": 1, "text": "a"}], {"columns": ItemColumns(labels=("word",))}, "a column 'word' of its own"),
        (3, {}, "items is of type int"),
        # a table of pandas, as far as the check looks
        (SimpleNamespace(columns=["item"], to_dict=dict), {}, r"give its rows: items.to_dict\('records'\)"),
        (["a", 3], {}, "item 2 is of type int"),
        (["ab", "a\u2603"], {}, "item 2: byte 1: the character"),
        (["a"], {"memory_lengths": []}, "memory_lengths is empty"),
        (["a"], {"memory_lengths": [-1]}, "memory_length"),
        (["a"], {"method": "dynamic"}, "method dynamic learns from the text"),
        (["a"], {"memroy_length": 3}, "did you mean 'memory_length'"),
    ],
)
def test_wrong_items_and_settings_are_refused(run_of, items, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        surprisal(run_of(CharTokenizer("ab\n", byte_fallback=False)), items, **settings)
