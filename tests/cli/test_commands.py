"""The commands on a tiny text, one after another as a user would, and what they print."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from refusals import Said, txl

import transformer_xl
from transformer_xl.config import EvaluationConfig, recipe_names
from transformer_xl.evaluation.evaluate import EvaluationPlan, evaluate
from transformer_xl.generation.generate import generate
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run_folder import RunFolder, load
from transformer_xl.text.token_store import Corpus

SENTENCE = "the cat sat on the mat, and the dog ran after it; then all of them slept in the sun. caf\u00e9!"
TEXT = " ".join(SENTENCE.split()[place * place % 19] + str(place % 7) for place in range(401)).encode()
TEST = TEXT[TEXT.index(b" ", len(TEXT) - round(len(TEXT) * 0.1) - 1) + 1 :]  # a tenth, from between two words on
MODEL = ["--model.n-layers=2", "--model.d-model=14", "--model.n-heads=2", "--model.d-head=5", "--model.d-ff=19"]
TRAIN = [
    "--train.segment-length=7", "--train.memory-length=11", "--train.batch-size=3", "--train.max-steps=17",
    "--train.log-interval=5", "--train.eval-interval=11", "--train.checkpoint-interval=13",
    "--train.dtype=float32", "--train.learning-rate=0.01",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, its corpus and a run."""
    place = tmp_path_factory.mktemp("commands")
    (place / "text.txt").write_bytes(TEXT)
    prepared = txl("prepare", place / "text.txt", "--out", place / "corpus", "--test-fraction", "0.1")
    assert (prepared.status, prepared.err) == (0, "")
    trained = txl("train", "--corpus", place / "corpus", "--run", place / "run", *MODEL, *TRAIN)
    assert trained.status == 0
    assert "17 steps" in trained.out
    assert f"next: txl evaluate {place / 'run'}" in trained.out
    return place


def test_what_training_leaves(place: Path) -> None:
    folder = RunFolder.open(place / "run")
    lines = folder.metrics()
    assert [(line["split"], line["step"]) for line in lines] == [
        ("train", 5), ("train", 10), ("valid", 11), ("train", 15), ("valid", 17),
    ]  # fmt: skip
    assert folder.checkpoints()[-1].name == "step-00000017"
    assert folder.config.model.d_head == 5
    assert folder.config.train.memory_length == 11
    assert folder.config.corpus is not None
    assert folder.config.corpus.path == str((place / "corpus").resolve())


def test_train_as_json_and_with_a_recipe(place: Path, tmp_path: Path) -> None:
    """Flags win over the recipe, and the word none takes its limit away."""
    recipe = tmp_path / "small.yaml"
    recipe.write_text(
        "title: small\nsource: a test\ncorpus: text\n"
        "model: {n_layers: 1, d_model: 14, n_heads: 2, d_head: 5, d_ff: 19}\n"
        "train: {segment_length: 7, memory_length: 11, batch_size: 3, max_steps: 5, eval_tokens: 29}\n"
        "evaluation: {memory_length: 13, attention_window: 5, clamp_length: 3}\n"
    )
    words = ["--train.max-steps", "2", "--train.eval-tokens", "none", "--evaluation.attention-window", "none", "--json"]
    said = txl("train", recipe, "--corpus", place / "corpus", "--run", tmp_path / "run", *words)
    assert said.status == 0
    found = said.object
    assert (found["run"], found["finished"], found["step"], found["max_steps"]) == (str(tmp_path / "run"), True, 2, 2)
    config = RunFolder.open(tmp_path / "run").config
    assert (config.recipe, config.model.n_layers, config.train.eval_tokens) == (str(recipe), 1, None)
    assert EvaluationPlan.resolve(config) == EvaluationPlan(7, ContextLimits(13, None, 3))
    more = txl("train", "--resume", tmp_path / "run", "--train.max-steps", "3", "--json")
    assert (more.status, more.object["step"]) == (0, 3)
    assert more.err.startswith(f"resuming {tmp_path / 'run'} at step 2 of 3\n")
    assert RunFolder.open(tmp_path / "run").config.train.max_steps == 3


LENGTHS = ("segment_length", "memory_length", "attention_window", "clamp_length")


def test_evaluate(place: Path) -> None:
    """The figures are the library's, and fit one another."""
    said = txl("evaluate", place / "run", "--json")
    assert (said.status, said.err) == (0, "")
    found = said.object
    wanted = evaluate(load(place / "run", device="cpu"), Corpus.open(place / "corpus").split("test"))
    assert found["tokens"] == found["bytes"] == len(TEST)
    assert found["nats_per_token"] == pytest.approx(wanted.nats_per_token, rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(found["nats_per_token"] / math.log(2), rel=1e-12)
    assert found["perplexity"] == pytest.approx(math.exp(found["nats_per_token"]), rel=1e-12)
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"])
    assert [found[name] for name in LENGTHS] == [7, 11, None, None]
    assert (found["run"], found["split"], found["dtype"]) == (str(place / "run"), "test", "float32")
    assert found["peak_memory_bytes"] > 0
    assert found["nats_per_token"] < math.log(256)  # it has learnt something


def test_evaluate_at_other_lengths(place: Path) -> None:
    lengths = ["--segment-length=5", "--memory-length=29", "--attention-window=23", "--clamp-length=3"]
    said = txl("evaluate", place / "run", "--json", *lengths, "--split=valid", "--max-tokens=31", "--checkpoint=last")
    found = said.object
    assert [found[name] for name in LENGTHS] == [5, 29, 23, 3]
    assert (found["tokens"], found["split"]) == (31, "valid")
    run_of = load(place / "run", device="cpu", checkpoint="last")
    split = Corpus.open(place / "corpus").split("valid")
    wanted = evaluate(run_of, split, EvaluationConfig(**dict(zip(LENGTHS, (5, 29, 23, 3), strict=True))), max_tokens=31)
    assert found["nats_per_token"] == pytest.approx(wanted.nats_per_token, rel=1e-6)
    limitless = txl("evaluate", place / "run", "--json", "--attention-window=none", "--clamp-length=none").object
    assert (limitless["attention_window"], limitless["clamp_length"]) == (None, None)


def test_sweep_equals_one_after_another(place: Path) -> None:
    said = txl("evaluate", place / "run", "--json", "--sweep-memory-length", "0, 11,53", "--max-tokens=101")
    assert (said.status, said.err) == (0, "")
    assert (said.object["run"], said.object["split"]) == (str(place / "run"), "test")
    sweep = said.object["sweep"]
    assert [result["memory_length"] for result in sweep] == [0, 11, 53]
    for result in sweep:
        length = f"--memory-length={result['memory_length']}"
        alone = txl("evaluate", place / "run", "--json", length, "--max-tokens=101").object
        same = ("tokens", "bytes", "nats_per_token", "bits_per_byte", "perplexity", *LENGTHS)
        assert [result[name] for name in same] == [alone[name] for name in same]
    assert len({result["nats_per_token"] for result in sweep}) == 3


def test_evaluate_for_people(place: Path) -> None:
    said = txl("evaluate", place / "run", "--sweep-memory-length", "0,11", "--max-tokens=101")
    assert (said.status, said.err) == (0, "")
    figures = txl("evaluate", place / "run", "--memory-length=11", "--max-tokens=101", "--json").object
    assert "101 tokens, 101 bytes" in said.out
    assert f"{figures['bits_per_byte']:.4f}" in said.out
    assert f"{figures['perplexity']:.3f}" in said.out


def test_generate(place: Path) -> None:
    """Streamed and as JSON it is the same text, the library's."""
    loaded = load(place / "run", device="cpu")
    wanted = generate(loaded, "the caf\u00e9", max_new_tokens=41, seed=3).text
    words = ["--prompt", "the caf\u00e9", "--max-new-tokens", "41", "--seed", "3"]
    streamed, said = txl("generate", place / "run", *words), txl("generate", place / "run", *words, "--json")
    assert (streamed.status, streamed.out, streamed.err) == (0, wanted + "\n", "")
    found = said.object
    assert (found["text"], found["prompt"], found["num_tokens"], found["seed"]) == (wanted, "the caf\u00e9", 41, 3)
    assert found["tokens_per_second"] == pytest.approx(41 / found["seconds"])


def test_generate_in_other_ways(place: Path, tmp_path: Path) -> None:
    loaded = load(place / "run", device="cpu")
    (tmp_path / "prompt").write_bytes(b"the caf\xc3\xa9" * 40)  # far longer than the memory of 11
    long = "the caf\u00e9" * 40
    for words, prompt, settings in (
        (["--greedy"], None, {"greedy": True}),
        (["--temperature", "0"], None, {"greedy": True}),
        (["--prompt-file", tmp_path / "prompt"], long, {}),
        (["--prompt-file", tmp_path / "prompt", "--memory-length", "53"], long, {"memory_length": 53}),
        (["--top-p", "0.5"], None, {"top_p": 0.5}),
        (["--top-k", "2", "--temperature", "3"], None, {"temperature": 3.0, "top_k": 2}),
    ):
        said = txl("generate", place / "run", "--max-new-tokens", "23", *words)
        assert (said.status, said.out) == (0, generate(loaded, prompt, max_new_tokens=23, **settings).text + "\n")


def test_info_of_a_run(place: Path) -> None:
    said = txl("info", place / "run", "--verify", "--json")
    assert (said.status, said.err) == (0, "")
    found = said.object["run"]
    model = RunFolder.open(place / "run").load_model(torch.device("cpu"))
    assert found["parameters"] == model.num_parameters()
    assert (found["model"]["n_layers"], found["train"]["max_steps"], found["newest_checkpoint"]) == (
        2,
        17,
        "step-00000017",
    )
    assert found["checksums"] == "valid"
    assert found["best_valid"]["split"] == "valid"
    assert found["last_train"]["step"] == 15
    shown = txl("info", place / "run")
    assert shown.status == 0
    assert f"{found['parameters']:,}" in shown.out


def test_info_of_a_corpus_and_the_machine(place: Path) -> None:
    found = txl("info", place / "corpus", "--verify", "--json").object
    assert found["corpus"]["test"]["tokens"] == len(TEST)
    assert found["corpus"]["checksums"] == "valid"
    machine = txl("info", "--json").object["machine"]
    assert (machine["torch"], machine["transformer_xl"]) == (torch.__version__, transformer_xl.__version__)
    assert machine["attn_implementation_auto"] in machine["attn_implementations"]
    assert "cpu" in machine["devices"]


def test_recipes() -> None:
    found = txl("recipes", "--json").object
    assert list(found) == recipe_names()
    assert found["enwik8-12l"]["published"] == {"bits_per_byte": 1.06}
    assert all(name in txl("recipes").out for name in recipe_names())


@pytest.mark.parametrize("words", [["train"], *(["reproduce", name] for name in ("ablation", "context", "all"))])
def test_help_says_that_a_recipe_goes_before_the_defaults_it_shows(words: list[str]) -> None:
    said = " ".join(txl(*words, "--help").out.split())
    assert "[default: 2000]" in said
    assert "the defaults, then the recipe" in said
    assert "then the recipe" not in txl("--help").out + txl("reproduce", "--help").out


def test_version_and_help() -> None:
    assert txl("--version").out.strip() == transformer_xl.__version__
    for words in ([], ["--help"]):
        said = txl(*words)
        assert said.status == 0
        assert "evaluate" in said.out
    assert "--sweep-memory" in txl("evaluate", "--help").out


# In a process of its own.

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(transformer_xl.__file__).parents[1])}
COMMAND = [sys.executable, "-m", "transformer_xl"]


def test_evaluate_as_a_program(place: Path) -> None:
    """Standard output is one JSON object and nothing else, standard error empty."""
    words = [*COMMAND, "evaluate", str(place / "run"), "--json", "--threads", "1"]
    ended = subprocess.run(words, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    found = Said(ended.returncode, ended.stdout, ended.stderr)
    assert (found.status, found.err) == (0, "")
    assert found.object["nats_per_token"] == txl("evaluate", place / "run", "--json").object["nats_per_token"]


def test_generate_streams_and_bears_a_reader_that_leaves(place: Path) -> None:
    """The text appears while it is made: the first of it is read, and then no more is wanted."""
    words = [*COMMAND, "generate", str(place / "run"), "--max-new-tokens", "1000000", "--prompt", "the"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert len(process.stdout.read(7)) == 7
        assert process.poll() is None
        process.stdout.close()
        assert process.wait(timeout=300) == 0
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
