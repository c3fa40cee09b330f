"""Each call that writes, renames or deletes a file may fail: no traceback, nothing lost, and a second try works.

TXL_FAILING_CALLS is the number of calls of each command and fault that are tried, or `all`, which takes hours; 1000 are
the first ones of each kind and path. By default it is 1, and some commands that take long to import are left out.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from failing_calls import FAULTS, FailingCalls, Fault, Trial
from integrations.checkpoints.checkpoints import golden, hugging_face_folder
from integrations.checkpoints.old_modules import OldConfig, old_corpus, old_model, old_modules
from refusals import NO_RECIPE, do, files
from safetensors.torch import load

TRIED = os.environ.get("TXL_FAILING_CALLS")
pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which("cc") is None, reason="needs LD_PRELOAD and a C compiler"
    ),
    pytest.mark.timeout(400 if TRIED is None else 7200),  # in the middle of a trial it would spoil those that follow
]
WORDS = [f"word{index}" for index in range(23)]
TRAIN = (
    f"train {NO_RECIPE} --corpus corpus --model.n-layers=2 --model.d-model=14 --model.n-heads=2 --model.d-head=5 "
    "--model.d-ff=19 --train.segment-length=7 --train.memory-length=11 --train.batch-size=3 --train.max-steps=4 "
    "--train.eval-interval=2 --train.warmup-steps=1 --train.checkpoint-interval=2"
)
SPLITS = "--valid-fraction 0.2 --test-fraction 0.2"
FINETUNE = "finetune run --corpus other --run new --train.max-steps 2 --train.warmup-steps 1 --train.eval-interval 1"


class Case(NamedTuple):
    """A command."""

    words: str
    changes: str = "\0"
    """What it may have changed or created when it fails."""
    stdin: bytes = b""


CASES = {
    "prepare": Case(f"prepare text.txt --out new {SPLITS}"),
    "prepare in folders": Case(f"prepare text.txt --out a/b/new --tokenizer word {SPLITS}", changes="a"),
    "prepare in processes": Case("prepare text.txt --out new --tokenizer bpe --vocab-size 270 --num-workers 2"),
    "train": Case(f"{TRAIN} --run new", changes="new"),
    "train with averages": Case(f"{TRAIN} --run new --train.weight-average=ema", changes="new"),
    "train with a tracker": Case(f"{TRAIN} --run new --train.trackers=tensorboard", changes="new"),
    "resume": Case("train --resume run --train.max-steps 8", changes="run"),
    "go back": Case("train --resume run --from 2", changes="run"),
    "finetune": Case(FINETUNE, changes="new"),
    "finetune an adapter": Case(f"{FINETUNE} --lora-rank 3", changes="new"),
    "export": Case("convert run new --to huggingface"),
    "export for earlier": Case("convert words-run new --to huggingface-4.37"),
    "import": Case("convert hub new"),
    "import the authors'": Case("convert official new"),
    "merge an adapter": Case("convert adapter new"),
    "watch": Case("watch run --state state --json", stdin=b"abc\nword1 word2\nwor"),
    "watch again": Case("watch run --state old.state --json", stdin=b"d3\nabc\n"),
    "score": Case("score run text.txt --out new.csv --per word"),
    "evaluate": Case("evaluate run --token-losses new.npy"),
    "embed": Case("embed run text.txt --out new.npy"),
    "attention": Case("analyze attention run --out new --max-tokens 30"),
    "context": Case(
        "analyze context run --out new.json --min-context 4 --max-context 8 --context-step 4 --num-positions 50"
    ),
    "speed": Case("analyze speed run --attention-windows 3 --segment-lengths 5 --repeats 1 --out new.json"),
}  # fmt: skip


QUICK = ("prepare", "resume", "export", "watch again")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts, corpora, runs and checkpoints of other programs."""
    folder = tmp_path_factory.mktemp("pristine")
    draw = random.Random(3)
    lines = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 9))) for _ in range(60)]
    text = "\n".join(lines).encode() + b"\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_bytes(text)
        do(f"prepare text.txt --out corpus {SPLITS}")
        do(f"{TRAIN} --run run")
        if not TRIED:
            return folder
        do(f"prepare text.txt --out words --tokenizer word {SPLITS}")
        do(f"prepare text.txt --out other {SPLITS}")
        do(f"{TRAIN.replace('--corpus corpus', '--corpus words')} --run words-run")
        do(FINETUNE.replace("--run new", "--run adapter") + " --lora-rank 3")
        config, weights, _ = golden("clusters")
        hugging_face_folder(Path("hub"), config, weights, WORDS)
        Path("official").mkdir()
        with old_modules():
            torch.save(old_model(OldConfig()), "official/model.pt")
            torch.save(old_corpus(WORDS), "official/cache.pt")
    return folder


@pytest.fixture(scope="module")
def calls(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailingCalls]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TXL_CACHE", "cache")
        for name in ("http_proxy", "https_proxy"):
            patch.setenv(name, "http://127.0.0.1:9")  # nothing listens there
        with FailingCalls(tmp_path_factory.mktemp("calls")) as calls:
            begun = calls.run(["watch", "run", "--state", "old.state"], pristine, stdin=b"text of before\nand wor")
            assert begun.status == 0, begun.err
            yield calls


def contents(folder: Path) -> dict[str, Any]:
    """Return the contents of all files by path, without times, process ids and dates."""

    def values(name: str, content: bytes | None) -> Any:
        if content is not None and "/training/shard-" in name and ".partial-" not in name:  # its metadata has no order
            return {key: tensor.tolist() for key, tensor in sorted(load(content).items())}
        if content is None or not name.endswith((".json", ".jsonl")):
            return content
        lines = [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]  # the last may be cut off
        entries = [json.loads(line) for line in lines] if name.endswith("l") else [json.loads(content)]
        if name == "new.json":  # of measured times, and losses
            return re.sub(r"\d+\.\d+(e-?\d+)?", "", json.dumps(entries))
        if name.endswith(("training.json", ".jsonl")):
            return json.loads(
                re.sub(r'"(seconds|tokens_per_second|sha256|shard-[^"]*)": [^,}]*', '"": 0', json.dumps(entries))
            )
        return entries

    found = {os.path.relpath(name, folder): content for name, content in files(folder).items()}
    skipped = re.compile(r"tensorboard/|trackers\.json$|starts\.jsonl$")
    return {name: values(name, content) for name, content in found.items() if not skipped.search(name)}


class Trials:
    """The trials of one command."""

    def __init__(self, case: Case, pristine: Path, calls: FailingCalls) -> None:
        self.case, self.pristine, self.calls = case, pristine, calls
        self.work = pristine.parent / "case"
        self.before = contents(pristine)
        self.fresh()
        self.clean = self.run()
        assert self.clean.status == 0, self.clean.err
        self.expected = contents(self.work)

    def fresh(self) -> None:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.pristine, self.work, symlinks=True)

    def run(self, words: str | None = None, fault: Fault = FAULTS[0], number: int = 0) -> Trial:
        return self.calls.run((words or self.case.words).split(), self.work, fault, number, self.case.stdin)

    def numbers(self, fault: Fault, name: str) -> dict[int, str]:
        """Return calls by number: the first ones of each kind and path, in random order, as many as asked for."""
        kinds = fault.kinds.split()
        made = dict(enumerate((call for call in self.clean.calls if call.split(" ")[0] in kinds), 1))
        if TRIED == "all":
            return made
        first = {re.sub(r"-\d+|\.tmp\w+", "", made[number]): number for number in reversed(made)}
        drawn = list(first.values())
        random.Random(f"{name} {fault}").shuffle(drawn)
        return {number: made[number] for number in drawn[: int(TRIED or 1)]}

    def problems(self, fault: Fault, number: int, call: str) -> list[str]:
        """Let a call fail, and return what is wrong then."""
        self.fresh()
        trial = self.run(fault=fault, number=number)
        if not trial.failed:
            return []
        found = list[str]()
        after, is_killed = contents(self.work), fault.error == "killed"
        could_delete = "unlink" not in call and (not fault.lasting or "unlink" not in fault.kinds) and not is_killed
        # after a rename that cannot be flushed, nothing can be put back where every later call fails too
        is_done = after == self.expected and (is_killed or (fault.lasting and "fsync" in call))
        left = [name for name in after if re.search(r"\.partial-|\.tmp", name)]
        if left and could_delete:
            found.append(f"left over: {left[:3]}")
        if trial.status in (2, -9):
            message = (trial.err.splitlines() or [""])[-1]
            if is_killed:
                pass
            elif (
                not message.startswith("txl: error: ") or trial.err.count("txl: error: ") != 1 or ".partial-" in message
            ):
                found.append("no clear message")
            changed = [
                name
                for name in {**self.before, **after}
                if name not in left
                and (name not in self.before or name not in after or self.before[name] != after[name])
            ]
            unasked = [name for name in changed if not name.startswith(self.case.changes)]
            if unasked and not is_done:
                found.append(f"changed by a command that failed: {unasked[:5]}")
            if (self.work / self.case.changes.strip("\0") / "config.yaml").exists() and self.case.changes != "\0":
                checked = self.run(f"info {self.case.changes} --verify --json")
                if checked.status not in (0, 2) or (checked.status and "no weights yet" not in checked.err):
                    found.append(f"the run is damaged: {checked.err[-300:]}")
        elif trial.status != 0:
            found.append("status")
        if "Traceback" in trial.err or "Warning" in trial.err:
            found.append("traceback")
        if trial.status != 0 and not is_done:
            trial_again = self.again()
            if trial_again.status != 0:
                found.append(f"a second try fails: {trial_again.err[-300:]}")
        after = self.expected if is_done else contents(self.work)
        kept = {name: value for name, value in after.items() if not re.search(r"\.partial-|\.tmp", name)}
        if is_killed and len(kept) < len(after) and self.case.words.startswith(("train", "finetune")):
            found.append(f"left over after the second try: {[name for name in after if name not in kept][:3]}")
        if differing := [name for name in {**kept, **self.expected} if kept.get(name, 0) != self.expected.get(name, 0)]:
            found.append(f"the result differs: {differing[:5]}")
        said = f"{fault.error}{' lasting' if fault.lasting else ''} in call {number}, {call}: status {trial.status}"
        return [f"{said}: {problem}; it said {trial.err[-600:]!r}" for problem in found]

    def again(self) -> Trial:
        """Run the command once more, and do what it says if there is a run by now."""
        trial = self.run()
        if trial.status == 2 and (advice := re.search(r"\(txl (train --resume [^)]*)\)", trial.err)):
            return self.run(advice[1])
        if trial.status == 2 and "remove the folder and fine-tune anew" in trial.err:
            shutil.rmtree(self.work / "new")
            return self.run()
        return trial


@pytest.fixture(scope="module")
def trials(pristine: Path, calls: FailingCalls) -> Callable[[str], Trials]:
    return cache(lambda name: Trials(CASES[name], pristine, calls))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.error)
@pytest.mark.parametrize("name", CASES if TRIED else QUICK)
def test_call_fails(name: str, fault: Fault, trials: Callable[[str], Trials]) -> None:
    numbers = trials(name).numbers(fault, name)
    assert numbers
    problems = [problem for number, call in numbers.items() for problem in trials(name).problems(fault, number, call)]
    assert not problems, "\n".join([f"{len(problems)} problems in {len(numbers)} calls", *problems])
