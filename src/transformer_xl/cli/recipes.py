"""`txl recipes`: the settings that come with the package."""

from __future__ import annotations

from transformer_xl.cli.options import Json
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import load_recipe, recipe_names


def recipes(*, json: Json = False) -> None:
    """List the settings that come with the package."""
    found = {name: load_recipe(name) for name in recipe_names()}
    if json:
        print_json({name: recipe.model_dump() for name, recipe in found.items()})
        return
    rows = [
        [
            name,
            recipe.title,
            recipe.corpus,
            "" if recipe.parameters is None else f"{recipe.parameters:,}",
            ", ".join(f"{value:g} {unit.replace('_', ' ')}" for unit, value in recipe.published.items()) or "-",
            ", ".join(f"{value:g} {unit.replace('_', ' ')}" for unit, value in recipe.measured.items())
            or "not measured",
        ]
        for name, recipe in found.items()
    ]
    print_table("Recipes", ["name", "what", "corpus", "parameters", "published", "ours"], rows)
