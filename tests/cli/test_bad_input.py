"""What a user can do wrong: one line on standard error, exit status 2, nothing new or changed on disk."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import FULL, assert_refused, do, error_of, files, full_after, no_file_larger_than
from safetensors.torch import save_file

from transformer_xl.cli.main import run
from transformer_xl.config import UserError
from transformer_xl.files import lock_folder
from transformer_xl.model.key_values import KeyValueMemory
from transformer_xl.model.memory import HiddenMemory
from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import load_tensors
from transformer_xl.training.trainer import Trainer

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
needs_permissions = pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")

MODEL = "--model.n-layers=2 --model.d-model=14 --model.n-heads=2 --model.d-head=5 --model.d-ff=19"
TRAIN = (
    "--train.segment-length=7 --train.memory-length=11 --train.batch-size=3 --train.max-steps=5 --train.eval-interval=3"
)
TRY = "train --corpus corpus --run new --train.segment-length=7 --train.batch-size=3"
NEW = f"train --corpus corpus --run new {MODEL} {TRAIN}"
DAMAGED = "copy it again, or delete its folder checkpoints/step-N"


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, a corpus and a run."""
    place = tmp_path_factory.mktemp("ready") / "w"
    place.mkdir()
    text = bytes((place * place + place // 13) % 26 + 97 for place in range(701))
    for name, content in {"text": text, "other": text[::-1], "short": b"abc", "small": text[:20], "empty": b""}.items():
        (place / f"{name}.txt").write_bytes(content)
    (place / "folder").mkdir()
    (place / "wrong.yaml").write_text("title: a\nsource: b\ncorpus: c\nmodle: {n_layers: 2}\n")
    (place / "list.yaml").write_text("- 1\n")
    (place / "yes.yaml").write_text("title: a\nsource: b\ncorpus: c\ntrain: {max_steps: yes}\n")
    (place / "off.yaml").write_text("title: a\nsource: b\ncorpus: c\ntrain: {compile: off}\n")
    (place / "twice.yaml").write_text("title: a\nsource: b\ncorpus: c\nmodel: {n_layers: 2}\nmodel: {d_model: 8}\n")
    with Patch.context() as patch:
        patch.chdir(place)
        do("prepare text.txt --out corpus")
        do("prepare small.txt --out small --valid-fraction 0 --test-fraction 0")
        do(NEW.replace("--run new", "--run run"))
    return place


@pytest.fixture
def place(ready: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """A copy of it to stand in."""
    shutil.copytree(ready, tmp_path / "w")
    monkeypatch.chdir(tmp_path / "w")
    return tmp_path / "w"


WRONG_WORDS = [
    # what does not exist, with the nearest name that does
    ("trian", r'Unknown command "trian"\. Did you mean "train"\?'),
    ("evaluate run --memory-lengt 5", "--memory-lengt. Did you mean --memory-length?"),
    (f"{TRY} --train.max-stepz 5", "--train.max-stepz. Did you mean --train.max-steps?"),
    ("train enwik8-12 --corpus corpus --run new", r"no recipe 'enwik8-12' \(did you mean 'enwik8-12l'\?\)"),
    ("train gone.yaml --corpus corpus --run new", "recipe file 'gone.yaml' cannot be read"),
    ("train wrong.yaml --corpus corpus --run new", r"wrong.yaml: unknown setting 'modle' \(did you mean 'model'\?\)"),
    ("train yes.yaml --corpus corpus --run new", r"train.max_steps: .* integer .*\(given: True; .* unless quoted\)"),
    ("train off.yaml --corpus corpus --run new", r"train.compile: .* \(given: False; .* unless quoted\)"),
    (
        "train twice.yaml --corpus corpus --run new",
        r"twice.yaml: .*duplicate key 'model'",
    ),
    ("train list.yaml --corpus corpus --run new", "list.yaml: wanted a mapping of settings, found list"),
    (f"{TRY} --model.attn-implementation refrence", r"no attention kernel 'refrence' \(did you mean 'reference'\?\)"),
    (f"{TRY} --device cpuu", r"no device 'cpuu' on this computer \(did you mean 'cpu'\?\); available: auto, "),
    (f"{TRY} --device cpu:1", "no device 'cpu:1' on this computer"),
    ("evaluate run --device gpu", "no device 'gpu' on this computer"),
    ("generate run --device gpu", "no device 'gpu' on this computer"),
    ("evaluate run --split tset", r"no split 'tset' \(did you mean 'test'\?\)"),
    ("evaluate run --checkpoint lst", 'Did you mean "last"?'),
    ("recipes enwik8-12l", "Unused Tokens"),
    # files and folders
    (
        NEW.replace("corpus corpus", "corpus small"),
        "has 20 tokens, .* 3 sequences of 7 tokens needs 21; lower --train.batch-size",
    ),
    (
        NEW.replace("corpus corpus", "corpus gone"),
        "no corpus at gone; 'txl prepare FILES --out gone' creates one there",
    ),
    (NEW.replace("corpus corpus", "corpus run"), "run is a run, expected a corpus"),
    (NEW.replace("corpus corpus", "corpus folder"), r"folder is not a corpus \(it has no corpus.json\)"),
    (NEW.replace("run new", "run run"), "run holds a run already; resume it with 'txl train --resume run'"),
    (NEW.replace("run new", "run corpus"), "corpus exists already; choose another path"),
    ("train --resume gone", "gone: no such folder; expected a folder made by"),
    ("train --resume corpus", "corpus: a corpus, not a run; expected a folder"),
    ("train --resume run --run new", "leave the recipe and --run out"),
    ("evaluate folder", "folder: not the folder of a run; expected a folder"),
    ("evaluate gone", "gone: no such folder"),
    ("evaluate run --corpus gone", "no corpus at gone"),
    ("generate corpus", "corpus: a corpus, not a run"),
    ("generate run --prompt-file gone", "reading gone: no such file or folder"),
    ("generate run --prompt-file folder", "reading folder: is a folder, must be a file"),
    ("generate run --prompt-file empty.txt", "the prompt is empty; give some text"),
    # numbers
    (f"{TRY} --model.n-heads 3", "d_model 256 is not divisible by n_heads 3; .* d_head"),
    (f"{TRY} --model.d-model 13", "model.d_model: Input should be a multiple of 2"),
    (f"{TRY} --model.attention-window 0", r"model.attention_window: Input should be greater than 0 \(given: 0\)"),
    (f"{TRY} --evaluation.attention-window 0", "evaluation.attention_window: Input should be greater than 0"),
    (f"{TRY} --model.n-layers two", r"n_layers: Input should be a valid integer.*\(given: 'two'\)"),
    (f"{TRY} --model.dropout 1", "model.dropout: Input should be less than 1"),
    (f"{TRY} --train.max-steps 0", "train.max_steps: Input should be greater than 0"),
    (f"{TRY} --train.seed -1", "train.seed: Input should be greater than or equal to 0"),
    (f"{TRY} --train.learning-rate nan", "train.learning_rate: Input should be"),
    (f"{TRY} --train.learning-rate inf", "train.learning_rate: Input should be a finite number"),
    (
        NEW.replace("batch-size=3", "batch-size=97"),
        "has 631 tokens, .* 97 sequences of 7 tokens needs 679; lower --train.batch-size",
    ),
    (f"{TRY} --threads 0", "--threads 0: must be"),
    (
        f"{TRY} --train.weight-average uniform --train.average-start-step 2000",
        "average_start_step 2,000 .*; give 1,999 or less, or weight_average none",
    ),
    (
        "train --corpus corpus --run new --train.segment-length 8 --train.initial-segment-length 4 "
        "--train.segment-warmup-steps 2000",
        "segment_warmup_steps 2,000 .*; give 1,999 or less, or more max_steps",
    ),
    (
        "train --resume run --model.n-layers 3",
        "model.n_layers cannot change within a run; start a new one with --run DIR",
    ),
    ("train --resume run --train.optimizer muon", "train.optimizer cannot change within a run; start a new one"),
    ("evaluate run --attention-window 0", "window.* 0"),
    ("evaluate run --clamp-length 0", "clamp.length.* 0"),
    ("evaluate run --segment-length 0", "segment.length.* 0"),
    ("evaluate run --memory-length -1", "memory.length.* -1"),
    ("evaluate run --max-tokens 0", "max-tokens 0: must be 1 or more"),
    ("evaluate run --threads 0", "--threads 0: must be"),
    ("evaluate run --sweep-memory-length 0,a", "--sweep-memory-length 0,a: must be"),
    ("evaluate run --sweep-memory-length 0,-1", "--sweep-memory-length 0,-1: must be"),
    ("evaluate run --sweep-memory-length 0 --memory-length 5", "--sweep-memory-length .*one of them"),
    # missing
    ("train --corpus corpus --run new --model.cutoffs 20,10", "cutoffs 20, 10 must increase"),
    (
        "train --corpus corpus --run new --model.cutoffs 5,256",
        "cutoffs 5, 256 must be below vocab_size 256",
    ),
    ("train --corpus corpus --run new --model.cutoffs 5;7", "must be integers separated by commas"),
    ("train wikitext-103-large --corpus corpus --run new", "must be below vocab_size 256"),
    ("train --corpus corpus --run new --model.cutoffs 5,7 --model.div_val 999", "last of 2 tails .* width 0"),
    (
        "train --corpus corpus --run new --train.shuffle-documents",
        "has 1 documents, .* 16 sequences .*; lower --train.batch-size",
    ),
    ("train", r"training needs --corpus DIR \(from 'txl prepare'\), or --resume RUN to resume a run"),
    ("evaluate", "RUN requires an argument"),
    ("generate", "RUN requires an argument"),
    ("info --verify", "--verify needs the folder of a run or a corpus"),
]


@pytest.mark.parametrize(("words", "message"), WRONG_WORDS, ids=[words[:60] for words, _ in WRONG_WORDS])
def test_wrong_words(place: Path, words: str, message: str, capfd: Capture) -> None:
    assert_refused(place, words, message, capfd)


NO_MEMORY = [
    MemoryError(),
    RuntimeError("alloc_cpu: can't allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=repr)
def test_not_enough_memory(place: Path, error: Exception, monkeypatch: Patch, capfd: Capture) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    for kind in (HiddenMemory, KeyValueMemory):
        monkeypatch.setattr(kind, "empty", refuse)
    for words in ("evaluate run", "generate run", NEW):
        assert_refused(place, words, "not enough memory; lower the batch size, .*memory length", capfd)


@needs_permissions
def test_no_permission(place: Path, capfd: Capture) -> None:
    (place / "text.txt").chmod(0)
    (place / "folder").chmod(0o500)
    for words, message in (
        (NEW.replace("run new", "run folder/new"), "writing folder/new: permission denied"),
        ("generate run --prompt-file text.txt", "reading text.txt: permission denied"),
    ):
        assert re.search(message, error_of(words, capfd))
        assert not list((place / "folder").iterdir())
        assert not (place / "new").exists()


# Files of a run that are not what they were.

Change = Callable[[bytes], bytes]


def flip(place: int) -> Change:
    return lambda content: content[:place] + bytes([content[place] ^ 1]) + content[place:][1:]


def cut(length: int) -> Change:
    return lambda content: content[:length]


def put(new: bytes) -> Change:
    return lambda _: new


def swap(old: bytes, new: bytes) -> Change:
    return lambda content: re.sub(old, new, content)


BEST, SETTINGS, FIGURES = "model.safetensors", "config.yaml", "metrics.jsonl"
LAST, PROGRESS = "checkpoints/step-00000005/model.safetensors", "checkpoints/step-00000005/training.json"
STATE = "checkpoints/step-00000005/training/shard-00001-model-00001-of-00001.safetensors"
NO_FIGURES = r"run/metrics.jsonl is damaged \(.*\); delete it"
GO_ON = "train --resume run --train.max-steps 7"
CHECKSUM = rf"safetensors is damaged \(its checksum does not match its contents\); {DAMAGED}"
CUT = rf"safetensors is damaged \(not a complete safetensors file: .*\); {DAMAGED}"
NO_YAML = r"run/config.yaml: not readable as YAML \("
# a file of the run, what becomes of it (nothing: it is deleted), a command, what is said
DAMAGES: dict[str, tuple[str, Change | None, str, str]] = {
    "weights cut short": (BEST, cut(-1), "evaluate run", CUT),
    "weights cut to nothing": (BEST, cut(0), "generate run", CUT),
    "a byte of a weight altered": (BEST, flip(-101), "evaluate run", CHECKSUM),
    "a name altered": (BEST, swap(b"softmax.bias", b"softmaxxbias"), "generate run", CHECKSUM),
    "best weights gone": (BEST, None, "evaluate run", f"run/{BEST}, the best weights, is missing; copy it again, or"),
    "last weights altered": (LAST, flip(-101), GO_ON, CHECKSUM),
    "state altered": (STATE, flip(-101), GO_ON, CHECKSUM),
    "state cut short": (STATE, cut(99), GO_ON, CHECKSUM),
    "state cut to nothing": (STATE, cut(0), "info run --verify", CHECKSUM),
    "state gone": (STATE, None, GO_ON, f"reading run/{STATE}: no such file"),
    "progress altered": (PROGRESS, swap(rb'"step": 5', rb'"step": 4'), GO_ON,
        rf"training.json is damaged \(its checksum does not match its contents\); {DAMAGED}"),
    "progress cut short": (PROGRESS, cut(99), GO_ON, rf"training.json is damaged \(it is incomplete\); {DAMAGED}"),
    "progress gone": (PROGRESS, None, "info run --verify", f"reading run/{PROGRESS}: no such file"),
    "any of it altered": (LAST, flip(-101), "info run --verify", CHECKSUM),
    "any of the state altered": (STATE, flip(-101), "info run --verify", CHECKSUM),
    "figures that are no JSON": (FIGURES, swap(b"{", b"["), GO_ON, NO_FIGURES),
    "figures that are no text": (FIGURES, put(b"\xff\n"), "info run", NO_FIGURES),
    "settings that are no YAML": (SETTINGS, put(b"model: ["), "evaluate run", NO_YAML),
    "settings that are no text": (SETTINGS, put(b"\xff\xfe\xff"), "generate run", NO_YAML),
    "settings with no such date": (SETTINGS, put(b"recipe: 2020-13-13"), "evaluate run", f"{NO_YAML}month must be"),
    "settings that are a list": (SETTINGS, put(b"- 1"), GO_ON, "config.yaml: wanted a mapping of settings, found list"),
    "an unknown setting": (SETTINGS, swap(b" max_steps:", b" max_stepz:"), "evaluate run",
        r"run/config.yaml: unknown setting 'train.max_stepz' \(did you mean 'max_steps'\?\)"),
    "settings of another model": (SETTINGS, swap(b"d_ff: 19", b"d_ff: 23"), "evaluate run",
        r"model.safetensors does not fit the settings in config.yaml \(at layers.0.feed_forward"),
    "the corpus moved": (SETTINGS, swap(b"/w/corpus\n", b"/w/moved\n"), "evaluate run",
        "the corpus of this run, .*/w/moved, no longer exists; pass --corpus DIR"),
    "another tokenizer": (SETTINGS, swap(rb"tokenizer_sha256: [0-9a-f]{5}", b"tokenizer_sha256: 0000"), "generate run",
        "run/txl_tokenizer.json is not the one this run was trained with; copy it again"),
    "no vocabulary": ("txl_tokenizer.json", None, "generate run", "run/txl_tokenizer.json: missing"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run(place: Path, damage: str, capfd: Capture) -> None:
    name, change, words, message = DAMAGES[damage]
    file = place / "run" / name
    if change is None:
        file.unlink()
    else:
        before = file.read_bytes()
        file.write_bytes(change(before))
        assert file.read_bytes() != before
    assert_refused(place, words, message, capfd)


def test_a_run_with_parts_that_are_something_else(place: Path, capfd: Capture) -> None:
    weights = place / "run" / "model.safetensors"
    save_file({"weight": torch.zeros(3)}, weights)
    assert_refused(place, "evaluate run", "model.safetensors was not written by this version of the program", capfd)
    weights.unlink()
    weights.mkdir()
    assert_refused(place, "evaluate run", "reading run/model.safetensors: is a folder, must be a file", capfd)
    shutil.rmtree(place / "run" / "checkpoints")
    assert_refused(place, GO_ON, "run/checkpoints contains no checkpoint; .* 'txl train --run DIR'", capfd)
    nothing = "run has no weights yet; train it with 'txl train --resume run'"
    assert_refused(place, "evaluate run --checkpoint last", nothing, capfd)


def test_a_corpus_of_another_vocabulary(place: Path, capfd: Capture) -> None:
    do("prepare text.txt --out other --tokenizer char")
    message = r"other has another tokenizer \(char, 282 tokens\) than run \(byte, 256 tokens\); prepare it"
    assert_refused(place, "evaluate run --corpus other", message, capfd)
    assert_refused(place, "train --resume run --corpus other", message, capfd)


def test_a_corpus_of_another_text(place: Path, capfd: Capture) -> None:
    """One may be scored on it, but training cannot go on with it."""
    do("prepare other.txt --out other")
    do("evaluate run --corpus other --json")
    message = "other has a different training text than run; pass the corpus of the run"
    assert_refused(place, "train --resume run --corpus other", message, capfd)


# A full disk.


@pytest.mark.skipif(os.name != "posix", reason="folders cannot be held there")
def test_a_run_that_another_command_trains(place: Path, monkeypatch: Patch, capfd: Capture) -> None:
    """Two would delete each other's checkpoints; a new run and one that goes on are held, until their end."""
    tried: list[str] = []
    train = Trainer.run

    def try_as_well(training: Trainer, *given: Any) -> Any:
        with pytest.raises(UserError) as error, lock_folder(training.folder.path):
            pass
        tried.append(str(error.value))
        return train(training, *given)

    monkeypatch.setattr(Trainer, "run", try_as_well)
    do(NEW)
    do("train --resume run --train.max-steps=6")
    said = "{} is in use by another txl command; wait until it has ended, or stop it"
    assert tried == [said.format(name) for name in ("new", "run")]
    with lock_folder(place / "run"):
        before = files(place)
        assert said.format("run") in error_of("train --resume run --train.max-steps=7", capfd)
        assert files(place) == before
    do("train --resume run --train.max-steps=7")


def test_a_disk_that_is_full(place: Path, monkeypatch: Patch, capfd: Capture) -> None:
    before = files(place)
    for writes in range(3):
        with monkeypatch.context() as patch:
            full_after(writes, patch)
            assert re.search(f"writing .*new.*: {FULL}", error_of(NEW, capfd))
        assert files(place) == before
    with no_file_larger_than(100):
        assert "file too large for this file system; choose another path" in error_of(NEW, capfd)
    assert files(place) == before


def test_a_disk_too_full_for_weights(place: Path, capfd: Capture) -> None:
    """The settings were written, the first checkpoint cannot be; once there is room, the run begins."""
    with no_file_larger_than(9000):
        said = error_of(NEW, capfd)
    assert re.search(r"writing new/checkpoints/.*model.safetensors: file too large", said)
    assert sorted(path.name for path in (place / "new").rglob("*")) == [
        "checkpoints",
        "config.yaml",
        "txl_tokenizer.json",
    ]
    do("train --resume new")
    found, wanted = (load_tensors(place / name / "model.safetensors")[0] for name in ("new", "run"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_weights_on_a_full_disk(place: Path, monkeypatch: Patch, capfd: Capture) -> None:
    """Wherever it happens: what was good stays good, nothing is half written, and later training goes on the same."""
    words = ["train", "--resume", "run", "--train.max-steps=11", "--train.checkpoint-interval=2"]
    shutil.copytree("run", "start")
    assert run(words) == 0
    shutil.move("run", "whole")
    wanted = load_tensors(place / "whole" / "model.safetensors")[0]
    number = 0
    while True:
        shutil.copytree("start", "run")
        with monkeypatch.context() as patch:
            full_after(number, patch)
            capfd.readouterr()
            if run(words) == 0:
                break
        assert re.search(rf"^txl: error: .*{FULL}$", capfd.readouterr().err, re.MULTILINE)
        assert not list(Path("run").rglob("*.partial-*"))
        assert RunFolder.open("run").metrics()
        assert Path("run/model.safetensors").exists()
        RunFolder.open("run").verify()
        assert run(words) == 0
        found = load_tensors(place / "run" / "model.safetensors")[0]
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
        shutil.rmtree("run")
        number += 7
    assert number > 30
