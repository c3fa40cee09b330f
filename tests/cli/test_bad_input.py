"""Errors of users with all commands: one line on standard error, exit status 2, and no file is created or changed.

Also damaged runs, runs in use by another command, and full disks.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from refusals import FULL, NO_RECIPE, assert_refused, do, error_of, full_after, no_file_larger_than
from safetensors.torch import save_file

from transformer_xl import device
from transformer_xl.cli.main import run
from transformer_xl.config import UserError
from transformer_xl.files import lock_folder
from transformer_xl.model.key_values import KeyValueMemory
from transformer_xl.model.memory import HiddenMemory
from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import load_tensors
from transformer_xl.training.trainer import Trainer

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
needs_permissions = pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write all files")

TRAIN = f"train {NO_RECIPE} --corpus corpus --run new"
TRAIN_SMALL = (
    f"{TRAIN} --model.n-layers=2 --model.d-model=14 --model.n-heads=2 --model.d-head=5 --model.d-ff=19 "
    "--train.segment-length=7 --train.memory-length=11 --train.batch-size=3 --train.max-steps=5 --train.eval-interval=3"
)
RESUME = "train --resume run --train.max-steps 7"
# advice of the messages on damaged files of a checkpoint
DAMAGED = "copy it again; if it is in a step-N folder, delete that"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, recipes, the corpora corpus (of text.txt) and small, and a run trained on corpus."""
    folder = tmp_path_factory.mktemp("prepared") / "w"
    folder.mkdir()
    # lowercase letters in an irregular order
    text = bytes((i * i + i // 13) % 26 + 97 for i in range(701))
    for name, content in {"text": text, "other": text[::-1], "small": text[:20], "empty": b""}.items():
        (folder / f"{name}.txt").write_bytes(content)
    (folder / "folder").mkdir()
    (folder / "list.yaml").write_text("- 1\n")
    for name, settings in {
        "unknown": "modle: {n_layers: 2}",
        "bool": "train: {max_steps: yes}",
        "off": "train: {compile: off}",
        "many": "model: {n_layers: a, d_modle: 3}\ntrain: {batch_size: -1}",
        "tab": "model:\n\tn_layers: 3",
        "twice": "model: {n_layers: 2}\nmodel: {d_model: 8}",
    }.items():
        (folder / f"{name}.yaml").write_text(f"{settings}\n")
    with Patch.context() as patch:
        patch.chdir(folder)
        do("prepare text.txt --out corpus")
        do("prepare small.txt --out small --valid-fraction 0 --test-fraction 0")
        do(TRAIN_SMALL.replace("--run new", "--run run"))
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """A copy of that folder, as the working directory."""
    shutil.copytree(prepared, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    return tmp_path / "w"


# a command line of txl, and a pattern of the message; misspelled names are meant to be so
BAD_COMMANDS = [
    # names that do not exist
    ("trian", r"no command 'trian' \(did you mean 'train'\?\); the commands are demo, .*, info; --help"),
    ("--verion", "no command '--verion'; the commands are demo"),
    (f"{TRAIN} --train.max-stepz 5", r"no option --train.max-stepz. Did you mean --train.max-steps\?"),
    (f"{TRAIN} --batch 5", r"Did you mean --train.batch-size or --evaluation.batch-size\?"),
    (f"{TRAIN} --lr 5", "Did you mean --train.learning-rate"),
    ("generate run --temp 5", r"Did you mean --temperature\?"),  # the beginning of a flag
    (f"{TRAIN} --train.lr=5", r"Did you mean --train.learning-rate\?"),
    (f"{TRAIN} --model.memory_length=5", "Did you mean --train.memory-length"),
    (f"{TRAIN} --n-layer 5", r"Did you mean --model.n-layers\?"),
    (f"{TRAIN} --epochs 5", r"no option --epochs. Did you mean --train.max-epochs\?"),
    ("convert run -- new --json", "--json stands after --, which ends the options"),
    ("evaluate run --mem-len 5", r"Did you mean --memory-length\?"),
    ("generate run --max-length 5", r"Did you mean --max-new-tokens\?"),
    ("train enwik8-12 --corpus corpus", r"no recipe 'enwik8-12' \(did you mean 'enwik8-12l'\?\)"),
    ("train gone.yaml --corpus corpus", "recipe gone.yaml cannot be read .*; name a YAML file"),
    ("train unknown.yaml --corpus corpus", r"unknown.yaml: unknown setting 'modle' \(did you mean 'model'\?\)"),
    ("train bool.yaml --corpus corpus", r"train.max_steps: .* integer .*\(given: True; .* unless quoted\)"),
    ("train off.yaml --corpus corpus", r"train.compile: .* \(given: False; .* unless quoted\)"),
    ("train twice.yaml --corpus corpus", "twice.yaml: .*duplicate key 'model'"),
    # all errors of the settings in a file or of the flags of a group at once
    (
        "train many.yaml --corpus corpus",
        r"many.yaml: 3 errors: \(1\) model.n_layers: .*'a'\) \(2\) model: .*'d_model'\?\) \(3\) train.b.* -1\)$",
    ),
    ("generate run --seed x --top-p y", r"2 errors: \(1\) --top-p: .* \(2\) --seed: .*"),
    ("recipes tab.yaml", r"not readable as YAML \(line 2, column 1: found .*\); check .* indentation there"),
    ("train list.yaml --corpus corpus", "list.yaml: must be a mapping of settings, not list"),
    (f"{TRAIN_SMALL} --model.attn-implementation refrence", "no attention kernel 'refrence' .*'reference'"),
    (f"{TRAIN} --device cpuu", r"no device 'cpuu' on this computer \(did you mean 'cpu'\?\); available: auto, "),
    ("evaluate run --split tset", r"no split 'tset' \(did you mean 'test'\?\)"),
    ("evaluate run --checkpoint lst", 'Did you mean "last"?'),
    ("recipes nope", "no recipe 'nope'; 'txl recipes' lists them"),
    ("info run nope", "nope.*; --help"),
    ("generate run --logprobs 5000", "5000.*; --help"),
    (f"{TRAIN} --model.qk-norm false", '"false": flags take no value, but for --FLAG=false;'),
    # files and folders
    (TRAIN_SMALL.replace("corpus corpus", "corpus small"), "has 20 tokens, .* 3 sequences of 7 .* 21; lower --train.b"),
    ("train --corpus run", "no corpus at run, .*; its config.yaml names .*; 'txl prepare .* creates a corpus"),
    ("train --corpus text.txt", "no corpus at text.txt"),
    ("train --corpus folder", "no corpus at folder, which has no corpus.json"),
    (TRAIN_SMALL.replace("run new", "run run"), r"run holds a run already; resume it \(txl train --resume run\)"),
    (TRAIN_SMALL.replace("run new", "run corpus"), "corpus exists already; choose another path"),
    ("train --resume gone", "gone: no such folder; expected a folder made by"),
    ("train --resume corpus", "corpus: not the folder of a run .*; expected a folder"),
    ("train --resume run --run new", "leave the recipe and --run out"),
    ("evaluate folder", "folder: not the folder of a run .*; expected a folder"),
    ("evaluate run --corpus gone", "no corpus at gone"),
    ("generate run --prompt-file gone", "reading gone: no such file or folder"),
    ("generate run --prompt-file empty.txt", "the prompt is empty; give some text"),
    # values
    ("train fast-small --corpus corpus --train.optimizer adam", "weight-decay 0.1 .*; give --train.weight-decay 0"),
    (f"{TRAIN} --model.n-heads 3", "d_model 256 is not divisible by n_heads 3; .* d_head"),
    (f"{TRAIN} --model.d-model 13", "--model.d-model: Input should be a multiple of 2"),
    (f"{TRAIN} --model.attention-window 0", r"--model.attention-window: Input should be greater than 0 \(given: 0\)"),
    (f"{TRAIN} --train.max-steps 0", "--train.max-steps: Input should be greater than 0"),
    (f"{TRAIN} --train.learning-rate inf", "--train.learning-rate: Input should be a finite number"),
    (f"{TRAIN} --train.max-steps 1.5e0", r"--train.max-steps: .* integer, .*\(given: '1.5e0'\)"),
    ("evaluate run --max-tokens 1.7", 'Invalid value for --max-tokens: unable to convert "1.7" into int'),
    (f"{TRAIN} --train.ema-decay 0.9", "--train.ema-decay has no effect without weight_average ema; give that too"),
    (f"{TRAIN} --train.muon-learning-rate-ratio 0.9", "muon-learning-rate-ratio has no effect without optimizer"),
    (f"{TRAIN} --train.muon-momentum 0.9", "muon-momentum"),
    (f"{TRAIN} --train.ngram-learning-rate-ratio 2", "ratio has no effect without --model.max-ngram 2 or more"),
    ("train --resume run --train.ema-decay 0.9", "--train.ema-decay has no effect without weight_average ema"),
    (f"{TRAIN} --model.ngram-buckets 9", "--model.ngram-buckets has no effect without max_ngram 2 or more; give"),
    (f"{TRAIN_SMALL} --model.max-ngram 3 --model.ngram-buckets 2000000000", "--model.ngram-buckets"),
    (f"{TRAIN} --model.d-ngram 8 --find-rate", "--model.d-ngram has no effect without max_ngram 2 or more"),
    ("reproduce ablation --corpus corpus --out new --model.d-ngram 8", "d-ngram has no effect without max_ngram 2"),
    ("finetune run --corpus corpus --run new --freeze nothing", "freeze 'nothing' matches no parameter; those of this"),
    ("finetune run --corpus corpus --run new --layer-rate-decay 0", "--layer-rate-decay: .* greater than 0"),
    (f"{TRAIN} --model.final-norm", "--model.final-norm has no effect without norm_first true"),
    (f"{TRAIN} --model.project-same-width", "--model.project-same-width has no effect without div_val 2 or more"),
    (
        f"{TRAIN} --model.tie-projections none --model.d-embed 256",
        "--model.tie-projections has no effect without d_embed other than d_model or div_val 2 or more; give that too",
    ),
    (f"{TRAIN} --threads 0", "--threads 0: must be"),
    (f"{TRAIN} --train.weight-average uniform --train.average-start-step 2000", "start_step 2,000 .*; give 1,999 or"),
    ("train --resume run --train.learning-rate 0.5", r"done all of its 5 steps, .*give --train.max-steps above 5"),
    ("train --resume run --model.n-layers 3", "--model.n-layers cannot change within a run; start a new one"),
    ("train --resume run --find-rate", "--find-rate is for a new run; give the recipe and .*, not --resume"),
    ("train --find-rate", "training needs --corpus DIR"),
    (f"{TRAIN.replace(' new', ' run')} --find-rate", "run holds a run already; "),
    (f"{TRAIN} --find-rate --evaluation.memory-length -4", "--evaluation.memory-length: .*given: -4"),
    (f"{TRAIN} --from 3", "--from and --base are for a run that is resumed; give --resume RUN"),
    (f"{TRAIN} --find-rate --base run", "--from and --base are for a run that is resumed; give --resume RUN"),
    ("train --resume run --train.optimizer muon", "--train.optimizer cannot change within a run; to train"),
    # `run` is what was typed, and a setting in the message
    ("train --resume run --train.optimizer muon", "start a new one with --run DIR"),
    ("evaluate memory_length", "error: memory_length: no such folder"),  # a file with the name of a setting
    ("evaluate run --attention-window 0", "window.* 0"),
    ("evaluate run --sweep-memory-length 0,a", "--sweep-memory-length 0,a: must be"),
    (f"{TRAIN} --model.cutoffs 5,256", "settings: model: cutoffs 5, 256 must be below vocab_size 256"),
    (f"{TRAIN} --model.cutoffs 5,7 --model.div_val 999", "last of 2 tails .* width 0"),
    (f"{TRAIN} --train.shuffle-documents", "has 3 documents or pieces .* 16 sequences .*; lower --train.batch-size"),
    # missing arguments
    ("train", r"training needs --corpus DIR \(from 'txl prepare'\), or --resume RUN to resume a run"),
    (
        "generate run --prompt -x",
        "--prompt requires an argument .a value that begins with - is given as --prompt=VALUE.",
    ),
    ("analyze context run --context-step 1 --max-context 2000000000", "0 have 2,000,000,000 before them"),
    ("info --verify", "--verify needs the folder of a run or a corpus"),
]


@pytest.mark.parametrize(("words", "message"), BAD_COMMANDS, ids=[words[:60] for words, _ in BAD_COMMANDS])
def test_bad_command_is_refused(folder: Path, words: str, message: str, capfd: Capture) -> None:
    assert_refused(folder, words, message, capfd)


# the available memory in bytes, above what the model needs by itself; a command; and what does not fit
LARGE = [
    (200_000, TRAIN_SMALL.replace("n-layers=2", "n-layers=2000000000"), "3 x 7 tokens .* smaller .*--model.n-layers"),
    (
        200_000,
        TRAIN_SMALL.replace("memory-length=11", "memory-length=900"),
        "a memory of 3 x 900.* lower .*--train.memory-length",
    ),
    (200_000, TRAIN_SMALL.replace("batch-size=3", "batch-size=80"), "80 x 7 tokens.* lower --train.micro-batch-size"),
    (200_000, f"{RESUME} --train.batch-size 80", "80 x 7 tokens.* lower --train.micro-batch-size"),
    (50_000, "evaluate run --split train --segment-length 600", "1 x 600 tokens.* lower .*--segment-length"),
    (50_000, "evaluate run --split train --batch-size 90", "a memory of 90 x 11.*--memory-length, .*--batch-size"),
    (
        50_000,
        "evaluate run --split train --method sliding-window --memory-length 0 --attention-window 90 --batch-size 90",
        "90 x 90 tokens.* lower --attention-window or --batch-size",
    ),
    (
        200_000,
        "evaluate run --method dynamic --dynamic.optimizer sgd --memory-length 90000",
        ".* lower --memory-length",
    ),
    (50_000, "score run other.txt --segment-length 600", "1 x 600 tokens.*"),
    (50_000, "generate run --num-samples 1000000000", "1,000,000,000 x 11 .* lower --memory-length or --num-samples"),
    (50_000, "generate run --num-beams 1000000000", "1,000,000,000 x 11 .* lower --memory-length or --num-beams"),
    (50_000, "generate run --memory-length 2000000000", "a memory of 1 x 2,000,000,000.*"),
    (50_000, "serve run --max-memory-length 2000000000", "of 64 x 2,000,000,000.* lower --max-batch, --memory-length"),
    (50_000, "analyze attention run --segment-length 600 --split train", "2 heads, .* lower --segment-length"),
    (50_000, "analyze context run --split train --num-positions 90 --context-step 30", "90 x 11.* lower --max-context"),
    (50_000, "analyze speed tiny --attention-windows 1000000", "1,000,000 tokens.* lower --attention-windows"),
]


@pytest.mark.parametrize(("available", "words", "message"), LARGE)
def test_sizes_that_do_not_fit_are_refused(
    folder: Path, available: int, words: str, message: str, capfd: Capture, monkeypatch: Patch
):
    monkeypatch.setattr(device, "_SMALL_BYTES", 0)
    monkeypatch.setattr(device, "available_memory_bytes", lambda _: available)
    assert_refused(folder, words, message.replace(".*", ".*needs at least .*", 1), capfd)


def test_weights_that_do_not_fit_are_refused(folder: Path, capfd: Capture, monkeypatch: Patch):
    monkeypatch.setattr(device, "_SMALL_BYTES", 0)
    monkeypatch.setattr(device, "available_memory_bytes", lambda _: 5_000)
    assert_refused(folder, "generate run", "the model needs at least .* use a machine with more memory", capfd)


# as raised by Python, by torch on a CPU and by torch on a GPU
OUT_OF_MEMORY = [
    MemoryError(),
    RuntimeError("alloc_cpu: can't allocate memory"),
    RuntimeError("Storage size calculation overflowed with sizes=[2000000000, 2000000000]"),
    torch.OutOfMemoryError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_out_of_memory_is_explained(folder: Path, error: Exception, monkeypatch: Patch, capfd: Capture) -> None:
    monkeypatch.setattr(HiddenMemory, "empty", Mock(side_effect=error))
    monkeypatch.setattr(KeyValueMemory, "empty", Mock(side_effect=error))
    for words in ("evaluate run", "generate run", TRAIN_SMALL):
        assert_refused(folder, words, "not enough memory; lower the batch size, .*memory length", capfd)


@needs_permissions
def test_missing_permission_is_refused(folder: Path, capfd: Capture) -> None:
    (folder / "text.txt").chmod(0)
    (folder / "folder").chmod(0o500)
    for words, message in (
        (TRAIN_SMALL.replace("run new", "run folder/new"), "writing folder/new: permission denied"),
        ("prepare other.txt --out folder/new", "writing folder/new: permission denied"),
        ("prepare text.txt --out new", "reading text.txt: permission denied"),
        ("generate run --prompt-file text.txt", "reading text.txt: permission denied"),
    ):
        assert re.search(message, error_of(words, capfd))
        assert not list((folder / "folder").iterdir())


Change = Callable[[bytes], bytes]


def flip_bit(index: int) -> Change:
    return lambda content: content[:index] + bytes([content[index] ^ 1]) + content[index:][1:]


def truncate(length: int) -> Change:
    return lambda content: content[:length]


def substitute(pattern: bytes, new: bytes) -> Change:
    return lambda content: re.sub(pattern, new, content)


WEIGHTS, CONFIG, METRICS = "model.safetensors", "config.yaml", "metrics.jsonl"
LAST_WEIGHTS, TRAINING = "checkpoints/step-00000005/model.safetensors", "checkpoints/step-00000005/training.json"
# shard-00001: written by the first process; model-00001-of-00001: the only file of that process
OPTIMIZER = "checkpoints/step-00000005/training/shard-00001-model-00001-of-00001.safetensors"
CHECKSUM = rf"safetensors is damaged \(its checksum does not match its contents\); {DAMAGED}"
INCOMPLETE = rf"safetensors is damaged \(not a complete safetensors file: .*\); {DAMAGED}"
# by name: file of the run, change of its contents or None to delete it, command, pattern of the message
DAMAGES: dict[str, tuple[str, Change | None, str, str]] = {
    "weights truncated": (WEIGHTS, truncate(-1), "evaluate run", INCOMPLETE),
    "best weights truncated, resumed": (WEIGHTS, truncate(-1), RESUME, INCOMPLETE),
    "weight altered": (WEIGHTS, flip_bit(-101), "evaluate run", CHECKSUM),
    "tensor name altered": (WEIGHTS, substitute(b"softmax.bias", b"softmaxxbias"), "generate run",
        r"model.safetensors does not fit the settings in config.yaml \(at softmax"),
    "weights missing": (WEIGHTS, None, "evaluate run", f"run/{WEIGHTS}, the best weights, is missing; copy it again, "),
    "last weights altered": (LAST_WEIGHTS, flip_bit(-101), RESUME, CHECKSUM),
    "optimizer altered": (OPTIMIZER, flip_bit(-101), RESUME, CHECKSUM),
    "optimizer empty, verified": (OPTIMIZER, truncate(0), "info run --verify", CHECKSUM),
    "optimizer missing": (OPTIMIZER, None, RESUME, f"run/{OPTIMIZER} is missing; {DAMAGED}"),
    "training state altered": (TRAINING, substitute(rb'"step": 5', rb'"step": 4'), RESUME,
        rf"training.json is damaged \(its checksum does not match its contents\); {DAMAGED}"),
    "training state truncated": (TRAINING, truncate(99), RESUME,
        rf"training.json is damaged \(it is incomplete\); {DAMAGED}"),
    "training state missing": (TRAINING, None, "info run --verify", f"run/{TRAINING} is missing; {DAMAGED}"),
    "metrics not JSON": (METRICS, substitute(b"{", b"["), RESUME, r"run/metrics.jsonl is damaged \(.*\); delete it"),
    "metrics with a loss as text": (METRICS, lambda content: content + b'{"split": "valid", "step": 9, '
        b'"nats_per_token": "1"}\n', "info run", r"run/metrics.jsonl is damaged \(the loss '1' is no number\); delete"),
    "metrics not text": (METRICS, lambda _: b"\xff\n", "info run", r"run/metrics.jsonl is damaged \(.*\); delete it"),
    "config not YAML": (CONFIG, lambda _: b"model: [", "evaluate run", r"run/config.yaml: not readable as YAML \("),
    "config with an invalid date": (CONFIG, lambda _: b"recipe: 2020-13-13", "evaluate run", "YAML .month must be"),
    "config with an unknown setting": (CONFIG, substitute(b" max_steps:", b" max_stepz:"), "evaluate run",
        r"run/config.yaml: train: unknown setting 'max_stepz' \(did you mean 'max_steps'\?\)"),
    "config of another model": (CONFIG, substitute(b"d_ff: 19", b"d_ff: 23"), "evaluate run",
        r"model.safetensors does not fit the settings in config.yaml \(at layers.0.feed_forward"),
    "corpus moved": (CONFIG, substitute(b"/w/corpus\n", b"/w/moved\n"), "evaluate run",
        "the corpus of this run, .*/w/moved, no longer exists; pass --corpus DIR"),
    "tokenizer of another run": (CONFIG, substitute(rb"tokenizer_sha256: [0-9a-f]{5}", b"tokenizer_sha256: 0000"),
        "generate run", "run/txl_tokenizer.json is not the one this run was trained with; copy it again"),
    "tokenizer missing": ("txl_tokenizer.json", None, "generate run", "run/txl_tokenizer.json: missing"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_run_is_refused(folder: Path, damage: str, capfd: Capture) -> None:
    name, change, words, message = DAMAGES[damage]
    file = folder / "run" / name
    if change is None:
        file.unlink()
    else:
        before = file.read_bytes()
        file.write_bytes(change(before))
        assert file.read_bytes() != before
    assert_refused(folder, words, message, capfd)


def test_run_with_wrong_or_missing_files_is_refused(folder: Path, capfd: Capture) -> None:
    weights = folder / "run" / "model.safetensors"
    save_file({"weight": torch.zeros(3)}, weights)
    assert_refused(folder, "evaluate run", "model.safetensors was not written by this version of the program", capfd)
    weights.unlink()
    weights.mkdir()
    assert_refused(folder, "evaluate run", "reading run/model.safetensors: is a folder, must be a file", capfd)
    shutil.rmtree(folder / "run" / "checkpoints")
    assert_refused(folder, RESUME, "run/checkpoints contains no checkpoint; .* 'txl train --run DIR'", capfd)
    weights.rmdir()
    no_weights = "run has no weights yet; train it: txl train --resume run"
    assert_refused(folder, "evaluate run --checkpoint last", no_weights, capfd)


def test_corpus_with_another_tokenizer_is_refused(folder: Path, capfd: Capture) -> None:
    do("prepare text.txt --out other --tokenizer char")
    # 26 letters and 256 tokens for the bytes of other characters
    message = r"other has another tokenizer than run \(char, 282 tokens, not byte, 256 tokens\); prepare it"
    assert_refused(folder, "evaluate run --corpus other", message, capfd)
    assert_refused(folder, "train --resume run --corpus other", message, capfd)


def test_corpus_of_another_text_can_be_evaluated_but_not_trained_on(folder: Path, capfd: Capture) -> None:
    do("prepare other.txt --out other")
    do("evaluate run --corpus other --json")
    message = "other has a different training text than run; pass the corpus of the run"
    assert_refused(folder, "train --resume run --corpus other", message, capfd)


@pytest.mark.skipif(os.name != "posix", reason="folders are locked on POSIX only")
def test_run_is_locked_while_it_is_trained(folder: Path, monkeypatch: Patch, capfd: Capture) -> None:
    """Two commands that train the same run would delete each other's checkpoints."""
    errors: list[str] = []
    train = Trainer.run

    def lock_and_train(trainer: Trainer) -> Any:
        with pytest.raises(UserError) as error, lock_folder(trainer.folder.path):
            pass
        errors.append(str(error.value))
        return train(trainer)

    monkeypatch.setattr(Trainer, "run", lock_and_train)
    do(TRAIN_SMALL)
    do("train --resume run --train.max-steps=6")
    message = "{} is in use by another txl command; wait until it has ended, or stop it"
    assert errors == [message.format(name) for name in ("new", "run")]
    with lock_folder(folder / "run"):
        assert_refused(folder, RESUME, message.format("run"), capfd)
    do(RESUME)


@pytest.mark.parametrize("words", ["prepare -", "score run -", "generate run --chat"])
def test_a_closed_standard_input_is_refused(folder: Path, words: str, monkeypatch: Patch, capfd: Capture) -> None:
    """As after `txl score run - <&-`."""
    monkeypatch.setattr("sys.stdin", None)
    assert_refused(folder, words, "standard input is closed; give it a text, or ", capfd)


@pytest.mark.parametrize("words", [TRAIN_SMALL, "prepare text.txt --out new"])
def test_full_disk_leaves_no_new_files(folder: Path, words: str, monkeypatch: Patch, capfd: Capture) -> None:
    for writes in range(3):  # number of files and folders that are flushed (os.fsync) before the disk is full
        with monkeypatch.context() as patch:
            full_after(writes, patch)
            assert_refused(folder, words, f"writing .*new.*: {FULL}", capfd)
    with no_file_larger_than(100):
        assert_refused(folder, words, "file too large for this file system; choose another path", capfd)


def test_run_whose_first_checkpoint_could_not_be_written_can_be_resumed(folder: Path, capfd: Capture) -> None:
    with no_file_larger_than(9000):  # larger than config.yaml and txl_tokenizer.json, smaller than the file of weights
        message = error_of(TRAIN_SMALL, capfd)
    assert re.search(r"writing new/checkpoints/.*model.safetensors: file too large", message)
    names = {"checkpoints", "config.yaml", "starts.jsonl", "txl_tokenizer.json"}
    assert {path.name for path in (folder / "new").rglob("*")} == names
    do("train --resume new")
    assert_same_weights(folder / "new", folder / "run")


def assert_same_weights(run_path: Path, expected_path: Path) -> None:
    weights, expected = (load_tensors(path / "model.safetensors")[0] for path in (run_path, expected_path))
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def test_full_disk_while_training_keeps_the_run_valid(folder: Path, monkeypatch: Patch, capfd: Capture) -> None:
    """Wherever training is interrupted (tried at every seventh os.fsync), it resumes to the same weights."""
    resume = "train --resume run --train.max-steps=8 --train.checkpoint-interval=2"
    shutil.copytree("run", "start")
    do(resume)
    shutil.move("run", "uninterrupted")
    writes = 0
    while True:
        shutil.copytree("start", "run")
        with monkeypatch.context() as patch:
            full_after(writes, patch)
            capfd.readouterr()
            if run(resume.split()) == 0:
                break
        assert re.search(rf"^txl: error: .*{FULL}$", capfd.readouterr().err, re.MULTILINE)
        assert not list(Path("run").rglob("*.partial-*"))
        assert RunFolder.open("run").metrics()
        assert Path("run/model.safetensors").exists()
        RunFolder.open("run").verify()
        do(resume)
        assert_same_weights(folder / "run", folder / "uninterrupted")
        shutil.rmtree("run")
        writes += 7
    assert writes >= 20  # so that several interruptions were tried
