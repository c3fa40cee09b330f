"""Token ids as users pass them: what is outside the vocabulary raises, and any integer dtype and container works.

These are equalities over all architectures and all kinds of softmax; the vocabulary is 23.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from model_configs import small_model

from transformer_xl.config import ARCHITECTURES, UserError

STYLES = {"dense": {}, "cutoffs": {"cutoffs": (5, 11)}, "div_val 2": {"cutoffs": (5, 11), "div_val": 2}}


def make(architecture="transformer-xl", **settings):
    lengths = {"shaw": {"max_relative_positions": 13}, "al-rfou": {"max_position_embeddings": 13}}
    return small_model(architecture=architecture, **lengths.get(architecture, {}), **settings)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ids_outside_the_vocabulary_raise(architecture, style):
    """The target -100 raises too: torch's cross-entropy would ignore it, and its loss would be 0."""
    model = make(architecture, **STYLES[style])
    hidden_BTD, _ = model(torch.zeros(1, 3, dtype=torch.int64))
    memory = model.generation_memory(1, segment_length=3)
    for wrong in (23, -1, -100):
        ids_BT = torch.tensor([[0, wrong, 3]])
        for call in (
            lambda ids: model(ids),
            lambda ids: model(ids.tolist()),
            lambda ids: model(ids.numpy(), memory),
            lambda ids: model.nats(hidden_BTD, ids),
            lambda ids: model.nats(hidden_BTD, ids.numpy()),
            lambda ids: model.training_losses(ids * 0, ids, model.initial_memory(1), progress=0.0),
        ):
            with pytest.raises(UserError, match=f"token id {wrong} is not in the vocabulary of 23; give 0 to 22"):
                call(ids_BT)


@pytest.mark.parametrize(
    "convert",
    [
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        *(lambda ids, kind=kind: ids.to(kind) for kind in (torch.uint8, torch.int8, torch.int16, torch.uint16)),
        *(lambda ids, kind=kind: ids.numpy().astype(kind) for kind in ("u1", ">u2", "<u4", "u8", "i1", ">i8")),
        lambda ids: [*ids],
    ],
)
@pytest.mark.parametrize("architecture", ["transformer-xl", "al-rfou"])
@torch.inference_mode()
def test_any_integers_in_any_container(tokens, architecture, convert):
    """Of shape (T,), as a tokenizer returns them, they are one batch row; al-rfou generates with a memory of tokens."""
    model, text_BT = make(architecture), tokens(2, 5)
    expected_BTD, _ = model(text_BT)
    losses_BT = model.nats(expected_BTD, text_BT)
    assert torch.equal(model(convert(text_BT))[0], expected_BTD)
    assert torch.equal(model.nats(expected_BTD, convert(text_BT)), losses_BT)
    memory = model.generation_memory(1, segment_length=7)
    row_BTD = model(text_BT[:1], memory)[0]
    assert torch.equal(model(convert(text_BT[0]), memory)[0], row_BTD)
    assert torch.equal(model.nats(row_BTD, convert(text_BT[0])), model.nats(row_BTD, text_BT[:1]))


@pytest.mark.parametrize(
    "ids",
    [
        [],
        3,
        [[1, 2], [3]],
        [1.0, 2.0],
        ["a"],
        "abc",
        [True],
        torch.tensor([True]),
        torch.zeros(1, 1, 1).long(),
        torch.zeros(0, 3).long(),
        np.array(3),
    ],
    ids=repr,
)
def test_what_is_no_token_id_raises(ids):
    model = make()
    hidden_BTD, _ = model([1, 2])
    for call in (lambda: model(ids), lambda: model.nats(hidden_BTD, ids)):
        with pytest.raises(UserError, match=r"^(tokens|targets) .*expected integers of shape \(batch, tokens\)"):
            call()


def test_targets_of_another_shape_and_k_below_1_raise():
    model = make()
    hidden_BTD, _ = model([[1, 2, 3]])
    with pytest.raises(UserError, match=r"targets of shape \(1, 2\) for hidden of shape \(1, 3, 14\)"):
        model.nats(hidden_BTD, [1, 2])
    with pytest.raises(UserError, match="k 0: must be 1 or more"):
        model.topk(hidden_BTD, 0)


@pytest.mark.parametrize("style", STYLES)
def test_exported_models_check_their_ids(tokens, style):
    """In compiled code an id cannot be read; the exported graph contains the check."""
    model, text_BT = make("vaswani", **STYLES[style]), tokens(1, 5)

    class Hidden(torch.nn.Module):
        def forward(self, ids_BT):
            return model(ids_BT)[0]

    exported = torch.export.export(Hidden(), (text_BT,)).module()
    torch.testing.assert_close(exported(text_BT), model(text_BT)[0])
    with pytest.raises((RuntimeError, IndexError), match=r"not in the model's vocabulary|out of range"):
        exported(text_BT + 23)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_ids_in_main_memory_are_checked_before_they_are_copied_to_the_gpu(tokens):
    model, text_BT = make(cutoffs=(5, 11), div_val=2), tokens(1, 5)
    expected_BTD = model(text_BT)[0]
    model.cuda()
    torch.testing.assert_close(model(text_BT)[0].cpu(), expected_BTD, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="token id 23"):
        model(text_BT * 0 + 23)
