"""The table of relative effective context lengths (paper table 8): its groups of models, and the paper's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformer_xl.apps.analyze.effective_context import FRACTIONS, format_length

GROUPS = (("xl-larger", "qrnn", "lstm"), ("xl-full", "shaw-recurrent", "relative-full", "learned-half"))
"""Names of the systems in each group (`systems.py` explains them); each model is compared with the best of its own
group."""

PUBLISHED = {
    "xl-larger": (900, 800, 700),
    "qrnn": (500, 400, 300),
    "lstm": (400, 300, 200),
    "xl-full": (700, 600, 500),
    "shaw-recurrent": (400, 400, 300),
    "relative-full": (300, 300, 300),
    "learned-half": (128, 128, 128),
}
"""The paper's lengths in words of WikiText-103, at each of FRACTIONS."""

COLUMNS = ["system", "parameters", *(f"r = {fraction:g}" for fraction in FRACTIONS), "the paper's (words)"]


def table_rows(groups: Sequence[Mapping[str, Any]]) -> list[list[list[str]]]:
    """Return a table for each group of models, as rows under COLUMNS; each cell has a length for each seed.

    Args:
        groups: the results of each group and seed, as returned by `EffectiveContext.as_dict`.
    """
    by_names: dict[tuple[str, ...], list[list[Mapping[str, Any]]]] = {}
    for group in groups:
        by_names.setdefault(tuple(model["name"] for model in group["models"]), []).append(group["models"])
    # zip: from a list of models for each seed to a tuple of seeds for each model
    return [[_row(models) for models in zip(*seeds, strict=True)] for seeds in by_names.values()]


def _row(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the row of a system from its results with each seed."""
    name, parameters = models[0]["name"], f"{models[0]['parameters']:,}"
    lengths = [
        ", ".join(format_length(model["fractions"][f"{fraction:g}"]) for model in models) for fraction in FRACTIONS
    ]
    return [name, parameters, *lengths, ", ".join(map(str, PUBLISHED[name]))]
