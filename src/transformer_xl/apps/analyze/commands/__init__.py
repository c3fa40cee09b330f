"""`txl analyze`: what a model does and how fast, in tables and plots. Each command is imported only when it is run."""

from cyclopts import App

COMMANDS = {
    "attention": "Draw what heads attend to, term by term, and how the loss decreases from a document's start.",
    "context": "Measure how far back a text still helps each model (the paper's relative effective context length).",
    "speed": "Compare evaluation with memory to a window moved token by token (the paper's table of evaluation speed).",
}

analyze = App(name="analyze", help="Measure and plot what a model does.", help_format="plaintext")
for name, help_line in COMMANDS.items():
    analyze.command(f"transformer_xl.apps.analyze.commands.{name}:{name}", name=name, help=help_line)
