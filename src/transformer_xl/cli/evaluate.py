"""`txl evaluate`: score a text with a run, at any segment, memory, window and clamp, in any of three ways."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import ANY_MACHINE, Json, MachineOptions, whole_numbers
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import RunConfig, UserError
from transformer_xl.progress import ProgressBar, say

if TYPE_CHECKING:
    import torch

    from transformer_xl.evaluation.plan import Documents, EvaluationPlan, Method
    from transformer_xl.run_folder import Run
    from transformer_xl.text.token_store import Corpus, TokenSplit
    from transformer_xl.text.tokenizer import Tokenizer

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class Lengths:
    """How far attention looks; what is not given is as the run has it."""

    segment: int | None = None
    """New tokens read in one step. It sets the speed and, without a window, how much the later ones of them see."""
    memory: int | None = None
    """Memory slots, in tokens; may be far more than in training."""
    window: int | Literal["none"] | None = None
    """Keys a query sees, itself included; none: all. With memory window - 1 or more, the segment changes no result."""
    clamp: int | Literal["none"] | None = None
    """Distances above this count as this one; none: no limit."""


@dataclass(frozen=True)
class Sweep:
    """Several lengths, with commas between: a line of results for each."""

    sweep_memory: str | None = None
    """Memory lengths, such as 0,64,512."""
    sweep_window: str | None = None
    """Windows, such as 64,128,512, each with just the memory that fills it."""

    def each(self, lengths: Lengths, method: str) -> list[Lengths]:
        """The lengths of each evaluation wanted.

        Raises:
            UserError: what was typed are no lengths, or one was given twice.
        """
        memories, windows = self.sweep_memory, self.sweep_window
        for name, sweep, value in (("memory", memories, lengths.memory), ("window", windows, lengths.window)):
            if sweep is not None and value is not None:
                raise UserError(f"--{name} and --sweep-{name} were both given; use one of them")
        if memories is not None and windows is not None:
            raise UserError("--sweep-memory and --sweep-window were both given; use one of them")
        if memories is not None:
            return [replace(lengths, memory=memory) for memory in whole_numbers("--sweep-memory", memories, least=0)]
        if windows is None:
            return [lengths]
        # a token sees itself and memory: so much of it fills the window wherever in its segment the token stands
        kept = lengths.memory is not None or method == "sliding-window"
        return [
            replace(lengths, window=window, memory=lengths.memory if kept else window - 1)
            for window in whole_numbers("--sweep-window", windows)
        ]


@dataclass(frozen=True)
class Chosen:
    """Which text is scored."""

    corpus: Path | None = None
    """Corpus with the run's vocabulary. [default: the one it was trained on]"""
    split: str = "test"
    """train, valid or test."""
    tokens: int | None = None
    """Score only so many tokens, from the start of the split."""


@dataclass(frozen=True)
class Rows:
    """How the text is shared out; changes the time and, with the warm-up it takes by itself, no result."""

    rows: int | None = None
    """Stretches of the text read side by side. [default: one; with documents reset, a machine's fill of documents]"""
    documents: Literal["continue", "reset"] | None = None
    """continue: memory goes on from one document to the next. reset: each is read as if it were the only text.
    [default: continue; of txl score, whose documents are files, reset]"""
    warmup: int | None = None
    """Tokens each reads before its own, not counted; fewer: quicker, less exact. [default: as far as losses look]"""


@dataclass(frozen=True)
class DynamicFlags:
    """How the weights follow the text with method dynamic."""

    form: Literal["rms", "sgd"] | None = None
    """Steps divided by the size gradients have on the training text, or plain ones. [default: rms]"""
    rate: float | None = None
    """Size of a step. [default: 1e-6 for rms, 0.01 for sgd]"""
    decay: float | None = None
    """Share of the way back to the trained weights that each step goes. [default: 0]"""
    epsilon: float | None = None
    """Added to the size of the gradients. [default: 8.5e-6]"""
    statistics_tokens: int | None = None
    """Tokens of the training text that tell the size of the gradients. [default: 17920]"""

    def given(self) -> dict[str, Any]:
        """What was typed."""
        return {name: value for name, value in asdict(self).items() if value is not None}


_WHOLE_TEST, _THE_RUNS, _NO_SWEEP, _ONE_ROW, _PUBLISHED = Chosen(), Lengths(), Sweep(), Rows(), DynamicFlags()


def evaluate(
    run: Path,
    /,
    *,
    chosen: Annotated[Chosen, Parameter(name="*")] = _WHOLE_TEST,
    lengths: Annotated[Lengths, Parameter(name="*")] = _THE_RUNS,
    sweep: Annotated[Sweep, Parameter(name="*")] = _NO_SWEEP,
    shares: Annotated[Rows, Parameter(name="*")] = _ONE_ROW,
    method: Literal["memory", "sliding-window", "dynamic"] = "memory",
    dynamic: DynamicFlags = _PUBLISHED,
    per_token: Path | None = None,
    weights: Literal["best", "last"] = "best",
    precision: Precision = "float32",
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> None:
    """Score a text: perplexity and bits per byte, every token once.

    Parameters
    ----------
    run
        Folder of a run.
    chosen
        Which text is scored.
    lengths
        How far attention looks.
    sweep
        Several lengths.
    shares
        How the text is shared out.
    method
        memory: read on, as the paper does. sliding-window: each token from exactly the window of tokens before it, all
        computed anew, as its vanilla model does. dynamic: take a gradient step after each segment.
    per_token
        File to write the loss of every token to, in nats and text order: a numpy array (.npy) of float32.
    weights
        The best weights on the validation text, or the last ones.
    precision
        Number format of matrix products; bfloat16 is faster where the machine has it, and less exact.
    """
    swept = sweep.each(lengths, method)
    _check_words(method, lengths, chosen)
    _check_alone(per_token, swept)
    from transformer_xl.run_folder import Run, RunFolder

    device = machine.choose()
    folder = RunFolder.open(run)
    opened = folder.open_corpus(chosen.corpus)
    text = opened.split(chosen.split)
    how = {"method": method_of(method, dynamic, opened), "precision": precision}
    plans = [replace(plan_of(folder.config, each, shares), **how) for each in swept]
    opened.verify(chosen.split)
    loaded = Run(folder.load_model(device, weights), folder.tokenizer, folder.config)
    say_remarks(plans, device)
    results = [_scored(loaded, text, plan, chosen.tokens, per_token) for plan in plans]
    head = {"run": str(run), "split": chosen.split}
    _show(head, results, folder.tokenizer, json, swept=sweep != _NO_SWEEP)


def _check_words(method: str, lengths: Lengths, chosen: Chosen) -> None:
    """Refuses words that cannot be meant, before anything is opened."""
    if chosen.tokens is not None and chosen.tokens < 1:
        raise UserError(f"--tokens {chosen.tokens}: wanted 1 or more")
    if method == "sliding-window" and lengths.segment is not None:
        raise UserError("--segment was given; a moving window reads whole windows, of --window tokens")


def _check_alone(per_token: Path | None, swept: list[Lengths]) -> None:
    if per_token is not None and len(swept) > 1:
        raise UserError("--per-token and a sweep were both given; a file holds the losses of one evaluation")


def plan_of(config: RunConfig, lengths: Lengths, shares: Rows, documents: Documents = "continue") -> EvaluationPlan:
    """The run's lengths, with those that were typed in their place; `documents` unless that was typed."""
    from transformer_xl.evaluation.plan import EvaluationPlan

    plan = replace(EvaluationPlan.of(config, **asdict(lengths)), rows=shares.rows, warmup=shares.warmup)
    return replace(plan, documents=shares.documents or documents)


def method_of(name: str, flags: DynamicFlags, corpus: Corpus | None) -> Method | None:
    """The way to score of that name; none: with memory.

    Raises:
        UserError: settings of another method, or ones out of range.
    """
    typed = flags.given()
    if typed and name != "dynamic":
        raise UserError(f"--dynamic.{next(iter(typed)).replace('_', '-')} was given; it goes with --method dynamic")
    unused = {"epsilon", "statistics_tokens"} & typed.keys()
    if flags.form == "sgd" and unused:
        raise UserError(f"--dynamic.{min(unused).replace('_', '-')} is for the form rms; leave it out with sgd")
    if name == "sliding-window":
        from transformer_xl.evaluation.sliding_window import SlidingWindow

        return SlidingWindow()
    if name == "dynamic":
        from transformer_xl.evaluation.dynamic import DynamicEvaluation

        if corpus is None or flags.form == "sgd":
            return DynamicEvaluation(**typed)
        corpus.verify("train")
        return DynamicEvaluation(**typed, training_K=corpus.split("train").tokens)
    return None


def say_remarks(plans: list[EvaluationPlan], device: torch.device) -> None:
    """Says to standard error what is not wrong, but may not be meant."""
    from transformer_xl.device import has_bfloat16

    if plans[0].precision == "bfloat16" and not has_bfloat16(device):
        say("remark: this machine has no bfloat16 instructions and imitates them; float32 is quicker and exact")
    for plan in plans:
        window, memory = plan.context_limits.attention_window, plan.context_limits.memory_length
        if plan.method is None and window is not None and not plan.window_is_full:
            say(
                f"remark: memory {memory:,} is too short for a window of {window:,}, so tokens see {memory + 1:,} keys "
                f"or more, as their place in the segment has it; --memory {window - 1} gives each the whole window"
            )


def _scored(
    run: Run, split: TokenSplit, plan: EvaluationPlan, limit: int | None, per_token: Path | None
) -> dict[str, Any]:
    from transformer_xl.evaluation.evaluate import evaluate as score

    total = min(split.num_tokens, limit or split.num_tokens)
    lengths = f"memory {plan.context_limits.memory_length:,}" + (
        f", window {plan.context_limits.attention_window:,}" if plan.context_limits.attention_window else ""
    )
    with ProgressBar(lengths, total, "tokens") as bar:
        result = score(run, split, plan, limit=limit, progress=bar.advance, per_token=per_token)
    return result.as_dict()


def _show(
    head: dict[str, Any], results: list[dict[str, Any]], tokenizer: Tokenizer, json: bool, *, swept: bool
) -> None:
    if json:
        from transformer_xl.device import peak_memory_bytes

        head = {**head, "peak_memory_bytes": peak_memory_bytes()}
        print_json({**head, "sweep": results} if swept else {**head, **results[0]})
        return
    first, words = results[0], tokenizer.kind == "words"
    shown = {"bits_per_byte": "bits/byte", "bits_per_character": "bits/char", "perplexity": "perplexity"}
    digits = dict.fromkeys(shown, 4) | {"perplexity": 3, "word_perplexity": 3}
    if words:
        shown["word_perplexity"] = "per word"
    if first["characters"] in (None, first["bytes"]):
        del shown["bits_per_character"]
    rows = [
        [
            f"{result['memory']:,}",
            f"{result['segment']:,}",
            *("all" if result[name] is None else f"{result[name]:,}" for name in ("window", "clamp")),
            *("" if result[name] is None else f"{result[name]:.{digits[name]}f}" for name in shown),
            f"{result['nats_per_token']:.4f}",
            f"{result['tokens_per_second']:,.0f}",
        ]
        for result in results
    ]
    columns = ["memory", "segment", "window", "clamp", *shown.values(), "nats/token", "tokens/s"]
    counted = "words and line ends" if words and tokenizer.adds_final_newline else "tokens"
    tokens, unknown = first["tokens"], first["unknown"]
    of_them = f" ({unknown:,} of them unknown words, {unknown / tokens:.1%})" if unknown else ""
    way = "" if first["method"] == "memory" else f", method {first['method']}"
    alone = "" if first["documents"] == "continue" else ", each document by itself"
    title = f"{head['run']}, {head['split']}: {tokens:,} {counted}{of_them}, {first['bytes']:,} bytes{way}{alone}"
    print_table(title, columns, rows)
