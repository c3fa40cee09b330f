"""The table of relative effective context lengths (paper table 8): its groups of models, and the paper's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GROUPS = (("xl-larger", "qrnn", "lstm"), ("xl-full", "shaw-recurrent", "relative-full", "learned-half"))
"""Names of the systems in each group; each model is compared with the best of its own group."""

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
    """Return a table for each group of models, as rows under COLUMNS, with a value for each seed.

    Args:
        groups: the measured groups: `EffectiveContext.as_dict` with `trained_with_seed`.
    """
    by_names: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for group in groups:
        by_names.setdefault(tuple(model["name"] for model in group["models"]), []).append(group)
    return [
        [_row(name, [group["models"][index] for group in seeds]) for index, name in enumerate(names)]
        for names, seeds in by_names.items()
    ]


def _row(name: str, models: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [name, f"{models[0]['parameters']:,}"]
    for fraction in FRACTIONS:
        found = [model["fractions"][f"{fraction:g}"] for model in models]
        cells.append(", ".join(_length(one) for one in found))
    return [*cells, ", ".join(map(str, PUBLISHED[name]))]


def _length(found: Mapping[str, Any]) -> str:
    return ("" if found["fell_below_threshold"] else ">= ") + f"{found['effective_context_tokens']:,}"
