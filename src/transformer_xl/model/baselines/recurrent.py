"""LSTM and QRNN language models: each layer continues from a state of fixed size, however much was read.

LSTM (Hochreiter & Schmidhuber 1997, with forget gates by Gers et al. 2000):

    i, f, z, o = gates(W x_t + U h_(t-1) + b)     c_t = f * c_(t-1) + i * z     h_t = o * tanh(c_t)

QRNN with fo-pooling (Bradbury et al. 2017), whose gates see inputs only, the current one or the one before as well:

    z, f, o = gates(W [x_(t-1) ; x_t] + b)        c_t = f * c_(t-1) + (1 - f) * z     h_t = o * c_t

z is a tanh, the others are sigmoids. All of a QRNN but a linear recurrence is computed for all positions at once, and
that recurrence without a loop (`scan.py`). Zoneout (Krueger et al. 2017) sets some of f to 1 in training.

Where we differ: an LSTM has one bias where torch has two that are only ever added; forget gates start with bias 1, so
that a new model remembers. Dropout is the plain one, on the embedding and on the output of every layer. There is no
LayerNorm that would bring small activations back to size, so initial weights do not make them small: activations have
variance 1, and so have the gates. With Transformer-XL's initial weights three layers took several times as long to
begin to learn.

Letters: B batch rows, T new tokens, D model width, X vectors of a state: h and c of an LSTM; c of a QRNN and the inputs
that its gates still need; W inputs that the gates of a QRNN see.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from typing_extensions import override

from transformer_xl.config import QRNNConfig, RecurrentConfig, UserError
from transformer_xl.model.baselines.scan import linear_recurrence
from transformer_xl.model.memory import ContextLimits, LayerCache, Memory
from transformer_xl.model.token_model import TokenModel

_FORGET_BIAS = 1.0  # Jozefowicz et al. 2015


@dataclass(frozen=True, eq=False)
class RecurrentCache(LayerCache):
    """The state of a layer after the last token of each batch row; zeros where nothing was read."""

    state_BXD: Tensor

    def replaced_by(self, state_BXD: Tensor) -> RecurrentCache:
        """Return the cache with the next state, detached and in this one's dtype."""
        return RecurrentCache(state_BXD.detach().to(self.state_BXD.dtype))

    @override
    def resized(self, length: int) -> RecurrentCache:
        return self if length else RecurrentCache(torch.zeros_like(self.state_BXD))


class StateMemory(Memory[RecurrentCache]):
    """The states of all layers.

    A state has no slots: it may hold something of all that was read. So any length above 0 means the same, and 0 means
    that nothing is carried from one segment to the next.
    """

    @staticmethod
    def empty(shape: tuple[int, int, int, int], context_limits: ContextLimits, like: Tensor) -> StateMemory:
        """Return a memory of nothing, on the device and in the dtype of `like`; `shape` is L, B, X, D."""
        num_layers, *state_shape = shape
        # not like.new_zeros: `like` may be sharded over processes, and memory never is
        zeros = (torch.zeros(state_shape, dtype=like.dtype, device=like.device) for _ in range(num_layers))
        return StateMemory.of_layers(map(RecurrentCache, zeros), state_shape[0], context_limits, like.device)


class LSTMLayer(nn.Module):
    """One layer of an LSTM; the gates are in torch's order: i, f, z, o."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.input_weight = nn.Parameter(torch.empty(4 * config.d_model, config.d_model))
        self.recurrent_weight = nn.Parameter(torch.empty(4 * config.d_model, config.d_model))
        self.bias = nn.Parameter(torch.empty(4 * config.d_model))

    def init_weights(self) -> None:
        """Draws initial weights: uniform of variance 1 / D, recurrent ones of 1 / (3 D); biases 0, forget gates' 1."""
        bound = self.input_weight.shape[1] ** -0.5
        nn.init.uniform_(self.input_weight, -(3**0.5) * bound, 3**0.5 * bound)
        nn.init.uniform_(self.recurrent_weight, -bound, bound)
        nn.init.zeros_(self.bias)
        _, forget, _, _ = self.bias.data.chunk(4)
        forget.fill_(_FORGET_BIAS)

    @override
    def forward(self, x_BTD: Tensor, cache: RecurrentCache, lengths_B: Tensor | None) -> tuple[Tensor, RecurrentCache]:
        """Return h at every position (B, T, D), and the cache of h and c after the last one."""
        with _autocast_torch_supports(x_BTD.device):
            hidden_BTD, state_BXD = self._run(x_BTD.to(self.bias.dtype), cache.state_BXD, lengths_B)
        return hidden_BTD, cache.replaced_by(state_BXD)

    def _run(self, x_BTD: Tensor, state_BXD: Tensor, lengths_B: Tensor | None) -> tuple[Tensor, Tensor]:
        first = tuple(row_BD[None].contiguous() for row_BD in state_BXD.to(x_BTD.dtype).unbind(1))
        weights = [self.input_weight, self.recurrent_weight, self.bias, torch.zeros_like(self.bias)]
        if lengths_B is None:
            hidden_BTD, *last = torch.lstm(x_BTD, first, weights, True, 1, 0.0, self.training, False, True)
            return hidden_BTD, torch.stack([row[0] for row in last], dim=1)
        # torch wants padding last, and one token or more: the output for sequences without any is dropped below
        num_new = x_BTD.shape[1]
        padding_B = num_new - lengths_B
        packed = pack_padded_sequence(
            _rolled(x_BTD, padding_B), lengths_B.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        order_B, back_B = packed.sorted_indices, packed.unsorted_indices
        assert order_B is not None
        assert back_B is not None
        first = tuple(row.index_select(1, order_B) for row in first)
        data, *last = torch.lstm(packed.data, packed.batch_sizes, first, weights, True, 1, 0.0, self.training, False)
        hidden_BTD, _ = pad_packed_sequence(packed._replace(data=data), batch_first=True, total_length=num_new)
        state = torch.stack([row[0].index_select(0, back_B) for row in last], dim=1)
        return _rolled(hidden_BTD, -padding_B), torch.where(lengths_B[:, None, None] > 0, state, state_BXD)


def _autocast_torch_supports(device: torch.device) -> AbstractContextManager[object]:
    """No autocast where torch would fail with it: its LSTM has no bfloat16 on older CPUs."""
    fails = device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.autocast("cpu", enabled=False) if fails else nullcontext()


def _rolled(x_BTD: Tensor, by_B: Tensor) -> Tensor:
    """Each batch row shifted to the front by so many positions, what falls out there coming in at the end."""
    index_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device) + by_B[:, None]
    return x_BTD.gather(1, index_BT.remainder(x_BTD.shape[1])[..., None].expand_as(x_BTD))


class QRNNLayer(nn.Module):
    """One layer of a QRNN with fo-pooling."""

    def __init__(self, config: QRNNConfig) -> None:
        super().__init__()
        self.kernel_size, self.zoneout = config.qrnn_kernel_size, config.zoneout
        self.gates = nn.Linear(self.kernel_size * config.d_model, 3 * config.d_model)

    def init_weights(self) -> None:
        """Draws initial weights: uniform of variance 1 / (W D); biases 0, forget gates' 1."""
        bound = (3 / self.gates.in_features) ** 0.5
        nn.init.uniform_(self.gates.weight, -bound, bound)
        nn.init.zeros_(self.gates.bias)
        _, forget, _ = self.gates.bias.data.chunk(3)
        forget.fill_(_FORGET_BIAS)

    @override
    def forward(self, x_BTD: Tensor, cache: RecurrentCache, lengths_B: Tensor | None) -> tuple[Tensor, RecurrentCache]:
        """Return h at every position (B, T, D), and the cache of c and the inputs that the next gates need."""
        state_BXD = cache.state_BXD
        before_BXD = state_BXD[:, 1:].to(x_BTD.dtype)
        padding_BT1 = None
        if lengths_B is not None:
            index_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
            padding_BT1 = (index_T < (x_BTD.shape[1] - lengths_B)[:, None])[..., None]
            # so that the first token after the padding has the last input of the segment before as its neighbour
            x_BTD = torch.where(padding_BT1, before_BXD[:, -1:] if self.kernel_size > 1 else 0.0, x_BTD)
        seen_BXD = torch.cat([before_BXD, x_BTD], dim=1)
        num_new = x_BTD.shape[1]
        wide = torch.cat([seen_BXD[:, start : start + num_new] for start in range(self.kernel_size)], dim=-1)
        z_BTD, forget_BTD, output_BTD = self.gates(wide).chunk(3, dim=-1)
        # float32 or more: the state is a sum over all of the text
        sums = torch.promote_types(forget_BTD.dtype, torch.float32)
        keep_BTD = forget_BTD.to(sums).sigmoid()
        if self.training and self.zoneout:
            keep_BTD = torch.where(torch.rand_like(keep_BTD) < self.zoneout, 1.0, keep_BTD)
        if padding_BT1 is not None:
            keep_BTD = torch.where(padding_BT1, 1.0, keep_BTD)
        added_BTD = (1 - keep_BTD) * z_BTD.to(sums).tanh()
        c_BTD = linear_recurrence(keep_BTD, added_BTD, state_BXD[:, 0].to(sums))
        hidden_BTD = (output_BTD.sigmoid() * c_BTD).to(x_BTD.dtype)
        kept_BXD = seen_BXD[:, num_new:].to(state_BXD.dtype)
        return hidden_BTD, cache.replaced_by(torch.cat([c_BTD[:, -1:].to(state_BXD.dtype), kept_BXD], dim=1))


class RecurrentModel(TokenModel):
    """Embedding, layers of LSTM or QRNN, softmax."""

    config: RecurrentConfig  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: RecurrentConfig, *, memory_length: int = 128) -> None:
        """Builds the model with initial weights drawn from torch's global random state."""
        super().__init__(config, memory_length=memory_length)
        self.layers = nn.ModuleList(
            QRNNLayer(config) if isinstance(config, QRNNConfig) else LSTMLayer(config) for _ in range(config.n_layers)
        )
        self.num_state_rows = config.qrnn_kernel_size if isinstance(config, QRNNConfig) else 2
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
    def initial_memory(self, batch_size: int, context_limits: ContextLimits | None = None) -> StateMemory:
        shape = (self.config.n_layers, batch_size, self.num_state_rows, self.config.d_model)
        # not like a layer's weights, which may be rounded (`precision.py`): a state is a sum over all of the text
        return StateMemory.empty(shape, self.check_limits(context_limits), self.softmax.bias)

    @override
    def forward(
        self,
        tokens_BT: Tensor | None = None,
        memory: Memory | None = None,
        *,
        inputs_BTD: Tensor | None = None,
        lengths_B: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Read T tokens of each batch row after what `memory` holds (see `LanguageModel.forward`).

        Raises:
            UserError: not exactly one kind of input, a wrong shape, or a memory of another batch or model.
        """
        x_BTD = self.embed_inputs(tokens_BT, inputs_BTD)
        memory = self.check_memory(memory, x_BTD, lengths_B)
        caches: list[RecurrentCache] = []
        x_BTD = self.dropout(x_BTD)
        for layer, cache in zip(self.layers, memory.layers, strict=True):
            x_BTD, cache = self.run_layer(layer, x_BTD, cache, lengths_B)
            caches.append(cache)
            x_BTD = self.dropout(x_BTD)
        # with length 0 the empty states it began with
        return x_BTD, memory.advance(caches if memory.length else memory.layers, x_BTD.shape[1], lengths_B)

    @override
    def check_memory(self, memory: Memory | None, x_BTD: Tensor, lengths_B: Tensor | None) -> StateMemory:
        memory = super().check_memory(memory, x_BTD, lengths_B)
        state_shape = (self.num_state_rows, self.config.d_model)
        if (
            not isinstance(memory, StateMemory)
            or len(memory.layers) != self.config.n_layers
            or memory.layers[0].state_BXD.shape[1:] != state_shape
        ):
            raise UserError("this memory was made by another model; start with initial_memory")
        return memory
