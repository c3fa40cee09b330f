"""`txl score` and `txl evaluate` print what the library computes; and the commands that they refuse.

Shape suffixes: K tokens of a text.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import FULL, NO_RECIPE, CommandResult, assert_refused, full_after, txl

from transformer_xl.config import DynamicConfig, EvaluationConfig
from transformer_xl.evaluation.evaluate import evaluate
from transformer_xl.evaluation.score import score
from transformer_xl.run import Run, load
from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import load_tensors
from transformer_xl.text.token_store import Corpus

MODEL = "--model.n-layers=2 --model.d-model=14 --model.n-heads=2 --model.d-head=5 --model.d-ff=19"
TRAIN = "--train.segment-length=7 --train.memory-length=11 --train.batch-size=3 --train.max-steps=5"
# characters of several bytes, a tab, brackets that rich would read as markup, an empty line, quotes, a backslash, and
# bytes that are not UTF-8
SPECIAL = 'caf\u00e9 \u2603\tb [red]x[/red]\n\n"quoted" \\ line'.encode() + b"\xff\x00 end\n"
PLAIN = b"the cat\nsat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus of three documents, runs of several methods of evaluation, and texts."""
    folder = tmp_path_factory.mktemp("score") / "folder"
    (folder / "folder").mkdir(parents=True)
    words = ["the", "cat", "sat", "on", "mat", "and", "dog", "ran", "after", "it", "then", "all", "of", "them"]
    documents = [folder / f"document{number}.txt" for number in range(3)]
    for number, document in enumerate(documents):
        text = " ".join(words[step * step % 17 % len(words)] for step in range(60 + number))
        document.write_text(text + "\n")
    splits = ["--train", *documents, "--valid", documents[0], "--test", *documents]
    assert txl("prepare", *splits, "--out", folder / "corpus").status == 0
    options = [*MODEL.split(), *TRAIN.split(), "--train.dtype=float32"]
    methods = {"run": [], "learns": ["--evaluation.method=dynamic"]}
    methods["windows"] = ["--evaluation.method=sliding-window", "--evaluation.attention-window=5"]
    for name, flags in methods.items():
        words = ["train", NO_RECIPE, "--corpus", folder / "corpus", "--run", folder / name, *options, *flags]
        assert txl(*words).status == 0
    for name, content in {"special": SPECIAL, "plain": PLAIN, "empty": b""}.items():
        (folder / f"{name}.txt").write_bytes(content)
    (folder / "pairs.jsonl").write_text('{"sentence_good": "the cat sat", "sentence_bad": "cat the sat"}\n')
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return load(folder / "run", device="cpu")


def json_lines(result: CommandResult) -> list[dict[str, Any]]:
    """Parse JSON lines; they must be ASCII and must not contain NaN or Infinity."""
    assert result.status == 0, result.err
    assert result.out.isascii()
    return [json.loads(line, parse_constant=pytest.fail) for line in result.out.splitlines()]


@pytest.fixture(scope="module")
def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the JSON lines of both texts by token, line and file."""
    command = ["score", folder / "run", folder / "special.txt", folder / "plain.txt", "--json", "--per"]
    return {per: json_lines(txl(*command, per)) for per in ("token", "line", "file")}


def test_scores_equal_the_library_and_add_up(folder: Path, run: Run, records) -> None:
    """Tokens of bytes that are not whole characters are also printed in hexadecimal, so that the output is valid
    JSON."""
    names = [str(folder / "special.txt"), str(folder / "plain.txt")]
    expected = score(run, {names[0]: SPECIAL, names[1]: PLAIN})
    assert [record["file"] for record in records["file"]] == names
    for text, record in zip(expected, records["file"], strict=True):
        assert record["logprob"] == pytest.approx(-text.sums.nats, rel=1e-6)
        assert record["perplexity"] == pytest.approx(text.sums.perplexity, rel=1e-6)
        assert (record["tokens"], record["bytes"]) == (text.sums.tokens, text.sums.bytes)
        for per in ("token", "line"):
            logprobs = [part["logprob"] for part in records[per] if part["file"] == text.name]
            assert math.fsum(logprobs) == pytest.approx(record["logprob"], rel=1e-12)
    tokens = [record for record in records["token"] if record["file"] == names[0]]
    contents = [bytes.fromhex(token["hex"]) if "hex" in token else token["text"].encode() for token in tokens]
    assert bytes(token["token"] for token in tokens) == b"".join(contents) == SPECIAL
    np.testing.assert_allclose([-token["logprob"] for token in tokens], expected[0].nats_K, rtol=1e-5)
    texts = [record["text"] for record in records["line"] if record["file"] == names[0]]
    assert texts == SPECIAL.decode("utf-8", "replace").removesuffix("\n").split("\n")
    # three lines of SPECIAL, two of PLAIN
    assert [record["line"] for record in records["line"]] == [1, 2, 3, 1, 2]
    assert {token["line"] for token in tokens} == {1, 2, 3}


def test_score_tables_have_the_total_and_escaped_characters(folder: Path, records) -> None:
    for per in ("token", "line", "file"):
        result = txl("score", folder / "run", folder / "special.txt", folder / "plain.txt", "--per", per)
        assert (result.status, result.warnings) == (0, "")
        assert f"{sum(record['logprob'] for record in records[per]):.4f}" in result.out
        assert per != "line" or "caf\u00e9 \u2603\\tb [red]x[/red]" in result.out


def test_csv_has_the_values_of_the_json_lines(folder: Path, records, tmp_path: Path) -> None:
    for per in ("token", "line", "file"):
        words = ["score", folder / "run", folder / "special.txt", folder / "plain.txt", "--per", per, "--out"]
        result = txl(*words, tmp_path / f"{per}.csv")
        assert (result.status, result.out, result.warnings) == (0, "", "")
        rows = list(csv.DictReader(io.StringIO((tmp_path / f"{per}.csv").read_text(encoding="utf-8"), newline="")))
        assert [float(row["logprob"]) for row in rows] == [record["logprob"] for record in records[per]]
        assert [row.get("text") for row in rows] == [record.get("text") for record in records[per]]
        assert txl(*words, "-").out == (tmp_path / f"{per}.csv").read_text(encoding="utf-8")


def test_text_whose_lines_end_in_cr_is_noted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mac.txt").write_bytes(b"one\rtwo\r")
    assert "mac.txt: its lines end in CR alone" in txl("score", folder / "run", tmp_path / "mac.txt").warnings


def test_text_that_looks_like_a_table_is_noted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("item,text\n1,the cat\n2,a dog\n3,it ran\n")
    noted = "a.txt looks like CSV, and is read as it is; --per word --input-format csv reads its rows"
    assert noted in txl("score", folder / "run", tmp_path / "a.txt").err


def test_score_reads_standard_input(folder: Path, records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(SPECIAL)))
    piped = json_lines(txl("score", folder / "run", "-", "--per", "file", "--json"))
    assert piped == [{**records["file"][0], "file": "-"}]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + SPECIAL)))
    assert json_lines(txl("score", folder / "run", "-", "--per", "file", "--json")) == piped


def test_compressed_text_is_decompressed(folder: Path) -> None:
    shutil.copy(folder / "document0.txt", folder / "text")
    (folder / "text.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + (folder / "text").read_bytes()))
    plain, compressed = (
        [
            {**json_lines(txl("score", folder / "run", file, "--per", "file", "--json"))[0], "file": None},
            txl("generate", folder / "run", "--prompt-file", file, "--greedy", "--max-new-tokens", "5").out,
        ]
        for file in (folder / "text", folder / "text.gz")
    )
    assert compressed == plain


def test_no_reset_memory_scores_files_as_one_text(folder: Path, run: Run) -> None:
    """With an attention window that memory fills (window - 1 slots), batch size and segment length change nothing."""
    command = ["score", folder / "run", folder / "special.txt", folder / "plain.txt", "--per", "file", "--json"]
    expected = score(run, [SPECIAL, PLAIN], EvaluationConfig(reset_memory=False))
    logprobs = [record["logprob"] for record in json_lines(txl(*command, "--no-reset-memory"))]
    np.testing.assert_allclose(logprobs, [-text.sums.nats for text in expected], rtol=1e-6)
    command += ["--attention-window", "9", "--memory-length", "8"]
    variants = [
        [record["logprob"] for record in json_lines(txl(*command, *flags.split()))]
        for flags in ("--batch-size 1", "--batch-size 4 --segment-length 3")
    ]
    np.testing.assert_allclose(variants[1], variants[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *(("learns", f"score RUN plain.txt --json --per {per}") for per in ("token", "word")),
        ("windows", "score RUN plain.txt --json --memory-length 8 --attention-window none"),
        ("windows", "score RUN plain.txt --json --per word --sweep-memory-length 8,5 --attention-window none"),
        ("learns", "minimal-pairs RUN pairs.jsonl --json"),
        ("windows", "minimal-pairs RUN pairs.jsonl --json --attention-window none"),
    ],
)
def test_texts_are_read_with_memory_where_the_method_of_the_run_cannot(
    folder: Path, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs differ in their method alone."""
    monkeypatch.chdir(folder)
    found, expected = (txl(*words.replace("RUN", run).split()) for run in (name, "run"))
    assert (found.status, found.out) == (0, expected.out)
    method = {"learns": "dynamic", "windows": "sliding-window"}[name]
    said = f"note: read by method memory, not {method} as txl evaluate does" in found.warnings
    assert said == words.startswith("score")
    assert "by method" not in expected.warnings


def test_runs_are_compared_with_memory_where_the_method_of_one_cannot(folder: Path) -> None:
    result = txl("runs", "compare", folder / "run", folder / "learns", "--on", folder / "document0.txt", "--json")
    assert result.object["losses"][1]["difference"] == 0
    assert "note: learns: read by method memory, not dynamic as txl evaluate does" in result.warnings


# Evaluation


def evaluate_json(folder: Path, *flags: str | Path) -> dict[str, Any]:
    result = txl("evaluate", folder / "run", "--json", *flags)
    assert result.status == 0, result.err
    return result.object


# settings of method dynamic
SGD = {"optimizer": "sgd", "learning_rate": 0.001, "decay": 0.1}
RMS = {"optimizer": "rms", "learning_rate": 0.001, "decay": 0.1, "epsilon": 0.01, "gradient_stats_tokens": 50}


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 5},
        {"batch_size": 5, "warmup_tokens": 0},
        {"reset_memory": True},
        {"method": "sliding-window", "attention_window": 13, "memory_length": 0},
        {"method": "dynamic", "dynamic": SGD},
        {"method": "dynamic", "dynamic": RMS},
    ],
    ids=str,
)
def test_evaluate_equals_the_library(folder: Path, run: Run, settings: dict[str, Any]) -> None:
    """Dynamic evaluation does not change the run on disk."""
    weights = (folder / "run" / "model.safetensors").read_bytes()
    flags = {name: value for name, value in settings.items() if name != "dynamic"}
    flags |= {f"dynamic.{name}": value for name, value in settings.get("dynamic", {}).items()}
    typed = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    values = evaluate_json(folder, "--max-tokens=101", *typed)
    corpus = Corpus.open(folder / "corpus")
    config = EvaluationConfig(**{**settings, "dynamic": DynamicConfig(**settings.get("dynamic", {}))})
    config = config if "dynamic" in settings else EvaluationConfig(**settings)
    expected = evaluate(run, corpus.split("test"), config, max_tokens=101, train_split=corpus.split("train")).as_dict()
    assert values["nats_per_token"] == pytest.approx(expected["nats_per_token"], rel=1e-6)
    for name in ("method", "method_settings", "memory_length", "attention_window", "batch_size", "reset_memory"):
        assert values[name] == expected[name]
    assert (folder / "run" / "model.safetensors").read_bytes() == weights


def test_warnings_go_to_standard_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that are probably not intended cause a warning, and the result is printed as usual."""
    command = ["evaluate", folder / "run", "--json", "--max-tokens", "20"]
    result = txl(*command, "--attention-window", "64")
    assert result.warnings.startswith("note: --memory-length 11 is too short for --attention-window 64")
    assert "give --memory-length 63, " in result.err
    assert result.object["attention_window"] == 64
    assert txl(*command, "--attention-window", "12").warnings == ""  # memory length 11 is enough
    own_window = txl("evaluate", folder / "windows", *command[2:], "--method=memory", "--memory-length=2")
    assert (own_window.warnings, own_window.object["attention_window"]) == ("", 5)  # the run's own window
    monkeypatch.setattr("transformer_xl.evaluation.plan.has_bfloat16", lambda _: False)
    result = txl(*command, "--dtype", "bfloat16")
    assert result.warnings.startswith("note: this device has no bfloat16 instructions")
    assert result.object["dtype"] == "bfloat16"


def test_sweep_of_windows_fills_them_where_the_method_of_the_run_has_memory(folder: Path) -> None:
    for run, flags, lengths in (("run", [], [1, 3]), ("windows", [], [0, 0]), ("windows", ["--method=memory"], [1, 3])):
        words = ["--sweep-attention-window=2,4", "--max-tokens=20", "--json"]
        result = txl("evaluate", folder / run, *words, *flags)
        assert result.status == 0, result.err
        assert [one["attention_window"] for one in result.object["sweep"]] == [2, 4]
        assert [one["memory_length"] for one in result.object["sweep"]] == lengths


# Errors

# a command line of txl, and a pattern of the message; misspelled names are meant to be so
SLIDING = "evaluate run --method sliding-window --memory-length 0"
REFUSED = [
    ("evaluate run --batch-size 0", "--batch-size.*greater than 0"),
    (f"evaluate run --segment-length {10**22}", "--segment-length.*less than or equal to 2147483647"),
    ("evaluate run --max-tokens 0", "--max-tokens 0: must be 1 or more"),
    (f"{SLIDING} --attention-window 5 --segment-length 3", "--segment-length was given, but method sliding-window"),
    (f"{SLIDING} --attention-window 5 --warmup-tokens 3", "no warm-up; leave out --warmup-tokens"),
    ("evaluate run --method moving", "moving"),
    ("evaluate run --method dynamic --warmup-tokens 3", "no warm-up; leave out --warmup-tokens"),
    ("evaluate run --method dynamic --batch-size 2", "batch-size 2: method dynamic reads one sequence; give 1"),
    ("evaluate run --method dynamic --dynamic.larning-rate 1", "Did you mean --dynamic.learning-rate?"),
    ("evaluate run --method dynamic --dynamic.optimizer sgd --dynamic.epsilon 5", "epsilon is for the optimizer rms"),
    ("evaluate run --sweep-memory-length 0,5 --memory-length 3", "give one of --sweep-memory-length and"),
    ("evaluate run --token-losses a.npy --sweep-memory-length 0,5", "--token-losses and a sweep were both given"),
    ("evaluate run --token-losses none/a.npy", "none/a.npy: folder none does not exist"),
    ("evaluate run --token-losses plain.txt", "plain.txt exists already; choose another path or delete it first"),
    ("evaluate run --token-losses folder", "folder exists already; choose another path"),
    ("score run", "txl score needs texts"),
    ("score none plain.txt", "none: no such folder"),
    ("score run none.txt", "reading none.txt: no such file or folder"),
    ("score run empty.txt", "empty.txt: the text is empty"),
    ("score run plain.txt plain.txt", "plain.txt was given twice; list each file once"),
    ("score run plain.txt --per syllable", "syllable"),
    ("score run plain.txt --memry 5", r"Unknown option: --memry; --help lists .*file of that name as \./--memry"),
    ("score run plain.txt --device gpu", "no device 'gpu' on this computer"),
]


@pytest.mark.parametrize(("command", "message"), REFUSED, ids=[command[:60] for command, _ in REFUSED])
def test_invalid_commands_are_refused(
    folder: Path, command: str, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert_refused(folder, command, message, capfd)


def test_damaged_weights_and_full_disks_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "parent" / "copy"
    shutil.copytree(folder, copy)
    monkeypatch.chdir(copy)
    with monkeypatch.context() as patch:
        full_after(0, patch)
        assert_refused(copy, "evaluate run --token-losses losses.npy", f"writing losses.npy: {FULL}", capfd)
    run_folder = RunFolder.open("run")
    weights, _ = load_tensors(run_folder.path / "model.safetensors")
    name = next(name for name in weights if name.startswith("layers.1."))
    weights[name].flatten()[3] = torch.nan
    run_folder.save_weights(weights, step=2, nats=1.0)
    for command in ("evaluate run", "score run plain.txt"):
        assert_refused(copy, command, f"the weights {name} are not finite; train again", capfd)
