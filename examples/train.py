"""Train a small model on the source of Python's email package with the functions of the library.

    python examples/train.py FOLDER     # a minute or two on a CPU; FOLDER must not exist

Prepare a corpus, train until a callback stops it, resume, evaluate with a longer memory, generate, save and load.
"""

from __future__ import annotations

import email
import sys
from pathlib import Path
from typing import Any

import transformer_xl as txl


class StopAtLoss(txl.Callback):
    """Stops training once the training loss is low enough."""

    def __init__(self, nats_per_token: float) -> None:
        self.nats_per_token = nats_per_token

    def on_metrics(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Look at the newest line of metrics."""
        if metrics["split"] == "train" and metrics["nats_per_token"] < self.nats_per_token:
            trainer.stop()


def main(folder: Path, max_steps: int = 300, stop_at: float = 2.5) -> None:
    """Create a corpus, a run and a saved copy of its model in a new folder.

    Args:
        folder: the folder to create.
        max_steps: optimizer steps in total.
        stop_at: training loss, in nats per byte, at which the callback stops training.
    """
    files = sorted(Path(email.__file__).parent.glob("*.py"))
    corpus = txl.prepare(files, folder / "corpus", tokenizer="byte", valid_fraction=0.1)

    config = txl.RunConfig(
        model=txl.TransformerXLConfig(n_layers=2, d_model=64, n_heads=2, d_ff=128, dropout=0.0),
        train=txl.TrainConfig(segment_length=64, memory_length=64, batch_size=8, max_steps=max_steps, warmup_steps=20),
    )
    result = txl.train(config, corpus, folder / "run", callbacks=[StopAtLoss(stop_at)])
    print(f"stopped at step {result.step} of {result.max_steps}")
    result = txl.resume(folder / "run", corpus)  # same results as without the stop
    print(f"finished: {result.finished}, best validation loss {result.best_nats_per_token:.3f} nats per byte")

    longer_memory = txl.EvaluationConfig(memory_length=4 * config.train.memory_length)
    metrics = txl.evaluate(result.run, corpus.split("valid"), longer_memory, max_tokens=5000)
    print(f"with memory {metrics.plan.context_limits.memory_length}: {metrics.bits_per_byte:.3f} bits per byte")
    print(txl.generate(result.run, "def parse(", max_new_tokens=80, seed=1).text)

    txl.save(result.run, folder / "model")
    greedy = {"max_new_tokens": 20, "greedy": True}
    completion = txl.generate(txl.load(folder / "model"), "import ", **greedy)
    assert completion.token_ids == txl.generate(result.run, "import ", **greedy).token_ids


if __name__ == "__main__":
    main(Path(sys.argv[1]))
