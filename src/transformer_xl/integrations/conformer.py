"""Run the attention of transformers' Conformers by `relative_attention`, in memory proportional to the audio's length.

These encoders for speech (Gulati et al. 2020) have the attention of Transformer-XL to both sides. transformers computes
their position scores as a matrix (B, N, T, 2T - 1) and adds it to the scores, so that memory grows with T squared. Here
modules of the classes in `_CLASSES` get a class of their own with another `forward`; weights, names, hooks and
everything else of the model stay.

Shape suffixes: B batch size, T queries, S = M + T keys (M of a cache), X one for each query or one for all of them, P
distances, D model width, N heads, H head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from transformer_xl.config import UserError
from transformer_xl.ops import relative_attention

_Model = TypeVar("_Model", bound=nn.Module)
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class _Parts:
    """What classes of attention modules call their parts."""

    q: str
    k: str
    v: str
    out: str
    position: str
    """The projection of encodings of distances to position keys."""
    content_bias: str
    position_bias: str
    encoding: str
    """The argument of forward with those encodings: (1 or B, 2S - 1, D), of distance S - 1 first."""
    adds_mask: bool = False
    """Whether a mask of numbers is added to the scores; in the others it is false where it is 0."""
    dropout: str | None = "dropout"
    """The module with the dropout of probabilities, or None where the number is `attention_dropout`."""


_LINEAR = ("linear_q", "linear_k", "linear_v", "linear_out", "linear_pos", "pos_bias_u", "pos_bias_v")
_WAV2VEC2 = _Parts(*_LINEAR, encoding="relative_position_embeddings", adds_mask=True)
_PARAKEET = _Parts(
    *("q_proj", "k_proj", "v_proj", "o_proj", "relative_k_proj", "bias_u", "bias_v"),
    encoding="position_embeddings",
    dropout=None,
)
_CLASSES = {
    "transformers.models.fastspeech2_conformer.modeling_fastspeech2_conformer.FastSpeech2ConformerAttention": _Parts(
        *_LINEAR, encoding="pos_emb"
    ),
    "transformers.models.nemotron_asr_streaming.modeling_nemotron_asr_streaming.NemotronAsrStreamingEncoderAttention": (
        _PARAKEET
    ),
    "transformers.models.parakeet.modeling_parakeet.ParakeetEncoderAttention": _PARAKEET,
    "transformers.models.seamless_m4t.modeling_seamless_m4t.SeamlessM4TConformerSelfAttention": _WAV2VEC2,
    "transformers.models.wav2vec2_bert.modeling_wav2vec2_bert.Wav2Vec2BertSelfAttention": _WAV2VEC2,
    "transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer.Wav2Vec2ConformerSelfAttention": _WAV2VEC2,
}
_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4}
"""Allowed difference from the outputs of the class, relative to the largest; of other dtypes 0.05. Some compute the
softmax in float32."""


def accelerate(model: _Model, *, implementation: str = "auto") -> _Model:
    """Compute the attention of a Conformer of transformers by `relative_attention` from now on, and return the model.

        model = accelerate(AutoModelForCTC.from_pretrained("nvidia/parakeet-ctc-0.6b"))

    Known are the encoders of Parakeet, Nemotron ASR (streaming), Wav2Vec2-Conformer, Wav2Vec2-BERT and SeamlessM4T with
    `position_embeddings_type="relative"`, and FastSpeech2-Conformer, also as parts of other models. Outputs and
    gradients are theirs within rounding, except that outputs of padding are 0 where padding attends to nothing
    (Parakeet). Dropout draws other random numbers. A call that asks for attention probabilities
    (`output_attentions=True`) is computed as before.

    Args:
        model: the model or a part of it. Its modules are changed in place, its weights not; `restore` undoes it.
        implementation: name of a kernel, as for `relative_attention`.

    Raises:
        UserError: there is no attention of a known class, one was changed, or the installed version computes something
            else; then nothing was changed.
    """
    found: list[Any] = [module for module in model.modules() if not isinstance(module, _Accelerated) and _check(module)]
    accelerated: list[Any] = [module for module in model.modules() if isinstance(module, _Accelerated)]
    if not found and not accelerated:
        types = {_name(module): getattr(module, "position_embeddings_type", None) for module in model.modules()}
        other = [f"{name} with position_embeddings_type={types[name]!r}" for name in _CLASSES if name in types]
        raise UserError(
            f"{type(model).__name__} has no attention that relative_attention computes"
            f"{f' ({other[0]})' if other else ''}; it does {', '.join(name.rpartition('.')[2] for name in _CLASSES)}"
            ", where positions are relative"
        )
    for module in {type(module): module for module in found}.values():
        _compare(module, implementation)
    for module in found:
        vars(module).pop("forward", None)
        module.__class__ = _accelerated(type(module))
    for module in [*found, *accelerated]:
        module.attention_kernel = implementation
    return model


def restore(model: _Model) -> _Model:
    """Undo `accelerate`: compute attention as transformers does, and return the model.

    Raises:
        UserError: it was not accelerated.
    """
    accelerated: list[Any] = [module for module in model.modules() if isinstance(module, _Accelerated)]
    if not accelerated:
        raise UserError(f"{type(model).__name__} was not accelerated, or is restored already")
    for module in accelerated:
        if _is_own_forward(module):
            vars(module).pop("forward", None)
        module.__class__ = module.original
        del module.attention_kernel
    return model


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_own_forward(module: nn.Module) -> bool:
    """Return whether forward is that of the class: some versions record outputs by replacing and setting it back."""
    replaced = vars(module).get("forward")
    return replaced is None or getattr(replaced, "__func__", None) is type(module).forward


def _check(module: nn.Module) -> bool:
    """Return whether a module is attention of a known class, with relative positions.

    Raises:
        UserError: it is, but something of it was changed or is not known.
    """
    bases = [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]
    known = next((name for name in bases if name in _CLASSES), None)
    if known is None or getattr(module, "position_embeddings_type", "relative") != "relative":
        return False
    parts, name = _CLASSES[known], type(module).__name__
    if known != bases[0]:
        raise UserError(f"{name} is derived from {known.rpartition('.')[2]}; give a model with the class itself")
    if not _is_own_forward(module):
        raise UserError(
            f"the forward of a module {name} was replaced; call accelerate before what replaces it (device maps of "
            "transformers do), or undo that"
        )
    projections = (parts.q, parts.k, parts.v, parts.out, parts.position)
    children = {*projections, *([parts.dropout] if parts.dropout else [])}
    given = {name for name, _ in module.named_children()}
    biases = {name: tuple(value.shape) for name, value in module.named_parameters(recurse=False)}
    expected = (parts.content_bias, parts.position_bias)
    arguments = inspect.signature(type(module).forward).parameters
    lacking = {"hidden_states", "attention_mask", parts.encoding} - set(arguments)
    if given != children or set(biases) != set(expected) or len(set(biases.values())) > 1 or lacking:
        raise _other_version(name, f"it has {', '.join(sorted([*given, *biases, *arguments]))}")
    if getattr(module, "num_key_value_groups", 1) != 1:
        raise UserError(f"{name} has fewer heads of keys than of queries; give a model with as many")
    return True


def _other_version(name: str, what: str) -> UserError:
    return UserError(
        f"{name} of the installed transformers is not the one that is known: {what}; use a version from 4.57 to 5.23"
    )


@torch.no_grad()
def _compare(module: Any, implementation: str) -> None:
    """Check on 5 random frames that a module of a known class computes what it should."""
    parts = _CLASSES[_name(module)]
    bias_NH = getattr(module, parts.content_bias)
    if bias_NH.is_meta:
        return
    width, generator = getattr(module, parts.position).in_features, torch.Generator()
    hidden_BTD, encoding_BPD = (torch.randn(1, size, width, generator=generator.manual_seed(size)) for size in (5, 9))
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.autocast(bias_NH.device.type, enabled=False):
            given = {"attention_mask": None, parts.encoding: encoding_BPD.to(bias_NH)}
            expected_BTD = type(module).forward(module, hidden_BTD.to(bias_NH), **given)[0]
            actual_BTD = _attend(module, parts, implementation, hidden_BTD.to(bias_NH), given)
    finally:
        for part, was in training.items():
            part.training = was
    error = (actual_BTD - expected_BTD).abs().max() / expected_BTD.abs().max()
    if not error <= _TOLERANCES.get(bias_NH.dtype, 0.05):
        raise _other_version(type(module).__name__, f"outputs for random input differ by {float(error):.2g}")


_signature = cache(inspect.signature)


class _Accelerated(nn.Module):
    """Attention whose forward is `relative_attention`; `original` is the class that it had and is derived from."""

    original: type[nn.Module]
    attention_kernel: str

    @torch.compiler.disable  # the mask is looked at
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = _signature(self.original.forward).bind(self, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        asked = given.get("output_attentions") or getattr(getattr(self, "config", None), "output_attentions", False)
        out_BTD = None
        if not asked:
            hidden_BTD = given["hidden_states"]
            out_BTD = _attend(self, _CLASSES[_original_name(type(self))], self.attention_kernel, hidden_BTD, given)
        return super().forward(*args, **kwargs) if out_BTD is None else (out_BTD, None)


def _original_name(accelerated: type[_Accelerated]) -> str:
    return f"{accelerated.original.__module__}.{accelerated.original.__qualname__}"


@cache
def _accelerated(original: type[nn.Module]) -> type[_Accelerated]:
    """Return the class of accelerated modules of a class, with its name, by which wrappers know modules."""
    return type(original.__name__, (_Accelerated, original), {"__module__": __name__, "original": original})


def __getattr__(name: str) -> Any:
    """Return the class of accelerated modules: pickle, which copies models to other processes, looks here for it."""
    for known in _CLASSES:
        module, _, original = known.rpartition(".")
        if original == name:
            return _accelerated(getattr(__import__(module, fromlist=[name]), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _attend(
    module: Any, parts: _Parts, implementation: str, hidden_BTD: Tensor, given: dict[str, Any]
) -> Tensor | None:
    """Return the output of the module for the arguments of its forward, or None if they are of an unknown kind."""
    mask, encoding_BPD, past = given.get("attention_mask"), given.get(parts.encoding), given.get("past_key_values")
    batch_size, num_queries = hidden_BTD.shape[:2]
    num_keys = num_queries if past is None else past.get_mask_sizes(num_queries, module.layer_idx)[0]
    sizes = (batch_size, num_queries, num_keys)
    attended: dict[str, Any] | None = {} if mask is None else None
    if isinstance(mask, Tensor):
        attended = _once(mask, sizes, lambda: _read_mask(mask, parts.adds_mask, *sizes))
    if attended is None or encoding_BPD is None or encoding_BPD.shape[1] != 2 * num_keys - 1:
        return None
    options = {"mask": _allowed(mask, parts.adds_mask)} if mask is not None and "mask" in attended else attended
    content_bias_NH = getattr(module, parts.content_bias)
    q_BTNH, k_BSNH, v_BSNH = (
        getattr(module, name)(hidden_BTD).unflatten(-1, content_bias_NH.shape) for name in (parts.q, parts.k, parts.v)
    )
    if past is not None:
        k_BSNH, v_BSNH = (
            keys_BNSH.transpose(1, 2)
            for keys_BNSH in past.update(k_BSNH.transpose(1, 2), v_BSNH.transpose(1, 2), module.layer_idx)
        )
    # position keys of distances that are in no chunk and window are not computed
    chunk = options.get("chunk_size", num_keys)
    before = min(options.get("window", (num_keys, 0))[0] + chunk - 1, num_keys - 1)
    encoding_BPD = encoding_BPD[:, num_keys - 1 - before : num_keys - 1 + min(chunk, num_queries)]
    # rows differ if there is dropout of positions
    is_shared = len(encoding_BPD) == 1 or _once(
        given[parts.encoding], (), lambda: bool((given[parts.encoding] == given[parts.encoding][:1]).all())
    )
    r_BPNH = getattr(module, parts.position)(encoding_BPD[:1] if is_shared else encoding_BPD)
    r_BPNH = r_BPNH.unflatten(-1, content_bias_NH.shape).to(q_BTNH)
    biases = [content_bias_NH.to(q_BTNH), getattr(module, parts.position_bias).to(q_BTNH)]
    dropout = getattr(module, parts.dropout).p if parts.dropout else module.attention_dropout

    def attend(rows: slice) -> Tensor:
        of_rows: dict[str, Any] = {
            name: value[rows] if isinstance(value, Tensor) and len(value) > 1 else value
            for name, value in options.items()
        }
        return relative_attention(
            *(q_BTNH[rows], k_BSNH[rows], v_BSNH[rows], r_BPNH[rows][0], *biases),
            causal=False,
            dropout=dropout if module.training else 0.0,
            implementation=implementation,
            **of_rows,
        )

    if is_shared:
        out_BTNH = attend(slice(None))
    else:
        out_BTNH = torch.cat([attend(slice(row, row + 1)) for row in range(len(q_BTNH))])
    return getattr(module, parts.out)(out_BTNH.flatten(2))


_SEEN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""What was found of the masks and encodings that all layers of a forward share, with their versions."""


def _once(tensor: Tensor, sizes: tuple[int, ...], find: Callable[[], _Found]) -> _Found:
    if tensor.is_inference():  # does not record whether it was changed
        return find()
    state = (tensor._version, sizes)
    seen = _SEEN.get(tensor)
    if seen is None or seen[0] != state:
        seen = _SEEN[tensor] = (state, find())
    return seen[1]


def _allowed(mask: Tensor, adds_mask: bool) -> Tensor:
    """Return a mask of transformers as bool (B, 1 or N, X, S), true where a query attends."""
    mask_BNXS = mask if mask.ndim == 4 else mask[:, None]
    return mask_BNXS == 0 if adds_mask and mask.dtype != torch.bool else mask_BNXS != 0


@torch.no_grad()
def _read_mask(
    mask: Tensor, adds_mask: bool, batch_size: int, num_queries: int, num_keys: int
) -> dict[str, Any] | None:
    """Return what a mask says in arguments of `relative_attention`, or None if it is of an unknown kind.

    It may be that of padding behind the texts, for keys or for both sides, or that of chunks, with such padding.
    """
    if mask.ndim not in (3, 4) or mask.shape[-1] != num_keys or mask.shape[-2] not in (1, num_queries):
        return None
    if adds_mask and mask.dtype != torch.bool and ((mask != 0) & (mask > torch.finfo(mask.dtype).min / 2)).any():
        return None  # it adds something else
    allowed_BNXS = _allowed(mask, adds_mask).expand(batch_size, -1, -1, -1)
    num_memory = num_keys - num_queries
    key_S, query_T = torch.arange(num_keys, device=mask.device), torch.arange(num_queries, device=mask.device)
    end_B = allowed_BNXS[:, 0].any(1).sum(-1)
    is_key_B11S = key_S < end_B[:, None, None, None]

    def same(expected_BNXS: Tensor) -> bool:
        return allowed_BNXS.shape[1] == 1 and torch.equal(allowed_BNXS, expected_BNXS.expand_as(allowed_BNXS))

    if (end_B < num_memory).any():
        return {"mask": True}
    padding = {"key_lengths": end_B - num_memory} if (end_B < num_keys).any() else {}
    if same(is_key_B11S):
        return padding
    if allowed_BNXS.shape[2] != num_queries:
        return {"mask": True}
    if not num_memory and same(is_key_B11S & is_key_B11S.transpose(-1, -2)):
        return {"lengths": end_B}
    # the first query tells the size of chunks, any of the longest row how far they see
    longest, num_tokens = int(end_B.argmax()), int(end_B.max()) - num_memory
    allowed_TS = allowed_BNXS[longest, 0, :num_tokens]
    chunk_size = int(allowed_TS[0].nonzero().amax()) + 1 - num_memory if allowed_TS[:1].any() else 0
    if chunk_size >= 1:
        start_T1 = (num_memory + query_T - query_T % chunk_size)[:, None]
        before = max(0, int((start_T1[:num_tokens, 0] - allowed_TS.int().argmax(-1)).max()))
        in_reach_TS = (key_S >= start_T1 - before) & (key_S < start_T1 + chunk_size)
        if same(in_reach_TS & is_key_B11S):
            return padding | {"chunk_size": chunk_size, "window": (before, 0)}
    return {"mask": True}
