"""`txl generate`: generate text with a run, shown as it is generated; several texts at once; or a conversation."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from transformer_xl.cli.flags import GenerationFlags, check_flags
from transformer_xl.cli.options import DEFAULT_DEVICE, DeviceFlags, Int8, Json
from transformer_xl.cli.output import load_and_say, print_json, say_memory_length, say_unknown
from transformer_xl.config import UserError
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.progress import note, say

if TYPE_CHECKING:
    from transformer_xl.run import Run


def generate(
    run: Path,
    /,
    *,
    prompt: Annotated[tuple[str, ...] | None, Parameter(negative=())] = None,
    prompt_file: Path | None = None,
    chat: Annotated[bool, Parameter(negative=())] = False,
    out: Path | None = None,
    settings: Annotated[GenerationFlags | None, Parameter(name="*", negative=())] = None,
    checkpoint: Literal["best", "last"] = "best",
    int8: Int8 = False,
    device_options: DeviceFlags = DEFAULT_DEVICE,
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
        File that contains the prompt; of a run on MIDI files, a MIDI file.
    chat
        Reply to each line of standard input, with memory of all lines before; a reply ends at a newline or at --stop.
    out
        New MIDI file for the generated piece, with its prompt; for a run on MIDI files.
    checkpoint
        best: the weights with the lowest validation loss; last: those of the last checkpoint.
    """
    config = check_flags(GenerationConfig, settings)
    prompts: list[str | bytes | None] = list(prompt or [None])
    is_list = len(prompts) > 1 or config.num_samples > 1 or config.num_beams is not None
    if prompt and prompt_file:
        raise UserError("--prompt and --prompt-file were both given; use one of them")
    if chat and (prompt or prompt_file or json or is_list):
        raise UserError("--chat reads prompts from standard input and prints one reply; leave the other options out")
    if config.max_new_tokens is None and (json or is_list or out is not None):
        raise UserError(
            "--max-new-tokens none never ends; give a number, or generate a single text without --json and --out"
        )
    if config.logprobs and not json:
        raise UserError("--logprobs are printed with --json; give that too")
    if out is not None:
        if chat or is_list or prompt or config.logprobs:
            raise UserError(
                "--out writes one piece of music; leave --prompt, --num-samples, --num-beams, --logprobs and --chat "
                "out (a piece to continue is given by --prompt-file)"
            )
        from transformer_xl.apps.music.midi import check_midi_path

        check_midi_path(out)
    if chat:
        from transformer_xl.text.sources.archives import standard_input

        standard_input("leave --chat out")
    if prompt_file is not None and out is None:
        from transformer_xl.text.sources.archives import read_text_file
        from transformer_xl.text.sources.file_codec import MIDI_SUFFIXES

        if prompt_file.suffix.lower() in MIDI_SUFFIXES:
            raise UserError(f"{prompt_file} is a MIDI file; give --out NEW.mid too, for the piece that continues it")
        prompts = [read_text_file(prompt_file)]

    from transformer_xl.generation.generate import memory_plan

    loaded = load_and_say(run, device_options.choose(), checkpoint, int8=int8)
    if out is not None:
        _write_midi(run, loaded, prompt_file, config, out, json=json)
        return
    say_memory_length(loaded, memory_plan(loaded, config.memory_length))
    say_unknown(loaded.tokenizer, [text for text in prompts if text is not None])
    if chat:
        _chat(loaded, config)
    elif json or is_list:
        _print_completions(run, loaded, prompts, config, json=json, is_list=is_list)
    else:
        from transformer_xl.generation.generate import stream

        _print_stream(stream(loaded, prompts[0], config))


def _write_midi(
    path: Path, run: Run, prompt_file: Path | None, config: GenerationConfig, out: Path, *, json: bool
) -> None:
    """Generate a piece of music, and print what the file has."""
    from transformer_xl.apps.music.music import generate_midi

    piece = generate_midi(run, out, prompt_file, config)
    num_tokens = len(piece.completion.token_ids)
    if not json:
        print(f"{piece.path}: {piece.num_notes:,} notes; {num_tokens:,} new tokens")
        return
    facts = {"out": str(piece.path), "num_notes": piece.num_notes, **piece.completion.details()}
    print_json({"run": str(path), **run.weights_values, **facts})


def _print_completions(
    path: Path, run: Run, prompts: list[str | bytes | None], config: GenerationConfig, *, json: bool, is_list: bool
) -> None:
    """Generate all texts and print them once they are finished; as JSON, a single text is not put in a list."""
    from transformer_xl.generation.beam_search import beam_search
    from transformer_xl.generation.generate import generate

    start = time.perf_counter()
    if config.num_beams is None:
        completions = generate(run, prompts, config)
    else:
        completions = [completion for prompt in prompts for completion in beam_search(run, prompt, config)]
    seconds = time.perf_counter() - start
    if json:
        texts = [completion.as_dict(tokens=config.logprobs) for completion in completions]
        tokens_per_second = sum(len(completion.token_ids) for completion in completions) / seconds
        speed = {"seconds": seconds, "tokens_per_second": tokens_per_second}
        found = {"texts": texts} if is_list else texts[0]
        print_json({"run": str(path), **run.weights_values, **found, **speed})
        return
    for number, completion in enumerate(completions, start=1):
        logprob = "" if completion.logprob is None else f", logprob {completion.logprob:.3f}"
        print(f"--- {number} of {len(completions)}{logprob}\n{completion.text}")


def _print_stream(pieces: Iterator[str]) -> None:
    """Print a text as it is generated, and a newline after it, also if Ctrl-C or an error ends the text."""
    pieces = chain([next(pieces, "")], pieces)  # an error before the first piece prints nothing
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        print(flush=True)


def _chat(run: Run, config: GenerationConfig) -> None:
    """Reply to each line of standard input that is not blank.

    Standard output has only the replies; who speaks is said on standard error.
    """
    from transformer_xl.generation.chat import Chat

    conversation = Chat(run, config)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are not UTF-8 are passed to the tokenizer
    for line in iter(_read_line, ""):
        if not line.strip():
            continue
        if not sys.stdin.isatty():  # a terminal shows what was typed
            say(f"you: {line.rstrip()}")
        try:
            reply = conversation.reply(line.removesuffix("\n").removesuffix("\r"))
        except UserError as error:
            if not sys.stdin.isatty():
                raise
            note(f"line ignored: {error}")
            continue
        print("model: ", end="", file=sys.stderr, flush=True)
        _print_stream(reply)


def _read_line() -> str:
    """Return the next line of standard input, after a prompt if it is a terminal; empty at the end of the input."""
    if sys.stdin.isatty():
        print("you: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline()
