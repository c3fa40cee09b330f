"""Settings of text generation. Their names are also the flags of `txl generate`."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from transformer_xl.config import INT32_MAX, Settings

_PAPER_TOP_K = 40  # of the samples in the paper's appendix

# settings that beam search refuses: it neither samples nor looks for stop strings
_NOT_WITH_BEAMS = (
    *("num_samples", "seed", "greedy", "temperature", "top_k", "top_p", "min_p"),
    *("repetition_penalty", "repetition_penalty_window", "stop", "prompt_lookup_num_tokens"),
)


class GenerationConfig(Settings):
    """Settings of text generation: length, sampling, beam search and outputs.

    Logits are processed in this order: repetition penalty, logits processor, temperature, top-k, top-p, min-p.
    """

    max_new_tokens: int | None = Field(default=500, ge=1)
    """Maximum number of new tokens; none: no limit, which only a single streamed text can have. Then its token ids
    and log-probabilities are not kept."""
    min_new_tokens: int = Field(default=0, ge=0)
    """Minimum number of new tokens: before it, EOS tokens are not generated and stop strings are ignored."""
    stop: tuple[str, ...] = ()
    """String that ends the generated text, even where it spans several tokens, and is not part of the text; the flag
    may be repeated."""
    stop_at_newline: bool = False
    """Treat every token that ends a line as an EOS token; with the integer tokenizer, this is the token that
    ends each sequence of integers."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids of the tokens that end a sequence. Their text is not part of the result, with one exception: of a BPE token
    that ends with a newline, such as a semicolon and a newline, only the newline is omitted."""

    greedy: bool = False
    """Always take the most likely token."""
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Logits are divided by it: below 1 is more predictable, above 1 more varied, 0 is greedy."""
    top_k: int | Literal["auto"] | None = "auto"
    """Sample from the k most likely tokens; auto: 40, as for the paper's samples, unless top_p or min_p is given."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the smallest set of most likely tokens whose total probability is at least top_p (nucleus
    sampling)."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from the tokens with at least min_p times the probability of the most likely token."""
    repetition_penalty: float = Field(default=1.0, ge=1e-3, le=1e3, allow_inf_nan=False)
    """Above 1, tokens that already occur become less likely (CTRL, Keskar et al. 2019, section 4.1)."""
    repetition_penalty_window: int = Field(default=1024, ge=1, le=INT32_MAX)
    """Number of latest tokens, of the prompt and the generated text, to which the repetition penalty applies."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the sampling. Sequence i of a batch has its own random generator with seed + i, so it equals the sequence
    that its prompt alone gives with that seed."""
    num_samples: int = Field(default=1, ge=1)
    """Number of sequences to sample for each prompt; the prompt is prefilled once for all of them."""

    prompt_lookup_num_tokens: int | None = Field(default=None, ge=1, le=256)
    """Speculative decoding of one text: at most so many tokens are drafted, those that followed the latest ones where
    they occurred before in prompt and generated text, and checked in one segment; fewer or none where that is not
    faster. The text is the same but for rounding. None: no drafts."""

    num_beams: int | None = Field(default=None, ge=1)
    """Number of beams of a beam search, and of sequences that it returns; none: sample instead."""
    length_penalty: float = Field(default=1.0, ge=-10, le=10, allow_inf_nan=False)
    """Beams are ranked by logprob / num_tokens ** length_penalty. logprob is the total log-probability of the generated
    tokens, and num_tokens their number, both with the EOS token and without the prompt. Above 0 favors long sequences;
    0 ranks by logprob."""

    add_bos_token: bool = True
    """Read the token that begins a text (with bytes, a newline) before the prompt; false: only the prompt, as
    generate() of transformers does with TransfoXL."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Prefill only the last max_prompt_tokens tokens of the prompt (512 for the paper's samples); none: all."""
    memory_length: int | None = Field(default=None, ge=0, le=INT32_MAX)
    """Memory length in tokens; none: the memory length with which the run is evaluated. If the length is 0, a query
    attends to the last train.segment_length tokens, itself included."""
    logprobs: bool = False
    """Compute the log-probability of each token under the model, before any processing of the logits."""
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"
    """Data type of matrix products; auto: bfloat16 (faster, less exact) where the hardware supports it, else
    float32."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_string(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if "" in self.stop:
            raise ValueError("a stop string is empty; give some text, or leave it out")
        if isinstance(self.top_k, int) and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k}: must be 1 or more, or none to sample from the whole vocabulary")
        limit = self.max_new_tokens
        if limit is not None and self.min_new_tokens > limit:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {limit}; lower it")
        if self.num_beams is None:
            if self.length_penalty != 1.0:
                raise ValueError("length_penalty is for beam search; give num_beams too, or leave it out")
            return self
        fields = type(self).model_fields
        if conflicts := [name for name in _NOT_WITH_BEAMS if getattr(self, name) != fields[name].default]:
            raise ValueError(
                f"beam search neither samples nor looks for stop strings; leave out {conflicts[0]} or num_beams"
            )
        if limit is None:
            raise ValueError("beam search needs a maximum length; give a number as max_new_tokens")
        return self

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.greedy or self.temperature == 0

    @property
    def effective_top_k(self) -> int | None:
        """The k of top-k sampling, or None for no limit."""
        if self.top_k != "auto":
            return self.top_k
        return _PAPER_TOP_K if self.top_p is None and self.min_p is None else None

    @property
    def num_candidates(self) -> int | None:
        """Number of most likely tokens that are enough to sample from, or None for the whole vocabulary."""
        return 1 if self.is_greedy else self.effective_top_k
