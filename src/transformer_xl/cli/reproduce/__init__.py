"""`txl reproduce`: the paper's tables at any scale, beside the paper's figures."""

from __future__ import annotations

from cyclopts import App

COMMANDS = {
    "ablation": "Train the ten systems of the paper's ablation, and score each over a sweep of attention lengths.",
}

reproduce = App(name="reproduce", help="The paper's tables, at any scale, beside its figures.", help_format="plaintext")
for name, help_line in COMMANDS.items():
    reproduce.command(f"transformer_xl.cli.reproduce.{name}:{name}", name=name, help=help_line)
