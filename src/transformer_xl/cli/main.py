"""Entry point of `txl`. Commands are named here and imported only when one is run."""

from __future__ import annotations

import os
import sys

from cyclopts import App, CycloptsError

from transformer_xl import __version__

COMMANDS = {
    "demo": "The main job on real text, end to end in minutes: prepare, train, evaluate, generate, report.",
    "prepare": "Turn text into a corpus: token numbers on disk.",
    "train": "Train a model on a corpus, or go on with a run.",
    "evaluate": "Score a text: perplexity and bits per byte, at any memory length.",
    "generate": "Write text with a trained model.",
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
    sys.exit(run(sys.argv[1:]))


def run(words: list[str]) -> int:
    """Runs one command line and gives its exit status; what the user can put right becomes one line."""
    try:
        status = build_app()(words, exit_on_error=False, print_error=False)
        return status if isinstance(status, int) else 0
    except (CycloptsError, ValueError) as error:
        print(f"txl: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        print(
            "txl: error: not enough memory for these sizes; lower rows, segment, memory or the model's sizes",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("txl: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output has gone (| head); nothing may be written to it when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _out_of_memory(error: Exception) -> bool:
    words = ("can't allocate memory", "out of memory", "Invalid buffer size")  # torch on CPU, CUDA, MPS
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _one_line(error: Exception) -> str:
    from pydantic import BaseModel, ValidationError

    from transformer_xl.config import UserError, explain

    if not isinstance(error, UserError | CycloptsError):
        raise error  # a fault of ours: its traceback is wanted
    cause = error.__cause__
    text = explain(BaseModel, cause) if isinstance(cause, ValidationError) else str(error)
    if isinstance(error, CycloptsError):
        text += "; --help shows what can be given"
    return " ".join(text.split())
