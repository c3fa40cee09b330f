"""What can go wrong with `txl generate`: one line on standard error, exit status 2, nothing changed on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from refusals import assert_refused

from transformer_xl.config import RunConfig, TransformerXLConfig
from transformer_xl.model.build import build_model
from transformer_xl.run_folder import Run, save
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of bytes, and one of words that knows no others and no newlines."""
    place = tmp_path_factory.mktemp("bad-generate") / "w"
    place.mkdir()
    (place / "text.txt").write_text("the cat sat on the mat")
    for name, tokenizer in (("run", ByteTokenizer()), ("words", WordTokenizer(("the", "cat", "sat"), None))):
        config = TransformerXLConfig(vocab_size=tokenizer.vocab_size, n_layers=1, d_model=14, n_heads=2, d_ff=19)
        save(Run(build_model(config, memory_length=11), tokenizer, RunConfig(model=config)), place / name)
    return place


WRONG_WORDS = [
    # numbers out of range; tests/generation/test_config.py has the others
    ("generate run --max-new-tokens 0", "max_new_tokens.*1"),
    ("generate run --max-new-tokens many", "many"),
    ("generate run --temperature -1", "temperature.*given: -1.0"),
    ("generate run --top-k 0", "top_k 0: must be 1 or more"),
    ("generate run --seed 18446744073709551616", "seed"),
    ("generate run --memory-length -1", "memory_length.*given: -1"),
    ("generate run --stop=", "a stop string is empty"),
    ("generate run --prompt=", "the prompt is empty; give some text, or no prompt to begin a new text"),
    ("generate run --prompt a --prompt=", "the prompt is empty"),
    # what does not go together
    ("generate run --prompt a --prompt-file text.txt", "--prompt and --prompt-file were both given; use one of them"),
    ("generate run --num-beams 2 --num-samples 2", "leave out num_samples or num_beams"),
    ("generate run --length-penalty 2", "length_penalty.*num_beams"),
    ("generate run --max-new-tokens none --json", "--max-new-tokens none never ends; give a number"),
    ("generate run --max-new-tokens none --num-samples 2", "--max-new-tokens none never ends"),
    ("generate run --max-new-tokens none --prompt a --prompt b", "--max-new-tokens none never ends"),
    ("generate run --logprobs", "--logprobs are printed with --json"),
    ("generate run --chat --prompt a", "--chat reads prompts from standard input"),
    ("generate run --chat --prompt-file text.txt", "--chat reads prompts from standard input"),
    ("generate run --chat --json", "--chat reads prompts from standard input"),
    ("generate run --chat --num-samples 2", "--chat reads prompts from standard input"),
    # words
    ("generate words --prompt cat --prompt horse", "'horse'"),
    ("generate words --stop-at-newline", "no token that ends a line"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_WORDS, ids=[words for words, _ in WRONG_WORDS])
def test_wrong_words(ready: Path, words: str, message: str, monkeypatch: Patch, capfd: Capture) -> None:
    monkeypatch.chdir(ready)
    assert_refused(ready, words, message, capfd)
