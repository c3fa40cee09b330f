"""The lower bounds of what a model stores, compared with what it does store; the bounds of recipes are close."""

from __future__ import annotations

from typing import Any

import pytest
from model_configs import model_config

from transformer_xl.architectures import build_model
from transformer_xl.config import load_recipe, recipe_names, run_settings
from transformer_xl.config.run_config import merge_recipe
from transformer_xl.inference import prepare_inference
from transformer_xl.model.memory import ContextLimits
from transformer_xl.model.sizes import min_activations, min_cache, min_parameters
from transformer_xl.training.cost import step_cost
from transformer_xl.training.data import min_training_bytes

BATCH_SIZE, SEGMENT_LENGTH = 3, 13
MODELS: dict[str, dict[str, Any]] = {
    "transformer-xl": {},
    "adaptive": {"cutoffs": (7, 19), "div_val": 2},
    "untied": {"tie_word_embeddings": False, "norm_first": True, "attend_empty_memory": True},
    "n-grams": {"max_ngram": 3, "ngram_buckets": 97, "d_ngram": 5, "qk_norm": True},
    "value embeddings": {"value_embeddings": True},
    "key offset": {"key_offset": True, "attention_sinks": True},
    "shaw": {"architecture": "shaw", "max_relative_positions": 11},
    "vaswani": {"architecture": "vaswani"},
    "al-rfou": {"architecture": "al-rfou", "max_position_embeddings": 17},
    "lstm": {"architecture": "lstm"},
    "qrnn": {"architecture": "qrnn"},
}


@pytest.mark.parametrize("name", MODELS)
def test_bounds_are_below_what_a_model_stores(name: str):
    config = model_config(
        **{"n_layers": 3, "d_model": 34, "n_heads": 2, "d_head": 19, "d_ff": 59, "vocab_size": 41, **MODELS[name]}
    )
    memory_length = 11 if config.has_memory else 0
    lengths = {"segment_length": SEGMENT_LENGTH, "memory_length": memory_length}
    cost = step_cost(config, batch_size=BATCH_SIZE, **lengths)
    assert 0.9 * cost.parameters <= min_parameters(config) <= cost.parameters
    activation_bytes = 4 * BATCH_SIZE * min_activations(config, **lengths)
    assert 0.4 * cost.activation_bytes <= activation_bytes <= cost.activation_bytes
    assert min_activations(config, **lengths, recomputed=True) < min_activations(config, **lengths)

    model = build_model(config, memory_length=memory_length)
    for training, one in ((True, model), (False, prepare_inference(model))):
        memory = one.initial_memory(BATCH_SIZE)
        stored = sum(tensor.numel() for tensor in memory.cache_tensors().values())
        bound = BATCH_SIZE * min_cache(config, memory_length, training=training)
        assert bound == stored or ("n_heads" not in type(config).model_fields and bound <= stored)


def test_bound_of_tokens_that_a_model_without_memory_reads_again():
    config = model_config(architecture="vaswani", n_layers=2, d_model=6, n_heads=2, d_ff=5, vocab_size=7)
    memory = build_model(config).generation_memory(3, ContextLimits(0), segment_length=6)
    assert sum(tensor.numel() for tensor in memory.cache_tensors().values()) == 3 * min_cache(config, 5)


# without those whose cutoffs are found from a corpus
SIZED_RECIPES = {name: recipe for name in recipe_names() if (recipe := load_recipe(name)).bytes_per_step}
SIZED_RECIPES = {name: recipe for name, recipe in SIZED_RECIPES.items() if recipe.model["cutoffs"] != "auto"}


@pytest.mark.parametrize("name", SIZED_RECIPES)
def test_bounds_of_recipes_are_close(name: str):
    recipe = SIZED_RECIPES[name]
    config = run_settings(merge_recipe(recipe, {}), name)
    lengths = {"memory_length": config.train.memory_length, "segment_length": config.train.segment_length}
    activations = min_activations(config.model, **lengths)
    cache = min_cache(config.model, config.train.memory_length, training=True)
    by_rows = 0 if config.train.ngram_learning_rate_ratio is None else config.model.ngram_table_parameters
    bound = 16 * min_parameters(config.model) - 12 * by_rows + 4 * config.train.batch_size * (activations + cache)
    assert recipe.bytes_per_step is not None
    # of masked attention, the bound counts the matrices that a fused kernel saves, and the recipe those of a CPU
    least = 0.3 if config.model.orders else 0.65
    assert least * recipe.bytes_per_step <= bound <= recipe.bytes_per_step


def test_tables_updated_by_rows_have_no_gradient_or_state():
    model = {"vocab_size": 50, "max_ngram": 3, "ngram_buckets": 10**6, "d_ngram": 8}
    bounds = {
        ratio: min_training_bytes(
            run_settings(
                {"model": model, "train": {"optimizer": "adamw", "ngram_learning_rate_ratio": ratio}}, "settings"
            ),
            *(1, "float32"),
        )
        for ratio in (None, 2.0)
    }
    assert bounds[None] - bounds[2.0] == 12 * 2 * 10**6 * 8


def test_fsdp_divides_weights_gradients_and_optimizer_state():
    """The whole weights, which each process has before they are divided, are freed before the first step."""
    config = run_settings(
        {"model": {"vocab_size": 50, "d_model": 512}, "train": {"parallelism": "fsdp", "segment_length": 1}}, "settings"
    )
    alone, eighth = (min_training_bytes(config, 1, "float32", num_processes) for num_processes in (1, 8))
    assert eighth < alone / 6


def test_bounds_build_nothing():
    """Sizes that no machine can hold are counted at once."""
    config = model_config(n_layers=2**31 - 1, d_model=2**31 - 2, n_heads=2, d_ff=2**31 - 1)
    assert min_parameters(config) > 1e27
    assert min_cache(config, 2**31 - 1, training=True) > 1e27
