"""Compares LoRA adapters with fine-tuning of all weights: parameters, memory, speed, and the losses gained and lost.

    python benchmarks/lora.py --base RUN --corpus DIR [--arms full,lora-8,lora-8:q_proj+v_proj@2e-3] [--max-steps 200]
        [--rounds 3] [--out FILE]

An arm is `full` or `lora-RANK`, with the names of the adapted layers after a colon (all without one), and the learning
rate after `@` (that of `txl finetune` without one). Each training has a process of its own, and the order of the arms
alternates between rounds (A B, then B A, ...); round r trains with seed r. Peak memory is that of the training steps,
above what the process needed before it loaded the base; Linux only, because it reads /proc. Losses are in nats per
token of the first 65,536 tokens of each test text, and medians are over the rounds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft  # noqa: F401 (in all arms, so that its import is in none of the differences)
import torch
from arguments import positive
from environment import command, commit, cpu_features, cpu_model, results_file, say, warn_if_busy, write
from trainee import StepTimer
from typing_extensions import override

from transformer_xl import Corpus, finetune, load
from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import describe_difference
from transformer_xl.training.trainer import Trainer

MIB = 2**20


@dataclass(frozen=True)
class Arm:
    """A way to fine-tune."""

    name: str
    arguments: dict[str, Any]
    """Arguments of `finetune`."""
    train: dict[str, Any]
    """Settings of training."""

    @staticmethod
    def parse(name: str) -> Arm:
        """Parse the name of an arm.

        Raises:
            UserError: the name is not that of an arm.
        """
        rest, _, rate = name.partition("@")
        kind, _, targets = rest.partition(":")
        rank = kind.removeprefix("lora-")
        if (kind != "full" and not (kind.startswith("lora-") and rank.isdecimal())) or (kind == "full" and targets):
            raise UserError(f"no arm '{name}'; must be like full, full@1e-3, lora-8 or lora-8:q_proj+v_proj@1e-3")
        arguments: dict[str, Any] = {} if kind == "full" else {"lora_rank": int(rank)}
        if targets:
            arguments["lora_targets"] = targets.split("+")
        return Arm(name, arguments, {"learning_rate": float(rate)} if rate else {})


class Recorder(StepTimer):
    """Records the seconds of the steps, the trained parameters, and the peak memory from the first step on."""

    num_trained = peak_bytes = 0

    @override
    def on_train_begin(self, trainer: Trainer) -> None:
        super().on_train_begin(trainer)
        self.num_trained = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    @override
    def on_step(self, trainer: Trainer, num_tokens: int) -> None:
        super().on_step(trainer, num_tokens)
        self.peak_bytes = resident_bytes("VmHWM")


def resident_bytes(field: str) -> int:
    """Return the resident memory of this process: VmRSS, now; VmHWM, the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(arm: Arm, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Fine-tune once, in a temporary folder, and return what was measured."""
    recorder, before = Recorder(), resident_bytes("VmRSS")
    train = {
        "max_steps": args.max_steps,
        "warmup_steps": max(1, args.max_steps // 20),
        "eval_interval": args.max_steps,
        "checkpoint_interval": args.max_steps,
        "seed": seed,
    }
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        result = finetune(
            *(args.base, args.corpus, run), **arm.arguments, train=train | arm.train,
            callbacks=[recorder], progress=False, device="cpu", threads=args.threads,
        )  # fmt: skip
        name = "adapter_model" if "lora_rank" in arm.arguments else "model"
        file_bytes = (run / f"{name}.safetensors").stat().st_size
    return {
        "trained_parameters": recorder.num_trained,
        "peak_mib": round((recorder.peak_bytes - before) / MIB, 1),
        "steps_per_second": 1 / statistics.median(recorder.step_seconds),
        "file_mib": round(file_bytes / MIB, 3),
        **{f"{loss.text}_{when}": getattr(loss, when) for loss in result.losses for when in ("before", "after")},
    }


def compare(arms: list[Arm], args: argparse.Namespace) -> dict[str, Any]:
    """Return all measurements of each arm and their medians."""
    rounds: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    context = multiprocessing.get_context("spawn")
    for index in range(args.rounds):
        for arm in arms if index % 2 == 0 else reversed(arms):
            with context.Pool(1) as pool:
                measured = pool.apply(measure, (arm, index + 1, args))
            rounds[arm.name].append(measured)
            say(f"{arm.name}: " + ", ".join(f"{name} {value:.6g}" for name, value in measured.items()))
    medians = {
        name: {key: statistics.median(one[key] for one in measured) for key in measured[0]}
        for name, measured in rounds.items()
    }
    return {"medians": medians, "rounds": rounds}


def main() -> None:
    """Measure, and write the results to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--arms", default="full,lora-8,lora-8:q_proj+v_proj")
    parser.add_argument("--max-steps", type=positive, default=200)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--out", type=Path, default=results_file("lora"))
    args = parser.parse_args()
    try:
        arms = [Arm.parse(name) for name in args.arms.split(",")]
        tokenizer, corpus = load(args.base, device="cpu").tokenizer, Corpus.open(args.corpus)
        if difference := describe_difference(corpus.tokenizer, tokenizer):
            raise UserError(
                f"{args.corpus} has another tokenizer ({difference}); prepare it with --tokenizer {args.base}"
            )
    except (UserError, ValueError) as error:
        parser.error(str(error))
    machine = {"cpu": cpu_model(), "instructions": cpu_features(), "python": platform.python_version()}
    results = {
        "command": command(),
        "commit": commit(),
        "torch": torch.__version__,
        "machine": {**machine, "threads": args.threads, "load": warn_if_busy()},
        **compare(arms, args),
    }
    write(results, args.out)


if __name__ == "__main__":
    main()
