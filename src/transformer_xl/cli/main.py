"""Entry point of `txl`. Commands are named here and imported only when one is run."""

from __future__ import annotations

import io
import os
import signal
import sys

from cyclopts import App, CycloptsError

from transformer_xl import __version__

# what 'txl --help' lists, and behind an empty line what only the command's own --help says
COMMANDS = {
    "demo": "The main job on real text, end to end in minutes: prepare, train, evaluate, generate, report.",
    "prepare": "Turn text into a corpus: token numbers on disk.",
    "train": "Train a model on a corpus, or go on with a run.\n\nSettings: the defaults, then the recipe, then flags. "
    "Ctrl-C or SIGTERM saves a checkpoint and ends the command with status 130 or 143; --resume goes on from there as "
    "if it had never stopped.",
    "evaluate": "Score a text: perplexity and bits per byte, at any memory length.",
    "score": "Say how likely texts are: log-probabilities by token, line or file.",
    "generate": "Generate text with a trained model.",
    "analyze": "Show what a model does: what heads attend to, how far a text helps, how fast memory is.",
    "reproduce": "Make the paper's tables at any scale, beside its figures.",
    "convert": "Make a run of another program's model, or write a run for Hugging Face.",
    "recipes": "List the settings that come with the package.",
    "info": "Show this machine, a run or a corpus.",
}


def build_app() -> App:
    """The command tree; nothing heavy is imported."""
    app = App(
        name="txl",
        help="Transformer-XL: train, evaluate with memory far beyond the training length, generate.",
        version=__version__,
        help_format="plaintext",
        result_action="return_value",
    )
    for name, help_line in COMMANDS.items():
        app.command(f"transformer_xl.cli.{name}:{name}", name=name, help=help_line)
    return app


def main() -> None:
    """Runs one command. Exit status: 0 done, 2 bad input, 130 or 143 stopped by Ctrl-C or SIGTERM."""
    # as Ctrl-C does, SIGTERM unwinds the program, so that half-written files are taken away
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character still shows the rest
    if sys.stdout is None:  # closed by the caller (>&-)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open as long as the program runs)
    sys.exit(run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Runs one command line and gives its exit status; what the user can put right becomes one line."""
    try:
        status = build_app()(words, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except KeyboardInterrupt:
        print("txl: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return _leave_output()  # the reader has gone (| head)
    except Exception as error:
        line = _one_line(error)
        if line is None:
            raise  # a fault of ours: its traceback is wanted
        if isinstance(error, CycloptsError) and _another_speaks():
            return 2
        print(f"txl: error: {line}", file=sys.stderr)
        if isinstance(error, OSError):
            _leave_output()
        return 2


def _another_speaks() -> bool:
    """Whether this is one of several processes that were started with the same words, and not the first."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size)


def _leave_output() -> int:
    """Sees to it that nothing more is written to standard output, not even when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _one_line(error: Exception) -> str | None:
    """What to tell the user; none where the user is not the cause."""
    from pydantic import BaseModel, ValidationError

    from transformer_xl.config import UserError, explain

    if _out_of_memory(error):
        return "not enough memory for these sizes; lower rows, segment, memory or the model's sizes"
    if isinstance(error, OSError):
        return f"{error.filename or 'writing the output'}: {error.strerror or error}"
    if not isinstance(error, UserError | CycloptsError):
        return None
    cause = error.__cause__
    text = explain(BaseModel, cause) if isinstance(cause, ValidationError) else str(error)
    if isinstance(error, CycloptsError):
        option = getattr(getattr(error, "argument", None), "name", "")
        text = f"{option}.{text}" if option and isinstance(cause, ValidationError) else text
        text = f"{text.rstrip('.')}; --help shows what can be given"
    return " ".join(text.split())


def _out_of_memory(error: Exception) -> bool:
    words = ("can't allocate memory", "out of memory", "Invalid buffer size")  # torch on CPU, CUDA, MPS
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)
