"""Names of settings in transformers, nanoGPT, Lightning and the authors' code, for messages on unknown names."""

from __future__ import annotations

OTHER_NAMES = {
    "batch": "batch-size", "bsz": "batch-size", "bs": "batch-size", "per-device-train-batch-size": "batch-size",
    "batch-chunk": "micro-batch-size", "gradient-accumulation-steps": "micro-batch-size",
    "lr": "learning-rate", "lr-scheduler-type": "lr-schedule", "scheduler": "lr-schedule",
    "warmup": "warmup-steps", "warmup-step": "warmup-steps", "warmup-iters": "warmup-steps",
    "optim": "optimizer", "clip": "max-grad-norm", "grad-clip": "max-grad-norm", "wd": "weight-decay",
    "steps": "max-steps", "max-step": "max-steps", "max-iters": "max-steps", "iters": "max-steps",
    "seq-len": "segment-length", "seq-length": "segment-length", "max-seq-len": "segment-length",
    "block-size": "segment-length", "context-length": "segment-length", "tgt-len": "segment-length",
    "n-ctx": "segment-length", "bptt": "segment-length",
    "mem-len": "memory-length", "mem": "memory-length", "clamp-len": "clamp-length",
    "window": "attention-window", "sliding-window": "attention-window",
    "n-layer": "n-layers", "num-layers": "n-layers", "num-hidden-layers": "n-layers", "layers": "n-layers",
    "n-head": "n-heads", "num-heads": "n-heads", "num-attention-heads": "n-heads", "heads": "n-heads",
    "n-embd": "d-model", "hidden-size": "d-model", "dim": "d-model",
    "d-inner": "d-ff", "intermediate-size": "d-ff", "dropatt": "attention-dropout", "pre-lnorm": "norm-first",
    "fp16": "dtype", "bf16": "dtype", "precision": "dtype", "amp": "dtype",
    "eval-steps": "eval-interval", "eval-iters": "eval-tokens", "logging-steps": "log-interval",
    "save-steps": "checkpoint-interval", "gradient-checkpointing": "activation-checkpointing",
    "report-to": "trackers", "log-with": "trackers", "logger": "trackers", "tensorboard": "trackers",
    "wandb": "trackers", "model-type": "architecture", "model-name": "recipe", "config": "recipe",
    "data": "corpus", "dataset": "corpus", "data-path": "corpus", "valid": "corpus", "test": "corpus",
    "train-file": "corpus", "output-dir": "run", "output": "out", "out-dir": "out", "work-dir": "run",
    "max-tokens": "max-new-tokens", "max-length": "max-new-tokens", "length": "max-new-tokens",
    "num-return-sequences": "num-samples", "do-sample": "greedy", "eos-token-id": "eos-token-ids",
    "text": "prompt", "input": "prompt-file", "beams": "num-beams", "vocabulary-size": "vocab-size",
    "ckpt": "checkpoint", "cuda": "device", "gpu": "device", "cpu": "device",
}  # fmt: skip
"""The setting of this package (or flag) by the other name, both spelled as flags."""
