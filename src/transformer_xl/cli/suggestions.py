"""Messages on unknown flags, with the flags that are probably meant."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

# What users of transformers, nanoGPT, Lightning and the authors' code type, and the end of the flag that it means here.
OTHER_NAMES = {
    "--batch": "batch-size", "--bsz": "batch-size", "--bs": "batch-size", "--per-device-train-batch-size": "batch-size",
    "--batch-chunk": "micro-batch-size", "--gradient-accumulation-steps": "micro-batch-size",
    "--lr": "learning-rate", "--lr-scheduler-type": "lr-schedule", "--scheduler": "lr-schedule",
    "--warmup": "warmup-steps", "--warmup-step": "warmup-steps", "--warmup-iters": "warmup-steps",
    "--optim": "optimizer", "--clip": "max-grad-norm", "--grad-clip": "max-grad-norm", "--wd": "weight-decay",
    "--steps": "max-steps", "--max-step": "max-steps", "--max-iters": "max-steps", "--iters": "max-steps",
    "--seq-len": "segment-length", "--seq-length": "segment-length", "--max-seq-len": "segment-length",
    "--block-size": "segment-length", "--context-length": "segment-length", "--tgt-len": "segment-length",
    "--n-ctx": "segment-length", "--bptt": "segment-length",
    "--mem-len": "memory-length", "--mem": "memory-length", "--clamp-len": "clamp-length",
    "--window": "attention-window", "--sliding-window": "attention-window",
    "--n-layer": "n-layers", "--num-layers": "n-layers", "--num-hidden-layers": "n-layers", "--layers": "n-layers",
    "--n-head": "n-heads", "--num-heads": "n-heads", "--num-attention-heads": "n-heads", "--heads": "n-heads",
    "--n-embd": "d-model", "--hidden-size": "d-model", "--dim": "d-model",
    "--d-inner": "d-ff", "--intermediate-size": "d-ff", "--dropatt": "attention-dropout", "--pre-lnorm": "norm-first",
    "--fp16": "dtype", "--bf16": "dtype", "--precision": "dtype", "--amp": "dtype",
    "--eval-steps": "eval-interval", "--eval-iters": "eval-tokens", "--logging-steps": "log-interval",
    "--save-steps": "checkpoint-interval", "--gradient-checkpointing": "activation-checkpointing",
    "--model-type": "architecture", "--model-name": "recipe", "--config": "recipe",
    "--data": "corpus", "--dataset": "corpus", "--data-path": "corpus", "--valid": "corpus", "--test": "corpus",
    "--train-file": "corpus", "--output-dir": "run", "--output": "out", "--out-dir": "out", "--work-dir": "run",
    "--max-tokens": "max-new-tokens", "--max-length": "max-new-tokens", "--length": "max-new-tokens",
    "--num-return-sequences": "num-samples", "--do-sample": "greedy", "--eos-token-id": "eos-token-ids",
    "--text": "prompt", "--input": "prompt-file", "--beams": "num-beams", "--vocabulary-size": "vocab-size",
    "--ckpt": "checkpoint", "--cuda": "device", "--gpu": "device", "--cpu": "device",
}  # fmt: skip
# what has no flag here
_ADVICE = {
    "epochs": "training is counted in steps of batch_size * segment_length tokens; give --train.max-steps",
}
_ADVICE |= dict.fromkeys(("num-train-epochs", "epoch", "max-epochs", "num-epochs", "n-epochs"), _ADVICE["epochs"])


def unknown_flag(flag: str, known: Sequence[str]) -> str:
    """Return the message on an unknown flag, with the flags that may be meant, of all groups of settings.

    Args:
        flag: what was typed, such as `--lr`.
        known: the flags of the command, such as `--train.learning-rate`.
    """
    text, name = f"no option {flag}", flag.lstrip("-").split("=")[0].rpartition(".")[2].replace("_", "-").lower()
    if flag.split("=")[0] in known:
        return f"{flag} stands after --, which ends the options; write options before it"
    if name in _ADVICE and "--train.max-steps" in known:
        return f"{text}: {_ADVICE[name]}"
    flags = [option for option in dict.fromkeys(known) if option.startswith("--") and "*" not in option]
    ends = {option: option.removeprefix("--").rpartition(".")[2] for option in flags}
    wanted = [name, OTHER_NAMES.get(f"--{name}", "")]
    meant = [option for option in flags if ends[option] in wanted]
    group = flag.rpartition(".")[0]
    meant = [option for option in meant if group and option.startswith(f"{group}.")] or meant
    if not meant:  # a typing error; in the whole flag where its group was given
        typed = flag.split("=")[0]
        meant = get_close_matches(typed, flags, n=1) if "." in typed else []
        close = get_close_matches(name, ends.values(), n=1, cutoff=0.7)
        meant = meant or [option for option in flags if ends[option] in close]
    return f"{text}. Did you mean {' or '.join(meant[:3])}?" if meant else text
