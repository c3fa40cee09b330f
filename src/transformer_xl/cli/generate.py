"""`txl generate`: write text with a run, shown as it is made; many texts at once; or answer line by line."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from transformer_xl.cli.options import ANY_MACHINE, Json, MachineOptions
from transformer_xl.cli.output import print_json, say_unknown
from transformer_xl.config import UserError
from transformer_xl.files import as_user_error
from transformer_xl.progress import say

if TYPE_CHECKING:
    from transformer_xl.device import Precision
    from transformer_xl.generation.decoding import Completion, Options
    from transformer_xl.generation.sampling import Sampler
    from transformer_xl.run_folder import CheckpointName, Run
    from transformer_xl.text.tokenizer import Tokenizer

_LINE_END = "\n"


@dataclass(frozen=True)
class Beginning:
    """What a text goes on from."""

    prompt: Annotated[tuple[str, ...] | None, Parameter(negative=())] = None
    """Text to go on from; may be given several times, for texts side by side. [default: begin a new text]"""
    prompt_file: Path | None = None
    """File that holds the prompt."""
    chat: Annotated[bool, Parameter(negative=())] = False
    """Go on after each line of standard input, with memory of all before; answers end with their line, or at --stop."""
    memory: int | None = None
    """Memory slots, in tokens; 0: what fills a segment of training. [default: the run's evaluation memory]"""
    context: int | None = None
    """Read only so many tokens, from the end of the prompt (the paper's samples: 512). [default: all]"""

    def prompts(self) -> list[str | bytes | None]:
        """The texts.

        Raises:
            UserError: they come from several places, or from a file that cannot be read.
        """
        if self.prompt is not None and self.prompt_file is not None:
            raise UserError("--prompt and --prompt-file were both given; use one of them")
        if self.prompt_file is None:
            return list(self.prompt or [None])
        with as_user_error(f"reading {self.prompt_file}"):
            return [self.prompt_file.read_bytes()]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    greedy: Annotated[bool, Parameter(negative=())] = False
    """Always take the likeliest token."""
    temperature: float = 1.0
    """Below 1 surer, above 1 wilder; 0 is greedy."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only; 40, as in the paper, unless this, top-p or min-p is given."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together reach this probability."""
    min_p: float | None = None
    """Draw from the tokens that have at least this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that stood there before become less likely."""
    repetition_window: int = 1024
    """So many last tokens count as having stood there before."""
    seed: int = 0
    """Of the random choices: the same seed gives the same text; text r of several has that of seed + r."""

    def sampler(self) -> Sampler:
        """As the generation wants it.

        Raises:
            UserError: a number out of range.
        """
        from transformer_xl.generation.sampling import Sampler

        limited = not (self.top_k is None and self.top_p is None and self.min_p is None)
        return Sampler(
            0.0 if self.greedy else self.temperature,
            self.top_k if limited else 40,
            self.top_p,
            self.min_p,
            self.repetition_penalty,
            self.repetition_window,
        )


@dataclass(frozen=True)
class Ending:
    """Where a text ends."""

    tokens: int | Literal["none"] = 500
    """Most tokens to make; none: go on until stopped."""
    min_tokens: int = 0
    """Before so many no text ends."""
    stop: Annotated[tuple[str, ...] | None, Parameter(negative=())] = None
    """End before this text; may be given several times."""
    until_line_end: Annotated[bool, Parameter(negative=())] = False
    """End with the token that ends a line (or a sequence of numbers)."""

    def options(self, tokenizer: Tokenizer) -> Options:
        """As the generation wants them.

        Raises:
            UserError: this vocabulary has no token that ends lines.
        """
        end_ids = tokenizer.is_newline_V.nonzero()[0].tolist() if self.until_line_end else []
        if self.until_line_end and not end_ids:
            raise UserError("this vocabulary has no token that ends a line; leave out --until-line-end, or use --stop")
        tokens = None if self.tokens == "none" else self.tokens
        return {"tokens": tokens, "min_tokens": self.min_tokens, "stop": self.stop or (), "end_ids": end_ids}


@dataclass(frozen=True)
class Several:
    """More than one text."""

    samples: int | None = None
    """Texts to write after each prompt."""
    beams: int | None = None
    """Find the likeliest text by beam search, with so many kept side by side, in place of drawing."""
    length_penalty: float = 1.0
    """Beams are ranked by log-probability / length ** length-penalty: above 0 favours long texts."""


@dataclass(frozen=True)
class _Form:
    """How texts are shown."""

    json: bool
    """As one JSON object."""
    in_detail: bool
    """With each token."""
    alone: bool
    """There can be only one."""


_A_NEW_TEXT, _THE_PAPERS, _A_PAGE, _ONE = Beginning(), Sampling(), Ending(), Several()


def generate(
    run: Path,
    /,
    *,
    beginning: Annotated[Beginning, Parameter(name="*")] = _A_NEW_TEXT,
    sampling: Annotated[Sampling, Parameter(name="*")] = _THE_PAPERS,
    ending: Annotated[Ending, Parameter(name="*")] = _A_PAGE,
    several: Annotated[Several, Parameter(name="*")] = _ONE,
    logprobs: Annotated[bool, Parameter(negative=())] = False,
    weights: Literal["best", "last"] = "best",
    precision: Literal["auto", "float32", "bfloat16"] = "float32",
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> None:
    """Write text with a trained model; it appears as it is made.

    Parameters
    ----------
    run
        Folder of a run.
    beginning
        What a text goes on from.
    sampling
        How the next token is chosen.
    ending
        Where a text ends.
    several
        More than one text.
    log_probabilities
        With --json: the log-probability of each token.
    weights
        The best weights on the validation text, or the last ones.
    precision
        Number format of matrix products; bfloat16 is faster where the machine has it, and less exact.
    """
    prompts = beginning.prompts()
    form = _Form(json, logprobs, alone=len(prompts) == 1 and several == _ONE)
    _check_words(several, sampling, ending, form)
    if beginning.chat and (prompts != [None] or json or several != _ONE):
        raise UserError("--chat reads prompts from standard input and shows one answer; leave the other options out")

    sampler = sampling.sampler()
    loaded = _load(run, weights, machine, precision)
    say_unknown(loaded.tokenizer, [_bytes(prompt) for prompt in prompts if prompt is not None])
    options = ending.options(loaded.tokenizer)
    options.update(memory=beginning.memory, context=beginning.context, precision=precision)
    options.update(logprobs=logprobs)
    if several.beams is None:
        options.update(sampler=sampler, seed=sampling.seed)
    if beginning.chat:
        _chat(loaded, options)
    elif form.alone and not json:
        _stream(loaded, prompts[0], options)
    else:
        began = time.perf_counter()
        texts = list(_texts(loaded, prompts, several, options))
        _show({"run": str(run)}, texts, time.perf_counter() - began, form)


def _load(run: Path, weights: CheckpointName, machine: MachineOptions, precision: Precision) -> Run:
    """The run, its weights rounded once where products are to be quicker."""
    import torch

    from transformer_xl.device import resolve_dtype
    from transformer_xl.model.precision import with_matrices_in
    from transformer_xl.run_folder import load

    loaded = load(run, device=str(machine.choose()), checkpoint=weights)
    if resolve_dtype(next(loaded.model.parameters()).device, precision) == "float32":
        return loaded
    return replace(loaded, model=with_matrices_in(loaded.model, torch.bfloat16))


def _check_words(several: Several, sampling: Sampling, ending: Ending, form: _Form) -> None:
    """Refuses words that do not go together."""
    if several.beams is not None and several.samples is not None:
        raise UserError("--beams and --samples were both given; use one of them")
    if several.beams is not None and (sampling != _THE_PAPERS or ending.stop):
        raise UserError(
            "--beams finds the likeliest text: leave out what says how to draw (--seed, --top-k) and --stop"
        )
    if several.beams is None and several.length_penalty != 1.0:
        raise UserError("--length-penalty ranks beams; give --beams, or leave it out")
    if ending.tokens == "none" and (form.json or not form.alone):
        raise UserError("--tokens none never ends; give a number, or write one text alone and without --json")
    if form.in_detail and not form.json:
        raise UserError("--log-probabilities are shown with --json; give that too")


@dataclass(frozen=True)
class _Shown:
    """A text that was written, and what it went on from."""

    prompt: str | bytes | None
    seed: int | None
    completion: Completion

    def as_dict(self, *, in_detail: bool) -> dict[str, Any]:
        found = self.completion
        values: dict[str, Any] = {
            "prompt": None if self.prompt is None else _bytes(self.prompt).decode("utf-8", "replace"),
            "text": found.text,
            "tokens": len(found.tokens),
            "ended": found.ended,
        }
        if self.seed is not None:
            values["seed"] = self.seed
        if found.logprobs:
            values["logprob"] = found.logprob
        if in_detail:
            values |= {"token_ids": found.tokens, "logprobs": found.logprobs}
        return values


def _bytes(text: str | bytes) -> bytes:
    """As it was typed, even where that is not UTF-8."""
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def _texts(run: Run, prompts: list[str | bytes | None], several: Several, options: Options) -> Iterator[_Shown]:
    from transformer_xl.generation.decoding import complete, search

    if several.beams is not None:
        for prompt in prompts:
            penalty = several.length_penalty
            for found in search(run, prompt, beams=several.beams, length_penalty=penalty, **options):
                yield _Shown(prompt, None, found)
        return
    samples = 1 if several.samples is None else several.samples
    seed = options.get("seed", 0)
    for place, found in enumerate(complete(run, prompts, samples=samples, **options)):
        yield _Shown(prompts[place // samples], seed + place, found)


def _show(named: dict[str, Any], texts: list[_Shown], seconds: float, form: _Form) -> None:
    tokens = sum(len(text.completion.tokens) for text in texts)
    if form.json:
        speed = {"seconds": seconds, "tokens_per_second": tokens / seconds}
        each = [text.as_dict(in_detail=form.in_detail) for text in texts]
        print_json({**named, **(each[0] if form.alone else {"texts": each}), **speed})
        return
    for place, text in enumerate(texts):
        score = text.completion.logprob
        said = "" if score is None else f", log-probability {score:.3f}"
        sys.stdout.write(f"--- {place + 1} of {len(texts)}{said}\n{text.completion.text}\n")


def _stream(run: Run, prompt: str | bytes | None, options: Options) -> None:
    from transformer_xl.generation.decoding import generate as write

    _write_out(write(run, prompt, **options))


def _write_out(pieces: Iterable[str]) -> None:
    """Shows a text as it comes, and ends its line, also where Ctrl-C ends the text."""
    shown = False
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
            shown = True
    except BaseException:
        if shown:
            sys.stdout.write("\n")
        raise
    sys.stdout.write("\n")
    sys.stdout.flush()


def _chat(run: Run, options: Options) -> None:
    """Reads a line, goes on after it, and so forth until the input ends; what was read and made stays in memory."""
    from transformer_xl.generation.decoding import generate as write

    stops = tuple(options.get("stop", ())) or (_LINE_END,)
    if not options.get("end_ids"):
        options = {**options, "stop": stops}
    missing = ""
    for line in _lines():
        try:
            run.tokenizer.encode(line)  # by itself, so that what is said of it counts from its start
            writing = write(run, missing + line + _LINE_END, **options)
        except UserError as error:
            if not sys.stdin.isatty():
                raise
            say(f"not read: {error}")
            continue
        _write_out(writing)
        # an answer that was cut off gets the end it did not come to, so that the next line stands by itself
        missing = stops[0] if writing.ended == "tokens" else ""
        options = {**options, "memory": writing.memory(), "seed": options.get("seed", 0) + 1}


def _lines() -> Iterator[str]:
    """The lines of standard input that hold something, without their ends."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are not UTF-8 are read as they are
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.removesuffix("\n").removesuffix("\r")
