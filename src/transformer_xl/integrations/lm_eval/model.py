"""The model `txl` of lm_eval: a run of this package.

With `windows=memory` (the default) each document is read as the exact scorer of this package reads it, with memory from
its first token to its last. With `windows=harness` it is read as lm_eval's model `hf` reads it: in windows of
`max_length` tokens, each with an empty memory. The numbers of the two differ only in what the model sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from typing_extensions import override

from transformer_xl.config import EvaluationConfig, UserError, check_settings, nearest
from transformer_xl.config.extras import missing_extra
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.evaluation.score import score
from transformer_xl.generation.generate import generate
from transformer_xl.integrations.lm_eval.continuations import Continuation, empty_memory, score_continuations
from transformer_xl.run import Run, load

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
except ImportError as error:
    raise missing_extra("lm_eval", "lm-eval") from error
from tqdm import tqdm

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

Windows = Literal["memory", "harness"]
_SETTINGS = ("segment_length", "memory_length", "attention_window", "clamp_length", "dtype")
# settings of a generation by lm_eval's names, which are also ours
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@register_model("txl")
class TxlLM(TemplateLM):
    """A run as a model of lm_eval."""

    def __init__(
        self,
        run: Run | Path | str | None = None,
        *,
        checkpoint: Literal["best", "last"] = "best",
        windows: Windows = "memory",
        max_length: int = 2048,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        """Load the run; the arguments are those of `--model_args`, and lm_eval passes its own flags too.

        Args:
            run: folder of the run, or a loaded run.
            checkpoint: the weights with the lowest validation loss (best), or the last ones.
            windows: memory reads each document with memory throughout; harness reads it in windows of `max_length`
                tokens, as lm_eval's model `hf` does.
            max_length: tokens of a window, and of the longest context; only with `windows=harness`.
            max_gen_toks: maximum number of new tokens where a task does not say it.
            batch_size: number of requests computed at once; auto, None or 1: enough to keep the device busy.
            max_batch_size: the batch size where it is auto.
            device: auto, cuda, mps or cpu.
            settings: settings of the evaluation: segment_length, memory_length, attention_window, clamp_length, dtype.

        Raises:
            UserError: an unknown argument, one that is out of range, or a run that cannot be loaded.
        """
        super().__init__()
        if run is None:
            raise UserError("no run was given; give its folder: --model_args run=DIR")
        settings.pop("trust_remote_code", None)  # which lm_eval adds for its flag of this name
        for name in settings:
            if name not in _SETTINGS:
                known = ("run", "checkpoint", "windows", "max_length", "max_gen_toks", *_SETTINGS)
                raise UserError(
                    f"no model argument {name!r}{nearest(name, known)}; the model arguments are {', '.join(known)}"
                )
        if windows not in get_args(Windows):
            raise UserError(f"no windows {windows!r}; give {' or '.join(get_args(Windows))}")
        self.windows: Windows = windows
        self.max_length = _positive("max_length", max_length)
        self.max_gen_toks = _positive("max_gen_toks", max_gen_toks)
        self.config = check_settings(
            EvaluationConfig, {**settings, "batch_size": _batch_size(batch_size, max_batch_size)}, "model argument"
        )
        # lm_eval passes cuda:0 where no device was given; its model `hf`, too, then takes what there is
        device = "auto" if device in (None, "cuda:0") else device
        self.run = run if isinstance(run, Run) else load(run, device=device, checkpoint=checkpoint)
        self.plan = EvaluationPlan.for_reading(self.run, self.config)
        self.plan.refuse_extended_context("lm_eval")
        self._inference = self.run.inference(self.plan.dtype)

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm_eval adds to the configuration in its results."""
        weights = self.run.weights
        return {
            "model_num_parameters": self.run.model.num_parameters(),
            "windows": self.windows,
            "weights": weights.used.describe() if weights else None,
            "evaluation": self.plan.as_dict(),
        }

    @property
    @override
    def eot_token_id(self) -> int:
        return self.run.tokenizer.bos_token_id

    @override
    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.run.tokenizer.encode(string).tolist()

    @override
    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation after its context, and whether it is the most likely one.

        With `windows=memory` a context begins like a text, after the BOS token, and is never shortened.
        """
        if self.windows == "harness":
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        pairs = []
        for context, continuation in (request.args for request in requests):
            ids = self._encode_pair(context, continuation) if context else ([], self.tok_encode(continuation))
            pairs.append(((context, continuation), [self.prefix_token_id, *ids[0]], ids[1]))
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    @override
    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        continuations = [self._continuation(*request) for request in requests]
        with tqdm(total=len(requests), desc="Running loglikelihood requests", disable=disable_tqdm) as bar:
            scores = score_continuations(self._inference, continuations, self.plan, bar.update)
        answers = [(-score.nats, score.is_greedy) for score in scores]
        for (strings, _, _), answer in zip(requests, answers, strict=True):
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, answer)
        return answers

    def _continuation(self, strings: tuple[str, str] | None, context_ids: list[int], ids: list[int]) -> Continuation:
        """Return a request in tokens.

        Raises:
            UserError: there is no token to score.
        """
        if not ids:
            context, continuation = strings or ("", "")
            raise UserError(
                f"the continuation {continuation!r} of {context[-40:]!r} has no token of its own; a task needs "
                "continuations that begin with a space, or another tokenizer than that of the run"
            )
        if self.windows == "harness":
            context_ids = context_ids[-max(1, self.max_length + 1 - len(ids)) :]
        # whitespace has no token of its own with words
        return Continuation(tuple(context_ids) or (self.prefix_token_id,), tuple(ids))

    @override
    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text."""
        texts = [text for (text,) in (request.args for request in requests)]
        results = self._in_windows(texts) if self.windows == "harness" else self._in_full(texts, disable_tqdm)
        for text, result in zip(texts, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), result)
        return results

    def _in_full(self, texts: list[str], disable_tqdm: bool) -> list[float]:
        """Return the log-probability of each text, read with memory throughout; of an empty one it is 0.

        The end of a last line without a newline, which `score` adds for words, is not of the text.
        """
        named = {f"text {number}": text for number, text in enumerate(texts, start=1) if text}
        if not named:
            return [0.0] * len(texts)
        with tqdm(desc="Running loglikelihood_rolling requests", unit=" tokens", disable=disable_tqdm) as bar:
            scores = iter(score(self.run, named, self.config, progress=bar.update))
        return [-float(next(scores).nats_K[: len(self.tok_encode(text))].sum()) if text else 0.0 for text in texts]

    def _in_windows(self, texts: list[str]) -> list[float]:
        """Return the log-probability of each text, read in windows as lm_eval's model `hf` does."""
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for text in texts:
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            of_text = [(None, *utils.make_disjoint_window(window)) for window in rolling]
            windows += of_text
            counts.append(len(of_text))
        answers = iter(self._loglikelihood_tokens(windows))
        return [sum(next(answers)[0] for _ in range(count)) for count in counts]

    @override
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text generated after each context, up to the first of its `until` strings.

        Request i is sampled with seed i of those with equal settings, so that no result depends on the batch size.
        """
        arguments: list[tuple[Any, ...]] = [request.args for request in requests]  # contexts and settings
        groups: dict[str, list[int]] = {}  # requests with equal settings
        for index, (_, gen_kwargs) in enumerate(arguments):
            groups.setdefault(repr(sorted(gen_kwargs.items())), []).append(index)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="Running generate_until requests", disable=disable_tqdm) as bar:
            for indices in groups.values():
                settings = self._generation_settings(arguments[indices[0]][1])
                size = self.config.batch_size or 16
                for start in range(0, len(indices), size):
                    part = indices[start : start + size]
                    prompts = [self._prompt(arguments[index][0]) for index in part]
                    memory = empty_memory(self._inference, self.plan, len(part))
                    completions = generate(self.run, prompts, seed=start, memory=memory, **settings)
                    for index, completion in zip(part, completions, strict=True):
                        texts[index] = completion.text
                        self.cache_hook.add_partial("generate_until", arguments[index], completion.text)
                    bar.update(len(part))
        return texts

    def _prompt(self, context: str) -> list[int]:
        """Return the tokens to generate from, which begin like those of a text."""
        ids = self.tok_encode(context)
        return ids if self.windows == "harness" and ids else [self.prefix_token_id, *ids]

    def _generation_settings(self, gen_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of our `generate` for those of a request.

        Raises:
            UserError: a setting that our `generate` does not have.
        """
        kwargs: dict[str, Any] = {**normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)}
        max_new_tokens, until = kwargs.pop("max_gen_toks"), kwargs.pop("until", [])
        is_sampled = kwargs.pop("do_sample")
        if unknown := [name for name in kwargs if name not in _SAMPLING]:
            raise UserError(
                f"no generation setting {unknown[0]!r}{nearest(unknown[0], _SAMPLING)}; the settings are until, "
                f"max_gen_toks, do_sample, {', '.join(_SAMPLING)}"
            )
        settings = {**kwargs, "top_k": kwargs.get("top_k") or None} if is_sampled else {"greedy": True}
        if self.windows == "harness":
            settings["max_prompt_tokens"] = max(1, self.max_length - max_new_tokens)
        return {
            **settings,
            "max_new_tokens": max_new_tokens,
            "memory_length": self.config.memory_length,
            "stop": tuple(text for text in until if text),
            "dtype": self.plan.dtype,
        }

    @override
    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        raise UserError("runs have no chat template; leave out --apply_chat_template")

    @property
    @override
    def tokenizer_name(self) -> str:
        raise UserError("runs have no chat template; leave out --apply_chat_template")


def _positive(name: str, value: Any) -> int:
    """Return a whole number above 0.

    Raises:
        UserError: it is not one.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} {value!r}: give a whole number above 0")
    return value


def _batch_size(batch_size: int | str | None, largest: int | None) -> Any:
    """Return a batch size to check, or what bounds it, or None if it is to be chosen here."""
    # 1 is what lm_eval passes where none was given
    if batch_size in (None, 1, "1") or str(batch_size).partition(":")[0] == "auto":
        return largest
    return int(batch_size) if str(batch_size).isdecimal() else batch_size
