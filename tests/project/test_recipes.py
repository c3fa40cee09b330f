"""Recipes are complete, and the parameters, FLOPs and memory they state are right and compared with the paper's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from transformer_xl.config import (
    RegularizationConfig,
    RunConfig,
    TransformerConfig,
    load_recipe,
    merge_recipe,
    recipe_names,
    run_settings,
)
from transformer_xl.training.cost import step_cost

FIDELITY = (Path(__file__).parents[2] / "docs" / "fidelity.md").read_text(encoding="utf-8")
# numbers of parameters that the papers report for the models of these recipes
PUBLISHED_PARAMETERS = {
    "enwik8-12l": 41e6,
    "enwik8-24l": 277e6,
    "enwik8-al-rfou-12l": 44e6,
    "enwik8-al-rfou-64l": 235e6,
    "text8-12l": 41e6,
    "text8-24l": 277e6,
    "wikitext-103-standard": 151e6,
    "wikitext-103-large": 257e6,
    "lm1b-base": 0.46e9,
    "lm1b-large": 0.8e9,
    "ptb": 24e6,
}
DIFFERENT_PARAMETERS = {"wikitext-103-large", "lm1b-base", "lm1b-large"}  # docs/fidelity.md explains why


def run_config(name: str) -> RunConfig:
    """Return the recipe's settings; cutoffs auto, which need a corpus, become one softmax over all tokens."""
    recipe = load_recipe(name)
    cutoffs = None if recipe.model["cutoffs"] == "auto" else recipe.model["cutoffs"]
    return run_settings(merge_recipe(recipe, {"model": {"cutoffs": cutoffs}}), name)


# settings that change neither the trained weights nor their evaluation
WITHOUT_EFFECT = {
    "evaluation.batch_size", "evaluation.warmup_tokens", "attn_implementation", "micro_batch_size", "compile",
    "activation_checkpointing", "parallelism", "log_interval", "checkpoint_interval", "trackers",
}  # fmt: skip


def effective_settings(config: RunConfig) -> dict[str, set[str]]:
    """Return the names of the settings, by group, that the result of a run depends on."""
    model, train = config.model, config.train
    # settings that another setting makes irrelevant
    is_unused = {
        "final_norm": not (isinstance(model, TransformerConfig) and model.norm_first),
        "tie_projections": model.div_val == 1 and model.d_embed in (None, model.d_model),
        "project_same_width": model.div_val == 1,
        "muon_learning_rate_ratio": not train.has_muon,
        "ngram_learning_rate_ratio": model.max_ngram == 1,
        "ngram_buckets": model.max_ngram == 1,
        "d_ngram": model.max_ngram == 1,
        "regularization": model.regularization == RegularizationConfig(),
        "decay_steps": train.lr_schedule != "wsd",
        "ema_decay": train.weight_average != "ema",
        "average_start_step": train.weight_average == "none",
        "average_learning_rate": train.weight_average == "none",
        "dynamic": config.evaluation.method != "dynamic",
        "num_orders": config.evaluation.method != "both-sides",
    }
    unused = WITHOUT_EFFECT | {name for name, is_unused_here in is_unused.items() if is_unused_here}
    return {
        group: {name for name in type(settings).model_fields if not {name, f"{group}.{name}"} & unused}
        for group, settings in (("model", model), ("train", train), ("evaluation", config.evaluation))
    }


@pytest.mark.parametrize("name", recipe_names())
def test_recipe_contains_every_setting_its_result_depends_on(name: str) -> None:
    """So that a change of a default changes no recipe."""
    recipe = load_recipe(name)
    assert recipe.title
    assert recipe.source
    for group, names in effective_settings(run_config(name)).items():
        assert names - getattr(recipe, group).keys() == set(), group


@pytest.mark.parametrize("name", recipe_names())
def test_parameters_and_cost_of_a_step_are_right(name: str) -> None:
    """All layers cost the same, or every second one with value embeddings, so the cost of n layers is extrapolated from
    that of a few; and so are rows of large batches."""
    recipe, config = load_recipe(name), run_config(name)
    names, rows = ("segment_length", "memory_length", "extended_context_length"), config.train.batch_size
    sizes = {name: getattr(config.train, name) for name in names}
    by_rows = config.train.ngram_learning_rate_ratio is not None

    def costs_of(n_layers: int, batch_size: int) -> npt.NDArray[np.float64]:
        if batch_size > 1024:
            few, more = (costs_of(n_layers, size) for size in (256, 512))
            return few + (batch_size / 256 - 1) * (more - few)
        cost = step_cost(
            config.model.model_copy(update={"n_layers": n_layers}),
            **sizes,
            batch_size=batch_size,
            tables_by_rows=by_rows,
        )
        return np.array([cost.parameters, cost.flops, cost.bytes], dtype=np.float64)

    n_layers, period = config.model.n_layers, 2 if getattr(config.model, "value_embeddings", False) else 1
    few = (n_layers - 1) % period + 1
    least, more = (costs_of(n, rows) for n in (few, few + period))
    total = least + (n_layers - few) / period * (more - least)
    costs = dict(zip(("parameters", "flops", "bytes"), total, strict=True))
    assert costs["parameters"] == recipe.parameters
    assert costs["flops"] == pytest.approx(recipe.flops_per_step, rel=0.01)
    assert costs["bytes"] == pytest.approx(recipe.bytes_per_step, rel=0.01)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters_equal_the_published_number_or_the_difference_is_explained(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.published_parameters == PUBLISHED_PARAMETERS[name]
    assert recipe.parameters is not None
    # the papers round to three digits or fewer
    is_close = abs(recipe.parameters / PUBLISHED_PARAMETERS[name] - 1) <= 0.015
    assert is_close == (name not in DIFFERENT_PARAMETERS)
    if not is_close:
        assert f"`{name}`" in FIDELITY
        assert f"{recipe.parameters:,}" in FIDELITY


def test_published_recipes_exist_with_results() -> None:
    assert set(PUBLISHED_PARAMETERS) <= set(recipe_names())
    assert all(
        load_recipe(name).published for name in PUBLISHED_PARAMETERS if name != "text8-12l"
    )  # without a published result
