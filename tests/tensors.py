"""Comparisons of tensors that report the name of the tensor that differs, and runs of a model in parts.

Shape suffixes: B batch size, T new tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from transformer_xl.model.memory import Memory

Tensors = Mapping[str, Tensor] | nn.Module | Memory | Iterable[Tensor]


def assert_same_tensors(actual: Tensors, expected: Tensors, *, rtol: float = 0, atol: float = 0) -> None:
    """Compare the weights of models, memories, or tensors by name or in order: bit for bit without a tolerance.

    Dtypes and shapes must be the same too. It is an error if there are no tensors to compare.
    """
    actual_named, expected_named = _by_name(actual), _by_name(expected)
    assert sorted(actual_named) == sorted(expected_named)
    assert expected_named, "no tensors to compare"
    for name, tensor in expected_named.items():
        torch.testing.assert_close(
            actual_named[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"tensor {name}: {text}"
        )


def run_parts(model, memory: Memory, *parts_BT: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Memory]:
    """Run a model on parts of a text, in inference mode; return the hidden states of all parts and the last memory."""
    hidden_BTD: list[Tensor] = []
    with torch.inference_mode():
        for part_BT in parts_BT:
            part_BTD, memory = model(part_BT, memory, lengths=lengths)
            hidden_BTD.append(part_BTD)
    return torch.cat(hidden_BTD, dim=1), memory


def copied_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """Return copies by name, to check later that an operation did not change the tensors."""
    return {name: tensor.detach().clone() for name, tensor in _by_name(tensors).items()}


def named_gradients(scalar: Tensor, tensors: Tensors) -> dict[str, Tensor]:
    """Return the gradients of a scalar by the names of the tensors; zeros where it does not depend on them."""
    named = dict(tensors.named_parameters()) if isinstance(tensors, nn.Module) else _by_name(tensors)
    return dict(zip(named, torch.autograd.grad(scalar, list(named.values()), materialize_grads=True), strict=True))


def authors_mean_std(name: str) -> tuple[float, float]:
    """Return mean and standard deviation of a parameter with this name in the authors' initialization.

    Content and position bias (the paper's u and v) are random vectors; all other biases are 0.
    """
    if name.endswith("norm.weight"):
        return 1.0, 0.02
    is_random = name in ("content_bias", "position_bias") or not name.endswith("bias")
    return 0.0, 0.02 if is_random else 0.0


def _by_name(tensors: Tensors) -> dict[str, Tensor]:
    if isinstance(tensors, nn.Module):
        return dict(tensors.state_dict())
    if isinstance(tensors, Memory):
        return tensors.tensors()
    if isinstance(tensors, Mapping):
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return {str(index): tensor for index, tensor in enumerate(tensors)}


def assert_drawn_from_normal(tensors: Tensors, mean_std: Callable[[str], tuple[float, float]]) -> None:
    """Check that each tensor looks like draws from a normal distribution, whose parameters follow from its name.

    Mean and standard deviation of n draws may differ by 5 standard errors, std / sqrt(n) and std / sqrt(2 n), which one
    in a million tensors exceeds; with std 0 every element must be the mean.
    """
    named = _by_name(tensors)
    assert named, "no tensors to check"
    for name, tensor in named.items():
        (mean, std), count = mean_std(name), tensor.numel()
        if not std:
            assert (tensor == mean).all(), name
            continue
        assert abs(tensor.mean().item() - mean) < 5 * std / count**0.5, name
        assert abs(tensor.std().item() - std) < 5 * std / (2 * count) ** 0.5, name
