"""`prepare_inference` makes of a model one that reads and generates fast, and whose weights are fixed.

    inference = prepare_inference(model, dtype="bfloat16")
    memory = inference.initial_memory(batch_size)              (a KV cache, if the model supports one)
    hidden_BTD, memory = inference(tokens_BT, memory)
    logits_BTV = inference.logits(hidden_BTD)

It has the contract of a language model, so what reads or generates takes either.

Shape suffixes: B batch size, T new tokens, D model width, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

import copy
import secrets
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from transformer_xl.device import Precision, autocast, require_memory, resolve_dtype
from transformer_xl.inference.decode import DecodeTables, decode_tables
from transformer_xl.model.backbone import Backbone
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits, Memory
from transformer_xl.model.relative import RelativeModel
from transformer_xl.model.sizes import min_cache
from transformer_xl.model.token_ids import TokenIds
from transformer_xl.model.transformer_xl import RelativeLanguageModel
from transformer_xl.ops.kernels import choose
from transformer_xl.ops.kernels import native as native_kernel
from transformer_xl.ops.linear import Int8Linear, PackedLinear

AnyModel = TypeVar("AnyModel", bound=LanguageModel | Backbone)


class InferenceModel:
    """A model for reading and generating, of `prepare_inference`; no method computes gradients."""

    training = False
    """As of a module in evaluation mode."""

    def __init__(self, model: LanguageModel, dtype: Precision, tables: DecodeTables | None) -> None:
        self.model = model
        """The model that computes, with prepared weights: not the one that was given."""
        self.dtype = dtype
        """Of matrix products: float32 or bfloat16."""
        self.config, self.device = model.config, model.device
        self.limits_visible = model.limits_visible
        """Whether calls take `visible`, which limits how many keys each token attends to."""
        self._tables = tables

    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory:
        """Return an empty memory: a KV cache if the model supports one.

        Only this object continues it, as keys and values depend on the weights.

        Args:
            batch_size: B.
            context_limits: how far back attention can look, or None for the model's `context_limits`.

        Raises:
            UserError: the model does not support these limits.
        """
        with self.computing():
            return self.model.initial_memory(batch_size, context_limits)

    def generation_memory(
        self, batch_size: int, context_limits: ContextLimits | None = None, *, segment_length: int
    ) -> Memory:
        """Return an empty memory for generating token after token, as `LanguageModel.generation_memory`."""
        with self.computing():
            return self.model.generation_memory(batch_size, context_limits, segment_length=segment_length)

    def __call__(self, tokens: Any = None, memory: Memory | None = None, **inputs: Any) -> tuple[Tensor, Memory]:
        """Process T tokens of each batch row; arguments and results are those of the model's `forward`.

        Raises:
            UserError: as by the model; or the memory is of another prepared model.
        """
        with self.computing():
            if self._tables is None or inputs:
                return self.model(tokens, memory, **inputs)
            model = self.model
            assert isinstance(model, RelativeLanguageModel | Backbone)
            x_BTD, memory = model.embed(tokens, memory)
            if not self._tables.accept(x_BTD, memory):
                states_BTD, memory = model.run_layers(x_BTD, memory)
                return states_BTD[-1], memory
            states_BTD, caches = self._tables.decode(x_BTD, memory, model.attention_context(x_BTD, memory))
            return model.final_norm(states_BTD[-1]), memory.advance(caches, x_BTD.shape[1])

    def hidden_states(
        self, tokens: TokenIds | None = None, memory: Memory | None = None, **inputs: Any
    ) -> tuple[list[Tensor], Memory]:
        """Return the hidden states of all layers, as `LanguageModel.hidden_states`."""
        with self.computing():
            return self.model.hidden_states(tokens, memory, **inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits, shape (B, T, V), for every position."""
        with self.computing():
            return self.model.logits(hidden)

    def nats(self, hidden: Tensor, targets: TokenIds, *, temperature: float = 1.0) -> Tensor:
        """Return the cross-entropy of each target in nats (B, T), as `LanguageModel.nats`."""
        with self.computing():
            return self.model.nats(hidden, targets, temperature=temperature)

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return logits and ids of the k most likely next tokens, (B, T, K) each, as `LanguageModel.topk`."""
        with self.computing():
            return self.model.topk(hidden, k)

    def computing(self) -> AbstractContextManager[object]:
        """Return a context that computes without gradients, and matrix products in the dtype.

        Each method enters it; entered around many calls, it makes them faster.
        """
        kind, is_low = self.device.type, self.dtype == "bfloat16"
        is_same = is_low == torch.is_autocast_enabled(kind)
        if is_same and not torch.is_grad_enabled() and (not is_low or torch.get_autocast_dtype(kind) == torch.bfloat16):
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        stack.enter_context(autocast(self.device, self.dtype))
        return stack


TokenModel = InferenceModel | LanguageModel
"""What reads tokens and predicts the next ones: a prepared model, or any language model, which is slower."""


def require_reading_memory(
    model: TokenModel, task: str, *, num_rows: int, num_slots: int, num_new: int = 1, advice: str
) -> None:
    """Check, before a memory is allocated, that a model can read with it on its device.

    Args:
        model: the model.
        task: what is computed; the message begins with it.
        num_rows: batch rows.
        num_slots: memory slots of each batch row.
        num_new: tokens of each batch row that are read at once.
        advice: what to do if there is not enough.

    Raises:
        UserError: memory and activations certainly need more than there is.
    """
    config = model.config
    # the residual and the inner activations of one layer
    numbers = min_cache(config, num_slots) + num_new * (config.d_model + config.inner_width)
    size = 2 if isinstance(model, InferenceModel) and model.dtype == "bfloat16" else 4
    task += f" of {num_rows:,} x {num_new:,} tokens with a memory of {num_rows:,} x {num_slots:,}"
    require_memory(task, size * num_rows * numbers, model.device, advice)


def prepare_inference(model: LanguageModel | Backbone, dtype: Precision = "float32") -> InferenceModel:
    """Return a model for reading and generating with the weights that a model has now.

    The matrices of linear layers are converted where their dtype differs, and packed; all other weights are shared with
    the model. After a change of its weights, what was prepared would mix old and new ones, and nothing notices that.

    Args:
        model: the model, which is unchanged.
        dtype: of matrix products: float32 (or that of the weights), bfloat16, or auto for bfloat16 where the hardware
            supports it and the weights are not float64 or float16.
    """
    resolved = resolve_dtype(model.device, dtype, model.like.dtype)
    of_products = torch.bfloat16 if resolved == "bfloat16" else model.like.dtype
    prepared = with_matrices_in(model, of_products).eval().requires_grad_(False)
    prepared.owner = secrets.randbits(63)  # also unlike those of other processes, where memories are pickled
    for module in prepared.modules():
        if isinstance(module, PackedLinear):
            module.pack(of_products)
    # a backbone has of a language model what reading needs
    return InferenceModel(cast(LanguageModel, prepared), resolved, _tables(prepared, of_products))


def with_matrices_in(model: AnyModel, dtype: torch.dtype) -> AnyModel:
    """Return a copy of a model with the matrices of its linear layers in `dtype`, for products of that dtype.

    Autocast converts weights each time they are used, which for a few tokens takes longer than the products. Here they
    are converted once, with the same results. The copy shares all other parameters with the model, which is unchanged.
    """
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and type(m) is not Int8Linear]
    matrices = {id(linear.weight): linear.weight for linear in linears}
    # parameters of their own, which share the memory of the weights: no gradient is wanted of these
    shared = {id(parameter): nn.Parameter(parameter.detach(), requires_grad=False) for parameter in model.parameters()}
    for module in model.modules():  # hooks are called as they are, not copies of them with the objects they belong to
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            shared |= {id(hook): hook for hook in hooks.values()}
    converted = {key: nn.Parameter(matrix.detach().to(dtype), requires_grad=False) for key, matrix in matrices.items()}
    return copy.deepcopy(model, {**shared, **converted})  # deepcopy's memo: it uses these objects instead of copies


def _tables(model: LanguageModel | Backbone, dtype: torch.dtype) -> DecodeTables | None:
    """Return what the native operator for few tokens reads of a prepared model, or None if it cannot compute it."""
    if not isinstance(model, RelativeLanguageModel | Backbone) or model.device.type != "cpu":
        return None
    if type(model).attention_context is not RelativeModel.attention_context:  # may attend in a way of its own
        return None
    if choose(model.attn_implementation or "auto", model.device, dtype).attend is not native_kernel.attend:
        return None
    return decode_tables(model.layers, model.layer_biases(), dtype)
