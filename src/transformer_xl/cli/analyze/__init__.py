"""`txl analyze`: what a model does and how fast, in tables and pictures. Its commands are imported when one is run."""

from __future__ import annotations

from cyclopts import App

COMMANDS = {
    "attention": "Draw what heads attend to, term by term, and how the loss falls from a document's start.",
    "context": "Measure how far back a text still helps each model (the paper's relative effective context length).",
    "speed": "Compare evaluation with memory to a window moved token by token (the paper's table of evaluation speed).",
}

analyze = App(name="analyze", help="Measure and show what a model does.", help_format="plaintext")
for name, help_line in COMMANDS.items():
    analyze.command(f"transformer_xl.cli.analyze.{name}:{name}", name=name, help=help_line)
