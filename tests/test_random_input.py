"""Random commands and randomly damaged files: no traceback, nothing lost, no wrong number, bounded time and memory.

TXL_RANDOM_CASES is the number of cases of each kind (default 12), TXL_RANDOM_SEED their seed (default 1).
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from cyclopts import CycloptsError
from integrations.checkpoints.checkpoints import FIXTURES, golden, hugging_face_folder
from integrations.checkpoints.old_modules import OldConfig, nvidia_checkpoint, old_corpus, old_model, old_modules
from random_input import commands, damage, draw_command
from refusals import do, files
from text_sources import make_files, tar_of, zip_of

from transformer_xl.cli.main import build_app, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limit on memory is Linux's")
Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
CASES, SEED = int(os.environ.get("TXL_RANDOM_CASES", "12")), int(os.environ.get("TXL_RANDOM_SEED", "1"))
SECONDS, NUM_BYTES = 60, 3 * 2**30  # more than any case may take
# results that differ from run to run, by JSON key
TIMES = {"seconds", "tokens_per_second", "from", "to", "tokens_per_s", "first_token_seconds"}
TREE = commands()
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
WORDS = [f"word{index}" for index in range(23)]
TRAIN = (
    "--model.n-layers=2 --model.d-model=14 --model.n-heads=2 --model.d-head=5 --model.d-ff=19 --train.segment-length=7 "
    "--train.memory-length=11 --train.batch-size=3 --train.max-steps=4 --train.eval-interval=2 --train.warmup-steps=1 "
    "--train.checkpoint-interval=2"
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, corpora, runs and checkpoints of other programs."""
    folder = tmp_path_factory.mktemp("pristine") / "w"
    folder.mkdir()
    draw = random.Random(3)
    lines = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 9))) for _ in range(60)]
    text = "\n".join(lines).encode() + b"\n"
    with Patch.context() as patch:
        patch.chdir(folder)
        Path("folder").mkdir()
        Path("link").symlink_to("nowhere")
        contents = {
            "text.txt": text, "a b.txt": text[::-1], "latin.txt": text + b"caf\xe9\n", "empty.txt": b"",
            "text.txt.gz": gzip.compress(text), "text.txt.bz2": bz2.compress(text), "text.txt.xz": lzma.compress(text),
            "archive.zip": zip_of({"a.txt": text}), "binary.bin": bytes(range(256)), "bad.npy": b"\x93NUMPY\x01\x00{",
            "numbers.txt": b"3 1 4 1 5\n9 2 6\n" * 20, "words.txt": "\n".join(["<eos>", "<unk>", *WORDS]).encode(),
            "small.yaml": b"title: a\nsource: b\ncorpus: c\nmodel: {n_layers: 1, d_model: 8, d_head: 3, n_heads: 2}\n"
            b"train: {max_steps: 2, segment_length: 5, memory_length: 4, batch_size: 2, warmup_steps: 1}\n",
            "list.yaml": b"- 1\n",
        }  # fmt: skip
        for name, content in contents.items():
            Path(name).write_bytes(content)
        np.save("ids.npy", np.arange(200, dtype=np.int64).reshape(20, 10) % 7)
        do("prepare text.txt --out corpus --valid-fraction 0.2 --test-fraction 0.2")
        do("prepare text.txt --out words --tokenizer word --valid-fraction 0.2 --test-fraction 0.2")
        do("prepare text.txt --out bpe --tokenizer bpe --vocab-size 270 --valid-fraction 0 --test-fraction 0")
        library = json.loads(Path("bpe/txl_tokenizer.json").read_text())["tokenizer"]
        Path("tokenizer.json").write_text(json.dumps(library))
        do(f"train --corpus corpus --run run {TRAIN}")
        do(f"train --corpus words --run words-run {TRAIN} --model.cutoffs=5,9")
        Path("words-run").rename("words run")
        lstm = "--model.architecture=lstm --model.n-layers=1 --model.d-model=6 " + TRAIN[TRAIN.index("--train") :]
        do(f"train --corpus corpus --run lstm {lstm.replace('memory-length=11', 'memory-length=1')}")
        config, weights, _ = golden("clusters")
        for hub in ("hub", "hub-bin"):
            hugging_face_folder(Path(hub), config, weights, WORDS)
        for name in ("model.safetensors", "vocab.json"):
            (Path("hub-bin") / name).unlink()
        torch.save(weights, "hub-bin/pytorch_model.bin")
        Path("hub-bin/vocab.pkl").write_bytes(pickle.dumps({"idx2sym": WORDS, "lower_case": False}, 2))
        for name in ("official", "nvidia", "legacy"):
            Path(name).mkdir()
        with old_modules():
            for name, is_archive in (("official", True), ("legacy", False)):
                torch.save(old_model(OldConfig()), f"{name}/model.pt", _use_new_zipfile_serialization=is_archive)
                torch.save(old_corpus(WORDS), f"{name}/cache.pt", _use_new_zipfile_serialization=is_archive)
            nvidia = nvidia_checkpoint(OldConfig(), old_model(OldConfig(nvidia=True)), WORDS)
            torch.save(nvidia, "nvidia/checkpoint_best.pt")
        shutil.copytree(FIXTURES.parent / "golden" / "tensorflow" / "words", "tensorflow/model")
        Path("tensorflow/data").mkdir()
        with old_modules():
            vocabulary = pickle.dumps(old_corpus([f"w{index}" for index in range(61)]), 2)
        Path("tensorflow/data/cache.pkl").write_bytes(vocabulary.replace(b"cutils.vocabulary\n", b"cvocabulary\n"))
        member = {"wikitext-2/wiki.train.tokens": text}
        make_files(Path(), {"zip/data.zip": zip_of(member), "tar.gz/data.tar.gz": tar_of(member)})
        Path("reports").mkdir()
        Path("reports/settings.yaml").touch()
        for name in ("ablation.json", "context.json"):
            shutil.copy(RESULTS / name, "reports")
    return folder


@pytest.fixture
def folder(pristine: Path, monkeypatch: Patch) -> Path:
    """A copy of that folder, as the working directory. No download is possible, and the cache is in the folder."""
    folder = copy_of(pristine)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TXL_CACHE", "cache")
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
    return folder


def copy_of(pristine: Path) -> Path:
    """Copy the folder to a path that is the same for all cases, because a corpus records the paths of its texts."""
    folder = pristine.parent / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(pristine, folder, symlinks=True)
    return folder


class TooSlow(BaseException):
    """Raised when a command exceeds its time."""


@contextmanager
def limits() -> Iterator[None]:
    """Limit the seconds that the block may take, and the memory that it may add to what this process has."""

    def stop(*_: Any) -> None:
        raise TooSlow

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + NUM_BYTES, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        torch.set_num_threads(1)


def relative_files(folder: Path) -> dict[str, bytes | None]:
    """Return the contents of all files in a folder by path in the folder, and None for each subfolder."""
    return {os.path.relpath(name, folder): content for name, content in files(folder).items()}


class Effect(NamedTuple):
    """What a command did."""

    status: int
    out: str
    err: str
    changed: list[str]
    """Files and folders that it created, changed or deleted."""
    numbers: Any
    """What it computed: the JSON object that it printed, and the files that it wrote."""


def effect_of(words: list[str], folder: Path, monkeypatch: Patch, capfd: Capture) -> Effect:
    """Run a command in the folder."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"word1 word2\n\xff\xfe\n")))
    before = relative_files(folder)
    capfd.readouterr()
    with limits():
        status = run(words)
    out, err = capfd.readouterr()
    after = relative_files(folder)
    changed = [name for name in {**before, **after} if name not in before or before[name] != after.get(name)]
    values = []
    if "--json" in words and status == 0 and "--help" not in words:
        lines = out.splitlines() if words[0] == "score" else [out]
        values = [without_times(json.loads(line, parse_constant=pytest.fail)) for line in lines]
    written = {
        name: after[name]
        for name in changed
        # the other files of a training contain times
        if name in after and (words[0] != "train" or name.endswith("model.safetensors"))
    }
    return Effect(status, out, err, changed, (values, written))


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(inner) for key, inner in value.items() if key not in TIMES}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def check(result: Effect, words: list[str], may_change: tuple[str, ...] = ()) -> None:
    """Check what holds for every command.

    Args:
        result: what the command did.
        words: the command.
        may_change: what it may change although it fails; a command that succeeds may also change the run that it
            resumes, and create what does not exist.
    """
    assert result.status in (0, 2)
    assert "Traceback" not in result.err
    assert "Warning" not in result.err
    assert not [name for name in result.changed if ".partial-" in name], "an incomplete file is left"
    lost = [name for name in result.changed if not name.startswith(may_change or "\0")]
    if result.status == 2:
        message = result.err.splitlines()[-1]
        assert message.startswith("txl: error: "), result.err
        assert result.err.count("txl: error: ") == 1
        assert len(message) < 3000
        assert result.out == "" or "--chat" in words  # replies to the lines before
        assert not lost, f"changed by a command that failed: {lost}"


@pytest.mark.parametrize("number", range(CASES))
def test_random_command(number: int, folder: Path, monkeypatch: Patch, capfd: Capture) -> None:
    words = draw_command(random.Random(f"{SEED} {number}"), TREE)
    print("txl", *map(repr, words))
    before = relative_files(folder)
    result = effect_of(words, folder, monkeypatch, capfd)
    print("txl", *map(repr, words), "->", result.status, result.err[-300:])
    check(result, words)
    resumed = words[words.index("--resume") + 1] if "--resume" in words else "\0"
    lost = [name for name in result.changed if name in before and not name.startswith(resumed)]
    assert not lost


def test_most_random_commands_pass_the_parser() -> None:
    passed, num_commands = 0, max(CASES, 50)
    for number in range(num_commands):
        words = draw_command(random.Random(f"{SEED} {number}"), TREE)
        try:
            build_app().parse_args(words, exit_on_error=False, print_error=False)
            passed += 1
        except CycloptsError:
            pass
    print(f"{passed} of {num_commands} command lines pass the parser")
    assert passed > num_commands / 2


class Damaged(NamedTuple):
    """A file to damage."""

    file: str
    commands: list[str]
    """Commands that read it."""
    is_json: bool = False
    is_checked: bool = True
    """Whether a change cannot go unnoticed, so that a command that succeeds has the same results as before."""
    may_change: tuple[str, ...] = ()
    """What a command may write although it fails."""


USE = [
    "evaluate run --json", "evaluate run --checkpoint last --json", "generate run --json --max-new-tokens 5",
    "info run --verify --json", "score run text.txt --json", "convert run new --to huggingface",
    "prepare text.txt --tokenizer run --out new",
]  # fmt: skip
RESUME = "train --resume run --train.max-steps 6"
CORPUS = [
    "evaluate run --json", "evaluate run --method dynamic --json", "info corpus --json", "info corpus --verify --json",
    f"train --corpus corpus --run new {TRAIN}",
]  # fmt: skip
PREPARE, CONVERT = "prepare {} --out new", "convert {} new --json"
FILES = [
    Damaged("run/config.yaml", [*USE, RESUME], is_checked=False, may_change=("run",)),
    Damaged("run/txl_tokenizer.json", [*USE, RESUME], is_json=True),
    Damaged("run/model.safetensors", [*USE, RESUME]),
    Damaged("run/metrics.jsonl", [*USE, RESUME], is_json=True, is_checked=False),
    *(
        Damaged(f"run/checkpoints/step-*4/{name}", [RESUME, "info run --verify --json"], is_json="json" in name)
        for name in ("training.json", "model.safetensors", "training/*")
    ),
    Damaged("words run/txl_tokenizer.json", ["evaluate|words run|--json", "score|words run|text.txt"], is_json=True),
    Damaged("corpus/corpus.json", CORPUS, is_json=True),
    Damaged("corpus/txl_tokenizer.json", CORPUS, is_json=True),
    *(Damaged(f"corpus/{name}", CORPUS) for name in ("train-00000.tokens", "test-00000.tokens", "test.documents")),
    Damaged("bpe/txl_tokenizer.json", [PREPARE.format("text.txt --tokenizer ./bpe")], is_json=True, is_checked=False),
    Damaged("tokenizer.json", [PREPARE.format("text.txt --tokenizer tokenizer.json")], is_json=True, is_checked=False),
    Damaged("small.yaml", ["train small.yaml --corpus corpus --run new"], is_checked=False, may_change=("new",)),
    Damaged("words.txt", [PREPARE.format("text.txt --tokenizer word --vocab-file words.txt")], is_checked=False),
    Damaged("text.txt", [PREPARE.format("text.txt"), PREPARE.format("text.txt --tokenizer word"),
                         PREPARE.format("text.txt --tokenizer char"), "score run text.txt --json",
                         PREPARE.format("text.txt --tokenizer bpe --vocab-size 270"),
                         "generate run --prompt-file text.txt --json --max-new-tokens 5"], is_checked=False),
    *(Damaged(f"text.txt.{suffix}", [PREPARE.format(f"text.txt.{suffix}"), f"score run text.txt.{suffix} --json"])
      for suffix in ("gz", "bz2", "xz")),
    Damaged("ids.npy", [PREPARE.format("ids.npy")], is_checked=False),
    Damaged("numbers.txt", [PREPARE.format("numbers.txt --tokenizer integer")], is_checked=False),
    *(Damaged(f"{name}/data.{name}", [PREPARE.format(f"wikitext-2 --data-dir {name}")], may_change=("cache",))
      for name in ("zip", "tar.gz")),
    *(Damaged(f"hub/{name}", [CONVERT.format("hub")], is_json="json" in name, is_checked=False)
      for name in ("config.json", "vocab.json", "model.safetensors")),
    Damaged("hub-bin/pytorch_model.bin", [CONVERT.format("hub-bin")]),
    Damaged("hub-bin/vocab.pkl", [CONVERT.format("hub-bin")], is_checked=False),
    *(Damaged(f"official/{name}", [CONVERT.format("official")]) for name in ("model.pt", "cache.pt")),
    *(Damaged(f"legacy/{name}", [CONVERT.format("legacy")], is_checked=False) for name in ("model.pt", "cache.pt")),
    Damaged("nvidia/checkpoint_best.pt", [CONVERT.format("nvidia")]),
    *(Damaged(f"tensorflow/model/{name}", [CONVERT.format("tensorflow")])
      for name in ("model.ckpt-17.index", "model.ckpt-17.data-00000-of-00001")),
    Damaged("tensorflow/data/cache.pkl", [CONVERT.format("tensorflow")], is_checked=False),
    *(Damaged(f"reports/{name}.json", ["reproduce speed run --smoke --out reports"], is_json=True, is_checked=False,
              may_change=("reports",)) for name in ("ablation", "context")),
]  # fmt: skip


@pytest.fixture(scope="module")
def undamaged() -> dict[str, Any]:
    """What each command computes from the undamaged files, filled as it is needed."""
    return {}


@pytest.mark.parametrize("number", range(CASES))
def test_random_damage(
    number: int, folder: Path, pristine: Path, undamaged: dict[str, Any], monkeypatch: Patch, capfd: Capture
) -> None:
    draw = random.Random(f"{SEED} {number}")
    # every file once before any file twice, in another order for each seed
    case = random.Random(SEED + number // len(FILES)).sample(FILES, len(FILES))[number % len(FILES)]
    command = draw.choice(case.commands)
    words = command.split("|") if "|" in command else command.split()  # | separates words that have blanks
    if case.is_checked and str(words) not in undamaged:
        expected = effect_of(words, folder, monkeypatch, capfd)
        undamaged[str(words)] = expected.numbers if expected.status == 0 else None
        monkeypatch.chdir(copy_of(pristine))
    path = min(folder.glob(case.file))
    content = path.read_bytes()
    path.write_bytes(damaged := damage(draw, content, is_json=case.is_json))
    result = effect_of(words, folder, monkeypatch, capfd)
    print(path, len(content), len(damaged), "txl", *words, "->", result.status, result.err[-300:])
    check(result, words, case.may_change)
    if case.is_checked and result.status == 0:
        assert result.numbers == undamaged[str(words)], "other results than from the undamaged file"
