"""A short run whose losses are checked in, so that no change moves training unseen; and the kernels against each other.

The text comes from a small grammar and a seed, and the numbers it is drawn with from `random.random`, which Python
promises never to change. After a change that is meant to move the curve:

    PYTHONPATH=src:tests python tests/training/test_loss_curve.py    # writes loss_curve.json anew
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
    """Sentences with names, verbs that agree in number, and clauses within clauses."""
    draw = random.Random(seed)

    def one_of(words: str) -> str:
        choices = words.split()
        return choices[int(len(choices) * draw.random() ** 2)]  # the first ones more often

    def clause(depth: int) -> str:
        many = draw.random() < 0.4
        noun = one_of("river cat teacher engine valley child painter stone") + ("s" if many else "")
        if depth and draw.random() < 0.3:
            noun += " that " + clause(depth - 1).removeprefix("the ")
        verb = one_of("see follow remember build cross paint") + ("" if many else "s")
        return f"the {noun} {verb} {one_of('a the every no')} {one_of('road house song bridge letter')}"

    parts: list[str] = []
    while sum(map(len, parts)) < length:
        parts.append(f"{clause(2).capitalize()}{one_of('. . ! ?')}\n")
    return "".join(parts).encode()[:length]


def losses(place: Path, steps: int, kernel: str = "auto", **changed: int | float) -> list[float]:
    """Of each step; further settings are of the model or of training."""
    corpus = make_corpus(place / f"{kernel} corpus", grammar_text(9973))
    train = {**TRAIN, "max_steps": steps, **{name: value for name, value in changed.items() if name in TRAIN}}
    model = {
        **MODEL,
        "attn_implementation": kernel,
        **{name: value for name, value in changed.items() if name in MODEL},
    }
    training = start(place / kernel, corpus, model=model, **train)
    assert training.run()
    return nats_of(training)


def test_the_loss_curve_is_the_one_checked_in(tmp_path: Path) -> None:
    wanted = json.loads(FILE.read_text(encoding="utf-8"))
    found = losses(tmp_path, len(wanted["nats_per_token"]))
    apart = np.abs(np.subtract(found, wanted["nats_per_token"]))
    assert apart.max() <= 1e-4, (
        f"the losses moved by up to {apart.max():.1e}, first at step {int((apart > 1e-4).argmax()) + 1}; a change that "
        f"moves them must say why, and renew them with: {wanted['renew_with']}"
    )
    assert found[-1] < found[0] - 1.5  # it learns


def test_kernels_train_alike(tmp_path: Path) -> None:
    """60 steps in float32 from the same weights, over the same text."""
    one, other = (losses(tmp_path, 60, kernel, learning_rate=1e-3) for kernel in ("reference", "cpu"))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
    assert one[-1] < one[0] - 1


def test_the_triton_kernel_trains_alike(tmp_path: Path) -> None:
    """A few steps in Triton's interpreter, which is slow; on a GPU the kernels' own tests go further."""
    with pytest.MonkeyPatch.context() as patch:  # Triton looks when it is imported
        patch.setenv("TRITON_INTERPRET", "1")
        pytest.importorskip("triton")
        from transformer_xl.model.kernels import triton_kernels  # noqa: F401

        if torch.cuda.is_available():
            pytest.skip("the kernels may have been imported as compiled ones")
        tiny = {"n_layers": 1, "segment_length": 5, "memory_length": 7, "batch_size": 1}
        one, other = (losses(tmp_path, 3, kernel, **tiny) for kernel in ("reference", "triton"))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def write() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        found = losses(Path(place), 40)
    command = "PYTHONPATH=src:tests python tests/training/test_loss_curve.py"
    FILE.write_text(json.dumps({"renew_with": command, "nats_per_token": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
