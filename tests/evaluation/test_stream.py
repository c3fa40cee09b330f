"""`SurprisalStream` gives the losses of `score`, however a text is divided into chunks and whenever it is saved.

The fixture make_model (tests/conftest.py) makes a small float64 model with random weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_configs import small_model

from transformer_xl import SurprisalStream
from transformer_xl.config import RunConfig, TrainConfig, UserError
from transformer_xl.evaluation import stream as stream_module
from transformer_xl.evaluation.score import score
from transformer_xl.evaluation.stream import ScoredTokens
from transformer_xl.run import Run
from transformer_xl.tensor_file import load_tensors, save_tensors
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.bpe import train_bpe
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

LINES = ["the cat  sat.\n", "\n", " a caf\u00e9\tsat \u2603 \r\n", "isn't the dog on the mat?\n", "\U0001f600 no"]
TEXT = "".join(LINES * 2)
SPECIAL: dict[str, Any] = {"eos_token": "<eos>", "unk_token": "<unk>"}
WORDS = ("<eos>", "<unk>", "the", "cat", "sat", ".", "isn", "'t", "on", ",")
TOKENIZERS = {
    "byte": ByteTokenizer(),
    "char": CharTokenizer("the catsdogi.'\n"),
    "bpe": train_bpe([["the cat sat on the mat\n", "  the dog sat\n"] * 20], 290),
    "word": WordTokenizer(WORDS, **SPECIAL),
    "word moses": WordTokenizer(WORDS, **SPECIAL, pre_tokenizer=PreTokenizer("moses")),
    "word punctuation": WordTokenizer(WORDS, **SPECIAL, pre_tokenizer=PreTokenizer("punctuation")),
}
BAD = b"the c\xe2\x98at\xff sat \xf0\x9f\n\xc3"


def chunks_of(text: bytes, seed: int, mean: int = 5) -> Iterator[bytes]:
    """Divide a text at random, also within characters."""
    generator, start = np.random.default_rng(seed), 0
    while start < len(text):
        size = int(generator.integers(0, 2 * mean))
        yield text[start : start + size]
        start += size


def joined(parts: list[ScoredTokens]) -> tuple[list[int], np.ndarray]:
    """Return ids and losses of parts, which must follow each other."""
    ends = np.cumsum([len(part) for part in parts]).tolist()
    assert [part.position for part in parts] == [0, *ends[:-1]]
    return np.concatenate([part.ids_K for part in parts]).tolist(), np.concatenate([part.nats_K for part in parts])


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_losses_are_those_of_score_whatever_the_chunks(run_of, tokenizer: Tokenizer, seed: int) -> None:
    run = run_of(tokenizer)
    stream = SurprisalStream(run)
    parts = [stream.read(chunk) for chunk in chunks_of(TEXT.encode(), seed)]
    assert all(len(part) % 7 == 0 for part in parts)  # whole segments
    ids, nats_K = joined([*parts, stream.finish()])
    (expected,) = score(run, TEXT)
    assert ids == expected.ids_K.tolist()
    assert nats_K.tolist() == expected.nats_K.tolist()  # bit for bit


def test_losses_are_those_of_score_wherever_segments_are_divided(run_of) -> None:
    """A flush after each chunk, and one token at a time."""
    run = run_of(ByteTokenizer())
    (expected,) = score(run, TEXT)
    flushed, single = SurprisalStream(run), SurprisalStream(run)
    parts = [part for chunk in chunks_of(TEXT.encode(), 5) for part in (flushed.read(chunk), flushed.flush())]
    tokens = [
        part for token in expected.ids_K.tolist() for part in (single.read_tokens([token]), single.flush()) if len(part)
    ]
    assert len(tokens) == len(expected.ids_K)
    for stream_parts in (parts, tokens):
        ids, nats_K = joined(stream_parts)
        assert ids == expected.ids_K.tolist()
        np.testing.assert_allclose(nats_K, expected.nats_K, rtol=1e-12)
    assert (flushed.num_tokens, flushed.num_waiting) == (len(expected.ids_K), 0)


MODELS: dict[str, dict[str, Any]] = {
    "n-grams": {"max_ngram": 4, "ngram_buckets": 31, "d_ngram": 6},
    "value embeddings": {"value_embeddings": True},
    "key offset": {"key_offset": True, "attention_sinks": True},
    "empty memory attended": {"attend_empty_memory": True},
    "window": {"attention_window": 5},
    "lstm": {"architecture": "lstm"},
    "qrnn": {"architecture": "qrnn"},
    "shaw": {"architecture": "shaw", "max_relative_positions": 6},
    "vaswani": {"architecture": "vaswani"},
}


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS)
def test_every_architecture(settings: dict[str, Any], tmp_path: Path) -> None:
    """Without memory also with an extended context; saved and loaded after each chunk."""
    model = small_model(vocab_size=256, **settings)
    has_memory = settings.get("architecture") != "vaswani"
    train = {"memory_length": 11} if has_memory else {"memory_length": 0, "extended_context_length": 9}
    run = Run(model, ByteTokenizer(), RunConfig(model=model.config, train=TrainConfig(segment_length=7, **train)))
    (expected,) = score(run, TEXT)
    stream, parts = SurprisalStream(run), []
    for index, chunk in enumerate(chunks_of(TEXT.encode(), 4, mean=13)):
        parts += [stream.read(chunk), *([stream.flush()] if index % 2 else [])]
        stream.save(tmp_path / "state", {"index": index})
        stream, extra = SurprisalStream.load(run, tmp_path / "state")
        assert extra == {"index": index}
    _, nats_K = joined([*parts, stream.finish()])
    np.testing.assert_allclose(nats_K, expected.nats_K, rtol=1e-12)


def test_state_with_the_last_token_of_the_vocabulary_is_opened(tmp_path: Path) -> None:
    """Where a prepared model caches ids beside hidden states."""
    model = small_model(vocab_size=256, value_embeddings=True, attend_empty_memory=True, norm_first=True)
    config = RunConfig(model=model.config, train=TrainConfig(segment_length=7, memory_length=11))
    run = Run(model, ByteTokenizer(), config)
    stream = SurprisalStream(run)
    stream.read(b"\xfe\xff" * 10)
    stream.save(tmp_path / "state")
    loaded, _ = SurprisalStream.load(run, tmp_path / "state")
    assert loaded.num_tokens == stream.num_tokens


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_saved_streams_continue_bit_for_bit(run_of, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Also within a character, and where the tokenizer waits for the end of a word."""
    run = run_of(tokenizer)
    (expected,) = score(run, TEXT)
    stream, parts = SurprisalStream(run), list[ScoredTokens]()
    for chunk in chunks_of(TEXT.encode(), 6, mean=9):
        parts.append(stream.read(chunk))
        stream.save(tmp_path / "state")
        stream, _ = SurprisalStream.load(run, tmp_path / "state")
    ids, nats_K = joined([*parts, stream.finish()])
    assert ids == expected.ids_K.tolist()
    assert nats_K.tolist() == expected.nats_K.tolist()


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_bytes_that_are_not_utf8(run_of, tokenizer: Tokenizer) -> None:
    """Each error becomes U+FFFD, unless tokens are bytes."""
    run = run_of(tokenizer)
    stream = SurprisalStream(run)
    ids, _ = joined([*(stream.read(bytes([byte])) for byte in BAD), stream.finish()])
    readable = BAD if tokenizer.kind == "byte" else BAD.decode("utf-8", errors="replace").encode()
    assert ids == score(run, readable)[0].ids_K.tolist()


@pytest.mark.parametrize("text", ["a\n ", "a ", "a\n", " ", ""])
def test_final_newline(run_of, text: str) -> None:
    """A tokenizer that ends lines with a token also ends the last line with it, as `score` does."""
    run = run_of(WordTokenizer(WORDS, **SPECIAL))
    stream = SurprisalStream(run)
    ids, _ = joined([*(stream.read(character) for character in text), stream.finish()])
    assert ids == (score(run, text)[0].ids_K.tolist() if text else [])


def test_what_cannot_be_split_is_bounded(run_of, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_HELD_BYTES", 100)
    stream = SurprisalStream(run_of(TOKENIZERS["word moses"]))
    for _ in range(300):
        stream.read("caf\u00e9" * 3)
        assert len(stream._held) <= 100
    assert stream.num_tokens + stream.num_waiting > 10


def test_text_that_cannot_be_encoded_changes_nothing(run_of) -> None:
    run = run_of(CharTokenizer("ab\n", byte_fallback=False))
    (expected,) = score(run, "abba\n" * 5)
    stream = SurprisalStream(run)
    first = stream.read(b"abba\n" * 3)
    with pytest.raises(UserError, match=r"the stream: byte 17: the character 'x'"):
        stream.read("abxa\n")
    _, nats_K = joined([first, stream.read(b"abba\n" * 2), stream.finish()])
    assert nats_K.tolist() == expected.nats_K.tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "sliding-window", "attention_window": 3}, "method sliding-window cannot read a stream; give"),
        ({"memory_lenght": 3}, r"memory_lenght.*did you mean 'memory_length'"),
    ],
)
def test_wrong_settings_are_refused(run_of, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SurprisalStream(run_of(ByteTokenizer()), **arguments)


def test_wrong_input_is_refused(run_of) -> None:
    stream = SurprisalStream(run_of(TOKENIZERS["word"]))
    with pytest.raises(UserError, match="token id 10 is not in this word vocabulary"):
        stream.read_tokens([10])
    with pytest.raises(UserError, match="the text is of type int"):
        stream.read(5)  # pyrefly: ignore[bad-argument-type]
    stream.read("th")
    with pytest.raises(UserError, match="call finish before token ids are read"):
        stream.read_tokens([1])


STATE = "is not a state that a stream of this run can have; give another file"


def forged(tensors: dict[str, torch.Tensor], values: dict[str, Any], what: str) -> None:
    """Change one thing in a saved stream."""
    match what:
        case "nan":
            tensors["keys_0"][0, 0, 0, 0] = float("nan")
        case "slots":
            tensors["keys_1"] = tensors["keys_1"][:, :, 1:].contiguous()
        case "missing":
            del tensors["values_1"]
        case "token":
            tensors["stream_tokens"][0] = 256
        case "long segment":
            tensors["stream_tokens"] = torch.zeros(8, dtype=torch.int64)
        case "float tokens":
            tensors["stream_tokens"] = torch.zeros(2)
        case "count":
            values["num_returned"] = 7
        case "negative":
            values["num_tokens"] = -1
        case "valid":
            tensors["valid"] += 1
        case "held":
            values["held"] = "00" * (stream_module.MAX_HELD_BYTES + 1)
        case "extra":
            values["extra"] = [1]


FORGERIES = ["nan", "slots", "missing", "token", "long segment", "float tokens", "count", "negative", "valid", "held"]


@pytest.mark.parametrize("what", [*FORGERIES, "extra"])
def test_forged_states_are_refused(run_of, tmp_path: Path, what: str) -> None:
    """The checksum of a forged file is right; its contents are checked nonetheless."""
    run, path = run_of(ByteTokenizer()), tmp_path / "state"
    stream = SurprisalStream(run)
    stream.read("0123456789")
    stream.save(path)
    tensors, metadata = load_tensors(path)
    values = json.loads(metadata["stream"])
    forged(tensors, values, what)
    save_tensors(path, tensors, {"stream": json.dumps(values)})
    with pytest.raises(UserError, match=STATE):
        SurprisalStream.load(run, path)


def test_states_of_others_are_refused(run_of, tmp_path: Path) -> None:
    run, path = run_of(ByteTokenizer()), tmp_path / "state"
    stream = SurprisalStream(run)
    stream.read("0123456789")
    stream.save(path)
    with pytest.raises(UserError, match="with other settings: segment_length is 7, not 5"):
        SurprisalStream.load(run, path, segment_length=5)
    with torch.no_grad():
        next(run.model.parameters()).add_(1)
    with pytest.raises(UserError, match="the state of a stream with other weights"):
        SurprisalStream.load(run, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="is damaged"):
        SurprisalStream.load(run, path)
    save_tensors(path, {"x": torch.zeros(1)}, {})
    with pytest.raises(UserError, match="is not the state of a stream"):
        SurprisalStream.load(run, path)
    with pytest.raises(UserError, match="missing"):
        SurprisalStream.load(run, tmp_path / "none")
