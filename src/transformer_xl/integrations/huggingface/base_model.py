"""Our models in transformers 5 without a head, and what the classes with one have in common.

All classes have one of our models in `model`, so the weights of all have the names of `LanguageModel.state_dict()`
behind `model.`. Only `TransformerXLForCausalLM` has the softmax among them.

Shape suffixes: B batch rows, T columns of the input, D model width, L layers, N heads, S keys, X any size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.generation import GenerationConfig
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput
from typing_extensions import override

from transformer_xl.architectures import build_model
from transformer_xl.baselines.token_memory import TokenMemory
from transformer_xl.config import UserError
from transformer_xl.inference import TokenModel
from transformer_xl.integrations.checkpoints import huggingface as transfo_xl
from transformer_xl.integrations.checkpoints.pretrained import WEIGHT_PREFIX, generation_values, write_code
from transformer_xl.integrations.huggingface.cache import MemoryCache, Preparation, preparable_dtype
from transformer_xl.integrations.huggingface.configuration import PretrainedTransformerXLConfig, TransfoXLConfig
from transformer_xl.integrations.huggingface.files import is_transfo_xl, local_folder
from transformer_xl.integrations.huggingface.padding import Padding, column_mask, read_mask
from transformer_xl.integrations.huggingface.prefix import prefix_memory
from transformer_xl.integrations.huggingface.reading import (
    AllLayers,
    Reading,
    Traced,
    check_cache,
    check_shape,
    refuse_others,
)
from transformer_xl.model.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.transformer_xl import RelativeLanguageModel
from transformer_xl.reader import STRIDE, Reader

AnyOutput = TypeVar("AnyOutput", bound=ModelOutput)


class NoSoftmax(nn.Module):
    """In place of the softmax of a model that predicts no tokens: `bias` has the dtype and device of the weights."""

    num_tails = 0

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.projections = nn.ParameterList(), nn.ParameterDict()
        self.register_buffer("bias", torch.zeros(1), persistent=False)


@dataclass
class _Shared:
    """What a model and its `base_model` prepared from the weights that they share."""

    preparation: Preparation | None = None


class TransformerXLPreTrainedModel(PreTrainedModel):
    """One of our models in `model`, and the one way in which all classes read with it."""

    config_class = PretrainedTransformerXLConfig
    base_model_prefix = WEIGHT_PREFIX.removesuffix(".")
    supports_gradient_checkpointing = True
    predicts_tokens = False
    """Whether the softmax is kept."""
    reads_documents = False
    """Whether a token also sees what follows it, in a model that can read so (XLNet)."""
    _keys_to_ignore_on_load_unexpected = [r"^model\.softmax\."]  # noqa: RUF012 (as in the base class)
    _is_stateful = True
    _no_split_modules: list[str] | set[str] | None = [  # noqa: RUF012 (instances replace it)
        *("TransformerXL", "XLNet", "ShawTransformer", "AbsoluteTransformer", "RecurrentModel")
    ]

    config: PretrainedTransformerXLConfig  # pyrefly: ignore[bad-override-mutable-attribute]
    _base: tuple[Any] | None = None  # the base model, in a tuple so that it is no submodule
    _is_made = False

    def __init__(self, config: PretrainedTransformerXLConfig) -> None:
        """Build the model with initial weights; a subclass calls `post_init` after it."""
        super().__init__(config)
        self.model: LanguageModel = build_model(config.model_config(), memory_length=config.memory_length)
        self._shared = _Shared()
        if not self.predicts_tokens:
            self.model.softmax = cast(AdaptiveSoftmax, NoSoftmax())

    @override
    def post_init(self) -> None:
        super().post_init()
        self._is_made = True

    @property
    @override
    def base_model(self) -> TransformerXLModel:
        """The model without its head, which shares the weights."""
        if isinstance(self, TransformerXLModel) or not self._is_made:  # transformers asks while it is being made
            return cast(TransformerXLModel, self)
        if self._base is None or self._base[0].model is not self.model:
            with torch.device("meta"):
                base = TransformerXLModel(self.config)
            base.model, base._shared = self.model, self._shared
            self._base = (base,)
        return self._base[0]

    @property
    def embeddings(self) -> nn.Module:
        """What PEFT's prompt learning looks for: a module whose `word_embeddings` embeds token ids."""
        return nn.ModuleDict({"word_embeddings": self.model.embedding})

    def begin_reading(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        others: Mapping[str, Any],
        wanted: tuple[bool | None, bool | None],
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
    ) -> Reading:
        """Check the arguments of `forward`, and return rows that are about to read.

        Args:
            input_ids: token ids (B, T).
            attention_mask: 1 for tokens and 0 for padding, (B, T), or with the columns of `past_key_values` before
                them. Padding is on the left, or without a cache on the right. A causal mask (B, T, T) says the same.
            inputs_embeds: embeddings (B, T, D) as `get_input_embeddings()` returns them, in place of `input_ids`.
            others: arguments that must be None, since they mean nothing here.
            wanted: `output_hidden_states` and `output_attentions`; None means as configured.
            past_key_values: a `MemoryCache`, which holds the next memory afterwards; keys and values of a learned
                prefix; or None if there is nothing before these tokens.
            use_cache: whether to return the memory; None means the configuration's `use_cache` in evaluation mode, and
                no in training mode or if rows are padded on the right.

        Raises:
            UserError: an argument that means nothing here or has another shape, a mask, cache or token id that the
                model cannot use, an embedding that was replaced although the softmax shares its weights, or weights
                that are not in memory.
        """
        refuse_others(others)
        if self.device.type == "meta":
            raise UserError(
                "the weights are not in memory (offloaded); open the model without device_map or cpu_offload"
            )
        _check_embedding(self.model)
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give either input_ids or inputs_embeds")
        if inputs_embeds is not None and self.model.num_recent:
            needs = "this model needs token ids (max_ngram, value_embeddings, key_offset)"
            raise UserError(f"{needs}, so it cannot read inputs_embeds")
        inputs = input_ids if input_ids is not None else inputs_embeds
        assert inputs is not None
        check_shape(inputs, is_ids=input_ids is not None)
        cache, prefix = check_cache(past_key_values)
        if attention_mask is not None:
            attention_mask = column_mask(attention_mask)
        padding = self._padding(input_ids, attention_mask, (inputs.shape[0], inputs.shape[1]), cache)
        configured = (self.config.output_hidden_states, self.config.output_attentions)
        pairs = zip(wanted, configured, strict=True)
        has_states, has_attention = (bool(default if given is None else given) for given, default in pairs)
        if has_attention and cache is None and use_cache is None:
            use_cache = False  # a new memory's empty slots would be among the keys
        keeps_memory = self._keeps_memory(use_cache, cache, padding, is_prefix=prefix is not None)
        if input_ids is not None:
            inputs = self._without_padding_ids(input_ids, attention_mask)
        has_gradients = torch.is_grad_enabled() and (
            inputs.requires_grad
            or prefix is not None
            or any(parameter.requires_grad for parameter in self.model.parameters())
        )
        reads_with = self.model.for_documents() if self.reads_documents else self.model
        sees_later = reads_with is not self.model
        preparation = None if sees_later else self._preparation(cache, has_gradients=has_gradients)
        model = reads_with if preparation is None else preparation.inference
        reading = Reading(model, inputs, padding, cache, preparation, keeps_memory, has_states, sees_later)
        if has_attention:
            reading.traces = []
            reading.reads_with = cast(TokenModel, Traced(model, reading.traces))
        elif has_states:
            reading.reads_with = cast(TokenModel, AllLayers(model))
        lengths = padding.lengths if padding is not None and padding.side == "left" else None
        self._begin(
            reading,
            prefix,
            num_tokens=inputs.shape[1] if lengths is None else max(lengths),
            has_gradients=has_gradients,
        )
        if (has_states or inputs_embeds is not None) and isinstance(reading.reader.memory, TokenMemory):
            what = "output_hidden_states" if has_states else "inputs_embeds"
            raise UserError(
                f"{self.config.architecture} has no memory, so generate reads its last token ids again and cannot have "
                f"{what}; leave it out" + (", or pass use_cache=False" if has_states else "")
            )
        if has_attention:
            self._check_attention(reading)
        if inputs_embeds is not None:
            reading.inputs_BTX = inputs * self.model.config.embedding_scale  # the model's inputs are scaled
        return reading

    def output(self, kind: type[AnyOutput], reading: Reading, return_dict: bool | None, **results: Any) -> Any:
        """Return an output of transformers, or a tuple: results, and what was asked for when reading began."""
        if reading.keeps_memory:
            cache = MemoryCache() if reading.cache is None else reading.cache
            cache.advance(reading.reader.memory, reading.inputs_BTX.shape[1], reading.preparation)
            results["past_key_values"] = cache
        output = kind(hidden_states=reading.states_BTD, attentions=reading.attentions(), **results)
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _padding(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        new_shape: tuple[int, int],
        cache: MemoryCache | None,
    ) -> Padding | None:
        """Return the padding that the mask marks, or without a mask the ids of padding."""
        num_past = cache.get_seq_length() if cache is not None else 0
        if attention_mask is None and input_ids is not None and not num_past:
            attention_mask = self.mask_of_ids(input_ids)
        read_B = None if cache is None or cache.memory is None else cache.memory.position_B
        return None if attention_mask is None else read_mask(attention_mask, new_shape, num_past, read_B)

    def mask_of_ids(self, input_ids: Tensor) -> Tensor | None:
        """Return the mask of a batch that was given without one, or None if it has no padding."""
        pad = self._padding_id()
        return None if pad is None or not bool((input_ids == pad).any()) else input_ids != pad

    def _padding_id(self) -> int | None:
        """Return the id of padding if it is beyond the vocabulary; another one may be a token of the text.

        The first one beyond it is that of our tokenizers.
        """
        if self.can_generate():
            pad = self.generation_config.pad_token_id if self.generation_config is not None else None
        else:
            pad = self.model.config.vocab_size if self.config.pad_token_id is None else self.config.pad_token_id
        return pad if isinstance(pad, int) and pad >= self.model.config.vocab_size else None

    def _without_padding_ids(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the ids with token 0 for padding, also after the end of a finished sequence of `generate`."""
        pad = self._padding_id()
        if attention_mask is not None:
            new_mask = attention_mask[:, attention_mask.shape[1] - input_ids.shape[1] :]
            input_ids = input_ids.masked_fill(new_mask == 0, 0)
        return input_ids if pad is None else input_ids.masked_fill(input_ids == pad, 0)

    def _keeps_memory(
        self, use_cache: bool | None, cache: MemoryCache | None, padding: Padding | None, *, is_prefix: bool
    ) -> bool:
        """Return whether the memory is returned.

        Raises:
            UserError: it was asked for, but would begin with padding on the right.
        """
        is_right, is_given = padding is not None and padding.side == "right", cache is not None and not is_prefix
        if is_right and (use_cache or is_given):
            raise UserError(
                "rows padded on the right have no memory to continue from; pad on the left (padding_side='left'), or "
                "pass use_cache=False"
            )
        if use_cache is None:
            return is_given or bool(self.config.use_cache and not self.model.training and not is_right)
        return use_cache

    def _preparation(self, cache: MemoryCache | None, *, has_gradients: bool) -> Preparation | None:
        """Return the prepared model that reads the inputs, or None where the model itself does.

        Raises:
            UserError: the cache is of other weights than the model has now, or gradients are to be computed through it.
        """
        if cache is not None and cache.memory is not None:
            preparation, is_checked, cache.is_checked = cache.preparation, cache.is_checked, False
            if preparation is None:
                return None
            if has_gradients:
                raise UserError("a KV cache passes no gradient; continue it under torch.no_grad()")
            if not (is_checked or preparation.is_current(self.model)):
                raise UserError(
                    "this memory holds keys and values of other weights than the model has now; begin with a new "
                    "MemoryCache()"
                )
            return preparation
        dtype = None if has_gradients or getattr(self, "_is_replica", False) else preparable_dtype(self.model)
        if dtype is None:
            return None
        found = self._shared.preparation
        if found is None or found.inference.dtype != dtype or not found.is_current(self.model):
            self._shared.preparation = found = Preparation.of(self.model, dtype)
        return found

    def _begin(self, reading: Reading, prefix: DynamicCache | None, *, num_tokens: int, has_gradients: bool) -> None:
        """Set the rows that read the inputs, after the cache or from nothing, and how many tokens they read at once.

        An empty cache means text to continue. It is read as any text is, except by a model that cannot limit what each
        token sees: one that attends to empty memory reads as much as it can at once, and one without memory keeps
        tokens.
        """
        model, cache, batch_size = reading.reads_with, reading.cache, len(reading.inputs_BTX)
        training = self.model.training
        segment_length = self.config.rows_segment_length(training=training)
        limits, is_continued = self.config.context_limits(training=training), cache is not None and not has_gradients
        if is_continued and not model.limits_visible:
            segment_length = STRIDE
        elif is_continued and not limits.memory_length:
            segment_length = 1  # see `prompt_segment_length`
        elif cache is not None and has_gradients and not model.limits_visible and not limits.memory_length:
            raise UserError(
                f"{self.config.architecture} continues a text by its tokens, without gradients; call it under "
                "torch.no_grad(), or leave past_key_values out"
            )
        if reading.sees_later:
            segment_length = min(segment_length, self.model.config.limit("perm_size") or segment_length)
        has_gradients |= torch.is_grad_enabled() and any(one.requires_grad for one in self.parameters())  # of the head
        at_once = 1 if has_gradients or not model.limits_visible else max(1, STRIDE // segment_length)
        reading.num_at_once = at_once * segment_length  # with gradients one segment, within which they stay
        memory = None if cache is None else cache.memory
        if memory is None:
            if prefix is not None:
                memory = prefix_memory(reading.model, prefix, batch_size, limits)
            elif not is_continued or limits.memory_length:
                # slots for the tokens before the last step at least, which are none for a short row
                max_tokens = max(0, num_tokens - 1) // reading.num_at_once * reading.num_at_once
                max_tokens = num_tokens if reading.keeps_memory else max_tokens
                reading.reader = Reader.begin(
                    model, batch_size, limits, segment_length=segment_length, max_tokens=max_tokens
                )
                reading.is_new = True
                return
            else:
                memory = model.generation_memory(batch_size, limits, segment_length=self.config.segment_length)
        reading.reader = Reader(model, memory, segment_length=segment_length)

    def _check_attention(self, reading: Reading) -> None:
        """Check that the attention of the inputs can be returned.

        Raises:
            UserError: the architecture has none of the kind, or rows have several segments.
        """
        num_tokens, segment_length = reading.inputs_BTX.shape[1], reading.reader.segment_length
        if not isinstance(self.model, RelativeLanguageModel):
            raise UserError(f"{self.config.architecture} returns no attention; leave output_attentions out")
        if num_tokens > segment_length:
            raise UserError(
                f"output_attentions is for one segment, here of {segment_length}, as each sees other memory, and these "
                f"rows have {num_tokens} tokens; give a segment at a time with past_key_values, or open the model with "
                f"evaluation_segment_length={num_tokens} (segment_length in training)"
            )

    @override
    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights that were not loaded, and fill buffers that are not saved.

        transformers calls this for every module. It makes models without contents and loads the weights afterwards.
        """
        if module is getattr(self, "score", None):
            super()._init_weights(module)
        if isinstance(module, NoSoftmax):
            module.bias.zero_()
        if not isinstance(module, LanguageModel):
            return
        for buffer in module.buffers():
            buffer.zero_()  # the biases of Shaw's model, and of a softmax that is none, the only ones
        parameters = list(module.parameters())
        is_loaded = [bool(getattr(parameter, "_is_hf_initialized", False)) for parameter in parameters]
        if all(is_loaded):
            return
        saved = [parameter.clone() if loaded else None for parameter, loaded in zip(parameters, is_loaded, strict=True)]
        module.init_weights()
        for parameter, value in zip(parameters, saved, strict=True):
            if value is not None:
                parameter.copy_(value)

    @override
    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; in training, nothing prepared for inference takes memory."""
        if mode:
            self._shared.preparation = None
        return super().train(mode)

    @override
    def __getstate__(self) -> dict[str, Any]:
        # copies prepare their own
        return {**self.__dict__, "_shared": _Shared(), "_base": None}

    @override
    def get_input_embeddings(self) -> nn.Module:
        """Return the module that embeds token ids, without the factor sqrt(d_model), which `forward` applies.

        It has a `weight` (V, D) where it is one table of the model's width, and none where it has clusters or
        projections.
        """
        return self.model.embedding

    @override
    def set_input_embeddings(self, value: nn.Module) -> None:
        """Refuse another embedding."""
        raise UserError("the embedding cannot be replaced: the softmax shares its weights")

    @override
    def get_output_embeddings(self) -> nn.Module | None:
        """Return the softmax, with `weight` (V, D) and `bias` (V,), or None.

        It is None for a model that predicts no tokens, and where the softmax has clusters or projections.
        """
        return self.model.softmax if hasattr(self.model.softmax, "weight") else None

    @override
    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Refuse another softmax."""
        raise UserError("the softmax cannot be replaced: it shares its weights with the embedding")

    @override
    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Refuse another vocabulary.

        Raises:
            UserError: always.
        """
        raise UserError(
            f"the vocabulary of {self.model.config.vocab_size:,} tokens is fixed: ids are ordered by frequency where "
            "the softmax is adaptive; train a model with another tokenizer instead (padding needs no token of its own)"
        )

    @property
    @override
    def gradient_checkpointing(self) -> bool:
        """Whether the backward pass recomputes activations; transformers sets it."""
        return self.model.activation_checkpointing

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.model.activation_checkpointing = enable

    @property
    @override
    def is_gradient_checkpointing(self) -> bool:
        """The same by the old name, which PEFT reads and of which transformers warns."""
        return self.gradient_checkpointing

    @classmethod
    @override
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Self:
        """Open a folder, or a repository of the Hub, that `txl convert`, `save_pretrained` or the old TransfoXL wrote.

        Arguments are those of transformers. Any class opens the folder of any other: what it has no use for is left
        out, and what it needs besides is drawn, with a warning. An old checkpoint is read by
        `transformer_xl.integrations.checkpoints`, which executes nothing in it.

        Raises:
            UserError: an old checkpoint is damaged or cannot be expressed in this package.
        """
        if pretrained_model_name_or_path is None or not is_transfo_xl(pretrained_model_name_or_path, kwargs):
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        folder = local_folder(pretrained_model_name_or_path, kwargs)
        kwargs.pop("subfolder", None)  # which is in the folder
        imported, head = transfo_xl.read_model(folder)
        config = kwargs.pop("config", None)
        if not isinstance(config, PretrainedTransformerXLConfig):
            found: Any = TransfoXLConfig.from_pretrained(folder, return_unused_kwargs=True, **kwargs)
            config, kwargs = found
        weights = {f"{WEIGHT_PREFIX}{name}": tensor for name, tensor in imported.weights.items()} | head
        opened = super().from_pretrained(None, *args, config=config, state_dict=weights, **kwargs)
        if imported.tokenizer is not None and cls.can_generate():
            model: Any = opened[0] if isinstance(opened, tuple) else opened  # with output_loading_info
            model.generation_config = GenerationConfig(**generation_values(imported.tokenizer))
        return opened

    @override
    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write the folder that `from_pretrained` opens; arguments are those of transformers.

        Raises:
            UserError: the weights are those of `to_int8`, which are for inference only.
        """
        self.model.check_not_quantized("saved")
        super().save_pretrained(save_directory, *args, **kwargs)
        write_code(Path(save_directory))

    @classmethod
    @override
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: a saved folder has a module that imports this package, not a copy of its code."""


class TransformerXLModel(TransformerXLPreTrainedModel):
    """The model without a head: hidden states of tokens, read with memory; `past_key_values` is a `MemoryCache`."""

    def __init__(self, config: PretrainedTransformerXLConfig) -> None:
        """Build the model with initial weights."""
        super().__init__(config)
        self.post_init()

    @override
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Return the hidden states of all positions; rows are read as `TransformerXLForCausalLM` reads them.

        Args:
            input_ids: token ids (B, T).
            attention_mask: 1 for tokens and 0 for padding, (B, T), or with the columns of `past_key_values` before
                them. Padding is on the left, or without a cache on the right. A causal mask (B, T, T) says the same.
            inputs_embeds: embeddings (B, T, D) as `get_input_embeddings()` returns them, in place of `input_ids`.
            past_key_values: as for `TransformerXLForCausalLM`.
            use_cache: as for `TransformerXLForCausalLM`; None means no if attention is asked for without a cache.
            output_hidden_states: whether to return the hidden states of all layers; None means as configured.
            output_attentions: whether to return the attention probabilities of all layers, which the reference kernel
                computes, without dropout; None means as configured. For one segment, without padding on the left.
            return_dict: whether to return a BaseModelOutputWithPast; otherwise a tuple.
            kwargs: must be None, since they mean nothing here.

        Returns:
            last_hidden_state (B, T, D), past_key_values, hidden_states (L + 1 of (B, T, D)) and attentions (L of
            (B, N, T, S), whose keys are the slots of the memory that `past_key_values` had and then the tokens), each
            None where it was not asked for.

        Raises:
            UserError: as by `TransformerXLForCausalLM`.
        """
        wanted = (output_hidden_states, output_attentions)
        reading = self.begin_reading(
            input_ids, attention_mask, inputs_embeds, kwargs, wanted, past_key_values, use_cache
        )
        return self.output(BaseModelOutputWithPast, reading, return_dict, last_hidden_state=reading.columns())


def _check_embedding(model: LanguageModel) -> None:
    """Check that the softmax has the weights of the embedding if it shares them.

    Raises:
        UserError: another module is in the place of either, as PEFT puts one for `modules_to_save`.
    """
    config, embedding, softmax = model.config, model.embedding, model.softmax
    is_own = isinstance(embedding, AdaptiveEmbedding) and isinstance(softmax, AdaptiveSoftmax)
    if isinstance(softmax, NoSoftmax) or (is_own and softmax.embedding in (None, embedding)):
        return
    names = [name for name, _ in embedding.named_parameters()]
    if config.tie_word_embeddings or (config.tie_projections != "none" and any("projections." in one for one in names)):
        name, other = ("softmax", softmax) if isinstance(embedding, AdaptiveEmbedding) else ("embedding", embedding)
        raise UserError(
            f"the {name} was replaced by a {type(other).__name__}, but the softmax shares its weights with the "
            f"embedding, and one of them would keep the old ones; leave {name} out (of modules_to_save, in PEFT), or "
            "take a model with tie_word_embeddings false"
        )
