"""The parameter groups of the optimizers, and Muon compared with that of torch and with a float64 implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_xl.config import TrainConfig
from transformer_xl.training.optimizers import Muon, build_optimizers, orthogonalize

# shapes of the matrices that Muon updates; it stacks those of equal shape, and transposes tall ones
SHAPES = [(7, 7), (5, 11), (11, 5), (5, 11), (3, 13), (11, 5)]


def groups_of(model: Any, **settings: Any) -> list[dict[str, Any]]:
    """Return all parameter groups, after checking that every parameter is in exactly one."""
    optimizers = build_optimizers(model, TrainConfig(learning_rate=0.03, **settings))
    groups = [{**group, "optimizer": optimizer} for optimizer in optimizers for group in optimizer.param_groups]
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    assert all(group["lr"] == 0.03 for group in groups)
    return groups


def names_in(model: Any, group: dict[str, Any]) -> set[str]:
    return {name for name, parameter in model.named_parameters() if any(parameter is one for one in group["params"])}


# adaptive softmax: clusters of the vocabulary with embeddings and softmax weights of different widths, none shared
ADAPTIVE = {"cutoffs": (5, 11), "div_val": 2, "tie_word_embeddings": False, "tie_projections": "none"}


def test_adam_has_the_settings_of_the_paper(make_model) -> None:
    """The paper's Adam has one group, torch's defaults and no weight decay."""
    (group,) = groups_of(make_model(tie_attention_biases=False, norm_first=True))
    assert type(group["optimizer"]) is torch.optim.Adam
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0)
    (group,) = groups_of(make_model(), beta1=0.8, beta2=0.95)
    assert group["betas"] == (0.8, 0.95)


@pytest.mark.parametrize("settings", [{}, ADAPTIVE, {"tie_attention_biases": False, "norm_first": True}])
def test_adamw_decays_only_matrices(make_model, settings: dict[str, Any]) -> None:
    model = make_model(**settings)
    decayed, others = groups_of(model, optimizer="adamw", weight_decay=0.1, beta2=0.95)
    assert type(decayed["optimizer"]) is torch.optim.AdamW
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == others["betas"] == (0.9, 0.95)
    assert names_in(model, others) == {name for name, _ in model.named_parameters() if "norm" in name or "bias" in name}


@pytest.mark.parametrize("settings", [{}, ADAPTIVE, {"tie_attention_biases": False, "norm_first": True}])
def test_muon_updates_the_matrices_of_the_layers(make_model, settings: dict[str, Any]) -> None:
    model = make_model(**settings)
    muon, decayed, others = groups_of(model, optimizer="muon", weight_decay=0.1, muon_momentum=0.9)
    assert (type(muon["optimizer"]), type(decayed["optimizer"])) == (Muon, torch.optim.AdamW)
    assert (muon["momentum"], muon["weight_decay"], decayed["weight_decay"], others["weight_decay"]) == (
        0.9, 0.1, 0.1, 0.0,
    )  # fmt: skip
    layer_matrices = {"q_proj", "k_proj", "v_proj", "o_proj", "r_proj", "up_proj", "down_proj"}
    assert {name.split(".")[-2] for name in names_in(model, muon)} == layer_matrices
    assert len(muon["params"]) == 7 * 3  # matrices of a layer, layers
    assert all(name.startswith(("embedding", "softmax")) for name in names_in(model, decayed))


def matrices(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=draw, dtype=dtype)) for shape in SHAPES]


def gradients(dtype: torch.dtype, steps: int) -> list[list[Tensor]]:
    """Return random gradients of all matrices for each step."""
    draw = torch.Generator().manual_seed(5)
    return [[torch.randn(shape, generator=draw, dtype=dtype) * 0.01 for shape in SHAPES] for _ in range(steps)]


def take_steps(
    optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], all_grads: list[list[Tensor]]
) -> None:
    for grads in all_grads:
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad.clone()
        optimizer.step()


CONFIG = TrainConfig(optimizer="muon", learning_rate=0.02, muon_momentum=0.9, weight_decay=0.3)


def test_muon_equals_torch_up_to_bfloat16() -> None:
    """torch rounds each product to bfloat16 (8 bits), which changes an update by about 1%."""
    ours, theirs = matrices(torch.float32), matrices(torch.float32)
    start = [weight.detach().clone() for weight in ours]
    take_steps(Muon(ours, CONFIG), ours, gradients(torch.float32, 5))
    # the settings of CONFIG; match_rms_adamw makes updates about as large as those of AdamW
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.3, "adjust_lr_fn": "match_rms_adamw"}
    take_steps(torch.optim.Muon(theirs, **settings), theirs, gradients(torch.float32, 5))
    for one, other, before in zip(ours, theirs, start, strict=True):
        # within 1.5% of the total change of the weights
        assert (one - other).norm().item() < 0.015 * (one - before).norm().item()


def test_muon_equals_a_float64_implementation() -> None:
    """Nesterov momentum 0.9, Newton-Schulz applied to singular values, learning rate 0.02 and weight decay 0.3."""
    weights = matrices(torch.float64)
    expected, means = [weight.detach().clone() for weight in weights], [torch.zeros(shape).double() for shape in SHAPES]
    all_grads = gradients(torch.float64, 4)
    for grads in all_grads:
        for index, grad in enumerate(grads):
            means[index] = 0.9 * means[index] + 0.1 * grad
            left, values, right = torch.linalg.svd(0.1 * grad + 0.9 * means[index], full_matrices=False)
            values = values / values.norm()
            for _ in range(5):  # the polynomial of the Newton-Schulz iteration, of each singular value
                values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
            size = 0.2 * max(SHAPES[index]) ** 0.5  # makes the RMS of an update about 0.2, as AdamW's
            expected[index] = expected[index] * (1 - 0.02 * 0.3) - 0.02 * size * (left * values @ right)
    take_steps(Muon(weights, CONFIG), weights, all_grads)
    for actual, by_hand in zip(weights, expected, strict=True):
        torch.testing.assert_close(actual.detach(), by_hand, rtol=0, atol=1e-10)


def test_orthogonalize_sets_singular_values_to_about_1() -> None:
    draw = torch.Generator().manual_seed(7)
    # 11 matrices, with scales from 1e-6 to 1e3
    many = torch.randn(11, 5, 13, generator=draw) * torch.logspace(-6, 3, 11)[:, None, None]
    values = torch.linalg.svdvals(orthogonalize(many).float())
    # 0.7 to 1.2, and a margin for bfloat16
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5).to(orthogonalize(many).dtype))


def test_muon_does_not_change_weights_without_a_gradient() -> None:
    weights = matrices(torch.float32)
    before = weights[1].detach().clone()
    optimizer = Muon(weights, CONFIG)
    for weight in weights[::2]:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(weights[1], before)
    assert not torch.equal(weights[0], matrices(torch.float32)[0])
