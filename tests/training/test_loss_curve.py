"""A short run whose losses are stored in the repository, so that no change to training goes unnoticed; and the same
training with different attention kernels.

The text is generated from a small grammar with `random.random`, whose numbers Python promises never to change. After a
change that is meant to change the losses:

    PYTHONPATH=src:tests python tests/training/test_loss_curve.py    # overwrites loss_curve.json
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from training_runs import make_corpus, nats_of, start

FILE = Path(__file__).with_name("loss_curve.json")
MODEL = {"n_layers": 3, "d_model": 34, "n_heads": 2, "d_head": 17, "d_ff": 67, "dropout": 0.0}
TRAIN = {
    "segment_length": 19,
    "memory_length": 23,
    "batch_size": 4,
    "learning_rate": 3e-3,
    "warmup_steps": 10,
    "max_grad_norm": 0.25,
}


def grammar_text(length: int, seed: int = 5) -> bytes:
    """Return sentences with nouns, verbs that agree in number, and nested clauses."""
    draw = random.Random(seed)

    def one_of(words: str) -> str:
        choices = words.split()
        return choices[int(len(choices) * draw.random() ** 2)]  # the first words more often

    def clause(depth: int) -> str:
        plural = draw.random() < 0.4
        noun = one_of("river cat teacher engine valley child painter stone") + ("s" if plural else "")
        if depth and draw.random() < 0.3:
            noun += " that " + clause(depth - 1).removeprefix("the ")
        verb = one_of("see follow remember build cross paint") + ("" if plural else "s")
        return f"the {noun} {verb} {one_of('a the every no')} {one_of('road house song bridge letter')}"

    parts: list[str] = []
    while sum(map(len, parts)) < length:
        parts.append(f"{clause(2).capitalize()}{one_of('. . ! ?')}\n")
    return "".join(parts).encode()[:length]


def losses(path: Path, steps: int, kernel: str = "auto", **changed: int | float) -> list[float]:
    """Train for some steps, and return the loss of each in nats per token.

    Args:
        path: folder for the corpus and the run.
        steps: number of training steps.
        kernel: the setting attn_implementation, which names an attention kernel; auto: the fastest for the device.
        changed: settings of MODEL or TRAIN that get another value.
    """
    corpus = make_corpus(path / f"{kernel} corpus", grammar_text(9973))
    train = {**TRAIN, "max_steps": steps, **{name: value for name, value in changed.items() if name in TRAIN}}
    model = {
        **MODEL,
        "attn_implementation": kernel,
        **{name: value for name, value in changed.items() if name in MODEL},
    }
    trainer = start(path / kernel, corpus, model=model, **train)
    assert trainer.run()
    return nats_of(trainer)


def test_losses_equal_the_stored_ones(tmp_path: Path) -> None:
    expected = json.loads(FILE.read_text(encoding="utf-8"))
    actual = losses(tmp_path, len(expected["nats_per_token"]))
    difference = np.abs(np.subtract(actual, expected["nats_per_token"]))
    assert difference.max() <= 1e-4, (
        f"the losses changed by up to {difference.max():.1e}, first at step {int((difference > 1e-4).argmax()) + 1}; "
        f"explain why in the commit, and overwrite them with: {expected['renew_with']}"
    )
    assert actual[-1] < actual[0] - 1.5  # the model learns


def test_kernels_give_the_same_losses(tmp_path: Path) -> None:
    one, other = (losses(tmp_path, 40, kernel, learning_rate=1e-3) for kernel in ("reference", "cpu"))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
    assert one[-1] < one[0] - 1


def test_triton_kernel_gives_the_same_losses(tmp_path: Path) -> None:
    """A few steps in Triton's interpreter, which is slow; on a GPU the kernels' own tests go further."""
    with pytest.MonkeyPatch.context() as patch:  # Triton reads this when it is imported
        patch.setenv("TRITON_INTERPRET", "1")
        pytest.importorskip("triton")
        from transformer_xl.ops.kernels import triton_kernels  # noqa: F401

        if torch.cuda.is_available():
            pytest.skip("the kernels may have been imported as compiled ones")
        tiny = {"n_layers": 1, "segment_length": 5, "memory_length": 7, "batch_size": 1}
        one, other = (losses(tmp_path, 3, kernel, **tiny) for kernel in ("reference", "triton"))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def write() -> None:
    """Overwrite loss_curve.json with the losses of 40 steps."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as path:
        actual = losses(Path(path), 40)
    command = "PYTHONPATH=src:tests python tests/training/test_loss_curve.py"
    FILE.write_text(json.dumps({"renew_with": command, "nats_per_token": actual}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
