"""Text generation: finished completions, or one text streamed as it is generated.

    completion = generate(run, "Once upon a time", max_new_tokens=300)
    completions = generate(run, ["Once", "The end"], num_samples=4, stop="\\n")
    for text in stream(run, "Once upon a time", top_p=0.9): ...

`beam_search` is in `beam_search.py`. All functions accept the settings of `GenerationConfig`, as an object or by name.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from typing_extensions import TypeIs, Unpack, override

from transformer_xl.config import EvaluationConfig, UserError, check_overrides, check_settings, check_type
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.generation.batch import BatchGenerator
from transformer_xl.generation.completion import Completion, CompletionBuilder, FinishReason, Prompt
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.generation.sampling import LogitsProcessor
from transformer_xl.inference import InferenceModel, TokenModel, require_reading_memory
from transformer_xl.model.memory import Memory
from transformer_xl.reader import STRIDE
from transformer_xl.run import Run, check_run
from transformer_xl.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import GenerationSettings


@overload
def generate(
    run: Run,
    prompts: Prompt = None,
    config: GenerationConfig | None = None,
    *,
    logits_processor: LogitsProcessor | None = None,
    memory: Memory | None = None,
    **overrides: Unpack[GenerationSettings],
) -> Completion: ...


@overload
def generate(
    run: Run,
    prompts: Sequence[Prompt],
    config: GenerationConfig | None = None,
    *,
    logits_processor: LogitsProcessor | None = None,
    memory: Memory | None = None,
    **overrides: Unpack[GenerationSettings],
) -> list[Completion]: ...


def generate(
    run: Run,
    prompts: Prompt | Sequence[Prompt] = None,
    config: GenerationConfig | None = None,
    *,
    logits_processor: LogitsProcessor | None = None,
    memory: Memory | None = None,
    **overrides: Unpack[GenerationSettings],
) -> Completion | list[Completion]:
    """Sample completions of one prompt or a batch of prompts; the result does not depend on the rest of the batch.

    Args:
        run: a loaded run.
        prompts: text or token ids to continue, or None to begin a new text, or a list of such prompts of any lengths.
        config: settings of the generation, or None for the defaults.
        logits_processor: changes the logits before each token is sampled.
        memory: the memory of earlier tokens, whose batch row i prompt i continues, or None if there are none. It is not
            changed.
        overrides: settings by name, which override those of `config`.

    Returns:
        one completion for one prompt; for a list, all samples of the first prompt, then those of the next.

    Raises:
        UserError: a setting that is out of range, or a prompt that is empty or cannot be encoded.
    """
    check_run(run)
    config = resolve_config(run.tokenizer, config, overrides)
    if config.max_new_tokens is None:
        raise UserError("generate returns finished texts; give a number as max_new_tokens, or use stream")
    if config.num_beams is not None:
        raise UserError("generate samples, and num_beams is for beam_search; call that, or leave num_beams out")
    if _is_one_prompt(prompts):
        if config.num_samples > 1:
            raise UserError("one prompt gives one completion; put it in a list to get num_samples of them")
        return generate(run, [prompts], config, logits_processor=logits_processor, memory=memory)[0]
    if isinstance(prompts, np.ndarray | torch.Tensor):  # of two dimensions: a prompt in each row
        prompts = prompts.tolist()
    check_type(prompts, Iterable, "prompts", "give text, token ids, or a list of these")
    prompts = list(prompts)
    prompt_ids = [encode_prompt(run.tokenizer, prompt, config, continued=memory is not None) for prompt in prompts]
    generator = _batch_generator(run, prompt_ids, config, logits_processor, memory)
    builders = [CompletionBuilder(run.tokenizer, ids, config) for ids in prompt_ids for _ in range(config.num_samples)]
    while generator.active:
        for token in generator.step():
            builders[token.sequence].add(token)
        generator.finish([index for index in generator.active if builders[index].finish_reason])
    return [
        builder.completion(prompt_text(run.tokenizer, prompts[index // config.num_samples]), config.seed + index)
        for index, builder in enumerate(builders)
    ]


def stream(
    run: Run,
    prompt: Prompt = None,
    config: GenerationConfig | None = None,
    *,
    logits_processor: LogitsProcessor | None = None,
    memory: Memory | None = None,
    **overrides: Unpack[GenerationSettings],
) -> GenerationStream:
    """Sample one text and return it as it is generated.

    Args:
        run: a loaded run.
        prompt: text or token ids to continue, or None to begin a new text.
        config: settings of the generation, or None for the defaults.
        logits_processor: changes the logits before each token is sampled.
        memory: the memory of earlier tokens, of batch size 1, which the prompt continues, or None if there are none. It
            is not changed.
        overrides: settings by name, which override those of `config`.

    Returns:
        an iterator over the text. The prompt is read immediately, and tokens are generated as it is iterated.

    Raises:
        UserError: a setting that is out of range, or a prompt that is empty or cannot be encoded.
    """
    check_run(run)
    config = resolve_config(run.tokenizer, config, overrides)
    if config.num_samples > 1 or config.num_beams is not None:
        raise UserError("a stream is one sampled text; leave num_samples and num_beams out, or use generate")
    prompt_ids = encode_prompt(run.tokenizer, prompt, config, continued=memory is not None)
    generator = _batch_generator(run, [prompt_ids], config, logits_processor, memory)
    return GenerationStream(CompletionBuilder(run.tokenizer, prompt_ids, config), generator)


@dataclass(eq=False, repr=False)
class GenerationStream(Iterator[str]):
    """A text while it is generated, made by `stream`. A character appears once all its bytes are known."""

    _builder: CompletionBuilder
    _generator: BatchGenerator

    @override
    def __next__(self) -> str:
        while self._builder.finish_reason is None:
            (token,) = self._generator.step()
            if text := self._builder.add(token):
                return text
        raise StopIteration

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated so far."""
        return self._builder.num_tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens generated so far; empty without max_new_tokens."""
        return tuple(self._builder.token_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Natural log-probability of each token so far; empty if `logprobs` is off, or without max_new_tokens."""
        return tuple(self._builder.logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended, or None if it is not finished."""
        return self._builder.finish_reason

    def memory(self) -> Memory:
        """Return the memory after all tokens so far, of batch size 1, to continue from with another prompt."""
        return self._generator.memory()


def resolve_config(
    tokenizer: Tokenizer, config: GenerationConfig | None, overrides: Mapping[str, Any], **defaults: Any
) -> GenerationConfig:
    """Merge and check settings. The token that ends documents ends a text, unless `eos_token_ids` is given.

    In descending order of precedence: `overrides`, the settings that were set in `config` (also to their defaults),
    `defaults`, the defaults of `GenerationConfig`. So resolved settings stay as they are when they are resolved again.

    Returns:
        settings in which `stop_at_newline` is replaced by the tokenizer's tokens that end a line.

    Raises:
        UserError: an unknown setting, one that is out of range, or no token that ends a line.
    """
    check_overrides(GenerationConfig, config, overrides, ("prompt", "logits_processor", "memory"))
    base = {} if config is None else config.model_dump(exclude_unset=True)
    if tokenizer.document_end is not None:
        defaults = {"eos_token_ids": (tokenizer.document_end.id,), **defaults}
    config = check_settings(GenerationConfig, {**defaults, **base, **overrides}, "generation settings")
    if not config.stop_at_newline:
        return config
    newline_ids = tokenizer.is_newline_V.nonzero()[0].tolist()
    if not newline_ids:
        raise UserError("this tokenizer has no token that ends a line; leave out stop_at_newline, or use stop")
    eos_token_ids = tuple({*config.eos_token_ids, *newline_ids})
    return config.model_copy(update={"stop_at_newline": False, "eos_token_ids": eos_token_ids})


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, config: GenerationConfig, *, continued: bool) -> list[int]:
    """Return the token ids to read: the BOS token (with `add_bos_token`) and the prompt, or the prompt alone where it
    continues a memory.

    Raises:
        UserError: the prompt is empty or cannot be encoded, or there is none after a memory or without a BOS token.
    """
    if prompt is None and not config.add_bos_token:
        raise UserError("a text without a prompt begins with the BOS token; give a prompt, or leave add_bos_token on")
    if prompt is None and continued:
        raise UserError("a memory was given without a prompt; give the text that continues it")
    token_ids: list[int] = []
    if prompt is None:
        pass
    elif not _is_one_prompt(prompt):
        raise UserError(f"the prompt is of type {type(prompt).__name__}; give text, token ids or None")
    elif not len(prompt):
        raise UserError("the prompt is empty; give some text, or no prompt to begin a new text")
    elif isinstance(prompt, str | bytes):
        token_ids = tokenizer.encode(prompt).tolist()
    else:
        token_ids = tokenizer.check_ids(prompt).tolist()
    if not continued and config.add_bos_token:
        token_ids = [tokenizer.bos_token_id, *token_ids]
    if not token_ids:
        raise UserError("the prompt has no token in this vocabulary; give some text")
    return token_ids if config.max_prompt_tokens is None else token_ids[-config.max_prompt_tokens :]


def _is_one_prompt(prompts: object) -> TypeIs[Prompt]:
    """Return whether an argument is one prompt and not a list of prompts (or something else)."""
    if isinstance(prompts, np.ndarray | torch.Tensor):
        return prompts.ndim == 1
    is_ids = isinstance(prompts, Sequence) and bool(prompts) and all(isinstance(token, Integral) for token in prompts)
    return prompts is None or isinstance(prompts, str | bytes) or is_ids


def prompt_text(tokenizer: Tokenizer, prompt: Prompt) -> str | bytes | None:
    """Return a prompt as text, where token ids are decoded."""
    return prompt if prompt is None or isinstance(prompt, str | bytes) else tokenizer.decode(prompt)


def memory_plan(run: Run, memory_length: int | None = None) -> EvaluationPlan:
    """Return the run's evaluation settings, whose memory generation uses, with another memory length if one is given.

    Raises:
        UserError: the model does not support the memory length.
    """
    length: dict[str, Any] = {} if memory_length is None else {"memory_length": memory_length}
    return EvaluationPlan.for_reading(run, EvaluationConfig(**length))


def prompt_segment_length(model: TokenModel, segment_length: int, memory_length: int) -> int:
    """Return the number of tokens of a segment in which prompts are read: that of evaluation, with two exceptions.

    Where empty memory slots are attended (the setting attend_empty_memory), a prompt is read in segments of `STRIDE`.
    Where evaluation has no memory, that of generation holds the tokens which fit a segment with the new one: each token
    of a prompt sees these, as the generated ones do.

    Args:
        model: the model that reads.
        segment_length: that of evaluation.
        memory_length: that of evaluation.
    """
    if model.config.attends_empty_slots:
        return STRIDE
    return 1 if model.limits_visible and not memory_length else segment_length


def prepare_generation(
    run: Run, config: GenerationConfig, memory: Memory | None, num_prompts: int
) -> tuple[InferenceModel, Memory, int]:
    """Return what generates and what it continues.

    Returns:
        the model, prepared with the configured dtype; `memory`, or if it is None an empty one of the configured length
        (by default the run's evaluation memory length); and the segment length of prompts.

    Raises:
        UserError: the memory of all sequences certainly does not fit on the device, or `memory` has another length than
            the configured one.
    """
    check_type(memory, (Memory, type(None)), "memory", "give a memory, such as that of a stream, or None")
    if memory is not None and config.memory_length not in (None, 0, memory.length):  # 0: read by single tokens
        raise UserError(
            f"memory_length {config.memory_length:,} and a memory of {memory.length:,} slots were both given; leave "
            "memory_length out"
        )
    model, plan = run.inference(config.dtype), memory_plan(run, config.memory_length)
    fits_segment = run.config.train.num_inputs
    num_slots = plan.context_limits.memory_length or fits_segment - 1
    if config.num_beams is None:
        num_rows, name = num_prompts * config.num_samples, "num_samples"
    else:  # short texts have fewer continuations than there are beams; the exponent is bounded to keep the power small
        num_continuations = model.config.vocab_size ** min((config.max_new_tokens or 1) - 1, 64)
        num_rows, name = min(config.num_beams, num_continuations), "num_beams"
    num_slots = num_slots if memory is None else memory.length
    advice = f"lower memory_length or {name}"
    require_reading_memory(model, "generation", num_rows=num_rows, num_slots=num_slots, advice=advice)
    if memory is None:
        memory = model.generation_memory(num_prompts, plan.context_limits, segment_length=fits_segment)
    return model, memory, prompt_segment_length(model, plan.segment_length, plan.context_limits.memory_length)


def _batch_generator(
    run: Run,
    prompts: list[list[int]],
    config: GenerationConfig,
    logits_processor: LogitsProcessor | None,
    memory: Memory | None,
) -> BatchGenerator:
    model, memory, segment_length = prepare_generation(run, config, memory, len(prompts))
    return BatchGenerator(
        model, prompts, config, segment_length=segment_length, logits_processor=logits_processor, memory=memory
    )
