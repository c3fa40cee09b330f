"""`txl generate`: one text, several texts, beams and a conversation; and the commands that it refuses."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import CommandResult, assert_refused, txl
from small_runs import make_run

import transformer_xl
from transformer_xl.generation.beam_search import beam_search
from transformer_xl.generation.chat import Chat
from transformer_xl.generation.generate import generate
from transformer_xl.run import Run, load
from transformer_xl.text.tokenizers.word import WordTokenizer

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}
WORDS = ("the", "cat", "sat", "on", "mat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run whose tokens are bytes, a run whose tokens are WORDS (without unknown-word and newline
    tokens), and a text."""
    folder = tmp_path_factory.mktemp("generate") / "folder"
    make_run(folder / "bytes", noise=0.3)
    make_run(folder / "words", tokenizer=WordTokenizer(WORDS), noise=0.3)
    (folder / "text.txt").write_text("the cat sat on the mat")
    return folder


@pytest.fixture
def run(folder: Path) -> Run:
    return load(folder / "bytes", device="cpu")


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("", {}),
        ("--top-p 0.8 --top-k 9", {"top_k": 9, "top_p": 0.8}),
        ("--top-k none", {"top_k": None}),
        ("--greedy --repetition-penalty 1.5", {"greedy": True, "repetition_penalty": 1.5}),
        ("--max-prompt-tokens 2 --memory-length 2", {"max_prompt_tokens": 2, "memory_length": 2}),
    ],
)
def test_flags_equal_the_settings(folder: Path, run: Run, flags: str, settings: dict[str, Any]) -> None:
    result = txl("generate", folder / "bytes", "--prompt", "the", "--max-new-tokens", "31", *flags.split())
    assert (result.status, result.err) == (0, "")
    assert result.out == generate(run, "the", max_new_tokens=31, **settings).text + "\n"


def test_stop_strings_and_eos_tokens(folder: Path, run: Run) -> None:
    text = generate(run, "the", max_new_tokens=80).text
    stop = text[9:11]
    command = ["generate", folder / "bytes", "--prompt", "the", "--max-new-tokens", "80"]
    assert txl(*command, "--stop", "no such text", "--stop", stop).out == text[: text.index(stop)] + "\n"
    values = txl(*command, "--stop", stop, "--json").object
    assert (values["finish_reason"], values["text"]) == ("stop", text[: text.index(stop)])
    # 10 is the id of the newline
    expected = generate(run, "the", max_new_tokens=80, eos_token_ids=[10], min_new_tokens=5)
    for flags in (["--stop-at-newline"], ["--eos-token-ids", "10"]):
        values = txl(*command, *flags, "--min-new-tokens", "5", "--json").object
        assert (values["text"], values["num_tokens"]) == (expected.text, len(expected.token_ids))


def test_several_prompts_and_samples(folder: Path, run: Run) -> None:
    flags = ["--prompt", "the", "--prompt", "a", "--num-samples", "2", "--max-new-tokens", "13", "--seed", "5"]
    flags += ["--dtype", "float32"]
    completions = generate(run, ["the", "a"], num_samples=2, max_new_tokens=13, seed=5, logprobs=True)
    expected = "".join(f"--- {number} of 4\n{one.text}\n" for number, one in enumerate(completions, start=1))
    assert txl("generate", folder / "bytes", *flags).out == expected
    values = txl("generate", folder / "bytes", *flags, "--json", "--logprobs").object
    for text, completion in zip(values["texts"], completions, strict=True):
        expected_values = completion.as_dict()
        assert text.keys() == expected_values.keys()
        for name in ("text", "prompt", "seed", "finish_reason"):
            assert text[name] == expected_values[name]
        assert text["token_ids"] == list(completion.token_ids)
        assert text["logprobs"] == pytest.approx(completion.logprobs, abs=1e-5)
        assert text["logprob"] == pytest.approx(completion.logprob, abs=1e-4)
    # four texts of 13 tokens
    assert values["tokens_per_second"] == pytest.approx(52 / values["seconds"])


def test_beams(folder: Path, run: Run) -> None:
    flags = ["--prompt", "the", "--num-beams", "3", "--max-new-tokens", "7", "--length-penalty", "0.5"]
    completions = beam_search(run, "the", num_beams=3, max_new_tokens=7, length_penalty=0.5)
    texts = txl("generate", folder / "bytes", *flags, "--json").object["texts"]
    assert [text["text"] for text in texts] == [completion.text for completion in completions]
    best = completions[0]
    result = txl("generate", folder / "bytes", *flags)
    assert result.out.startswith(f"--- 1 of 3, logprob {best.logprob:.3f}\n{best.text}\n")


# Conversations


def chat(folder: Path, *flags: str, lines: bytes, run: str = "bytes") -> CommandResult:
    """Run `txl generate --chat` with lines on standard input."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
        return txl("generate", folder / run, "--chat", *flags)


def test_chat_replies_to_each_line_that_is_not_blank(folder: Path, run: Run) -> None:
    """Blank lines and the carriage return at the end of a line are ignored; the last line needs no newline."""
    conversation = Chat(run, max_new_tokens=9, seed=2)
    expected = "".join(f"{''.join(conversation.reply(line))}\n" for line in ("the cat", "caf\u00e9", "a dog"))
    lines = "the cat\n\ncaf\u00e9\r\na dog".encode()
    result = chat(folder, "--max-new-tokens", "9", "--seed", "2", lines=lines)
    assert (result.status, result.out) == (0, expected)
    # who speaks, beside the replies on standard output
    assert result.err == "you: the cat\nmodel: you: caf\u00e9\nmodel: you: a dog\nmodel: "
    assert chat(folder, lines=b"").out == ""


def test_chat_reads_bytes_that_are_not_utf8(folder: Path, run: Run) -> None:
    result = chat(folder, "--max-new-tokens", "5", lines=b"a\xff\n")
    assert result.status == 0
    assert result.out == generate(run, b"a\xff\n", stop="\n", max_new_tokens=5).text + "\n"


def test_line_that_cannot_be_encoded_ends_a_chat_from_a_pipe(folder: Path) -> None:
    result = chat(folder, "--max-new-tokens", "3", run="words", lines=b"the cat\nthe horse\n")
    assert result.status == 2
    assert "'horse'" in result.err


def test_ctrl_c_keeps_the_text_and_ends_its_line(folder: Path) -> None:
    command = [sys.executable, "-m", "transformer_xl", "generate", str(folder / "bytes"), "--max-new-tokens", "none"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore SIGINT
    )
    try:
        assert process.stdout is not None
        assert len(process.stdout.read(50)) == 50
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, b"")
    assert rest.endswith(b"\n")


# Warnings and errors


def test_unknown_words_cause_a_warning(tmp_path: Path) -> None:
    tokenizer = WordTokenizer(("<eos>", "<unk>", *WORDS), eos_token="<eos>", unk_token="<unk>")
    make_run(tmp_path / "run", tokenizer=tokenizer)
    (tmp_path / "zebra.txt").write_text("the zebra\n")
    for command in (
        ["generate", tmp_path / "run", "--prompt", "the zebra", "--prompt", "the cat", "--max-new-tokens", "3"],
        ["score", tmp_path / "run", tmp_path / "zebra.txt", "--per", "file", "--json"],
    ):
        result = txl(*command)
        assert (result.status, result.err.count("\n")) == (0, 1)
        assert "not in the vocabulary" in result.err
        assert "'zebra'" in result.err


def test_prompt_that_is_not_utf8_has_replacement_characters_in_json(folder: Path) -> None:
    prompt = os.fsdecode(b"a\xff")
    values = txl("generate", folder / "bytes", "--prompt", prompt, "--max-new-tokens", "1", "--json").object
    assert values["prompt"] == "a\ufffd"


# arguments of `txl generate`, beginning with the run, and a pattern of the message
REFUSED = [
    # values out of range; tests/generation/test_config.py has the others
    ("bytes --max-new-tokens many", "many"),
    ("bytes --temperature -1", "temperature.*given: -1.0"),
    ("bytes --prompt a --prompt=", "the prompt is empty; give some text, or no prompt to begin a new text"),
    # flags that contradict each other
    ("bytes --prompt a --prompt-file text.txt", "--prompt and --prompt-file were both given; use one of them"),
    ("bytes --num-beams 2 --num-samples 2", "leave out --num-samples or --num-beams"),
    ("bytes --max-new-tokens none --json", "--max-new-tokens none never ends; give a number"),
    ("bytes --max-new-tokens none --prompt a --prompt b", "--max-new-tokens none never ends"),
    ("bytes --logprobs", "--logprobs are printed with --json"),
    ("bytes --chat --prompt-file text.txt", "--chat reads prompts from standard input"),
    ("bytes --chat --json", "--chat reads prompts from standard input"),
    ("bytes --chat --num-samples 2", "--chat reads prompts from standard input"),
    # a tokenizer without unknown-word and newline tokens
    ("words --prompt cat --prompt horse", "'horse'"),
    ("words --stop-at-newline", "no token that ends a line"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED, ids=[arguments for arguments, _ in REFUSED])
def test_invalid_commands_are_refused(
    folder: Path, arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert_refused(folder, f"generate {arguments}", message, capfd)
