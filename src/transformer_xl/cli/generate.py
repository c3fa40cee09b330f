"""`txl generate`: generate text with a run, shown as it is generated; several texts at once; or a conversation."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from transformer_xl.cli.flags import GenerationFlags, given
from transformer_xl.cli.options import ANY_MACHINE, Json, MachineOptions
from transformer_xl.cli.output import print_json, say_unknown
from transformer_xl.config import UserError, check_settings
from transformer_xl.files import as_user_error
from transformer_xl.generation.config import GenerationConfig
from transformer_xl.progress import say

if TYPE_CHECKING:
    from transformer_xl.generation.completion import Prompt
    from transformer_xl.run_folder import Run


def generate(
    run: Path,
    /,
    *,
    prompt: Annotated[tuple[str, ...] | None, Parameter(negative=())] = None,
    prompt_file: Path | None = None,
    chat: Annotated[bool, Parameter(negative=())] = False,
    settings: Annotated[GenerationFlags | None, Parameter(name="*", negative=())] = None,
    checkpoint: Literal["best", "last"] = "best",
    machine: MachineOptions = ANY_MACHINE,
    json: Json = False,
) -> None:
    """Generate text with a trained model; it appears as it is generated.

    Parameters
    ----------
    run
        Folder of a run.
    prompt
        Text to continue; may be given several times, for several texts. [default: begin a new text]
    prompt_file
        File that holds the prompt.
    chat
        Reply to each line of standard input, with memory of all before; a reply ends with its line, or at --stop.
    checkpoint
        The weights with the best validation loss, or the last ones.
    """
    config = check_settings(GenerationConfig, given(generation=settings).get("generation", {}), "txl generate")
    prompts: list[Prompt] = list(prompt or [None])
    several = len(prompts) > 1 or config.num_samples > 1 or config.num_beams is not None
    if prompt and prompt_file:
        raise UserError("--prompt and --prompt-file were both given; use one of them")
    if chat and (prompt or prompt_file or json or several):
        raise UserError("--chat reads prompts from standard input and shows one reply; leave the other options out")
    if config.max_new_tokens is None and (json or several):
        raise UserError("--max-new-tokens none never ends; give a number, or generate a single text without --json")
    if config.logprobs and not json:
        raise UserError("--logprobs are shown with --json; give that too")
    if prompt_file is not None:
        with as_user_error(f"reading {prompt_file}"):
            prompts = [prompt_file.read_bytes()]

    from transformer_xl.run_folder import load

    loaded = load(run, device=str(machine.choose()), checkpoint=checkpoint)
    say_unknown(loaded.tokenizer, [one for one in prompts if one is not None])
    if chat:
        _chat(loaded, config)
    elif json or several:
        _show_finished(run, loaded, prompts, config, json=json, several=several)
    else:
        from transformer_xl.generation.generate import stream

        _show(stream(loaded, prompts[0], config))


def _show_finished(
    path: Path, run: Run, prompts: list[Prompt], config: GenerationConfig, *, json: bool, several: bool
) -> None:
    """Shows texts once all of them are finished."""
    from transformer_xl.generation.beam_search import beam_search
    from transformer_xl.generation.generate import generate

    start = time.perf_counter()
    if config.num_beams is None:
        completions = generate(run, prompts, config)
    else:
        completions = [one for prompt in prompts for one in beam_search(run, prompt, config)]
    seconds = time.perf_counter() - start
    if json:
        texts = [one.as_dict(tokens=config.logprobs) for one in completions]
        speed = {
            "seconds": seconds,
            "tokens_per_second": sum(len(one.token_ids) for one in completions) / seconds,
        }
        print_json({"run": str(path), **({"texts": texts} if several else texts[0]), **speed})
        return
    for number, one in enumerate(completions, start=1):
        logprob = "" if one.logprob is None else f", logprob {one.logprob:.3f}"
        sys.stdout.write(f"--- {number} of {len(completions)}{logprob}\n{one.text}\n")


def _show(pieces: Iterable[str]) -> None:
    """Shows a text as it is generated, and ends its line, also where Ctrl-C ends the text."""
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


def _chat(run: Run, config: GenerationConfig) -> None:
    from transformer_xl.generation.chat import Chat

    conversation = Chat(run, config)
    for line in _lines():
        try:
            reply = conversation.reply(line)
        except UserError as error:
            if not sys.stdin.isatty():
                raise
            say(f"not read: {error}")
            continue
        _show(reply)


def _lines() -> Iterator[str]:
    """The lines of standard input that are not blank, without their newlines."""
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
