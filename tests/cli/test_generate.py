"""`txl generate` as a user would: one text, many, beams, and a conversation through a pipe."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import CommandResult, txl

import transformer_xl
from transformer_xl.config import RunConfig, TrainConfig, TransformerXLConfig
from transformer_xl.generation.beam_search import beam_search
from transformer_xl.generation.chat import Chat
from transformer_xl.generation.generate import generate
from transformer_xl.model.build import build_model
from transformer_xl.run_folder import Run, RunFolder, load, save
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}


WORDS = ("the", "cat", "sat", "on", "mat")


def save_run(path: Path, tokenizer: Tokenizer) -> None:
    """An untrained model whose weights are large enough for attention and memory to matter."""
    model = TransformerXLConfig(vocab_size=tokenizer.vocab_size, n_layers=2, d_model=14, n_heads=2, d_head=5, d_ff=19)
    config = RunConfig(model=model, train=TrainConfig(segment_length=7, memory_length=11))
    torch.manual_seed(3)
    language_model = build_model(model, memory_length=11)
    with torch.no_grad():
        for parameter in language_model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    save(Run(language_model, tokenizer, config), path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of bytes, and one of words without a word for unknown ones."""
    place = tmp_path_factory.mktemp("generate")
    save_run(place / "bytes", ByteTokenizer())
    save_run(place / "words", WordTokenizer(("<eos>", *WORDS), None, "<eos>"))
    return place


@pytest.fixture
def run(place: Path) -> Run:
    return load(place / "bytes", device="cpu")


def ask(place: Path, *words: str, given: bytes, kind: str = "bytes") -> CommandResult:
    """With something on standard input."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        return txl("generate", place / kind, *words)


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ([], {}),
        (["--min-p", "0.3"], {"min_p": 0.3}),
        (["--top-p", "0.8", "--top-k", "9"], {"top_k": 9, "top_p": 0.8}),
        (["--top-k", "none"], {"top_k": None}),
        (["--repetition-penalty", "1.5"], {"repetition_penalty": 1.5}),
        (
            ["--greedy", "--repetition-penalty", "1.5", "--repetition-penalty-window", "3"],
            {"greedy": True, "repetition_penalty": 1.5, "repetition_penalty_window": 3},
        ),
        (["--max-prompt-tokens", "2"], {"max_prompt_tokens": 2}),
        (["--memory-length", "2"], {"memory_length": 2}),
    ],
)
def test_flags_are_the_settings(place: Path, run: Run, words: list[str], settings: dict[str, Any]) -> None:
    said = txl("generate", place / "bytes", "--prompt", "the", "--max-new-tokens", "31", *words)
    assert (said.status, said.err) == (0, "")
    assert said.out == generate(run, "the", max_new_tokens=31, **settings).text + "\n"


def test_where_a_text_ends(place: Path, run: Run) -> None:
    whole = generate(run, "the", max_new_tokens=80).text
    stop = whole[9:11]
    words = ["--prompt", "the", "--max-new-tokens", "80"]
    said = txl("generate", place / "bytes", *words, "--stop", "no such text", "--stop", stop)
    assert said.out == whole[: whole.index(stop)] + "\n"
    found = txl("generate", place / "bytes", *words, "--stop", stop, "--json").object
    assert (found["finish_reason"], found["text"]) == ("stop", whole[: whole.index(stop)])
    for flags in (["--stop-at-newline"], ["--eos-token-ids", "10"]):
        line = txl("generate", place / "bytes", *words, *flags, "--min-new-tokens", "5", "--json").object
        wanted = generate(run, "the", max_new_tokens=80, eos_token_ids=[10], min_new_tokens=5)
        assert (line["text"], line["num_tokens"]) == (wanted.text, len(wanted.token_ids))


def test_bfloat16(place: Path) -> None:
    words = ["--max-new-tokens", "3", "--greedy", "--json", "--logprobs"]
    exact = txl("generate", place / "bytes", *words).object
    rounded = txl("generate", place / "bytes", *words, "--dtype", "bfloat16").object
    assert exact["logprob"] != rounded["logprob"]
    assert exact["logprobs"][0] == pytest.approx(rounded["logprobs"][0], abs=0.3)


def test_several_prompts_and_samples(place: Path, run: Run) -> None:
    words = ["--prompt", "the cat", "--prompt", "a", "--num-samples", "2", "--max-new-tokens", "13", "--seed", "5"]
    wanted = generate(run, ["the cat", "a"], num_samples=2, max_new_tokens=13, seed=5, logprobs=True)
    said = txl("generate", place / "bytes", *words)
    assert said.out == "".join(f"--- {number} of 4\n{one.text}\n" for number, one in enumerate(wanted, start=1))
    found = txl("generate", place / "bytes", *words, "--json", "--logprobs").object
    for text, one in zip(found["texts"], wanted, strict=True):
        assert (text["text"], text["prompt"], text["seed"]) == (one.text, one.prompt, one.seed)
        assert (text["token_ids"], text["finish_reason"]) == (list(one.token_ids), one.finish_reason)
        assert text["logprobs"] == pytest.approx(one.logprobs, abs=1e-5)
        assert text["logprob"] == pytest.approx(one.logprob, abs=1e-4)
    assert found["tokens_per_second"] == pytest.approx(52 / found["seconds"])


def test_beams(place: Path, run: Run) -> None:
    words = ["--prompt", "the", "--num-beams", "3", "--max-new-tokens", "7", "--length-penalty", "0.5"]
    wanted = beam_search(run, "the", num_beams=3, max_new_tokens=7, length_penalty=0.5)
    found = txl("generate", place / "bytes", *words, "--json").object["texts"]
    assert [text["text"] for text in found] == [one.text for one in wanted]
    assert [text["logprob"] for text in found] == pytest.approx([one.logprob for one in wanted], abs=1e-4)
    assert "seed" not in found[0]
    said = txl("generate", place / "bytes", *words)
    assert said.out.startswith(f"--- 1 of 3, logprob {wanted[0].logprob:.3f}\n{wanted[0].text}\n")


# A conversation.


def replies(run: Run, *lines: str, **settings: Any) -> str:
    chat = Chat(run, **settings)
    return "".join(f"{''.join(chat.reply(line))}\n" for line in lines)


def test_a_conversation_through_a_pipe(place: Path, run: Run) -> None:
    """Lines in, a reply after each; empty lines are skipped, and the last line needs no newline."""
    given = "the cat\n\ncaf\u00e9\r\na dog".encode()
    command = [sys.executable, "-m", "transformer_xl", "generate", str(place / "bytes")]
    words = ["--chat", "--max-new-tokens", "9", "--seed", "2"]
    ended = subprocess.run([*command, *words], input=given, capture_output=True, env=ENVIRONMENT, check=False)
    wanted = replies(run, "the cat", "caf\u00e9", "a dog", max_new_tokens=9, seed=2)
    assert (ended.returncode, ended.stdout.decode(), ended.stderr) == (0, wanted, b"")


def test_a_conversation_bears_bytes_that_are_no_text(place: Path, run: Run) -> None:
    said = ask(place, "--chat", "--max-new-tokens", "5", given=b"a\xff\n")
    assert (said.status, said.err) == (0, "")
    assert said.out == generate(run, b"a\xff\n", stop="\n", max_new_tokens=5).text + "\n"


def test_a_word_that_is_not_known_ends_a_conversation(place: Path) -> None:
    said = ask(place, "--chat", "--max-new-tokens", "3", kind="words", given=b"the cat\nthe horse\n")
    assert (said.status, len(said.out.splitlines())) == (2, 1)
    assert said.err.startswith("txl: error: byte 4 ")
    assert "'horse'" in said.err


def test_a_conversation_without_a_line_is_none(place: Path) -> None:
    said = ask(place, "--chat", given=b"")
    assert (said.status, said.out, said.err) == (0, "", "")


def test_ctrl_c_ends_what_was_shown(place: Path) -> None:
    """A text without end; what was shown stays, its line is ended, and the status says that it was stopped."""
    words = [sys.executable, "-m", "transformer_xl", "generate", str(place / "bytes"), "--max-new-tokens", "none"]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs in the background ignore it
    )
    try:
        assert process.stdout is not None
        begun = process.stdout.read(50)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, b"")
    assert len(begun) == 50
    assert rest.endswith(b"\n")


@pytest.mark.parametrize("words", [["--greedy"], [], ["--num-beams", "2"], ["--num-samples", "2"]])
def test_weights_that_are_not_numbers(place: Path, tmp_path: Path, words: list[str], monkeypatch) -> None:
    model = RunFolder.open(place / "bytes").load_model(torch.device("cpu"))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    monkeypatch.setattr(RunFolder, "load_model", lambda *_: model)
    said = txl("generate", place / "bytes", "--max-new-tokens", "5", *words)
    assert (said.status, said.out) == (2, "")
    assert said.err.startswith("txl: error: ")
    assert "not finite" in said.err
    assert said.err.count("\n") == 1


def test_unknown_words_are_named(place: Path, tmp_path: Path) -> None:
    """They are read as the unknown word, which nobody would see otherwise."""
    save_run(tmp_path / "run", WordTokenizer(("<eos>", "<unk>", *WORDS), None, "<eos>", "<unk>"))
    said = txl("generate", tmp_path / "run", "--prompt", "the zebra", "--prompt", "the cat", "--max-new-tokens", "3")
    assert (said.status, said.err) == (0, "warning: not in the vocabulary, and read as <unk>: 'zebra'\n")
    (tmp_path / "zebra.txt").write_text("the zebra\n")
    said = txl("score", tmp_path / "run", tmp_path / "zebra.txt", "--per", "file", "--json")
    assert (said.status, said.err) == (0, "warning: not in the vocabulary, and read as <unk>: 'zebra'\n")


def test_a_prompt_that_is_no_text_is_shown_with_signs(place: Path) -> None:
    said = txl("generate", place / "bytes", "--prompt", os.fsdecode(b"a\xff"), "--max-new-tokens", "1", "--json")
    assert said.object["prompt"] == "a\ufffd"
