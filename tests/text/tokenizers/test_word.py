"""Word tokens: ids, special tokens, words that are not in the vocabulary, and the speed of pre-tokenizers."""

from __future__ import annotations

import pickle
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.text.tokenizers.base import EncodingError
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer, PreTokenizerName
from transformer_xl.text.tokenizers.word import WordTokenizer

PROPERTY = settings(deadline=None, max_examples=50)
# The last is a single word, since only ASCII whitespace separates words.
WORDS = ("<eos>", "<unk>", "the", "dog", "isn", "'t", ",", "na\u00efve", "\x00\u2028x")
TOKENIZER = WordTokenizer(WORDS, eos_token="<eos>", unk_token="<unk>")
LOWERCASE = WordTokenizer(WORDS, eos_token="<eos>", unk_token="<unk>", pre_tokenizer=PreTokenizer(lowercase=True))
PUNCTUATION = WordTokenizer(WORDS, eos_token="<eos>", unk_token="<unk>", pre_tokenizer=PreTokenizer("punctuation"))
NO_SPECIAL_TOKENS = WordTokenizer(WORDS[2:])


def expected_ids(text: str) -> list[int]:
    """Encode line by line and word by word, as the Transformer-XL authors' code does."""
    ids: list[int] = []
    for line in text.split("\n"):
        ids += [WORDS.index(word.decode()) if word.decode() in WORDS else 1 for word in line.encode().split()]
        ids.append(0)
    return ids[:-1]


@PROPERTY
@given(
    st.lists(st.sampled_from([*WORDS, "cat", "The", " ", " ", "\n", "\r\n", "\t", "\u00a0", "\x1c"])).map("".join)
    | st.text()
)
def test_ids_equal_those_of_each_line_and_word(text: str) -> None:
    chunk = TOKENIZER.encode_chunk(text.encode())
    assert chunk.ids.tolist() == expected_ids(text)
    assert chunk.num_unknown == sum(word.decode() not in WORDS for word in text.encode().split())


@PROPERTY
@given(st.lists(st.integers(0, len(WORDS) - 1)))
def test_encoding_restores_decoded_ids(ids: list[int]) -> None:
    assert TOKENIZER.encode(TOKENIZER.decode(ids)).tolist() == ids


def test_pre_tokenizers_and_newlines() -> None:
    text = "the dog , na\u00efve\n\nthe \x00\u2028x\n"
    assert TOKENIZER.encode(text).tolist() == [2, 3, 6, 7, 0, 0, 2, 8, 0]
    assert TOKENIZER.decode([2, 3, 6, 7, 0, 0, 2, 8, 0]) == text
    assert PUNCTUATION.encode("the dog, isn't\n").tolist() == [2, 3, 6, 4, 5, 0]
    assert PUNCTUATION.decode([2, 3, 6, 4, 5, 0, 3]) == "the dog, isn't\ndog"
    assert LOWERCASE.encode("The DOG NA\u00cfVE <EOS>").tolist() == [2, 3, 7, 0]
    assert NO_SPECIAL_TOKENS.encode("the\n\n dog").tolist() == [0, 1]
    assert NO_SPECIAL_TOKENS.decode([0, 1]) == "the dog"


def test_special_tokens() -> None:
    assert (TOKENIZER.bos_token_id, TOKENIZER.unk_token_id, TOKENIZER.adds_final_newline) == (0, 1, True)
    other = NO_SPECIAL_TOKENS
    assert (other.bos_token_id, other.unk_token_id, other.adds_final_newline) == (0, None, False)
    tokenizer = WordTokenizer(("the", "<S>", "<UNK>"), eos_token="<S>", unk_token="<UNK>")  # not at the front
    assert tokenizer.encode("the cat\n<S>").tolist() == [0, 2, 1, 1]
    assert (tokenizer.bos_token_id, tokenizer.decode([0, 1, 0])) == (1, "the\nthe")


@pytest.mark.parametrize(
    # `position`: byte offset of the first unknown word. `shown`: how the message shows this word.
    ("pre_tokenizer", "text", "position", "shown"),
    [
        (PreTokenizer(), "the  dog\n na\u00efve xcat cat the cow", 17, "'xcat'"),
        (PreTokenizer(), "the dog\n na\u00efve, cat the cat", 9, "'na\u00efve,'"),
        (PreTokenizer(), "the " + "x" * 99, 4, "'" + "x" * 40 + r"\.\.\.'"),
        # the start of the text, which contains the word in another form
        (PreTokenizer(lowercase=True), "The DOG\nthe CAT", 0, "'cat'"),
        (PreTokenizer("punctuation"), "the dog,\nthe dog's", 0, '"\'s"'),
    ],
)
def test_unknown_word_without_unknown_token_is_refused(
    pre_tokenizer: PreTokenizer, text: str, position: int, shown: str
) -> None:
    tokenizer = WordTokenizer(WORDS[2:], pre_tokenizer=pre_tokenizer)
    with pytest.raises(EncodingError, match=f"the word {shown} is not one of the 7 .* no unknown token") as caught:
        tokenizer.encode_chunk(text.encode())
    assert caught.value.position == position


def test_unknown_words_are_in_descending_order_of_frequency() -> None:
    assert TOKENIZER.unknown_words("a cat the a\nDog") == ["a", "cat", "Dog"]
    assert LOWERCASE.unknown_words(b"The Cat \xff") == ["cat", "\ufffd"]
    assert PUNCTUATION.unknown_words("the dogs, isn't") == ["dogs"]


def test_pickle_contains_no_lookup_table() -> None:
    tokenizer = WordTokenizer(tuple(f"word{number}" for number in range(10_007)))
    size = len(pickle.dumps(tokenizer))
    tokenizer.encode("word7")
    assert len(pickle.dumps(tokenizer)) == size < 200_000


# `part` is repeated without whitespace, so that the text is a single long word for the rules of the pre-tokenizer
@pytest.mark.parametrize(
    ("name", "part"), [("punctuation", "x."), ("punctuation", "a-"), ("moses", "x."), ("moses", '".'), ("moses", "1,")]
)
def test_splitting_takes_linear_time(name: PreTokenizerName, part: str) -> None:
    seconds = []
    for repeats in (2_500, 2_500, 20_000, 20_000):
        start = time.process_time()
        PreTokenizer(name).split(part.encode() * repeats)
        seconds.append(time.process_time() - start)
    assert min(seconds[2:]) < 24 * max(seconds[:2])  # 8 times the length; quadratic time would be 64 times as long
