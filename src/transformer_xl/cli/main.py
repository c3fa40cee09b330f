"""Entry point of the command line `txl`: lists the commands, runs one, and turns errors into one-line messages."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from transformer_xl import __version__
from transformer_xl.progress import notes_worded

# 'txl --help' shows only the first paragraph, 'txl COMMAND --help' the whole text.
COMMANDS = {
    "demo": "The main workflow on real text, in minutes: prepare, train, evaluate, generate, report.",
    "prepare": "Turn text into a corpus: token ids on disk.",
    "join": "Join what the tasks of a datatrove pipeline wrote to one corpus.",
    "train": "Train a model on a corpus, or resume a run.\n\nSettings: those of the recipe, replaced by flags; "
    "'if not set' is for what neither sets. "
    "Ctrl-C or SIGTERM saves a checkpoint, validates its weights and ends the command with status 130 or 143; a second "
    "one skips the validation. --resume continues from there with the same training as without the stop.",
    "finetune": "Train the weights of a run further, on another corpus or as a classifier, as a new run.",
    "runs": "List runs with their results, or compare some: settings, curves, losses on the same text.",
    "plot": "Draw the curves of runs: loss, learning rate, gradient norm, tokens/s.",
    "evaluate": "Evaluate a run on a text: perplexity and bits per byte, at any memory length.",
    "score": "Compute log-probabilities of texts by token, line or file, and surprisal by word.",
    "reading-times": "Fit reading times by surprisal at several memory lengths, attention windows and n-gram orders.",
    "minimal-pairs": "Compare the probabilities of the sentences of minimal pairs, as in BLiMP: accuracy by group.",
    "embed": "Write a vector for each document, of any length, read with memory.",
    "classify": "Predict the labels of documents with a classifier of 'txl finetune --task classification'.",
    "watch": "Read a text as it is written, and print the lines that surprise a run.",
    "generate": "Generate text with a trained model.",
    "infill": "Fill the blanks of a text, given what is on both sides of them, with an XLNet.",
    "serve": "Serve runs over HTTP: OpenAI's API, and sessions whose memory stays on the server.",
    "analyze": "Analyze a model: what heads attend to, how much distant context helps, how fast evaluation is.",
    "reproduce": "Reproduce the paper's tables at any scale, and compare with the paper's results.",
    "convert": "Convert another program's checkpoint to a run, or a run to the Hugging Face layout.",
    "push": "Publish an exported model in a repository of the Hub.",
    "recipes": "List the recipes that come with the package, or show one as YAML.",
    "info": "Show the hardware, a run or a corpus.",
}

APPS = {
    "serve": "serve.command",
    "demo": "reproduce.demo_command",
    "reproduce": "reproduce.command",
    "analyze": "analyze.commands",
    "watch": "watch.command",
    "reading-times": "surprisal.reading_times_command",
    "minimal-pairs": "surprisal.minimal_pairs_command",
    "embed": "classify.command",
    "classify": "classify.command",
    "runs": "runs.command",
    "plot": "runs.command",
}
"""The module in `apps/` of each command that is not of the core."""

_OUT_OF_MEMORY = (
    *("can't allocate memory", "not enough memory: you tried to allocate", "Storage size calculation overflowed"),
    *("numel: integer multiplication overflow", "array is too big", "Maximum allowed dimension exceeded"),
    *("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Invalid buffer size"),
)
"""In messages of torch on CPUs and of numpy, and in those of CUDA and MPS; sizes may be too large to compute with."""


def build_app() -> App:
    """Return the application with all commands; a command's module is imported only when the command runs."""
    app = App(
        name="txl",
        help="Transformer-XL: train, evaluate with memory far beyond the training length, generate.",
        version=__version__,
        help_format="plaintext",
        result_action="return_value",
    )
    for name, help_line in COMMANDS.items():
        module = f"apps.{APPS[name]}" if name in APPS else f"cli.{name}"
        app.command(f"transformer_xl.{module}:{name.replace('-', '_')}", name=name, help=help_line)
    return app


def main() -> None:
    """Run the command in `sys.argv` and exit: 0 on success, 2 on bad input, 130 or 143 after Ctrl-C or SIGTERM."""
    # SIGTERM raises SystemExit, so that incomplete files are removed, as after Ctrl-C
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # the terminal's encoding may lack a character
    for name in ("stderr", "stdout"):
        if getattr(sys, name) is None:  # the shell closed it (txl ... >&-)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (stays open until the program exits)
    sys.exit(run(sys.argv[1:]))


def keep_freed_memory() -> bool:
    """Let glibc keep the memory that this process frees, so that a training step reuses the pages of the previous one.

    The kernel zeroes each fresh page, which costs more time than using it. Buffers above 32 MiB, the largest that glibc
    can allocate in its heap, still go back to the system: otherwise gaps between aligned buffers make the heap grow.

    Returns:
        Whether the settings were applied; false if the C library is not glibc.
    """
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD in malloc.h
    # buffers from 32 MiB get their own mapping; the heap is never trimmed (-1), and grows by 64 MiB more than requested
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform.startswith("linux") else None
    return mallopt is not None and all(
        [mallopt(mmap_threshold, 2**25), mallopt(trim_threshold, -1), mallopt(top_pad, 2**26)]
    )


def run(arguments: list[str]) -> int:
    """Run a command and return its exit status; an error that the user can correct is printed as one line.

    Args:
        arguments: the command and its arguments, such as ["info", "runs/mine"].
    """
    if arguments[:1] == ["help"]:  # as in git: txl help train
        arguments = [*arguments[1:], "--help"]
    if arguments[:1] == ["prepare"]:  # its files may follow options, where - would be taken for one
        arguments = ["/dev/stdin" if word == "-" else word for word in arguments]
    app = build_app()

    def with_flags(message: str) -> str:
        """Return a message of the library, which names settings, with the flags of the command instead."""
        from transformer_xl.cli.flags import name_flags

        command = app.parse_commands(arguments)[1][-1]
        flags = [name for flag in command.assemble_argument_collection() for name in flag.names]
        # a file may have the name of a setting; without an underscore, only name= and name: are taken for one
        typed = {f"--{word.replace('_', '-')}" for word in arguments if "_" in word}
        return name_flags(message, [flag for flag in flags if flag not in typed])

    try:
        with notes_worded(with_flags):
            status = app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except KeyboardInterrupt:
        print("txl: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        from transformer_xl.cli.output import discard_output

        discard_output()  # the program that reads the pipe has closed it (txl ... | head)
        return 0
    except Exception as error:
        message = _user_message(error)
        if message is None:
            raise  # a bug: keep the traceback
        if isinstance(error, CycloptsError) and _is_nonzero_rank():
            return 2
        from transformer_xl.cli.output import discard_output, printable

        if not isinstance(error, CycloptsError):
            message = with_flags(message)
        print(f"txl: error: {printable(message)}", file=sys.stderr)
        if isinstance(error, OSError):
            discard_output()
        return 2


def _is_nonzero_rank() -> bool:
    """Return whether this is a torchrun process other than rank 0; rank 0 prints the same error."""
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return rank.isdecimal() and world_size.isdecimal() and 0 < int(rank) < int(world_size)


def _user_message(error: Exception) -> str | None:
    """Return a one-line message, or None if the user cannot correct the error."""
    from pydantic import ValidationError

    from transformer_xl.cli.flags import unknown_flag
    from transformer_xl.config import UserError, explain, nearest
    from transformer_xl.files import final_names

    if isinstance(error, MemoryError) or any(phrase in str(error) for phrase in _OUT_OF_MEMORY):
        return "not enough memory; lower the batch size, the segment length, the memory length or the model's size"
    if isinstance(error, OSError):
        return final_names(f"{error.filename or 'writing the output'}: {error.strerror or error}")
    if not isinstance(error, UserError | CycloptsError):
        return None
    cause, text = error.__cause__, str(error)
    if isinstance(error, CycloptsError):
        if isinstance(error, MissingArgumentError) and error.argument and error.argument.name.startswith("--"):
            text = f"{text.rstrip('.')} (a value that begins with - is given as {error.argument.name}=VALUE)"
        if isinstance(cause, ValidationError):
            group = getattr(getattr(error, "argument", None), "name", "*")  # of settings, such as --model
            text = explain(cause, "--" if group == "*" else f"{group}.")
        elif isinstance(error, UnusedCliTokensError):
            text = f'Unexpected "{" ".join(error.unused_tokens or [])}": flags take no value, but for --FLAG=false'
        elif isinstance(error, UnknownCommandError):
            word, commands = (error.unused_tokens or [""])[0], [name for name in error.app or () if name[0] != "-"]
            text = f"no command '{word}'{nearest(word, commands)}; the commands are {', '.join(commands)}"
        elif isinstance(error, UnknownOptionError):
            flag = error.token.keyword or error.token.value
            text = unknown_flag(flag, [name for argument in error.argument_collection for name in argument.names])
        text = f"{text.rstrip('.')}{'' if text.endswith('?') else ';'} --help lists the options"
    return " ".join(text.split())
