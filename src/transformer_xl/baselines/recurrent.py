"""LSTM and QRNN language models: each layer continues from a state of fixed size, whatever the length of the text.

LSTM (Hochreiter & Schmidhuber 1997, with forget gates by Gers et al. 2000):

    i, f, z, o = gates(W x_t + U h_(t-1) + b)     c_t = f * c_(t-1) + i * z     h_t = o * tanh(c_t)

QRNN with fo-pooling (forget gate f and output gate o; Bradbury et al. 2017). Its gates depend on inputs only: with
qrnn_kernel_size 1 on the current one, with 2 also on the previous one:

    z, f, o = gates(W [x_(t-1) ; x_t] + b)        c_t = f * c_(t-1) + (1 - f) * z     h_t = o * c_t

z is a tanh, the other gates are sigmoids. A QRNN computes its gates for all positions at once, and then c_t, a linear
recurrence, without a loop over positions (`linear_recurrence`). Zoneout (Krueger et al. 2017) sets random elements of f
to 1 in training.

Where we differ: an LSTM has one bias where torch has two, of which only the sum matters; forget gates start with bias
1, so that a new model remembers. Dropout is applied to the embedding and to the output of every layer. There is no
LayerNorm to rescale small activations, so initial weights give activations and gates variance 1; with Transformer-XL's
initial weights, the loss of three layers took several times as many steps to start falling.

Shape suffixes: B batch size, T new tokens, D model width, X vectors of a state: h and c of an LSTM; c of a QRNN and the
earlier inputs that its gates need; W width of the inputs that the gates of a QRNN depend on (kernel size times D).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from typing_extensions import override

from transformer_xl.config import QRNNConfig, RecurrentConfig
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import ContextLimits, LayerCache, Memory
from transformer_xl.ops.dropout import FastDropout
from transformer_xl.ops.linear import is_transformed

_FORGET_BIAS = 1.0  # initial bias of forget gates, as recommended by Jozefowicz et al. 2015


@dataclass(frozen=True, eq=False, repr=False)
class RecurrentCache(LayerCache):
    """The state of a layer after the last token of each batch row; zeros before the first token.

    A state has no slots: it may depend on all earlier tokens. So all values of memory_length above 0 have the
    same effect on it (n-gram embeddings need max_ngram - 1 tokens of memory), and with 0 no state is passed from one
    segment to the next.
    """

    state_BXD: Tensor

    @property
    @override
    def token_shape(self) -> tuple[int, ...]:
        return self.state_BXD.shape[1:]

    @override
    def resized(self, length: int, num_more: int) -> RecurrentCache:
        return self if length else RecurrentCache(torch.zeros_like(self.state_BXD))


class LSTMLayer(nn.Module):
    """One layer of an LSTM; the gates are in torch's order: i, f, z, o."""

    num_state_vectors = 2

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.input_weight = nn.Parameter(torch.empty(4 * config.d_model, config.d_model))
        self.recurrent_weight = nn.Parameter(torch.empty(4 * config.d_model, config.d_model))
        self.bias = nn.Parameter(torch.empty(4 * config.d_model))

    def init_weights(self) -> None:
        """Draw uniform weights, of variance 1 / D for inputs and 1 / (3 D) for h; biases 0, those of forget gates 1."""
        bound = self.input_weight.shape[1] ** -0.5
        nn.init.uniform_(self.input_weight, -(3**0.5) * bound, 3**0.5 * bound)
        nn.init.uniform_(self.recurrent_weight, -bound, bound)
        nn.init.zeros_(self.bias)
        _, forget, _, _ = self.bias.data.chunk(4)
        forget.fill_(_FORGET_BIAS)

    @override
    def forward(self, x_BTD: Tensor, state_BXD: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return h at every position (B, T, D), and the state (h and c) after the last one."""
        with _supported_autocast(x_BTD.device):
            return self._run(x_BTD.to(self.bias.dtype), state_BXD, lengths_B)

    def _run(self, x_BTD: Tensor, state_BXD: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return h at every position, and the state after the last one."""
        initial = tuple(vector_BD[None].contiguous() for vector_BD in state_BXD.to(x_BTD.dtype).unbind(1))
        weights = [self.input_weight, self.recurrent_weight, self.bias, torch.zeros_like(self.bias)]
        # has biases, one layer, no dropout, training, one direction (and batch first)
        options = True, 1, 0.0, self.training, False
        if lengths_B is None:
            hidden_BTD, *last = torch.lstm(x_BTD, initial, weights, *options, True)
            return hidden_BTD, torch.stack([vector[0] for vector in last], dim=1)
        # torch expects padding last and one token or more; the state of rows without tokens is restored below
        num_new = x_BTD.shape[1]
        padding_B = num_new - lengths_B
        packed = pack_padded_sequence(
            _rolled(x_BTD, padding_B), lengths_B.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        order_B, inverse_B = packed.sorted_indices, packed.unsorted_indices
        assert order_B is not None
        assert inverse_B is not None
        initial = tuple(vector.index_select(1, order_B) for vector in initial)
        data, *last = torch.lstm(packed.data, packed.batch_sizes, initial, weights, *options)
        hidden_BTD, _ = pad_packed_sequence(packed._replace(data=data), batch_first=True, total_length=num_new)
        last_BXD = torch.stack([vector[0].index_select(0, inverse_B) for vector in last], dim=1)
        return _rolled(hidden_BTD, -padding_B), torch.where(lengths_B[:, None, None] > 0, last_BXD, state_BXD)


def _supported_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast on CPUs without bfloat16 support, where torch's LSTM would fail with it."""
    fails = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.autocast("cpu", enabled=False) if fails else nullcontext()


def _rolled(x_BTD: Tensor, shift_B: Tensor) -> Tensor:
    """Return each batch row rotated to the left by its shift."""
    index_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device) + shift_B[:, None]
    return x_BTD.gather(1, index_BT.remainder(x_BTD.shape[1])[..., None].expand_as(x_BTD))


class QRNNLayer(nn.Module):
    """One layer of a QRNN with fo-pooling."""

    def __init__(self, config: QRNNConfig) -> None:
        super().__init__()
        self.kernel_size, self.zoneout = config.qrnn_kernel_size, config.zoneout
        self.num_state_vectors = self.kernel_size  # c and the previous kernel_size - 1 inputs
        self.gates = nn.Linear(self.kernel_size * config.d_model, 3 * config.d_model)

    def init_weights(self) -> None:
        """Draw uniform weights of variance 1 / W; biases 0, those of forget gates 1."""
        bound = (3 / self.gates.in_features) ** 0.5
        nn.init.uniform_(self.gates.weight, -bound, bound)
        nn.init.zeros_(self.gates.bias)
        _, forget, _ = self.gates.bias.data.chunk(3)
        forget.fill_(_FORGET_BIAS)

    @override
    def forward(self, x_BTD: Tensor, state_BXD: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return h at every position (B, T, D), and the state: c and the inputs that the next gates need."""
        previous_BXD = state_BXD[:, 1:].to(x_BTD.dtype)
        num_new, padding_BT1 = x_BTD.shape[1], None
        if lengths_B is not None:
            index_T = torch.arange(num_new, device=x_BTD.device)
            padding_BT1 = (index_T < (num_new - lengths_B)[:, None])[..., None]
            # padding repeats the last input of the previous segment, which is the one before the first new token
            x_BTD = torch.where(padding_BT1, previous_BXD[:, -1:] if self.kernel_size > 1 else 0.0, x_BTD)
        inputs_BXD = torch.cat([previous_BXD, x_BTD], dim=1)
        inputs_BTW = torch.cat([inputs_BXD[:, start : start + num_new] for start in range(self.kernel_size)], dim=-1)
        z_BTD, forget_BTD, output_BTD = self.gates(inputs_BTW).chunk(3, dim=-1)
        # float32 or more: the state is a sum over the whole text
        sum_dtype = torch.promote_types(forget_BTD.dtype, torch.float32)
        keep_BTD = forget_BTD.to(sum_dtype).sigmoid()
        if self.training and self.zoneout:
            keep_BTD = torch.where(torch.rand_like(keep_BTD) < self.zoneout, 1.0, keep_BTD)
        if padding_BT1 is not None:
            keep_BTD = torch.where(padding_BT1, 1.0, keep_BTD)
        added_BTD = (1 - keep_BTD) * z_BTD.to(sum_dtype).tanh()
        c_BTD = linear_recurrence(keep_BTD, added_BTD, state_BXD[:, 0].to(sum_dtype))
        hidden_BTD = (output_BTD.sigmoid() * c_BTD).to(x_BTD.dtype)
        next_BXD = [c_BTD[:, -1:].to(state_BXD.dtype), inputs_BXD[:, num_new:].to(state_BXD.dtype)]
        return hidden_BTD, torch.cat(next_BXD, dim=1)


class RecurrentModel(LanguageModel):
    """Token embedding times sqrt(D), layers of LSTM or QRNN, softmax."""

    config: RecurrentConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: RecurrentConfig, *, memory_length: int = 128) -> None:
        """Build the model with initial weights drawn from torch's global random state."""
        super().__init__(config, memory_length=memory_length)
        self.dropout = FastDropout(
            config.dropout, variational=config.regularization.variational_dropout
        )  # between layers
        layers = [
            QRNNLayer(cast(QRNNConfig, config)) if config.architecture == "qrnn" else LSTMLayer(config)
            for _ in range(config.n_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.state_shape = (layers[0].num_state_vectors, config.d_model)
        self.cache_shapes = {RecurrentCache: self.state_shape}
        self.init_weights()

    @override
    def init_weights(self) -> None:
        super().init_weights()
        for part in (self.embedding, self.softmax):
            for table in part.tables:
                nn.init.normal_(table, 0.0, self.config.d_model**-0.5)
            for projection in part.projections.values():
                nn.init.normal_(projection, 0.0, projection.shape[1] ** -0.5)
        for layer in self.layers:
            assert isinstance(layer, LSTMLayer | QRNNLayer)
            layer.init_weights()

    @override
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> Memory[RecurrentCache]:
        limits = self.check_limits(context_limits)
        # in the dtype of the softmax bias: layers may have bfloat16 weights (`prepare_inference`), but a state is a sum
        # over the whole text, for which bfloat16 is too inexact
        like = self.softmax.bias
        # not like.new_zeros: `like` may be sharded over processes (fsdp), but memory is not
        zeros = (torch.zeros(batch_size, *self.state_shape, dtype=like.dtype, device=like.device) for _ in self.layers)
        caches = map(RecurrentCache, zeros)
        return Memory[RecurrentCache].empty(caches, batch_size, limits, like.device, num_recent=self.num_recent)

    @override
    def run_layers(
        self, x_BTD: Tensor, memory: Memory, lengths_B: Tensor | None = None, visible_BT: Tensor | None = None
    ) -> tuple[list[Tensor], Memory]:
        states_BTD = [self.input_dropout(x_BTD)]
        caches: list[RecurrentCache] = []
        for layer, cache in zip(self.layers, memory.layers, strict=True):
            assert isinstance(cache, RecurrentCache)
            x_BTD, state_BXD = self.run_layer(layer, states_BTD[-1], cache.state_BXD, lengths_B)
            is_last = len(caches) + 1 == len(self.layers)
            states_BTD.append(x_BTD if is_last else self.dropout(x_BTD))
            caches.append(RecurrentCache(state_BXD.detach().to(cache.state_BXD.dtype)))
        # with memory_length 0, the next segment starts from the empty states of this memory too
        return states_BTD, memory.advance(caches if memory.length else memory.layers, x_BTD.shape[1], lengths_B)


def linear_recurrence(keep_BTD: Tensor, added_BTD: Tensor, first_BD: Tensor) -> Tensor:
    """Return all states c_1 ... c_T, shape (B, T, D), of c_t = keep_t c_(t-1) + added_t, without a loop over the steps.

    The method is doubling (Hillis & Steele 1986): s steps together are again c_t = keep c_(t-s) + added. If this keep
    and added are known for the s steps up to each position, combining those of two neighbouring ranges gives them for
    2 s steps. So T steps take log2(T) operations on whole tensors. Without divisions and logarithms, products of
    numbers below 1 become small but never overflow, however long the text is. The gradient is the same kind of
    recurrence, from the last position to the first.

    Args:
        keep_BTD: keep_1 ... keep_T, in float32 or float64, because rounding errors add up.
        added_BTD: added_1 ... added_T.
        first_BD: c_0.
    """
    if is_transformed():  # which do not take in-place operations of a function of its own
        states_BTD = torch.cat([added_BTD[:, :1] + (keep_BTD[:, 0] * first_BD)[:, None], added_BTD[:, 1:]], dim=1)
        num_combined = 1
        while num_combined < states_BTD.shape[1]:
            later_BTD, earlier_BTD = keep_BTD[:, num_combined:], keep_BTD[:, :-num_combined]
            combined_BTD = states_BTD[:, num_combined:] + later_BTD * states_BTD[:, :-num_combined]
            states_BTD = torch.cat([states_BTD[:, :num_combined], combined_BTD], dim=1)
            keep_BTD = torch.cat([keep_BTD[:, :num_combined], later_BTD * earlier_BTD], dim=1)
            num_combined *= 2
        return states_BTD
    return _Recurrence.apply(keep_BTD, added_BTD, first_BD)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, keep_BTD: Tensor, added_BTD: Tensor, first_BD: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        states_BTD = added_BTD.clone()
        states_BTD[:, 0] += keep_BTD[:, 0] * first_BD
        _scan(keep_BTD.clone(), states_BTD)
        ctx.save_for_backward(keep_BTD, states_BTD, first_BD)
        return states_BTD

    @staticmethod
    @override
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, *grad_outputs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        keep_BTD, states_BTD, first_BD = ctx.saved_tensors
        # d_t = (incoming gradient of c_t) + keep_(t+1) d_(t+1): the same recurrence in reverse
        dstates_BTD = grad_outputs[0].flip(1)
        _scan(keep_BTD.flip(1).roll(1, 1), dstates_BTD)
        dstates_BTD = dstates_BTD.flip(1)
        previous_BTD = torch.cat([first_BD[:, None], states_BTD[:, :-1]], dim=1)
        return dstates_BTD * previous_BTD, dstates_BTD, dstates_BTD[:, 0] * keep_BTD[:, 0]


def _scan(keep_BTD: Tensor, states_BTD: Tensor) -> None:
    """Turn what is added at each step into states, in place; overwrites `keep_BTD`, whose first step is not used."""
    num_combined, num_steps = 1, states_BTD.shape[1]
    while num_combined < num_steps:
        later_BTD, earlier_BTD = keep_BTD[:, num_combined:], keep_BTD[:, :-num_combined]
        states_BTD[:, num_combined:] += later_BTD * states_BTD[:, :-num_combined]
        keep_BTD[:, num_combined:] = later_BTD * earlier_BTD
        num_combined *= 2
