"""Training and generation with the paper's other transformers, which have no memory and can have auxiliary losses.

`vaswani` has sinusoidal absolute positions (Vaswani et al. 2017), `al-rfou` learned ones (Al-Rfou et al. 2018). Of the
auxiliary losses of Al-Rfou et al., `intermediate_layer_losses` lets every layer predict the next token, and with
`num_targets` 2 each position also predicts the token after the next.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_runs import letters_corpus, nats_of, start, train_until

from transformer_xl.generation.generate import generate
from transformer_xl.run import load


def test_auxiliary_losses_train_but_are_not_in_the_metrics(tmp_path: Path) -> None:
    """The loss of the first step is that of a model without auxiliary losses; that of the second step differs."""
    corpus, model = letters_corpus(tmp_path / "corpus", num_train=70, num_valid=0), {"architecture": "al-rfou"}
    auxiliary = {"intermediate_layer_losses": True, "num_targets": 2}
    without = start(tmp_path / "without", corpus, model=model, max_steps=3, warmup_steps=0)
    trainer = start(tmp_path / "with", corpus, model={**model, **auxiliary}, max_steps=3, warmup_steps=0)
    # equal weights, except those of the auxiliary losses
    trainer.model.load_state_dict({**trainer.model.state_dict(), **without.model.state_dict()})
    trainer.run()
    without.run()
    assert nats_of(trainer)[0] == nats_of(without)[0]
    assert nats_of(trainer)[1] != nats_of(without)[1]


def test_intermediate_layer_losses_stop_with_the_progress_of_training(tmp_path: Path) -> None:
    """With two layers, the first predicts in the first quarter of training (2 of 8 steps); then the weights with which
    it predicts stay the same."""
    corpus = letters_corpus(tmp_path / "corpus", num_train=70, num_valid=0)
    model = {"architecture": "al-rfou", "intermediate_layer_losses": True}
    trainer = start(tmp_path / "run", corpus, model=model, max_steps=8, warmup_steps=0, beta1=0.0)
    weight = dict(trainer.model.named_parameters())["next_heads.1.weight"]  # of the predictions of the first layer
    changed = []
    for step in range(1, 6):
        before = weight.detach().clone()
        train_until(trainer, step)
        changed.append(not torch.equal(weight, before))
    assert changed == [True, True, False, False, False]


@pytest.mark.parametrize("architecture", ["vaswani", "al-rfou"])
def test_generation_without_memory_uses_the_last_segment(tmp_path: Path, architecture: str) -> None:
    """A model without memory must process the last tokens again, not only the newest."""
    corpus, prompt = letters_corpus(tmp_path / "corpus", num_train=70, num_valid=0), "abcabcabcabc"
    start(tmp_path / "run", corpus, model={"architecture": architecture}, max_steps=1).run()
    run = load(tmp_path / "run", device="cpu")
    torch.manual_seed(5)
    for parameter in run.model.parameters():  # so that the generated tokens vary
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    generated = generate(run, prompt, max_new_tokens=9, greedy=True)

    def expected_tokens(context: int) -> list[int]:
        """Return the most likely tokens, each predicted from the last `context` tokens."""
        tokens = list(prompt.encode())
        with torch.no_grad():
            for _ in range(9):
                hidden_BTD, _ = run.model(torch.tensor([tokens[-context:]]))
                tokens.append(int(run.model.logits(hidden_BTD)[0, -1].argmax()))
        return tokens[len(prompt) :]

    assert list(generated.token_ids) == expected_tokens(7)  # the segment length
    assert list(generated.token_ids) != expected_tokens(1)
