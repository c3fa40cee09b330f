"""Minimal pairs: sentences have the log-probability of `score`, and accuracies are counted by group."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from refusals import assert_refused, txl
from small_runs import make_run

from transformer_xl import score
from transformer_xl.apps.surprisal.minimal_pairs import MinimalPair, minimal_pairs, read_minimal_pairs
from transformer_xl.config import UserError
from transformer_xl.run import Run
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.bpe import train_bpe
from transformer_xl.text.tokenizers.word import WordTokenizer

WORDS = ("<eos>", "<unk>", "the", "cat", "cats", "sleep", "sleeps", "here")
TOKENIZERS: dict[str, Tokenizer] = {
    "byte": ByteTokenizer(),
    "bpe": train_bpe([["the cat sleeps here\n", "the cats sleep here\n"] * 20], 280),
    "word": WordTokenizer(WORDS, eos_token="<eos>", unk_token="<unk>"),
}
SENTENCES = [("the cat sleeps", "the cat sleep"), ("cats sleep here", "cats sleeps here"), ("the cats", "cats the")]
LINES = [
    {"sentence_good": good, "sentence_bad": bad, "UID": f"u{number % 2}", "field": "syntax", "before": "here\nthe cat"}
    for number, (good, bad) in enumerate(SENTENCES)
]
CONTENT = "".join(json.dumps(line) + "\n" for line in LINES)


@pytest.fixture(params=TOKENIZERS)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    return make_run(tmp_path / "run", tokenizer=TOKENIZERS[request.param], noise=0.3, dropout=0.0)


def nats(run: Run, text: str, **settings: Any) -> float:
    (scored,) = score(run, text, **settings)
    return float(scored.nats_K[: len(run.tokenizer.encode(text))].sum())


def test_sentences_have_the_probability_of_score(run: Run) -> None:
    """From an empty memory, and after a context as the rest of the text that begins with it."""
    pairs = read_minimal_pairs("a.jsonl", CONTENT.encode(), context_field="before")
    settings: dict[str, Any] = {"memory_length": 5, "softmax_temperature": 1.5}
    alone = minimal_pairs(run, [MinimalPair(pair.good, pair.bad) for pair in pairs], **settings)
    after = minimal_pairs(run, pairs, context="cats sleep\n", **settings)
    before = "cats sleep\nhere\nthe cat\n"
    for (good, bad), row, row_after in zip(SENTENCES, alone, after, strict=True):
        for text, name in ((good, "logprob_good"), (bad, "logprob_bad")):
            assert row[name] == pytest.approx(-nats(run, text, **settings), abs=1e-4)
            expected = nats(run, before + text, **settings) - nats(run, before, **settings)
            assert row_after[name] == pytest.approx(-expected, abs=1e-4)
        assert row["is_correct"] == (row["logprob_good"] > row["logprob_bad"])


def test_sentences_have_the_probability_of_lm_eval(tmp_path: Path) -> None:
    """As its task `blimp` asks for it."""
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    from transformer_xl.integrations.lm_eval.model import TxlLM

    run = make_run(tmp_path / "run", noise=0.3, dropout=0.0)
    requests = [
        instance(request_type="loglikelihood", doc={}, arguments=("", text), idx=0)
        for pair in SENTENCES
        for text in pair
    ]
    theirs = [logprob for logprob, _ in TxlLM(run, memory_length=5).loglikelihood(requests, disable_tqdm=True)]
    ours = minimal_pairs(run, [MinimalPair(*pair) for pair in SENTENCES], memory_length=5)
    assert [row[name] for row in ours for name in ("logprob_good", "logprob_bad")] == theirs


def test_accuracies_are_by_group() -> None:
    run = make_run_scores([(-1, -2), (-2, -1), (-3, -3), (-1, -5)])
    assert run == [
        {"group": "file", "name": "a", "pairs": 4, "accuracy": 0.5},
        {"group": "UID", "name": "u0", "pairs": 2, "accuracy": 0.5},
        {"group": "UID", "name": "u1", "pairs": 2, "accuracy": 0.5},
        {"group": "all", "name": "", "pairs": 4, "accuracy": 0.5},
    ]


def make_run_scores(scores: list[tuple[int, int]]) -> list[dict]:
    from transformer_xl.apps.surprisal.minimal_pairs import MinimalPairScores

    return MinimalPairScores(
        {"file": "a", "UID": f"u{number % 2}", "logprob_good": good, "logprob_bad": bad, "is_correct": good > bad}
        for number, (good, bad) in enumerate(scores)
    ).accuracies()


def test_the_command_prints_what_the_library_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "run", noise=0.3, dropout=0.0)
    Path("a.jsonl").write_text(CONTENT)
    for name in ("b.jsonl", "other/a.jsonl"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(CONTENT.splitlines()[0].replace("syntax", "syn\\u001btax") + "\n\n")
    Path("before.txt").write_text("cats sleep\n")
    flags = ["--context", "before.txt", "--memory-length", "5", "--json", "--out", "o.csv"]
    result = txl("minimal-pairs", "run", "a.jsonl", "b.jsonl", "other/a.jsonl", *flags)
    assert (result.status, result.warnings) == (0, "")
    files = ("a.jsonl", "b.jsonl", "other/a.jsonl")  # the two of one name are groups of their own
    pairs = [pair for name in files for pair in read_minimal_pairs(name, Path(name).read_bytes())]
    expected = minimal_pairs(run, pairs, context="cats sleep\n", memory_length=5)
    assert result.object["groups"] == expected.accuracies()
    assert result.object["accuracy"] == expected.accuracies()[-1]["accuracy"]
    assert [row["name"] for row in result.object["groups"]] == [
        *("a.jsonl", "b", "other/a.jsonl", "u0", "u1", "syntax", "syn\x1btax", ""),
    ]
    rows = list(csv.DictReader(io.StringIO(Path("o.csv").read_text())))
    assert [{name: str(row[name]) for name in rows[0]} for row in expected] == rows
    table = txl("minimal-pairs", "run", "a.jsonl", "--context-field", "before").out
    words = WordTokenizer(("<eos>", "<unk>", "cats"), eos_token="<eos>", unk_token="<unk>")
    make_run(tmp_path / "words", tokenizer=words)
    assert "not in the vocabulary, and read as <unk>: 'the'" in txl("minimal-pairs", "words", "b.jsonl").err
    assert "linguistics_term" not in table
    assert "syntax" in table
    assert r"syn\x1btax" in txl("minimal-pairs", "run", "b.jsonl").out  # no text may change the terminal


BAD = {
    "list.jsonl": ("[1]\n", "list.jsonl: line 1: expected a JSON object"),
    "lacks.jsonl": (
        '{"sentence_good": "a"}\n',
        "line 1: 'sentence_bad' is missing, empty or no text; .* sentence_good",
    ),
    "empty.jsonl": ('{"sentence_good": "a", "sentence_bad": " "}\n', "line 1: 'sentence_bad' is missing, empty"),
    "number.jsonl": ('{"sentence_good": 5, "sentence_bad": "a"}\n', "line 1: 'sentence_good' is missing, empty or no"),
    "same.jsonl": ('{"sentence_good": "a", "sentence_bad": "a"}\n', "line 1: sentence_good and .* the same: 'a'"),
    "none.jsonl": ("\n", "none.jsonl: there are no pairs"),
    "missing.jsonl": (None, "missing.jsonl"),
}


def test_bad_pairs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    run = make_run(folder / "run")
    for name, (content, message) in BAD.items():
        if content is not None:
            Path(name).write_text(content)
        assert_refused(folder, f"minimal-pairs run {name} --out new.csv", message, capfd)
    Path("good.jsonl").write_text(CONTENT)
    assert_refused(folder, "minimal-pairs run", "there are no pairs; give files", capfd)
    assert_refused(folder, "minimal-pairs run good.jsonl good.jsonl", "a file was given twice", capfd)
    assert_refused(folder, "minimal-pairs run good.jsonl --context-field contexts", "line 1: 'contexts' is", capfd)
    assert_refused(folder, "minimal-pairs run good.jsonl --out good.jsonl", "exists already", capfd)
    with pytest.raises(UserError, match="there are no pairs"):
        minimal_pairs(run, [])
    with pytest.raises(UserError, match="method memory"):
        minimal_pairs(run, [MinimalPair("a", "b")], method="dynamic")
