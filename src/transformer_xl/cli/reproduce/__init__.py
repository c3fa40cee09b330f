"""`txl reproduce`: the paper's tables at any scale, beside the paper's figures."""

from __future__ import annotations

from cyclopts import App

# behind what 'txl reproduce --help' lists: flags show the defaults of settings, which the recipe goes before
_SETTINGS = (
    "\n\nSettings: the defaults, then the recipe (--recipe), then flags. When stopped, the same command goes on."
)

COMMANDS = {
    "ablation": "Train the ten systems of the paper's ablation, and score each over a sweep of attention lengths."
    + _SETTINGS,
    "context": "Measure how far back a text still helps the models of the paper's two groups." + _SETTINGS,
    "speed": "Compare evaluation with memory to a moving window, as 'txl analyze speed' does, for the report.",
    "all": "All of these and the pictures of attention, in one report." + _SETTINGS,
}

reproduce = App(name="reproduce", help="The paper's tables, at any scale, beside its figures.", help_format="plaintext")
for name, help_line in COMMANDS.items():
    module = {"all": "everything"}.get(name, name)  # Python has a function of that name
    reproduce.command(f"transformer_xl.cli.reproduce.{module}:{module}", name=name, help=help_line)
