"""Comparisons that name the tensor that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from transformer_xl.model.memory import Memory

Tensors = Mapping[str, Tensor] | nn.Module | Memory | Iterable[Tensor]


def assert_same_tensors(found: Tensors, wanted: Tensors, *, rtol: float = 0, atol: float = 0) -> None:
    """Compare weights of models, memories, or tensors by name or in order: bit for bit unless a tolerance is given.

    Dtypes and shapes must be the same too. Nothing to compare is a failure.
    """
    found_named, wanted_named = _by_name(found), _by_name(wanted)
    assert sorted(found_named) == sorted(wanted_named)
    assert wanted_named, "no tensors to compare"
    for name, tensor in wanted_named.items():
        torch.testing.assert_close(
            found_named[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"tensor {name}: {text}"
        )


def copied_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """Return copies by name, to compare with after something that must not change them."""
    return {name: tensor.detach().clone() for name, tensor in _by_name(tensors).items()}


def named_gradients(scalar: Tensor, tensors: Tensors) -> dict[str, Tensor]:
    """Return the gradients of a scalar by the names of the tensors; zeros where it does not depend on them."""
    named = dict(tensors.named_parameters()) if isinstance(tensors, nn.Module) else _by_name(tensors)
    return dict(zip(named, torch.autograd.grad(scalar, list(named.values()), materialize_grads=True), strict=True))


def authors_mean_std(name: str) -> tuple[float, float]:
    """Mean and standard deviation of a parameter in the authors' initialisation."""
    if name.endswith("norm.weight"):
        return 1.0, 0.02
    is_drawn = name in ("content_bias", "position_bias") or not name.endswith("bias")
    return 0.0, 0.02 if is_drawn else 0.0


def _by_name(tensors: Tensors) -> dict[str, Tensor]:
    if isinstance(tensors, nn.Module):
        return dict(tensors.state_dict())
    if isinstance(tensors, Memory):
        return tensors.tensors()
    if isinstance(tensors, Mapping):
        return dict(tensors)
    return {str(index): tensor for index, tensor in enumerate(tensors)}


def assert_drawn_from_normal(tensors: Tensors, mean_std: Callable[[str], tuple[float, float]]) -> None:
    """Check that each tensor looks like draws from the normal distribution that its name calls for.

    Mean and standard deviation of n draws may be off by 5 standard errors, std / sqrt(n) and std / sqrt(2 n), which one
    in a million tensors exceeds; with std 0 every element is the mean.
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
