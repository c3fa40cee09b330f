"""Compare the speed and memory of two commits, measured in turn on this machine.

    python benchmarks/speed.py [BASE [HEAD]]         base: the last tag, or HEAD~1; head: the working tree
    python benchmarks/speed.py --works train-small,score-small --rounds 5

Each work runs in a process of its own with the package of one commit, in the order base, head, head, base and so on.
A commit is checked out as a git worktree in a temporary folder; native operators are shared where the C++ sources are
the same. Two servers stand beside each other, and get load for 4 seconds in turn. A ratio is above 1 where head is
better, whatever the unit; its interval has the ratios of all rounds, its quartiles the middle half of them. The status
is 1 if a whole interval is below 0.95; the operators whose time rose most are printed then. The workers are those of
this file, and use the public interface alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from arguments import listed, one_of, positive
from environment import command, commit, cpu_features, cpu_model, refuse, results_file, say, warn_if_busy, write
from golden_cases import text_of

ROOT = Path(__file__).resolve().parents[1]
LOWEST_RATIO = 0.95
MODELS: dict[str, dict[str, Any]] = {
    "small": {"n_layers": 4, "d_model": 256, "n_heads": 4, "d_head": 64, "d_ff": 1024, "dropout": 0.0},
    "41m": {"n_layers": 12, "d_model": 512, "n_heads": 8, "d_head": 64, "d_ff": 2048, "dropout": 0.1},
}
TINY = {"n_layers": 1, "d_model": 16, "n_heads": 2, "d_head": 8, "d_ff": 16}
# works of `txl train`: the model, settings of training, and the steps that are measured, after 2 others
SMALL_TRAIN = {"segment_length": 64, "memory_length": 64, "batch_size": 32}
LARGE_TRAIN = {"segment_length": 512, "memory_length": 512, "batch_size": 2}
TRAINING: dict[str, tuple[str, dict[str, Any], int]] = {
    "train-small": ("small", {**SMALL_TRAIN, "dtype": "float32"}, 12),
    "train-small-bfloat16": ("small", {**SMALL_TRAIN, "dtype": "bfloat16"}, 12),
    "train-41m": ("41m", {**LARGE_TRAIN, "dtype": "float32"}, 3),
    "train-41m-bfloat16": ("41m", {**LARGE_TRAIN, "dtype": "bfloat16"}, 3),
}
# works of `worker`: the model, what it does, and how many tokens it reads or generates
WORKERS: dict[str, tuple[str, str, int]] = {
    "score-small": ("small", "score", 12_000),
    "score-41m": ("41m", "score", 4000),
    "generate-small": ("small", "generate", 200),
    "generate-41m": ("41m", "generate", 60),
    "prefill-small": ("small", "prefill", 4000),
    "prefill-41m": ("41m", "prefill", 1000),
}
SERVING = {f"serve-{clients}": clients for clients in (1, 8, 64)}
COMMANDS = {"import": ["-c", "import transformer_xl"], "help": ["-m", "transformer_xl", "--help"]}
WORKS = (*COMMANDS, *TRAINING, *WORKERS, *SERVING)
HIGHER_IS_BETTER = ("tokens/s",)


def worker(name: str, run: Path, *, memory_length: int, scale: int) -> float:
    """Do a work in this process, and return tokens per second.

    Args:
        name: one of WORKERS.
        run: folder of the run.
        memory_length: memory length in tokens.
        scale: the number of tokens is divided by this.
    """
    from transformer_xl import generate, load, score, stream

    _, kind, number = WORKERS[name]
    loaded, text, number = load(run, device="cpu"), text_of(6000, seed=5), number // scale
    limits = {"memory_length": memory_length}
    if kind == "score":
        score(loaded, text[:200], segment_length=80, **limits)
        start = time.perf_counter()
        score(loaded, text[:number], segment_length=80, **limits)
    elif kind == "generate":
        tokens = stream(loaded, text[:memory_length], seed=1, max_new_tokens=number, **limits)
        next(tokens)  # the prompt was read before
        start, number = time.perf_counter(), number - tokens.num_tokens
        "".join(tokens)
    else:  # prompts of 1/40 to 1 times the number of tokens
        prompts = [text[index : index + number * size // 40] for index, size in enumerate((1, 3, 10, 20, 40))]
        number = sum(map(len, prompts))
        start = time.perf_counter()
        generate(loaded, prompts, max_new_tokens=1, **limits)
    return number / (time.perf_counter() - start)


def operator_seconds(name: str, folder: Path, *, memory_length: int, scale: int) -> dict[str, float]:
    """Do a work in this process, and return the seconds of each operator of torch, without those that it calls.

    Args:
        name: one of WORKERS or TRAINING.
        folder: as for `prepare_files`.
        memory_length: as for `worker`.
        scale: as for `worker`; above 1, a tiny model is trained.
    """
    from torch.profiler import profile

    from transformer_xl import train

    with tempfile.TemporaryDirectory() as made, profile() as profiled:
        if name in WORKERS:
            worker(name, folder / WORKERS[name][0], memory_length=memory_length, scale=scale)
        else:
            model, settings, steps = TRAINING[name]
            model = TINY if scale > 1 else MODELS[model]
            settings = {**settings, "max_steps": steps + 2}
            train(None, folder / "corpus", Path(made) / "run", model=model, train=settings, progress=False)
    return {event.key: event.self_cpu_time_total / 1e6 for event in profiled.key_averages()}


def prepare_files(folder: Path, quick: bool, memory_length: int) -> None:
    """Write the corpus, and a run of each model with random weights, to a folder."""
    import torch

    from transformer_xl import Run, RunConfig, build_model, prepare, save

    corpus = prepare(out=folder / "corpus", documents={"train": [text_of(30_000, seed=4)]}, tokenizer="byte")
    for name, model in MODELS.items():
        settings = {"vocab_size": 256, **model, **(TINY if quick else {})}
        lengths = {"train": {"memory_length": 512}, "evaluation": {"memory_length": memory_length}}
        config = RunConfig.model_validate({"model": settings, **lengths})
        torch.manual_seed(1)
        made = build_model(config.model, memory_length=512).eval()
        save(Run(made, corpus.tokenizer, config), folder / name)


class Version:
    """A commit, or the working tree, and what measures it."""

    def __init__(self, name: str, source: Path, folder: Path, args: Namespace) -> None:
        """Take a source folder that contains the package; files are written to `folder`."""
        self.name, self.source, self.folder, self.args = name, source, folder, args
        self.environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": str(args.threads)}
        self.memory_length = 20 if args.quick else 2100
        self.server: tuple[subprocess.Popen[str], str] | None = None
        """The server of the work that is measured, and its address; it waits while the other version is measured."""

    def prepare(self) -> None:
        """Build the native operators where they are not built yet, and write the files.

        Raises:
            SystemExit: Python imports another package than that of this version.
        """
        if not self.args.quick:
            self._run("-m", "transformer_xl", "info", "--build-native", check=False)
        printed = self._run("-c", "import transformer_xl; print(transformer_xl.__file__)")
        if not printed.startswith(str(self.source)):
            raise SystemExit(f"the package of {self.name} is not that in {self.source}, but {printed.strip()}")
        self._run(__file__, "--worker", "prepare", *self._flags())

    def measure(self, work: str) -> dict[str, float]:
        """Do a work, and return its results by unit."""
        if work in COMMANDS:
            times = []
            for _ in range(1 if self.args.quick else 5):
                start = time.perf_counter()
                self._run(*COMMANDS[work])
                times.append(time.perf_counter() - start)
            return {"s": statistics.median(times)}
        if work in TRAINING:
            return self._train(*TRAINING[work])
        if work in SERVING:
            return self._serve(SERVING[work])
        return json.loads(self._run(__file__, "--worker", work, *self._flags()))

    def operators(self, work: str) -> dict[str, float]:
        """Return the seconds of each operator in a work, those of torch's profiler included."""
        return json.loads(self._run(__file__, "--worker", work, "--profile", *self._flags()))

    def _flags(self) -> list[str]:
        quick = ["--quick"] if self.args.quick else []
        return ["--folder", str(self.folder), "--memory-length", str(self.memory_length), *quick]

    def _run(self, *words: str, check: bool = True) -> str:
        printed = subprocess.run(
            [sys.executable, *words], env=self.environment, cwd=self.folder, capture_output=True, text=True
        )
        if check and printed.returncode:
            raise SystemExit(f"{self.name}: {' '.join(words)} failed:\n{printed.stderr[-3000:]}")
        return printed.stdout

    def _train(self, model: str, train: dict[str, Any], steps: int) -> dict[str, float]:
        settings = {"model": MODELS[model], "train": {**train, "max_steps": steps + 2, "log_interval": 1}}
        if self.args.quick:
            settings["model"], settings["train"]["segment_length"], settings["train"]["batch_size"] = TINY, 16, 2
        flags = [
            f"--{group}.{name.replace('_', '-')}={value}"
            for group, values in settings.items()
            for name, value in values.items()
        ]
        recipe = self.folder / "empty.yaml"
        recipe.write_text("title: all settings are flags\n")
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            run = Path(folder) / "run"
            words = ["-m", "transformer_xl", "train", str(recipe), "--corpus", str(self.folder / "corpus")]
            words += ["--run", str(run), f"--threads={self.args.threads}", *flags]
            with open(Path(folder) / "output", "w+") as output:
                process = subprocess.Popen(
                    [sys.executable, *words], env=self.environment, stdout=output, stderr=subprocess.STDOUT
                )
                _, status, used = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                if status:
                    raise SystemExit(f"{self.name}: training failed:\n{Path(output.name).read_text()[-3000:]}")
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        seconds = {line["step"]: line["seconds"] for line in lines if line["split"] == "train"}
        tokens = steps * settings["train"]["batch_size"] * settings["train"]["segment_length"]
        # the time is logged in milliseconds
        rate = tokens / max(seconds[steps + 2] - seconds[2], 0.001)
        return {"tokens/s": rate, "MiB peak": used.ru_maxrss / 1024}

    def _serve(self, clients: int) -> dict[str, float]:
        import serving

        load = serving.arguments().parse_args(["small", f"--threads={self.args.threads}", "--seconds=4"])
        if self.args.quick:
            load.tokens, load.prompt_tokens, load.seconds = 8, 6, 0.5
        if self.server is None:
            environment = dict(os.environ)
            os.environ |= self.environment  # of the server, which is started by serving.py
            try:
                self.server = serving.start_server(self.folder / "small", clients, load)
            finally:
                os.environ.clear()
                os.environ.update(environment)
            asyncio.run(serving.run_load(self.server[1], "small", clients, load))
        process, url = self.server
        result = asyncio.run(serving.run_load(url, "small", clients, load))
        if result.errors:
            raise SystemExit(f"{self.name}: {result.errors[0]}")
        return {"tokens/s": result.num_tokens / load.seconds, "MiB peak": serving.resident_bytes(process)[1] / 2**20}

    def stop_server(self) -> None:
        """Stop the server, if one was started."""
        if self.server is not None:
            self.server[0].kill()
            self.server[0].communicate()
            self.server = None


def git(*words: str) -> str:
    """Return what a git command prints about this repository."""
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout.strip()


def default_base() -> str:
    """Return the last tag, or the commit before the last one if there is no tag."""
    tagged = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--tags", "--abbrev=0"], capture_output=True, text=True
    )
    return "HEAD~1" if tagged.returncode else tagged.stdout.strip()


@contextmanager
def checked_out(name: str | None, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the abbreviated hash of a commit and its source folder; None is the working tree."""
    if name is None:
        yield commit(), ROOT / "src"
        return
    try:
        git("worktree", "add", "--detach", str(folder), name)
    except subprocess.CalledProcessError as error:
        refuse(f"no worktree of {name}; give a commit, a branch or a tag: {error.stderr.strip()}")
    try:
        yield git("rev-parse", "--short=12", f"{name}^{{commit}}"), folder / "src"
    finally:
        git("worktree", "remove", "--force", str(folder))


def compare(rounds: list[tuple[dict[str, float], dict[str, float]]]) -> list[dict[str, Any]]:
    """Return for each unit the medians of base and head, the ratio and its interval.

    Args:
        rounds: the results of base and head by unit, in each round.
    """
    found = []
    for unit in rounds[0][0]:
        base, head = ([results[unit] for results in side] for side in zip(*rounds, strict=True))
        pairs = zip(base, head, strict=True)
        ratios = [other / one if unit in HIGHER_IS_BETTER else one / other for one, other in pairs]
        median = {"base": statistics.median(base), "head": statistics.median(head), "ratio": statistics.median(ratios)}
        middle = statistics.quantiles(ratios, n=4, method="inclusive")[::2] if len(ratios) > 1 else ratios * 2
        interval = [min(ratios), max(ratios)]
        found.append({"unit": unit, **median, "quartiles": middle, "interval": interval, "rounds": [base, head]})
    return found


def slower(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the works of which one interval is below LOWEST_RATIO as a whole."""
    return [work for work, lines in found.items() if any(line["interval"][1] < LOWEST_RATIO for line in lines)]


def operator_table(base: dict[str, float], head: dict[str, float], number: int = 5) -> list[str]:
    """Return lines of Markdown with the operators whose seconds rose most."""
    rise = {name: head.get(name, 0.0) - base.get(name, 0.0) for name in {*base, *head}}
    return ["| operator | s in base | in head |", "|---|---|---|"] + [
        f"| {name} | {base.get(name, 0.0):.3f} | {head.get(name, 0.0):.3f} |"
        for name in sorted(rise, key=rise.__getitem__, reverse=True)[:number]
    ]


def main() -> None:
    """Measure both commits, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", metavar="BASE")
    parser.add_argument("head", nargs="?", metavar="HEAD")
    parser.add_argument("--works", type=listed(one_of(WORKS)), default=",".join(WORKS), help=f"of {', '.join(WORKS)}")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="tiny models, for a test of this file")
    parser.add_argument("--out", type=Path, default=results_file("speed"))
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    for name in ("worker", "folder", "memory-length"):  # of the processes that this program starts
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker == "prepare":
        prepare_files(Path(args.folder), args.quick, int(args.memory_length))
        return
    if args.worker:
        folder, scales = Path(args.folder), {"memory_length": int(args.memory_length), "scale": 20 if args.quick else 1}
        if args.profile:
            print(json.dumps(operator_seconds(args.worker, folder, **scales)))
        else:
            print(json.dumps({"tokens/s": worker(args.worker, folder / WORKERS[args.worker][0], **scales)}))
        return

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that worktrees are removed
    busy = warn_if_busy()
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="speed-") as temporary, ExitStack() as stack:
        versions = []
        for side, name in {"base": args.base or default_base(), "head": args.head}.items():
            label, source = stack.enter_context(checked_out(name, Path(temporary) / side))
            (folder := Path(temporary) / f"{side}-files").mkdir()
            versions.append(Version(label, source, folder, args))
            versions[-1].prepare()
            stack.callback(versions[-1].stop_server)
        base, head = versions
        say(f"base {base.name}, head {head.name}")
        print("| work | unit | base | head | ratio | quartiles | interval |\n|---|---|---|---|---|---|---|")
        for work in args.works:
            rounds = []
            for number in range(args.rounds):
                order = (base, head) if number % 2 == 0 else (head, base)
                results = {version: version.measure(work) for version in order}
                rounds.append((results[base], results[head]))
            for version in versions:
                version.stop_server()
            found[work] = compare(rounds)
            for line in found[work]:
                spread = " | ".join(f"{low:.3f} to {high:.3f}" for low, high in (line["quartiles"], line["interval"]))
                numbers = f"{line['base']:,.5g} | {line['head']:,.5g} | {line['ratio']:.3f} | {spread}"
                print(f"| {work} | {line['unit']} | {numbers} |", flush=True)
        slow = slower(found)
        for work in slow:
            if work in {*TRAINING, *WORKERS}:
                say("\n".join([f"{work}, by operator:", *operator_table(*(one.operators(work) for one in versions))]))
    about = {"command": command(), "cpu": cpu_model(), "cpu_features": cpu_features(), "threads": args.threads}
    write({**about, "busy": busy, "base": base.name, "head": head.name, "works": found}, args.out)
    if slow:
        raise SystemExit(f"worse than {LOWEST_RATIO} of base: {', '.join(slow)}")


if __name__ == "__main__":
    main()
