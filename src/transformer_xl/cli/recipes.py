"""`txl recipes`: list the recipes that come with the package, or show one."""

from __future__ import annotations

from transformer_xl.cli.options import Json
from transformer_xl.cli.output import print_json, print_table
from transformer_xl.config import load_recipe, recipe_names, recipe_text


def recipes(name: str | None = None, /, *, json: Json = False) -> None:
    """List the recipes that come with the package, with published and measured results, or show one.

    Parameters
    ----------
    name
        Recipe to show, as YAML that can be saved, changed and trained; or a YAML file of your own, to check it.
        [default: list all]
    """
    if name is not None:
        recipe = load_recipe(name)
        if json:
            print_json(recipe.model_dump())
        else:
            print(recipe_text(name), end="")
        return
    loaded = {name: load_recipe(name) for name in recipe_names()}
    if json:
        print_json({name: recipe.model_dump() for name, recipe in loaded.items()})
        return
    rows = [
        [
            name,
            recipe.corpus,
            f"{recipe.parameters or 0:,}",
            f"{(recipe.flops_per_step or 0) / 1e12:,.3g}",
            f"{(recipe.bytes_per_step or 0) / 1e9:,.3g}",
            _format_metrics(recipe.published) or "-",
            " on ".join(filter(None, [_format_metrics(recipe.measured), recipe.measured_corpus])) or "not measured",
        ]
        for name, recipe in loaded.items()
    ]
    columns = ["name", "corpus", "parameters", "TFLOP/step", "GB/step", "published", "measured"]
    print_table("Recipes: parameters, FLOPs and memory (float32) of a training step, test results", columns, rows)


def _format_metrics(metrics: dict[str, float]) -> str:
    units = {"bits_per_byte": "bits/byte", "perplexity": "ppl"}
    return ", ".join(f"{value:g} {units.get(name, name.replace('_', ' '))}" for name, value in metrics.items())
