"""The parameter groups of the optimizers, and Muon compared with a float64 implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_xl.config import TrainConfig, UserError, run_settings
from transformer_xl.training.optimizers import (
    Muon,
    RowRMSProp,
    _orthogonalized_blocks,
    _soap_direction,
    build_optimizers,
    load_optimizer_state,
    optimizer_state,
    orthogonalize,
)

# shapes of the matrices that Muon updates, and whether blocks are of rows (0) or columns (1), in blocks of 4: three are
# divided into blocks, one of which is tall; the others are one block each
SHAPES = [(8, 11), (11, 8), (5, 11), (8, 3), (11, 5), (7, 7)]
BLOCK_DIMS = [0, 1, 0, 0, 1, 1]


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


def test_embedding_has_a_rate_of_its_own_and_adam_regularizes_all_weights(make_model) -> None:
    model = make_model(max_ngram=2)
    ratios = {"embedding_learning_rate_ratio": 2.0, "weight_decay": 0.1}
    embedding, others = groups_of(model, **ratios)
    assert (embedding["is_embedding"], others["is_embedding"]) == (True, False)
    assert names_in(model, embedding) == {
        name for name, _ in model.named_parameters() if name.startswith(("embedding.", "ngrams."))
    }
    assert embedding["weight_decay"] == others["weight_decay"] == 0.1
    marked = [group.get("is_embedding", False) for group in groups_of(model, optimizer="muon", **ratios)]
    assert marked == [False, False, True, False]


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
    by_rows, by_columns, decayed, others = groups_of(model, optimizer="muon", weight_decay=0.1)
    assert type(decayed["optimizer"]) is torch.optim.AdamW
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    # blocks of the heads' or hidden units' side of each matrix
    names = {"q_proj", "k_proj", "v_proj", "r_proj", "up_proj"}, {"o_proj", "down_proj"}
    for dim, (group, expected) in enumerate(zip((by_rows, by_columns), names, strict=True)):
        assert (type(group["optimizer"]), group["momentum"], group["weight_decay"]) == (Muon, 0.95, 0.1)
        assert (group["block_dim"], group["block_width"]) == (dim, model.config.head_dim)
        assert {name.split(".")[-2] for name in names_in(model, group)} == expected
        assert len(group["params"]) == len(expected) * model.config.n_layers
    assert all(name.startswith(("embedding", "softmax")) for name in names_in(model, decayed))


def test_projections_of_distances_have_no_bases(make_model) -> None:
    model = make_model()
    plain, *with_bases, _, _ = groups_of(model, optimizer="soap-muon", weight_decay=0.1)
    assert {name.split(".")[-2] for name in names_in(model, plain)} == {"r_proj"}
    for group, expected in zip(with_bases, groups_of(model, optimizer="muon"), strict=False):
        assert names_in(model, group) == names_in(model, expected) - names_in(model, plain)
        assert group["optimizer"] is not plain["optimizer"]


@pytest.mark.parametrize("optimizer", ["adam", "soap-muon"])
def test_tables_with_a_rate_of_their_own_are_updated_by_rows(make_model, optimizer: str) -> None:
    model = make_model(max_ngram=3, ngram_buckets=29, d_ngram=3)
    settings = {"optimizer": optimizer, "embedding_learning_rate_ratio": 2.0}
    *_, tables = groups_of(model, **settings, ngram_learning_rate_ratio=0.5, weight_decay=0.1)
    assert type(tables["optimizer"]) is RowRMSProp
    assert names_in(model, tables) == {"ngrams.tables.0", "ngrams.tables.1"}
    assert not any(type(group["optimizer"]) is RowRMSProp for group in groups_of(model, **settings))


@pytest.mark.parametrize(
    ("setting", "what"), [({"optimizer": "soap-muon"}, "matrices"), ({"ngram_learning_rate_ratio": 1.0}, "tables")]
)
def test_what_needs_whole_parameters_refuses_sharded_ones(setting: dict[str, Any], what: str) -> None:
    train = {**setting, "parallelism": "fsdp"}
    with pytest.raises(UserError, match=f"needs whole {what}; give parallelism ddp"):
        run_settings({"model": {"vocab_size": 50, "max_ngram": 2}, "train": train}, "settings")
    if what == "tables":
        run_settings({"model": {"vocab_size": 50}, "train": train}, "settings")


@pytest.mark.parametrize("is_sparse", [True, False])
def test_rows_of_a_table_equal_a_simple_implementation(is_sparse: bool) -> None:
    """Rows that are looked up twice in a step, later with a gradient of zero, or never."""
    table = torch.nn.Parameter(torch.arange(18, dtype=torch.float64).view(6, 3))
    optimizer = RowRMSProp(
        [{"params": [table]}], TrainConfig(learning_rate=0.5, beta2=0.9, ngram_learning_rate_ratio=2.0)
    )
    expected, squares = table.detach().clone(), [0.0] * 6
    for step, (ids, factors) in enumerate(
        [([1, 4, 4], [1.0, 2.0, -3.0]), ([4, 2, 0], [0.5, 0.0, 4.0]), ([4, 1], [7.0, 0.0])]
    ):
        grads = dict.fromkeys(ids, torch.zeros(3, dtype=torch.float64))
        rows = torch.nn.functional.embedding(torch.tensor(ids), table, sparse=is_sparse)
        weights = torch.tensor(factors, dtype=torch.float64)[:, None] * torch.tensor([1.0, -2.0, 0.5 + step])
        (rows * weights).sum().backward()
        assert table.grad is not None
        assert table.grad.is_sparse == is_sparse
        for row, weight in zip(ids, weights, strict=True):
            grads[row] = grads[row] + weight
        for row, grad in grads.items():
            if grad.any():
                squares[row] = 0.9 * squares[row] + 0.1 * float(grad.square().mean())
                expected[row] -= 2 * 0.5 * grad / (squares[row] ** 0.5 + 1e-8)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(table.detach(), expected, rtol=1e-12, atol=0)
    assert optimizer.state[table]["square"].tolist() == pytest.approx(squares, rel=1e-12)


def test_state_of_another_soap_muon_is_refused(make_model) -> None:
    """At first a square matrix had bases for both sides, and covariances were stacked."""
    model = make_model()
    optimizers = build_optimizers(model, TrainConfig(optimizer="soap-muon"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    state = optimizer_state(optimizers, model)
    state = {name: tensor[None] if name.endswith("/covariance") else tensor for name, tensor in state.items()}
    with pytest.raises(UserError, match="bases for both sides of a matrix, which is gone"):
        load_optimizer_state(optimizers, model, state)


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


CONFIG = TrainConfig(optimizer="muon", learning_rate=0.02, weight_decay=0.3)


def muon(weights: list[torch.nn.Parameter], config: TrainConfig = CONFIG, *, has_bases: bool = False) -> Muon:
    by_dim = [[weight for weight, dim in zip(weights, BLOCK_DIMS, strict=True) if dim == wanted] for wanted in (0, 1)]
    groups = [{"params": params, "block_dim": dim, "block_width": 4} for dim, params in enumerate(by_dim)]
    return Muon(groups, config, has_bases=has_bases)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Apply the polynomials of the three Newton-Schulz iterations to each singular value."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm() / 1.02
    polynomials = [(8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526)]
    for a, b, c in polynomials:
        values = a * values + b * values**3 + c * values**5
    return left * values @ right


def test_muon_equals_a_float64_implementation() -> None:
    """Nesterov momentum 0.95, a rate of 1.5 times 0.02, weight decay 0.3, blocks of 4 rows or columns."""
    weights, rate = matrices(torch.float64), 0.02 * 1.5
    expected, means = [weight.detach().clone() for weight in weights], [torch.zeros(shape).double() for shape in SHAPES]
    all_grads = gradients(torch.float64, 4)
    for grads in all_grads:
        for index, grad in enumerate(grads):
            means[index] = 0.95 * means[index] + 0.05 * grad
            direction, dim = 0.05 * grad + 0.95 * means[index], BLOCK_DIMS[index]
            blocks = direction.split(4, dim) if grad.shape[dim] % 4 == 0 else [direction]
            # the factor makes the RMS of an update about 0.2, as AdamW's
            updates = [0.2 * max(block.shape) ** 0.5 * orthogonalized(block) for block in blocks]
            expected[index] = expected[index] * (1 - rate * 0.3) - rate * torch.cat(updates, dim)
    take_steps(muon(weights, CONFIG.model_copy(update={"muon_learning_rate_ratio": 1.5})), weights, all_grads)
    for actual, by_hand in zip(weights, expected, strict=True):
        torch.testing.assert_close(actual.detach(), by_hand, rtol=0, atol=1e-10)


def soap_directions(all_grads: list[Tensor], momentum: float = 0.9) -> list[Tensor]:
    state: dict[str, Any] = {}
    return [_soap_direction(grad, state, momentum) for grad in all_grads]


@pytest.mark.parametrize("shape", [(5, 5), (5, 9), (9, 5)])
def test_soap_directions_turn_with_the_gradients(shape: tuple[int, int]) -> None:
    """They do not depend on the coordinates of the side that has a basis: the shorter one, or a square's inputs.

    But for the slope in the first covariance, a millionth of it.
    """
    draw = torch.Generator().manual_seed(3)
    grads = [torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(35)]
    turn, straight = torch.linalg.qr(torch.randn(5, 5, generator=draw, dtype=torch.float64))[0], torch.eye(9).double()
    left, right = (turn, straight) if shape == (5, 9) else (straight[: shape[0], : shape[0]], turn)
    turned = soap_directions([left @ grad @ right for grad in grads])
    for actual, expected in zip(turned, soap_directions(grads), strict=True):
        torch.testing.assert_close(actual, left @ expected @ right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
@pytest.mark.parametrize(("momentum", "num_steps", "least"), [(0.9, 200, 0.99), (0.5, 52, 0.9)])
def test_soap_directions_are_those_of_adam_in_the_eigenbasis(
    shape: tuple[int, int], momentum: float, num_steps: int, least: float
) -> None:
    """Independent gradients, whose size falls along the shorter side, have that side's coordinates as their basis.

    Of 52 steps, the last two have the sizes in reverse, and with that eigenvectors in another order.
    """
    draw = torch.Generator().manual_seed(4)
    side = shape.index(4)
    sizes = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64).unsqueeze(1 - side)
    grads = [sizes * torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(num_steps)]
    if num_steps == 52:
        grads[-2:] = [grad / sizes * sizes.flip(side) for grad in grads[-2:]]
    mean, square = torch.zeros(shape).double(), torch.zeros(shape).double()
    for grad in grads[1:]:  # the first only gives the basis
        mean, square = mean.lerp(grad, 1 - momentum), square.lerp(grad**2, 1 - momentum)
    expected = mean.lerp(grads[-1], 1 - momentum) / square.sqrt()
    actual = soap_directions(grads, momentum)[-1]
    assert torch.cosine_similarity(actual.flatten(), expected.flatten(), dim=0) > least


def test_soap_directions_in_float32_are_those_in_float64() -> None:
    """But for products, which may be in bfloat16."""
    draw = torch.Generator().manual_seed(6)
    grads = [torch.randn(16, 24, generator=draw) * torch.logspace(0, -1, 16)[:, None] for _ in range(25)]
    exact = soap_directions([grad.double() for grad in grads])[5:]
    for actual, expected in zip(soap_directions(grads)[5:], exact, strict=True):
        assert torch.cosine_similarity(actual.double().flatten(), expected.flatten(), dim=0) > 0.98


@pytest.mark.parametrize("rank", [4, 12])
def test_rounding_of_gradients_changes_no_soap_direction(rank: int) -> None:
    """Not in directions that the first gradient does not have, and later ones do (rank 4 of 12)."""
    draw = torch.Generator().manual_seed(8)
    factors = [(torch.randn(12, 12, generator=draw), torch.randn(12, 12, generator=draw)) for _ in range(25)]
    ranks = [rank, *[12] * 24]
    grads = [left[:, :number] @ right[:number] for (left, right), number in zip(factors, ranks, strict=True)]
    rounded = [grad * (1 + 1e-7 * torch.randn(12, 12, generator=draw)) for grad in grads]
    for actual, expected in zip(soap_directions(rounded), soap_directions(grads), strict=True):
        assert (actual - expected).norm() < 1e-3 * expected.norm()


def test_soap_muon_orthogonalizes_its_directions() -> None:
    weights, plain, states = matrices(torch.float64), matrices(torch.float64), [{} for _ in SHAPES]
    all_grads = gradients(torch.float64, 12)
    take_steps(muon(weights, has_bases=True), weights, all_grads)
    for grads in all_grads:
        directions = [_soap_direction(*pair, 0.95) for pair in zip(grads, states, strict=True)]
        for index, (weight, direction) in enumerate(zip(plain, directions, strict=True)):
            (update,) = _orthogonalized_blocks([direction], BLOCK_DIMS[index], 4)
            weight.data.mul_(1 - 0.02 * 0.3).add_(update, alpha=-0.02)
    for actual, expected in zip(weights, plain, strict=True):
        torch.testing.assert_close(actual.detach(), expected.detach(), rtol=0, atol=1e-12)


def test_soap_muon_takes_gradients_that_are_not_finite() -> None:
    """Whoever trains sees that the loss is not finite, and stops with a message of its own."""
    weights = matrices(torch.float32)
    optimizer = muon(weights, has_bases=True)
    take_steps(optimizer, weights, [[torch.full(shape, torch.nan) for shape in SHAPES]] * 12)


def test_orthogonalize_sets_singular_values_to_about_1() -> None:
    draw = torch.Generator().manual_seed(7)
    # 11 matrices, with scales from 1e-6 to 1e3
    many = torch.randn(11, 5, 13, generator=draw) * torch.logspace(-6, 3, 11)[:, None, None]
    values = torch.linalg.svdvals(orthogonalize(many.double()))
    assert 0.73 < float(values.min()) < float(values.max()) < 1.27
    values = torch.linalg.svdvals(orthogonalize(many).float())  # in bfloat16, where the device supports it
    assert 0.6 < float(values.min()) < float(values.max()) < 1.5
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 5)), torch.zeros(2, 3, 5).to(orthogonalize(many).dtype))


def test_muon_does_not_change_weights_without_a_gradient() -> None:
    weights = matrices(torch.float32)
    before = weights[1].detach().clone()
    optimizer = muon(weights)
    optimizer.step()
    for weight in weights[::2]:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(weights[1], before)
    assert not torch.equal(weights[0], matrices(torch.float32)[0])
