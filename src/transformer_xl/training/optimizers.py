"""Builds the optimizers and their parameter groups: the paper's Adam, AdamW, or Muon for the matrices of the layers.

Tables of n-grams may have an optimizer of their own, which updates only the rows that a batch looks up.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from transformer_xl.config import TrainConfig, UserError
from transformer_xl.device import has_bfloat16
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.training.distributed import full_tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Optimizers = tuple[torch.optim.Optimizer, ...]

# Coefficients of the three Newton-Schulz iterations that orthogonalize updates: the best odd polynomials of degree 5
# for singular values of 0.01 to 1, computed as in Polar Express (Amsel et al. 2025). All of them become 0.73 to 1.27.
_MUON_COEFFICIENTS = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))
_MUON_MOMENTUM = 0.95
_EMBEDDINGS = ("embedding.", "ngrams.")  # beginnings of the names of their parameters
_MUON_NORM_MARGIN, _MUON_MIN_NORM = 1.02, 1e-7  # the margin keeps values below 1 where bfloat16 rounds
_SOAP_INTERVAL, _EPS = 10, 1e-8  # steps between two bases; added to the root of a second moment
_TABLES = "ngrams.tables."  # beginning of the names of n-gram tables


def build_optimizers(model: LanguageModel, config: TrainConfig, *, layer_rate_decay: float = 1.0) -> Optimizers:
    """Build the optimizers of the settings; every parameter that is trained is in exactly one group of one optimizer.

    Decoupled weight decay applies to matrices only, including the embedding: not to LayerNorms, biases and the
    attention biases (the paper's u and v), nor sinks. Adam's L2 regularization applies to all weights.
    Muon updates the matrices of the layers (query, key and value projections are separate matrices, as Muon
    requires), and AdamW all other parameters, among them the narrow matrices of an adapter and value embeddings.
    Tables of n-grams that have a learning rate of their own are updated by `RowRMSProp`.

    Args:
        model: the model; parameters without `requires_grad` are left out.
        config: settings of training.
        layer_rate_decay: factor between the learning rates of a layer and the layer above it (Howard and Ruder 2018);
            the last layer and what follows it have the full rate, and embeddings the rate of a layer below the first.
            Groups have it as `rate_factor`; those of embeddings with a rate of their own have `is_embedding`.
    """
    # parameters by their rate, and in Muon by whether they have bases and the side of their blocks, in Adam by whether
    # they decay and whether they have the rate of the embedding
    muon: dict[bool, dict[tuple[float, int], list[nn.Parameter]]] = {False: {}, True: {}}
    adam: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    tables: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        factor, is_matrix = _rate_factor(name, len(model.layers), layer_rate_decay), parameter.ndim == 2
        is_other = ".lora_" in name or ".value_embedding." in name
        if config.has_muon and is_matrix and name.startswith("layers.") and not is_other:
            block_dim = int(name.endswith(("o_proj.weight", "down_proj.weight")))
            # encodings of distances have few directions: those without gradients would get rounding errors as updates
            has_bases = config.optimizer == "soap-muon" and not name.endswith("r_proj.weight")
            muon[has_bases].setdefault((factor, block_dim), []).append(parameter)
            continue
        if config.ngram_learning_rate_ratio is not None and name.startswith(_TABLES):
            tables.setdefault(factor, []).append(parameter)
        else:
            is_embedding = config.embedding_learning_rate_ratio != 1 and name.startswith(_EMBEDDINGS)
            adam.setdefault((is_matrix or config.optimizer == "adam", factor, is_embedding), []).append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    for has_bases, params_by_group in muon.items():
        width = model.config.block_width
        muon_groups = [
            {"params": params, "block_dim": block_dim, "block_width": width, "rate_factor": factor}
            for (factor, block_dim), params in params_by_group.items()
        ]
        if muon_groups:
            optimizers.append(Muon(muon_groups, config, has_bases=has_bases))
    if adam:
        adam_groups = [
            {
                "params": params,
                "weight_decay": config.weight_decay * decays,
                "rate_factor": factor,
                "is_embedding": is_embedding,
            }
            for (decays, factor, is_embedding), params in sorted(adam.items(), key=itemgetter(0), reverse=True)
        ]
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        optimizers.append(kind(adam_groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True))
    if tables:
        table_groups = [{"params": params, "rate_factor": factor} for factor, params in tables.items()]
        optimizers.append(RowRMSProp(table_groups, config))
    return tuple(optimizers)


def freeze_parameters(model: LanguageModel, patterns: Sequence[str]) -> None:
    """Leave out of training the parameters whose names match one of the patterns, such as `layers.0.*`.

    Raises:
        UserError: a pattern matches no parameter that is trained, or nothing is left to train.
    """
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for pattern in patterns:
        matching = fnmatch.filter(parameters, pattern)
        if not matching:
            groups = dict.fromkeys(
                ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1]) for name in parameters
            )
            known = ", ".join(f"{name}*" for name in groups)
            raise UserError(f"freeze '{pattern}' matches no parameter; those of this model are {known}")
        for name in matching:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise UserError(f"freeze {' '.join(patterns)} leaves no parameter to train; give fewer patterns")


def optimizer_state(optimizers: Optimizers, model: LanguageModel) -> dict[str, Tensor]:
    """Return the state of the optimizers, as `optimizer/PARAMETER/KEY`; before the first step there is none."""
    return {
        f"{prefix}{key}": tensor
        for optimizer in optimizers
        for prefix, parameter in _named_parameters(optimizer, model)
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }


def empty_optimizer_state(
    optimizers: Optimizers, model: LanguageModel, saved: Mapping[str, TensorStorageMetadata]
) -> dict[str, Tensor]:
    """Allocate tensors to read a saved state into, sharded like the parameters.

    What is saved of one parameter of an optimizer is expected of all.
    """
    tensors: dict[str, Tensor] = {}
    for optimizer in optimizers:
        named = dict(_named_parameters(optimizer, model))
        keys = {name.removeprefix(prefix) for prefix in named for name in saved if name.startswith(prefix)}
        for prefix, parameter in named.items():
            for key in keys:
                entry, shape_like, dtype = saved.get(prefix + key), parameter, parameter.dtype
                if entry is not None:
                    shape_like = parameter if entry.size == parameter.shape else torch.empty(entry.size)
                    dtype = entry.properties.dtype
                tensors[prefix + key] = torch.zeros_like(shape_like, dtype=dtype)
    return tensors


def load_optimizer_state(optimizers: Optimizers, model: LanguageModel, tensors: Mapping[str, Any]) -> None:
    """Restore what `optimizer_state` returned; learning rates and other settings stay.

    Raises:
        UserError: the state is of `soap-muon` as it was at first.
    """
    for optimizer in optimizers:
        states: dict[int, dict[str, Any]] = {}
        for index, (prefix, _) in enumerate(_named_parameters(optimizer, model)):
            state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            if state:
                states[index] = state
            if "covariance" in state and state["covariance"].ndim != 2:
                raise UserError(
                    "this run's soap-muon had bases for both sides of a matrix, which is gone; train its weights "
                    "further as a new run with txl finetune"
                )
        optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _named_parameters(optimizer: torch.optim.Optimizer, model: LanguageModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the optimizer's parameters in its order, each with the name prefix of its state."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield f"optimizer/{names[id(parameter)]}/", parameter


def _rate_factor(name: str, num_layers: int, decay: float) -> float:
    """Return the learning rate of a parameter as a fraction of the full one."""
    if name.startswith("layers."):
        return decay ** (num_layers - 1 - int(name.split(".")[1]))
    return decay**num_layers if name.startswith(_EMBEDDINGS) else 1.0


class Muon(torch.optim.Optimizer):
    """Momentum SGD with nearly orthogonalized updates of matrices (Jordan et al. 2024).

    It has Nesterov momentum, and its updates have the RMS of AdamW's (Liu et al. 2025). It differs from
    `torch.optim.Muon` in two ways, which make a step cheaper. Matrices are divided into blocks, one for each attention
    head and as many hidden units of a feed-forward layer, and each block is orthogonalized by itself, blocks of equal
    shape in one batch. And three iterations with the coefficients of Polar Express (Amsel et al. 2025) replace five
    with fixed ones. Products are in bfloat16 if the device supports it, else in float32. If weights are sharded over
    processes, each process gathers the full matrices and keeps its shard of the update.

    With the optimizer `soap-muon`, momentum is divided by the root of the second moment before, both in the eigenbasis
    of the covariance of the gradient's shorter side, the inputs of a square matrix (SOAP, Vyas et al. 2024). The basis
    follows the covariance every 10 steps.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: TrainConfig, *, has_bases: bool = False) -> None:
        """Prepare the optimizer.

        Args:
            groups: parameter groups, each with `params` (matrices), `block_dim` (0: blocks of rows; 1: of columns) and
                `block_width` (rows or columns of a block; a matrix that is no multiple of it is one block).
            config: settings of training.
            has_bases: whether momentum is divided in the eigenbasis.
        """
        defaults = {
            "lr": config.learning_rate,
            "lr_ratio": config.muon_learning_rate_ratio,
            "momentum": _MUON_MOMENTUM,
            "weight_decay": config.weight_decay,
        }
        super().__init__(groups, defaults)
        self._has_bases = has_bases

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """Update every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not updated:  # torch's functions on lists refuse empty ones
                continue
            if self._has_bases:
                directions = [_soap_direction(one.grad, self.state[one], group["momentum"]) for one in updated]
            else:
                directions = self._directions(updated, group["momentum"])
            rate = group["lr"] * group["lr_ratio"]
            if group["weight_decay"]:
                torch._foreach_mul_(updated, 1 - rate * group["weight_decay"])
            updates = _orthogonalized_blocks(directions, group["block_dim"], group["block_width"])
            for parameter, update in zip(updated, updates, strict=True):
                parameter.add_(_shard_like(parameter, update), alpha=-rate)

    def _directions(self, parameters: list[nn.Parameter], momentum: float) -> list[Tensor]:
        """Return the Nesterov momentum of the gradients, gathered from all processes if they are sharded."""
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter, grad in zip(parameters, grads, strict=True):
            state: dict[str, Any] = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(grad)
        means = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(means, grads, 1 - momentum)
        return [full_tensor(direction) for direction in torch._foreach_lerp(grads, means, momentum)]


def _soap_direction(grad: Tensor | None, state: dict[str, Any], momentum: float) -> Tensor:
    """Return the direction of a matrix with the optimizer `soap-muon`, and update its state; any scale is as good.

    Matrices of the state have rows for the side that has the basis.
    """
    assert grad is not None
    turns = grad.shape[1] <= grad.shape[0]
    wide = _for_products(grad.mT if turns else grad)
    covariance = (wide @ wide.mT).to(grad)
    if not state:
        state |= {"step": torch.zeros(()), "covariance": (1 - momentum) * covariance}
        state |= {"momentum_buffer": grad.new_zeros(wide.shape), "second_moment": grad.new_zeros(wide.shape)}
        state["basis"] = _first_basis(grad.mT if turns else grad)
        return grad
    mean, square, basis = state["momentum_buffer"], state["second_moment"], state["basis"]
    turning = _for_products(basis)
    rotated = (turning.mT @ wide).to(grad)
    mean.lerp_(rotated, 1 - momentum)
    square.lerp_(rotated.square(), 1 - momentum)
    direction = turning @ _for_products(mean.lerp(rotated, 1 - momentum).div_(square.sqrt().add_(_EPS)))
    state["covariance"].lerp_(covariance, 1 - momentum)
    state["step"] += 1
    if state["step"] % _SOAP_INTERVAL == 0:
        # a step of the power method; it converges where eigenvalues fall from column to column
        image = state["covariance"] @ basis
        order = (basis * image).sum(0).argsort(descending=True)
        image = image[:, order]
        new = torch.linalg.qr(image.cpu() if image.is_mps else image)[0].to(basis)  # MPS has no decompositions
        mean.copy_(new.mT @ (basis @ mean))
        square.copy_(square[order])
        basis.copy_(new)
    return direction.mT if turns else direction


def _first_basis(wide: Tensor) -> Tensor:
    """Return the eigenvectors of the covariance of a gradient's rows, those of the largest eigenvalues first.

    Where the gradient has no direction any basis would do, and rounding would choose one, which later gradients see. So
    a slope is added to the covariance, too small for other directions: the basis is the same up to rounding however
    many processes or micro-batches made the gradient.
    """
    exact = wide.cpu().double().nan_to_num(0.0, 0.0, 0.0)  # else eigh raises before training is stopped
    covariance = exact @ exact.mT
    slope = torch.linspace(1e-6, 0, len(exact), dtype=exact.dtype) * covariance.diagonal().mean()
    return torch.linalg.eigh(covariance + slope.diag())[1].flip(-1).contiguous().to(wide)


class RowRMSProp(torch.optim.Optimizer):
    """RMSProp of the rows of tables that have a gradient; all other rows stay as they are.

    So with sparse gradients a step takes no longer with larger tables. Adam would read and write all of them. The
    second moment is one number a row, the mean of the squares (as in row-wise Adagrad, Gupta et al. 2014); it begins at
    0, so the first update of a row is 1 / sqrt(1 - beta2) times the learning rate.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], config: TrainConfig) -> None:
        """Prepare the optimizer.

        Args:
            groups: parameter groups, each with `params`, tables whose gradients may be sparse.
            config: settings of training.
        """
        defaults = {"lr": config.learning_rate, "lr_ratio": config.ngram_learning_rate_ratio, "beta2": config.beta2}
        super().__init__(groups, defaults)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """Update every row that has a gradient other than zero."""
        assert closure is None
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is None:
                    continue
                state = self.state[table]
                if not state:
                    state["square"] = table.new_zeros(len(table))
                rows_N, grad_NE = _rows_with_gradients(table.grad)
                square_N = state["square"][rows_N].lerp_(grad_NE.square().mean(1), 1 - group["beta2"])
                state["square"][rows_N] = square_N
                update_NE = grad_NE / square_N.sqrt().add_(_EPS)[:, None]
                table.index_add_(0, rows_N, update_NE, alpha=-group["lr"] * group["lr_ratio"])


def _rows_with_gradients(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of the rows of a table whose gradient is not zero, each once, and their gradients."""
    if grad.is_sparse:
        grad = grad.coalesce()
        rows_N, grad_NE = grad.indices()[0], grad.values()
        kept_N = grad_NE.any(1)
        return rows_N[kept_N], grad_NE[kept_N]
    rows_N = grad.any(1).nonzero()[:, 0]
    return rows_N, grad[rows_N]


def _orthogonalized_blocks(matrices: Sequence[Tensor], block_dim: int, block_width: int) -> list[Tensor]:
    """Return the matrices with each of their blocks orthogonalized, with an RMS of about 0.2, like AdamW's updates.

    Arguments are those of Muon's parameter groups.
    """
    by_rows = [matrix.mT if block_dim else matrix for matrix in matrices]
    results: list[Tensor] = [*matrices]
    stacks: dict[tuple[int, int], list[tuple[int, Tensor]]] = {}
    for index, matrix in enumerate(by_rows):
        height, width = matrix.shape
        blocks = matrix.reshape(-1, block_width if height % block_width == 0 else height, width)
        wide = blocks if blocks.shape[1] <= blocks.shape[2] else blocks.mT
        stacks.setdefault((wide.shape[1], wide.shape[2]), []).append((index, wide))
    for (_, num_columns), members in stacks.items():
        updates = orthogonalize(torch.cat([wide for _, wide in members])).to(matrices[0].dtype)
        updates *= 0.2 * num_columns**0.5
        for (index, _), part in zip(members, updates.split([len(wide) for _, wide in members]), strict=True):
            matrix = by_rows[index]
            update = (part if part.shape[2] == matrix.shape[1] else part.mT).reshape(matrix.shape)
            results[index] = update.mT if block_dim else update
    return results


def orthogonalize(matrices: Tensor) -> Tensor:
    """Set all singular values of wide matrices, shape (count, rows, columns), to about 1.

    Uses three Newton-Schulz iterations with polynomials of degree 5: singular values of at least a hundredth of the
    matrix's norm become 0.71 to 1.27, somewhat more where bfloat16 rounds; sufficient for Muon.
    """
    x = _for_products(matrices)
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) * _MUON_NORM_MARGIN).clamp(min=_MUON_MIN_NORM)
    for a, b, c in _MUON_COEFFICIENTS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _for_products(matrices: Tensor) -> Tensor:
    """Return the matrices in the format of an optimizer's products: bfloat16 if the device supports it."""
    fast_dtype = torch.bfloat16 if has_bfloat16(matrices.device) else torch.float32
    return matrices if matrices.dtype == torch.float64 else matrices.to(fast_dtype)


def _shard_like(like: Tensor, tensor: Tensor) -> Tensor:
    """Return this process's shard of `tensor`, sharded as `like` is; every process has the whole `tensor`."""
    if not hasattr(like, "to_local"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor  # slow to import

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
