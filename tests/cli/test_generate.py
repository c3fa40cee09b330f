"""`txl generate` as a user would: one text, many, beams, and a conversation through a pipe."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from refusals import Said, txl

import transformer_xl
from transformer_xl.config import UserError
from transformer_xl.generation.decoding import complete, generate, search
from transformer_xl.generation.sampling import Sampler
from transformer_xl.generation.writer import BatchGenerator
from transformer_xl.run_folder import Run, RunFolder, load
from transformer_xl.text.tokenizer import save_tokenizer
from transformer_xl.text.tokenizers.words import WordTokenizer

MODEL = ["--model.n-layers=2", "--model.d-model=14", "--model.n-heads=2", "--model.d-head=5", "--model.d-ff=19"]
TRAIN = [
    "--train.segment-length=7",
    "--train.memory-length=11",
    "--train.batch-size=3",
    "--train.max-steps=9",
    "--train.learning-rate=0.01",
]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of bytes, and one of words without a word for unknown ones."""
    place = tmp_path_factory.mktemp("generate")
    lines = ["the cat sat on the mat", "a dog ran after it", "all of them slept"]
    (place / "text.txt").write_text("\n".join(lines[turn * turn % 3] for turn in range(97)) + "\n")
    words = ("<eos>", *sorted({word for line in lines for word in line.split()}))
    save_tokenizer(WordTokenizer(words, None, "<eos>"), place / "words.json")
    for kind, how in (("bytes", []), ("words", ["--vocabulary", place / "words.json"])):
        assert txl("prepare", place / "text.txt", "--out", place / f"{kind}-corpus", *how).status == 0
        made = txl("train", "--corpus", place / f"{kind}-corpus", "--run", place / kind, *MODEL, *TRAIN)
        assert made.status == 0, made.err
    folder = RunFolder.open(place / "bytes")
    weights = folder.load_model(torch.device("cpu")).state_dict()
    generator = torch.Generator().manual_seed(3)
    for tensor in weights.values():  # a few steps leave attention uniform, and memory without a voice
        tensor += torch.randn(tensor.shape, generator=generator) * 0.3
    folder.save_weights(weights, step=9, nats=None)
    return place


@pytest.fixture
def run(place: Path) -> Run:
    return load(place / "bytes", device="cpu")


def ask(place: Path, *words: str, given: bytes, kind: str = "bytes") -> Said:
    """With something on standard input."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        return txl("generate", place / kind, *words)


@pytest.mark.parametrize(
    ("words", "sampler"),
    [
        ([], Sampler(top_k=40)),
        (["--min-p", "0.3"], Sampler(min_p=0.3)),
        (["--top-p", "0.8", "--top-k", "9"], Sampler(top_k=9, top_p=0.8)),
        (["--repetition-penalty", "1.5"], Sampler(top_k=40, repetition_penalty=1.5)),
        (
            ["--greedy", "--repetition-penalty", "1.5", "--repetition-window", "3"],
            Sampler(0.0, 40, repetition_penalty=1.5, repetition_window=3),
        ),
    ],
)
def test_how_tokens_are_chosen(place: Path, run: Run, words: list[str], sampler: Sampler) -> None:
    said = txl("generate", place / "bytes", "--prompt", "the", "--tokens", "31", *words)
    assert (said.status, said.err) == (0, "")
    assert said.out == "".join(generate(run, "the", tokens=31, sampler=sampler)) + "\n"


def test_where_a_text_ends(place: Path, run: Run) -> None:
    whole = "".join(generate(run, "the", tokens=80))
    stop = whole[9:11]
    words = ["--prompt", "the", "--tokens", "80"]
    said = txl("generate", place / "bytes", *words, "--stop", "no such text", "--stop", stop)
    assert said.out == whole[: whole.index(stop)] + "\n"
    found = txl("generate", place / "bytes", *words, "--stop", stop, "--json").object
    assert (found["ended"], found["text"]) == ("stop", whole[: whole.index(stop)])
    line = txl("generate", place / "bytes", *words, "--until-line-end", "--min-tokens", "5", "--json").object
    wanted = complete(run, ["the"], tokens=80, end_ids=[10], min_tokens=5)[0]
    assert (line["text"], line["ended"], line["tokens"]) == (wanted.text, wanted.ended, len(wanted.tokens))


def test_only_the_end_of_a_prompt(place: Path, run: Run) -> None:
    said = txl("generate", place / "bytes", "--prompt", "the cat sat", "--context", "3", "--tokens", "19")
    assert said.out == "".join(generate(run, "the cat sat", tokens=19, context=3)) + "\n"


def test_another_number_format(place: Path) -> None:
    words = ["--tokens", "3", "--greedy", "--json", "--log-probabilities"]
    exact = txl("generate", place / "bytes", *words).object
    rounded = txl("generate", place / "bytes", *words, "--precision", "bfloat16").object
    assert exact["logprob"] != rounded["logprob"]
    assert exact["logprobs"][0] == pytest.approx(rounded["logprobs"][0], abs=0.3)


def test_several_prompts_and_samples(place: Path, run: Run) -> None:
    words = ["--prompt", "the cat", "--prompt", "a", "--samples", "2", "--tokens", "13", "--seed", "5"]
    wanted = complete(run, ["the cat", "a"], samples=2, tokens=13, seed=5, logprobs=True)
    said = txl("generate", place / "bytes", *words)
    assert said.out == "".join(f"--- {place + 1} of 4\n{one.text}\n" for place, one in enumerate(wanted))
    found = txl("generate", place / "bytes", *words, "--json", "--log-probabilities").object
    assert [text["text"] for text in found["texts"]] == [one.text for one in wanted]
    assert [text["prompt"] for text in found["texts"]] == ["the cat", "the cat", "a", "a"]
    assert [text["seed"] for text in found["texts"]] == [5, 6, 7, 8]
    assert [text["token_ids"] for text in found["texts"]] == [list(one.tokens) for one in wanted]
    for text, one in zip(found["texts"], wanted, strict=True):
        assert text["logprobs"] == pytest.approx(one.logprobs, abs=1e-5)
        assert text["logprob"] == pytest.approx(one.logprob, abs=1e-4)
    assert found["tokens_per_second"] == pytest.approx(52 / found["seconds"])


def test_beams(place: Path, run: Run) -> None:
    words = ["--prompt", "the", "--beams", "3", "--tokens", "7", "--length-penalty", "0.5"]
    wanted = search(run, "the", beams=3, tokens=7, length_penalty=0.5)
    found = txl("generate", place / "bytes", *words, "--json").object["texts"]
    assert [text["text"] for text in found] == [one.text for one in wanted]
    assert [text["logprob"] for text in found] == pytest.approx([one.logprob for one in wanted], abs=1e-4)
    assert "seed" not in found[0]
    said = txl("generate", place / "bytes", *words)
    assert said.out.startswith(f"--- 1 of 3, log-probability {wanted[0].logprob:.3f}\n{wanted[0].text}\n")


# A conversation.


def answers(run: Run, lines: list[str], stop: str, **options) -> list[str]:
    """What is said after each line, by the library: the memory of all before is handed on."""
    found, memory, missing = [], None, ""
    for turn, line in enumerate(lines):
        writing = generate(run, f"{missing}{line}\n", stop=stop, memory=memory, seed=2 + turn, **options)
        found.append("".join(writing))
        memory, missing = writing.memory(), stop if writing.ended == "tokens" else ""
    return found


def test_a_conversation_through_a_pipe(place: Path, run: Run) -> None:
    """Lines in, an answer after each; empty lines are passed over, and the last line needs no end."""
    given = "the cat\n\ncaf\u00e9\r\na dog".encode()
    command = [sys.executable, "-m", "transformer_xl", "generate", str(place / "bytes")]
    words = ["--chat", "--tokens", "9", "--seed", "2"]
    ended = subprocess.run([*command, *words], input=given, capture_output=True, env=ENVIRONMENT, check=False)
    wanted = "".join(f"{answer}\n" for answer in answers(run, ["the cat", "caf\u00e9", "a dog"], "\n", tokens=9))
    assert (ended.returncode, ended.stdout.decode(), ended.stderr) == (0, wanted, b"")


@pytest.mark.parametrize("stop", ["e", "no such text"])
def test_a_conversation_remembers(place: Path, run: Run, stop: str) -> None:
    """Ended by a text of one's own, or cut off: then the next line begins after that text all the same."""
    said = ask(place, "--chat", "--tokens", "90", "--stop", stop, "--seed", "2", given=b"the cat\na\nb\n")
    wanted = answers(run, ["the cat", "a", "b"], stop, tokens=90)
    assert (said.status, said.out) == (0, "".join(f"{answer}\n" for answer in wanted))
    if stop != "e":
        forgetful = "".join(generate(run, f"{stop}a\n", stop=stop, tokens=90, seed=3))
        assert forgetful != wanted[1]


def test_a_conversation_ends_lines_by_their_token(place: Path) -> None:
    """As far as the text goes, it is the same as stopping before the line end."""
    words = ("--chat", "--tokens", "60")
    by_token = ask(place, *words, "--until-line-end", given=b"the cat\na dog\n")
    assert by_token.out == ask(place, *words, given=b"the cat\na dog\n").out
    assert by_token.status == 0


def test_a_conversation_bears_bytes_that_are_no_text(place: Path, run: Run) -> None:
    said = ask(place, "--chat", "--tokens", "5", given=b"a\xff\n")
    assert (said.status, said.err) == (0, "")
    assert said.out == "".join(generate(run, b"a\xff\n", stop="\n", tokens=5)) + "\n"


def test_a_word_that_is_not_known_ends_a_conversation(place: Path) -> None:
    said = ask(place, "--chat", "--tokens", "3", kind="words", given=b"the cat\nthe horse\n")
    assert (said.status, len(said.out.splitlines())) == (2, 1)
    assert said.err.startswith("txl: error: byte 4 of the text: the word 'horse' is not one of the ")


def test_a_conversation_without_a_line_is_none(place: Path) -> None:
    said = ask(place, "--chat", given=b"")
    assert (said.status, said.out, said.err) == (0, "", "")


def test_ctrl_c_ends_what_was_shown(place: Path) -> None:
    """A text without end; what was shown stays, its line is ended, and the status says that it was stopped."""
    words = [sys.executable, "-m", "transformer_xl", "generate", str(place / "bytes"), "--tokens", "none"]
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


@pytest.mark.parametrize("words", [["--greedy"], [], ["--beams", "2"], ["--samples", "2"]])
def test_weights_that_are_not_numbers(place: Path, tmp_path: Path, words: list[str], monkeypatch) -> None:
    model = RunFolder.open(place / "bytes").load_model(torch.device("cpu"))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    monkeypatch.setattr(RunFolder, "load_model", lambda *_: model)
    said = txl("generate", place / "bytes", "--tokens", "5", *words)
    assert (said.status, said.out) == (2, "")
    assert said.err.startswith(
        "txl: error: the model's scores are not numbers: its weights are damaged, or its training"
    )
    assert said.err.count("\n") == 1


def test_unknown_words_are_named(place: Path, tmp_path: Path) -> None:
    """They are read as the unknown word, which nobody would see otherwise."""
    words = ("<eos>", "<unk>", "the", "cat", "sat", "on", "mat")
    save_tokenizer(WordTokenizer(words, None, "<eos>", "<unk>"), tmp_path / "words.json")
    how = ("--vocabulary", tmp_path / "words.json", "--out", tmp_path / "corpus")
    assert txl("prepare", place / "text.txt", *how).status == 0
    assert txl("train", "--corpus", tmp_path / "corpus", "--run", tmp_path / "run", *MODEL, *TRAIN).status == 0
    said = txl("generate", tmp_path / "run", "--prompt", "the zebra", "--prompt", "the cat", "--tokens", "3")
    assert (said.status, said.err) == (0, "remark: not in the vocabulary, and read as <unk>: 'zebra'\n")
    (tmp_path / "zebra.txt").write_text("the zebra\n")
    said = txl("score", tmp_path / "run", tmp_path / "zebra.txt", "--per", "file", "--json")
    assert (said.status, said.err) == (0, "remark: not in the vocabulary, and read as <unk>: 'zebra'\n")


def test_the_last_weights_can_be_asked_for(place: Path) -> None:
    texts = [
        txl("generate", place / "bytes", "--weights", which, "--greedy", "--tokens", "30", "--json").object["text"]
        for which in ("best", "last")
    ]
    assert texts[0] != texts[1]  # best weights were changed above


def test_a_prompt_that_is_no_text_is_shown_with_signs(place: Path) -> None:
    said = txl("generate", place / "bytes", "--prompt", os.fsdecode(b"a\xff"), "--tokens", "1", "--json")
    assert said.object["prompt"] == "a\ufffd"


def test_one_text_is_no_list_of_texts(run: Run) -> None:
    with pytest.raises(UserError, match="prompts is one text; give a list of texts"):
        complete(run, "def ", tokens=3)
    for odd, message in (({"top_k": 2.5}, "top_k 2.5: wanted a whole number"), ({"repetition_window": 1.5}, "whole")):
        with pytest.raises(UserError, match=message):
            Sampler(**odd)
    with pytest.raises(UserError, match="something else was given; give whole numbers"):
        BatchGenerator(run.model, [[1.5]])  # pyrefly: ignore[bad-argument-type]
