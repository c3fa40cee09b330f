"""Our models as a causal language model of transformers 5.

Shape suffixes: B batch rows, T columns of the input, D model width, L layers, V vocabulary, K columns with logits.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.generation import GenerationConfig, StoppingCriteriaList
from transformers.modeling_outputs import CausalLMOutputWithPast
from typing_extensions import override

from transformer_xl.architectures import build_model
from transformer_xl.baselines.token_memory import TokenMemory
from transformer_xl.checkpoint_record import CheckpointName
from transformer_xl.config import UserError
from transformer_xl.inference import TokenModel
from transformer_xl.integrations.checkpoints import huggingface as transfo_xl
from transformer_xl.integrations.checkpoints.pretrained import (
    WEIGHT_PREFIX,
    config_values,
    generation_values,
    write_code,
)
from transformer_xl.integrations.huggingface.cache import MemoryCache, Preparation, preparable_dtype
from transformer_xl.integrations.huggingface.configuration import PretrainedTransformerXLConfig, TransfoXLConfig
from transformer_xl.integrations.huggingface.files import is_transfo_xl, local_folder
from transformer_xl.integrations.huggingface.padding import Padding, masked_padding, read_columns, read_mask
from transformer_xl.integrations.huggingface.stopping import StopStrings
from transformer_xl.integrations.huggingface.tokenization import (
    OwnTokenizer,
    TransformerXLTokenizer,
    TransformerXLTokenizersBackend,
    transformers_tokenizer,
)
from transformer_xl.model.adaptive import AdaptiveEmbedding
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.memory import Memory
from transformer_xl.model.token_ids import as_token_ids
from transformer_xl.ops.cross_entropy import cross_entropy
from transformer_xl.reader import STRIDE, Reader
from transformer_xl.run import Run, load

_IGNORED = -100  # the label that marks a position without a loss


class TransformerXLForCausalLM(PreTrainedModel, GenerationMixin):
    """Any of our models, in `model`; its memory is `past_key_values`, a `MemoryCache`."""

    config_class = PretrainedTransformerXLConfig
    base_model_prefix = WEIGHT_PREFIX.removesuffix(".")
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _is_stateful = True
    _no_split_modules: list[str] | set[str] | None = [  # noqa: RUF012 (instances replace it)
        *("TransformerXL", "ShawTransformer", "AbsoluteTransformer", "RecurrentModel")
    ]

    config: PretrainedTransformerXLConfig  # pyrefly: ignore[bad-override-mutable-attribute]
    _inference: Preparation | None = None

    def __init__(self, config: PretrainedTransformerXLConfig) -> None:
        """Build the model with initial weights."""
        super().__init__(config)
        self.model: LanguageModel = build_model(config.model_config(), memory_length=config.memory_length)
        self.post_init()

    @override
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return the logits of the next token at every position.

        Rows longer than a segment are read in segments, and memory connects them; gradients stay within a segment. In
        evaluation mode without gradients a prepared model reads them, which is kept until the weights change.

        Args:
            input_ids: token ids (B, T).
            attention_mask: 1 for tokens and 0 for padding, (B, T), or with the columns of `past_key_values` before
                them. Padding is on the left, or without a cache on the right.
            inputs_embeds: embeddings (B, T, D) as `get_input_embeddings()` returns them, in place of `input_ids`.
            past_key_values: a `MemoryCache`, which holds the next memory afterwards, or None if there is nothing before
                these tokens. An empty one says that they are a text to continue, as `generate` does; a model without
                memory then keeps its newest tokens.
            labels: the tokens themselves (B, T); each position is scored with the next one, and -100 is not scored.
            use_cache: whether to return the memory; None means the configuration's `use_cache` in evaluation mode, and
                no in training mode or if rows are padded on the right.
            output_hidden_states: whether to return the hidden states of all layers; None means as configured.
            logits_to_keep: number of last positions to compute logits for, 0 for all; or their indices.
            return_dict: whether to return a CausalLMOutputWithPast; otherwise a tuple.
            num_items_in_batch: what the sum of the losses is divided by; None means the number of scored labels.
            kwargs: must be None, since they mean nothing here.

        Returns:
            loss, logits, past_key_values and hidden_states, each None where it was not asked for. In training an
            adaptive softmax computes the loss without logits, which are None then.

        Raises:
            UserError: an argument that means nothing here or has another shape, a mask, cache or token id that the
                model cannot use, or an embedding that was replaced although the softmax shares its weights.
        """
        _refuse(kwargs)
        _check_embedding(self.model)
        if (input_ids is None) == (inputs_embeds is None):
            raise UserError("give either input_ids or inputs_embeds")
        if inputs_embeds is not None and self.model.ngrams is not None:
            raise UserError("this model embeds n-grams of token ids (max_ngram), so it cannot read inputs_embeds")
        inputs = input_ids if input_ids is not None else inputs_embeds
        assert inputs is not None
        _check_shapes(inputs, labels, is_ids=input_ids is not None)
        cache = _check_cache(past_key_values)
        padding = self._padding(input_ids, attention_mask, inputs.shape[1], cache)
        keeps_memory = self._keeps_memory(use_cache, cache, padding)
        if input_ids is not None:
            inputs = self._without_padding_ids(input_ids, attention_mask)
        has_gradients = torch.is_grad_enabled() and (
            inputs.requires_grad or any(parameter.requires_grad for parameter in self.model.parameters())
        )
        preparation = self._preparation(cache, has_gradients=has_gradients)
        model = self.model if preparation is None else preparation.inference
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        lengths = padding.lengths if padding is not None and padding.side == "left" else None
        reader, num_at_once = self._begin(
            cast(TokenModel, _AllLayers(model)) if output_hidden_states else model,
            cache,
            batch_size=len(inputs),
            num_tokens=inputs.shape[1] if lengths is None else max(lengths),
            keeps_memory=keeps_memory,
            has_gradients=has_gradients,
        )
        if (output_hidden_states or inputs_embeds is not None) and isinstance(reader.memory, TokenMemory):
            what = "output_hidden_states" if output_hidden_states else "inputs_embeds"
            raise UserError(
                f"{self.config.architecture} has no memory, so generate reads its last token ids again and cannot have "
                f"{what}; leave it out" + (", or pass use_cache=False" if output_hidden_states else "")
            )
        if inputs_embeds is not None:
            inputs = inputs * self.model.config.d_model**0.5  # embeddings of the table; the model's inputs are scaled
        states_BTD = read_columns(reader, inputs, lengths, num_at_once).split(self.model.config.d_model, dim=-1)
        if keeps_memory:
            cache = MemoryCache() if cache is None else cache
            cache.advance(reader.memory, inputs.shape[1], preparation)
        targets_BT = _targets(labels, padding)
        loss, logits_BKV = self._head(model, states_BTD[-1], logits_to_keep, targets_BT, num_items_in_batch)
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits_BKV,
            past_key_values=cache if keeps_memory else None,
            hidden_states=states_BTD if output_hidden_states else None,
        )
        wants_dict = self.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _padding(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, num_new: int, cache: MemoryCache | None
    ) -> Padding | None:
        """Return the padding that the mask marks, or without a mask the ids beyond the vocabulary."""
        num_past = cache.get_seq_length() if cache is not None else 0
        if attention_mask is None:
            pad = self._padding_id()
            if input_ids is None or pad is None or num_past or not bool((input_ids == pad).any()):
                return None
            attention_mask = input_ids != pad
        return read_mask(attention_mask, num_new, num_past)

    def _padding_id(self) -> int | None:
        """Return the id of padding if it is beyond the vocabulary; another one may be a token of the text."""
        pad = self.generation_config.pad_token_id if self.generation_config is not None else None
        return pad if isinstance(pad, int) and pad >= self.model.config.vocab_size else None

    def _without_padding_ids(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Return the ids with token 0 for padding, also after the end of a finished sequence of `generate`."""
        pad = self._padding_id()
        if attention_mask is not None:
            new_mask = attention_mask[:, attention_mask.shape[1] - input_ids.shape[1] :]
            input_ids = input_ids.masked_fill(new_mask == 0, 0)
        return input_ids if pad is None else input_ids.masked_fill(input_ids == pad, 0)

    def _keeps_memory(self, use_cache: bool | None, cache: MemoryCache | None, padding: Padding | None) -> bool:
        """Return whether the memory is returned.

        Raises:
            UserError: it was asked for, but would begin with padding on the right.
        """
        is_right = padding is not None and padding.side == "right"
        if is_right and (use_cache or cache is not None):
            raise UserError(
                "rows padded on the right have no memory to continue from; pad on the left (padding_side='left'), or "
                "pass use_cache=False"
            )
        if use_cache is None:
            return cache is not None or bool(self.config.use_cache and not self.training and not is_right)
        return bool(use_cache)

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
        found = self._inference
        if found is None or found.inference.dtype != dtype or not found.is_current(self.model):
            self._inference = found = Preparation.of(self.model, dtype)
        return found

    def _begin(
        self,
        model: TokenModel,
        cache: MemoryCache | None,
        *,
        batch_size: int,
        num_tokens: int,
        keeps_memory: bool,
        has_gradients: bool,
    ) -> tuple[Reader, int]:
        """Return rows that read the inputs, after the cache or from nothing, and the number of tokens to read at once.

        An empty cache means text to continue. It is read as any text is, except by a model that cannot limit what each
        token sees: one that attends to empty memory reads as much as it can at once, and one without memory keeps
        tokens.
        """
        segment_length = self.config.rows_segment_length(training=self.training)
        is_continued = cache is not None and not has_gradients
        if is_continued and not model.limits_visible:
            segment_length = STRIDE
        at_once = 1 if has_gradients or not model.limits_visible else max(1, STRIDE // segment_length)
        num_at_once = at_once * segment_length  # with gradients one segment, within which they stay
        memory = None if cache is None else cache.memory
        if memory is None:
            limits = self.config.context_limits(training=self.training)
            if not is_continued or limits.memory_length:
                # slots for the tokens before the last step at least, which are none for a short row
                max_tokens = num_tokens if keeps_memory else max(0, num_tokens - 1) // num_at_once * num_at_once
                reader = Reader.begin(model, batch_size, limits, segment_length=segment_length, max_tokens=max_tokens)
                return reader, num_at_once
            memory = model.generation_memory(batch_size, limits, segment_length=self.config.segment_length)
        return Reader(model, memory, segment_length=segment_length), num_at_once

    def _head(
        self,
        model: TokenModel,
        hidden_BTD: Tensor,
        logits_to_keep: int | Tensor,
        targets_BT: Tensor | None,
        num_items: Tensor | int | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the loss and the logits."""
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if targets_BT is None:
            return None, model.logits(hidden_BTD[:, kept])
        is_scored_BT = targets_BT != _IGNORED
        targets_BT = as_token_ids(targets_BT.masked_fill(~is_scored_BT, 0), self.model.config.vocab_size, "labels")
        # an adaptive softmax needs no logits for its loss, and those of all words would take more memory than all else
        logits_BKV = None
        if not (self.training and self.model.softmax.num_tails):
            logits_BKV = model.logits(hidden_BTD[:, kept])
        if logits_BKV is not None and not self.model.softmax.num_tails and logits_BKV.shape[1] == hidden_BTD.shape[1]:
            losses_BT = cross_entropy(logits_BKV.flatten(0, 1), targets_BT.flatten()).view(targets_BT.shape)
        else:
            losses_BT = model.nats(hidden_BTD, targets_BT)
        count = is_scored_BT.sum() if num_items is None else num_items
        if isinstance(count, Tensor):
            count = count.to(losses_BT.device)
        return (losses_BT * is_scored_BT).sum() / count, logits_BKV

    @override
    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of `forward` for the next step of `generate`."""
        kwargs.pop("tokenizer", None)  # for `stop_strings`; `generate` passes it on here too
        if is_first_iteration and past_key_values is None and kwargs.get("use_cache"):
            past_key_values = MemoryCache()
        if isinstance(past_key_values, MemoryCache):
            past_key_values.is_checked = not is_first_iteration
        return super().prepare_inputs_for_generation(  # pyrefly: ignore[bad-argument-type]
            cast(Any, input_ids),
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=cast(Any, attention_mask),
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )

    @override
    def _get_stopping_criteria(
        self, generation_config: GenerationConfig, stopping_criteria: Any, tokenizer: Any = None
    ) -> StoppingCriteriaList:
        """Return the criteria of transformers, but with our own for `stop_strings`."""
        strings = generation_config.stop_strings
        if is_ours := strings is not None and isinstance(tokenizer, OwnTokenizer):
            generation_config = copy.copy(generation_config)
            generation_config.stop_strings = None
        criteria = super()._get_stopping_criteria(  # pyrefly: ignore[bad-argument-type]
            generation_config, stopping_criteria, tokenizer
        )
        return StoppingCriteriaList([*criteria, StopStrings(tokenizer, strings)]) if is_ours else criteria

    @classmethod
    @override
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `prepare_inputs_for_generation` makes it

    @override
    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the weights that were not loaded, and fill buffers that are not saved.

        transformers calls this for every module. It makes models without contents and loads the weights afterwards.
        """
        if not isinstance(module, LanguageModel):
            return
        for buffer in module.buffers():
            buffer.zero_()  # the biases of Shaw's model, the only ones
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
            self._inference = None
        return super().train(mode)

    @override
    def __getstate__(self) -> dict[str, Any]:
        # copies prepare their own
        return {name: value for name, value in self.__dict__.items() if name != "_inference"}

    @override
    def get_input_embeddings(self) -> nn.Module:
        """Return the module that embeds token ids, without the factor sqrt(d_model), which `forward` applies."""
        return self.model.embedding

    @override
    def set_input_embeddings(self, value: nn.Module) -> None:
        """Refuse another embedding."""
        raise UserError("the embedding cannot be replaced: the softmax shares its weights")

    @override
    def get_output_embeddings(self) -> None:
        """Return None: the softmax has no weight matrix of its own, or one for each cluster."""

    @override
    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Refuse another vocabulary.

        Raises:
            UserError: always.
        """
        raise UserError(
            f"the vocabulary of {self.model.config.vocab_size:,} tokens is fixed: ids are ordered by frequency where "
            "the softmax is adaptive; train a model with another tokenizer instead (padding needs no token: its id "
            "is the first after the vocabulary)"
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

        Arguments are those of transformers. An old checkpoint is read by `transformer_xl.integrations.checkpoints`,
        which executes nothing in it.

        Raises:
            UserError: an old checkpoint is damaged or cannot be expressed in this package.
        """
        if pretrained_model_name_or_path is None or not is_transfo_xl(pretrained_model_name_or_path, kwargs):
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        folder = local_folder(pretrained_model_name_or_path, kwargs)
        imported = transfo_xl.read(folder)
        config = kwargs.pop("config", None)
        if not isinstance(config, PretrainedTransformerXLConfig):
            config = TransfoXLConfig.from_pretrained(folder)
        weights = {f"{WEIGHT_PREFIX}{name}": tensor for name, tensor in imported.weights.items()}
        model = super().from_pretrained(None, *args, config=config, state_dict=weights, **kwargs)
        if imported.tokenizer is not None:
            model.generation_config = GenerationConfig(**generation_values(imported.tokenizer))
        return model

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
    def register_for_auto_class(cls, auto_class: str = "AutoModelForCausalLM") -> None:
        """Do nothing: a saved folder has a module that imports this package, not a copy of its code."""


def from_run(
    run: Run | Path | str, *, checkpoint: CheckpointName = "best", eos_token: str | None = None
) -> tuple[TransformerXLForCausalLM, TransformerXLTokenizer | TransformerXLTokenizersBackend]:
    """Return a run's model and tokenizer for transformers, without writing a folder.

    Args:
        run: the folder of a run, or a loaded run, whose weights are shared.
        checkpoint: the weights with the lowest validation loss (best), or those of the newest checkpoint (last); not
            with a loaded run.
        eos_token: the token that ends a text, as for `convert`.

    Raises:
        UserError: it is not the folder of a run, it has no weights yet, its files are damaged, or its vocabulary has no
            such token.
    """
    if not isinstance(run, Run):
        run = load(run, device="cpu", checkpoint=checkpoint)
    config = PretrainedTransformerXLConfig(**config_values(run.config, run.memory_lengths))
    with torch.device("meta"):
        model = TransformerXLForCausalLM(config)
    model.model = run.model
    model.generation_config = GenerationConfig(**generation_values(run.tokenizer, eos_token))
    return model.eval(), transformers_tokenizer(run.tokenizer, eos_token)


class _AllLayers:
    """A model whose hidden states are those of all layers side by side, (B, T, (L + 1) * D)."""

    def __init__(self, model: TokenModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Memory]:
        states_BTD, memory = self._model.hidden_states(*args, **kwargs)
        return torch.cat(states_BTD, dim=-1), memory


def _targets(labels: Tensor | None, padding: Padding | None) -> Tensor | None:
    """Return the target of each position (B, T), -100 where it has none, or None without labels.

    The first token after padding on the left is not predicted, as the first token of a row without padding is not.
    """
    if labels is None:
        return None
    targets_BT = F.pad(labels[:, 1:], (0, 1), value=_IGNORED)
    if padding is None or padding.side == "right":
        return targets_BT
    return masked_padding(targets_BT, padding.lengths, _IGNORED)


def _check_shapes(inputs: Tensor, labels: Tensor | None, *, is_ids: bool) -> None:
    """Check that the inputs are rows of one token or more, and that labels have their shape.

    Raises:
        UserError: they are not, or have not.
    """
    if inputs.ndim != (2 if is_ids else 3) or not inputs.shape[1]:
        name, wanted = "inputs_embeds", "(batch, tokens, d_model)"
        if is_ids:
            name, wanted = "input_ids", "(batch, tokens)"
        raise UserError(
            f"{name} of shape {tuple(inputs.shape)}; expected {wanted}, with one token or more (a text from nothing "
            "begins with generation_config.bos_token_id)"
        )
    if labels is not None and labels.shape != inputs.shape[:2]:
        raise UserError(
            f"labels of shape {tuple(labels.shape)}; expected {tuple(inputs.shape[:2])}, a label for each token"
        )


def _check_embedding(model: LanguageModel) -> None:
    """Check that the softmax has the weights of the embedding if it shares them.

    Raises:
        UserError: another module is in the embedding's place, as PEFT puts one for `modules_to_save`.
    """
    if isinstance(model.embedding, AdaptiveEmbedding):
        return
    config, names = model.config, [name for name, _ in model.embedding.named_parameters()]
    if config.tie_word_embeddings or (config.tie_projections != "none" and any("projections." in one for one in names)):
        raise UserError(
            f"the embedding was replaced by a {type(model.embedding).__name__}, but the softmax shares its weights and "
            "would keep the old ones; leave embedding out (of modules_to_save, in PEFT), or take a model with "
            "tie_word_embeddings false"
        )


def _check_cache(cache: Cache | None) -> MemoryCache | None:
    """Return the cache.

    Raises:
        UserError: it is the cache of other models.
    """
    if cache is None or isinstance(cache, MemoryCache):
        return cache
    raise UserError(
        f"past_key_values is a {type(cache).__name__}; this model has a memory: give what it returned, or to begin "
        "MemoryCache()"
    )


def _refuse(arguments: Mapping[str, Any]) -> None:
    """Check that no argument is given that means nothing here.

    Raises:
        UserError: one is given.
    """
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        if name == "position_ids":
            raise UserError("positions are relative to each token; leave position_ids out (rows cannot be packed)")
        if name == "output_attentions":
            raise UserError("attention is not returned; 'txl analyze attention' shows it, TransformerXL.trace has it")
        raise UserError(f"forward has no argument {name}; leave it out")
