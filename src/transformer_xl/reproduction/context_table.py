"""The paper's table of relative effective context lengths (table 8): which models form a group, and what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GROUPS = (("xl-larger", "qrnn", "lstm"), ("xl-full", "shaw-recurrent", "relative-full", "learned-half"))
"""Names of the systems of each group; a model is held to the best of its own."""

FRACTIONS = (0.1, 0.5, 1.0)
"""The paper's r."""

PUBLISHED = {
    "xl-larger": (900, 800, 700),
    "qrnn": (500, 400, 300),
    "lstm": (400, 300, 200),
    "xl-full": (700, 600, 500),
    "shaw-recurrent": (400, 400, 300),
    "relative-full": (300, 300, 300),
    "learned-half": (128, 128, 128),
}
"""Words of WikiText-103, at each of FRACTIONS."""

COLUMNS = ["system", "parameters", *(f"r = {fraction:g}" for fraction in FRACTIONS), "the paper's (words)"]


def table_rows(groups: Sequence[Mapping[str, Any]]) -> list[list[list[str]]]:
    """For each of the paper's groups the rows under COLUMNS, from what was measured of it with each seed.

    Args:
        groups: for each group and seed what `EffectiveContext.as_dict` gave, and `trained_with_seed`.
    """
    tables: list[list[list[str]]] = []
    for names in GROUPS:
        by_seed = [
            {model["name"]: model for model in group["models"]}
            for group in groups
            if [model["name"] for model in group["models"]] == list(names)
        ]
        if by_seed:
            tables.append([_row(name, [models[name] for models in by_seed]) for name in names])
    return tables


def _row(name: str, models: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [name, f"{models[0]['parameters']:,}"]
    for fraction in FRACTIONS:
        found = [model["fractions"][f"{fraction:g}"] for model in models]
        cells.append(", ".join(_length(one) for one in found))
    return [*cells, ", ".join(map(str, PUBLISHED[name]))]


def _length(found: Mapping[str, Any]) -> str:
    return ("" if found["fell_below_threshold"] else ">= ") + f"{found['effective_context_tokens']:,}"
