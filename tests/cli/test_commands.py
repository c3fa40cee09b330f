"""The commands `txl prepare`, `train`, `evaluate`, `generate`, `info` and `recipes` on a tiny text, as users run them.

Their results must equal those of the library's functions.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from refusals import NO_RECIPE, txl

import transformer_xl
from transformer_xl import __version__
from transformer_xl.config import load_recipe, recipe_names
from transformer_xl.evaluation.evaluate import evaluate
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run import Run, load
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.token_store import Corpus

SENTENCE = "the cat sat on the mat, and the dog ran after it; then all of them slept in the sun. caf\u00e9!"
# 401 of its words in an irregular order, each with a digit
TEXT = " ".join(SENTENCE.split()[i * i % 19] + str(i % 7) for i in range(401)).encode()
TEST = TEXT[TEXT.index(b" ", len(TEXT) - round(len(TEXT) * 0.1) - 1) + 1 :]  # the last tenth, from a word boundary on
MODEL = ["--model.n-layers=2", "--model.d-model=14", "--model.n-heads=2", "--model.d-head=5", "--model.d-ff=19"]
TRAIN = [
    "--train.segment-length=7", "--train.memory-length=11", "--train.batch-size=3", "--train.max-steps=17",
    "--train.log-interval=5", "--train.eval-interval=11", "--train.checkpoint-interval=13",
    "--train.dtype=float32", "--train.learning-rate=0.01",
]  # fmt: skip
# settings of EvaluationConfig that the JSON of `txl evaluate` contains
LENGTHS = ("segment_length", "memory_length", "attention_window", "clamp_length")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file text.txt, its corpus in corpus/, and in run/ a run trained on it for 17 steps."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "text.txt").write_bytes(TEXT)
    prepared = txl(
        "prepare", folder / "text.txt", "--out", folder / "corpus", "--test-fraction", "0.1", "--split-method", "end"
    )
    assert (prepared.status, prepared.err) == (0, "")
    trained = txl("train", NO_RECIPE, "--corpus", folder / "corpus", "--run", folder / "run", *MODEL, *TRAIN)
    assert trained.status == 0
    assert "17 steps" in trained.out
    assert f"next: txl evaluate {folder / 'run'}" in trained.out
    return folder


@pytest.fixture
def run(folder: Path) -> Run:
    return load(folder / "run", device="cpu")


def test_printed_commands_quote_paths(tmp_path: Path) -> None:
    """The commands can be pasted into a shell."""
    (tmp_path / "text.txt").write_bytes(TEXT)
    corpus, run = tmp_path / "a corpus", tmp_path / "it's a run"
    printed = txl("prepare", tmp_path / "text.txt", "--out", corpus).out.splitlines()[-1]
    assert shlex.split(printed) == ["next:", "txl", "train", "tiny", "--corpus", str(corpus)]
    printed = txl("train", NO_RECIPE, "--corpus", corpus, "--run", run, *MODEL, *TRAIN).out.splitlines()[-1]
    assert shlex.split(printed) == ["next:", "txl", "evaluate", str(run)]
    refused = txl("train", NO_RECIPE, "--corpus", corpus, "--run", run, *MODEL, *TRAIN).err
    assert f"resume it (txl train --resume {shlex.quote(str(run))})" in refused


def test_the_default_recipe(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ["--model.n-layers", "1", "--train.batch-size", "2", "--train.max-steps", "1", "--train.warmup-steps", "9"]
    trained = txl("train", "--corpus", folder / "corpus", *flags, "--json")
    assert "learning rate 0.007; lower --train.warmup-steps" in trained.err  # notes name settings as errors do
    assert trained.object["run"] == "runs/corpus-fast-small"
    config = RunFolder.open(Path("runs/corpus-fast-small")).config
    assert (config.model.n_layers, config.model.max_ngram, config.train.optimizer) == (1, 8, "soap-muon")


def test_result_of_a_training_that_diverged_is_printed(folder: Path, tmp_path: Path) -> None:
    """exp of its loss overflows."""
    options = [*TRAIN[:3], "--train.max-steps=3", "--train.eval-interval=2", "--train.dtype=float32"]
    options += ["--train.learning-rate=1000000", "--train.warmup-steps=1"]
    trained = txl("train", NO_RECIPE, "--corpus", folder / "corpus", "--run", tmp_path / "run", *MODEL, *options)
    assert trained.status == 2
    assert "(perplexity per token inf)" in trained.out
    assert "next" not in trained.out
    assert trained.err.endswith("the training diverged; use a lower learning rate, in a new run\n")


def test_find_rate_prints_a_rate_and_the_command_that_trains_with_it(folder: Path, tmp_path: Path) -> None:
    run, flags = tmp_path / "a run", ["--model.norm-first", "--train.lr-schedule", "wsd", "--evaluation.dtype", "auto"]
    flags += ["--train.warmup-steps", "3", "--train.eval-tokens", "none"]
    words = ["train", NO_RECIPE, "--corpus", folder / "corpus", "--run", run, *MODEL, *TRAIN, *flags, "--device", "cpu"]
    found = txl(*words, "--find-rate", "--json")
    assert found.status == 0, found.err
    assert not run.exists()
    result = found.object
    assert result["learning_rate"] > 0
    assert {trial["steps"] for trial in result["trials"]} == {17}  # all of the run, which takes less than the time
    command = shlex.split(result["command"])
    assert command[:2] == ["txl", "train"]
    trained = txl(*command[1:], "--json")
    assert trained.object["run"] == str(run)
    config = RunFolder.open(run).config
    assert config.train.learning_rate == result["learning_rate"]
    assert (config.model.n_layers, config.train.lr_schedule, config.evaluation.dtype) == (2, "wsd", "auto")
    assert config.model.norm_first
    printed = txl(*words[:4], *MODEL, *TRAIN, *flags, "--find-rate")
    start = f"next: txl train {NO_RECIPE} --corpus {folder / 'corpus'} --model"
    assert printed.out.splitlines()[-1].startswith(start)
    assert "learning rate 0." in printed.out


def test_train_flags_override_the_recipe_and_none_removes_limits(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "small.yaml"
    recipe.write_text(
        "title: small\nsource: a test\ncorpus: text\n"
        "model: {n_layers: 1, d_model: 14, n_heads: 2, d_head: 5, d_ff: 19}\n"
        "train: {segment_length: 7, memory_length: 11, batch_size: 3, max_steps: 5, eval_tokens: 29}\n"
        "evaluation: {memory_length: 13, attention_window: 5, clamp_length: 3}\n"
    )
    flags = ["--train.max-steps", "2", "--train.eval-tokens", "none", "--evaluation.attention-window", "none"]
    trained = txl("train", recipe, "--corpus", folder / "corpus", "--run", tmp_path / "run", *flags, "--json")
    result = trained.object
    assert (trained.status, result["run"], result["finished"]) == (0, str(tmp_path / "run"), True)
    assert (result["step"], result["max_steps"]) == (2, 2)
    config = RunFolder.open(tmp_path / "run").config
    assert (config.recipe, config.model.n_layers, config.train.eval_tokens) == (str(recipe), 1, None)
    # segment length 7 of the training settings; memory length 13 and clamp length 3 of the evaluation settings
    assert EvaluationPlan.resolve(config) == EvaluationPlan(7, ContextLimits(13, clamp_length=3))
    resumed = txl("train", "--resume", tmp_path / "run", "--train.max-steps", "3", "--json")
    assert (resumed.status, resumed.object["step"]) == (0, 3)
    assert resumed.err.startswith(f"resuming {tmp_path / 'run'} at step 2 of 3\n")
    assert RunFolder.open(tmp_path / "run").config.train.max_steps == 3


def test_evaluate_prints_the_metrics_of_the_library(folder: Path, run: Run) -> None:
    evaluated = txl("evaluate", folder / "run", "--json")
    assert evaluated.status == 0
    valid = RunFolder.open(folder / "run").metrics()[-1]["nats_per_token"]
    assert evaluated.err == f"weights: best, step 17 (validation loss {valid:.4f} nats/token)\n"
    metrics = evaluated.object
    expected = evaluate(run, Corpus.open(folder / "corpus").split("test"))
    assert metrics["tokens"] == metrics["bytes"] == len(TEST)
    assert metrics["nats_per_token"] == pytest.approx(expected.nats_per_token, rel=1e-6)
    assert metrics["bits_per_byte"] == pytest.approx(metrics["nats_per_token"] / math.log(2), rel=1e-12)
    assert metrics["token_perplexity"] == pytest.approx(math.exp(metrics["nats_per_token"]), rel=1e-12)
    assert metrics["tokens_per_second"] == pytest.approx(metrics["tokens"] / metrics["seconds"])
    assert [metrics[name] for name in LENGTHS] == [7, 11, None, None]
    assert (metrics["run"], metrics["split"], metrics["dtype"]) == (str(folder / "run"), "test", "float32")


def test_every_command_says_which_weights_it_uses(folder: Path, tmp_path: Path) -> None:
    """Also without metrics.jsonl. The copy's best weights are of step 17, and its newest checkpoint is of step 13."""
    path = shutil.copytree(folder / "run", tmp_path / "run")
    shutil.rmtree(path / "checkpoints" / "step-00000017")
    chosen = RunFolder.open(path).choose_weights()
    assert (chosen.used.name, chosen.used.step, chosen.others[0].step) == ("best", 17, 13)
    (path / "metrics.jsonl").unlink()
    text = folder / "text.txt"
    attention = ["analyze", "attention", path, "--max-tokens=40", "--out", tmp_path / "attention"]
    for checkpoint, used, other in (("best", 17, 13), ("last", 13, 17)):
        for words in (
            ["evaluate", path, "--max-tokens=19"],
            ["generate", path, "--max-new-tokens=3", "--prompt=the"],
            ["score", path, text, "--per=file"],
            *([attention] if checkpoint == "last" else []),
        ):
            result = txl(*words, f"--checkpoint={checkpoint}", "--json")
            values = json.loads(result.out)
            assert (values["checkpoint"]["name"], values["checkpoint"]["step"]) == (checkpoint, used)
            assert f"weights: {checkpoint}, step {used} (" in result.err
            assert f"step {other} (" in result.err
            assert [weights["step"] for weights in values["other_checkpoints"]] == [other]
    for words in (["convert", path, tmp_path / "hf", "--to=huggingface"], ["info", path]):
        values = txl(*words, "--json").object
        assert {name: values.get("run", values)[name] for name in chosen.as_dict()} == chosen.as_dict()
    (path / "model.safetensors").unlink()
    assert "best weights, is missing" in txl("evaluate", path).err


def test_sweep_equals_separate_evaluations(folder: Path) -> None:
    words = ["evaluate", folder / "run", "--max-tokens=101"]
    swept = txl(*words, "--sweep-memory-length", "0, 11,53", "--json")
    assert (swept.status, swept.warnings) == (0, "")
    results = swept.object["sweep"]
    assert [result["memory_length"] for result in results] == [0, 11, 53]
    assert len({result["nats_per_token"] for result in results}) == 3
    table = txl(*words, "--sweep-memory-length", "0,11,53").out
    assert "101 tokens, 101 bytes" in table
    for result in results:
        single = txl(*words, f"--memory-length={result['memory_length']}", "--json").object
        same = ("tokens", "bytes", "nats_per_token", "bits_per_byte", "perplexity", *LENGTHS)
        assert [result[name] for name in same] == [single[name] for name in same]
        assert f"{result['bits_per_byte']:.4f}" in table
        assert f"{result['nats_per_token']:.4f}" in table
    assert "perplexity" not in table  # bytes are no words


def test_info_of_a_run(folder: Path) -> None:
    facts = txl("info", folder / "run", "--verify", "--json").object["run"]
    assert facts["parameters"] == load(folder / "run").model.num_parameters()
    assert (facts["model"]["n_layers"], facts["train"]["max_steps"]) == (2, 17)
    assert (facts["newest_checkpoint"], facts["checksums"]) == ("step-00000017", "valid")
    # the training loss is logged every 5 of the 17 steps
    assert (facts["checkpoint"]["step"], facts["last_train"]["step"]) == (17, 15)
    table = txl("info", folder / "run")
    assert table.status == 0
    assert f"{facts['parameters']:,}" in table.out
    start = facts["last_start"]
    assert (start["step"], start["processes"], start["transformer_xl"]) == (0, 1, __version__)
    assert start["date"].startswith("20")
    assert {"commit", "torch", "processor", "device", "command"} <= start.keys()
    assert "\nlast start\n" in table.out


def test_info_of_a_corpus_and_the_hardware(folder: Path) -> None:
    corpus = txl("info", folder / "corpus", "--verify", "--json").object["corpus"]
    assert (corpus["test"]["tokens"], corpus["checksums"]) == (len(TEST), "valid")
    facts = txl("info", "--measure", "--json").object
    assert all(0 < ways["torch"] < 1e7 for ways in facts["gflops"].values())
    assert {"float32, large", "float32, 1 token"} <= set(facts["gflops"])
    hardware = facts["machine"]
    assert (hardware["torch"], hardware["transformer_xl"]) == (torch.__version__, transformer_xl.__version__)
    assert hardware["attn_implementation_auto"] in hardware["attn_implementations"]
    assert "cpu" in hardware["devices"]


def test_recipes_lists_all_with_published_results() -> None:
    recipes = txl("recipes", "--json").object
    assert list(recipes) == recipe_names()
    assert recipes["enwik8-12l"]["published"] == {"bits_per_byte": 1.06}
    table = txl("recipes").out
    assert all(name in table for name in recipes)
    # results of different texts are in one column, so each that is for any corpus names its own
    for_any = [recipe for recipe in recipes.values() if recipe["measured"] and recipe["corpus"] == "any"]
    assert for_any
    assert all(recipe["measured_corpus"] for recipe in for_any)
    assert table.count("/byte on") + table.count("ppl on") == len(for_any)


def test_recipe_that_is_shown_can_be_saved_and_trained(tmp_path: Path) -> None:
    shown = txl("recipes", "tiny")
    (tmp_path / "mine.yaml").write_text(shown.out)
    assert load_recipe(str(tmp_path / "mine.yaml")) == load_recipe("tiny")
    assert txl("recipes", tmp_path / "mine.yaml").out == shown.out
    assert txl("recipes", "tiny", "--json").object == txl("recipes", "--json").object["tiny"]


def test_version_and_help() -> None:
    assert txl("--version").out.strip() == transformer_xl.__version__
    for words in ([], ["--help"]):
        shown = txl(*words)
        assert shown.status == 0
        assert "evaluate" in shown.out
        assert "then the recipe" not in shown.out  # only the first paragraph of a command's help
    assert "--sweep-memory" in txl("evaluate", "--help").out
    assert txl("help").out == txl("--help").out
    assert txl("help", "analyze", "speed").out == txl("analyze", "speed", "--help").out


def test_generate_streams_and_exits_when_the_pipe_is_closed(folder: Path) -> None:
    """Text appears while it is generated; once its reader has closed the pipe, the command ends without an error."""
    environment = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}
    words = ["generate", str(folder / "run"), "--max-new-tokens", "1000000", "--prompt", "the"]
    command = [sys.executable, "-m", "transformer_xl", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert len(process.stdout.read(7)) == 7
            assert process.poll() is None
            process.stdout.close()
            assert process.wait(timeout=300) == 0
            assert process.stderr.read().startswith(b"weights: best, step 17 ")
        finally:
            process.kill()


def test_closed_standard_error_leaves_standard_output_as_it_is(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a text\n")
    words = ["score", str(folder / "run"), str(tmp_path / "text"), "--json", "--per", "file"]
    command = [sys.executable, "-m", "transformer_xl", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *command], stdout=subprocess.PIPE, env=environment, timeout=300
    )
    assert json.loads(ended.stdout)["file"] == words[2]


@pytest.mark.parametrize("words", ["score {run} {text} --json --out {out}", "runs {folder} --csv {out}"])
def test_files_are_written_after_the_pipe_is_closed(words: str, folder: Path, tmp_path: Path) -> None:
    """The second command prints a table, which another library does."""
    (tmp_path / "text").write_text("a text\n")
    reader, writer = os.pipe()
    os.close(reader)
    paths = {"run": folder / "run", "folder": folder, "text": tmp_path / "text", "out": tmp_path / "out.csv"}
    command = [sys.executable, "-m", "transformer_xl", *words.format(**paths).split()]
    environment = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=300)
    finally:
        os.close(writer)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "out.csv").read_text().count("\n") >= 2
