"""What is read from another program's checkpoint: its settings, and the model in this package's names.

`SourceConfig` checks the type of each setting when it is used, and translates them to this package's settings.
The readers huggingface.py, official.py and nvidia.py collect a checkpoint's settings under the names of Hugging Face's
config.json (`n_layer`, `mem_len`, ...); those of the authors' code are the same or nearly so. Some need explanation:

    cutoffs, div_val    token ids at which the adaptive softmax splits the vocabulary into clusters, and the factor by
                        which the embeddings of each cluster are narrower than those of the cluster before
    tie_projs           for each cluster whether the softmax shares the embedding's projection to d_model
    same_length         every query attends to equally many keys
    clamp_len           longer distances between query and key are encoded as this one; -1 for no limit
    untie_r             each layer has biases u and v (of the paper) of its own
    tgt_len, mem_len    lengths of a segment and of the memory, in tokens
    ext_len             tokens of context that the authors' code can keep in addition to the memory
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from transformer_xl.config import TransformerXLConfig, UserError, check_settings
from transformer_xl.text.tokenizers import Tokenizer

_MAX_LAYERS, _MAX_CUTOFFS = 1000, 100


SHARED_SETTINGS: dict[str, tuple[str, int | float | bool | None]] = {
    "vocab_size": ("vocab_size", None),
    "n_layer": ("n_layers", None),
    "d_model": ("d_model", None),
    "n_head": ("n_heads", None),
    "d_head": ("d_head", None),
    "d_inner": ("d_ff", None),
    "dropout": ("dropout", 0.0),
    "dropatt": ("attention_dropout", 0.0),
    "pre_lnorm": ("norm_first", False),
    "layer_norm_epsilon": ("norm_eps", 1e-5),
    "div_val": ("div_val", 1),
    "tie_word_embeddings": ("tie_word_embeddings", True),
}
"""Settings that have the same values in this package: by Hugging Face's name ours, and the value where it is missing,
or None for an integer that must be there."""


def format_value(value: object) -> str:
    """Format a value for a message, in 60 characters at most.

    Of a nested value only the type is named: a hostile file can nest lists so deeply that formatting them crashes.
    """
    plain = str, bytes, int, float, type(None)
    items = value[:60] if isinstance(value, (list, tuple)) else [value]
    if all(isinstance(item, plain) for item in items):
        return ascii(items if isinstance(value, (list, tuple)) else value)[:60]
    return f"of type {type(value).__name__}"


@dataclass(frozen=True)
class SourceConfig:
    """Settings of another program, each of which is type-checked when it is used."""

    values: Mapping[str, Any]
    """Settings by Hugging Face's names."""
    source: str
    """Path of the file that contains them, for messages."""

    def get(self, name: str, default: float | None = None) -> Any:
        """Return a setting of the type of its default (an integer, a number, true or false); an integer without one."""
        if isinstance(default, bool):
            return self._get(name, default, "true or false", bool)
        if isinstance(default, float):
            return float(self._get(name, default, "a number", int, float))
        return self._get(name, default, "an integer", int)

    def get_ints(self, name: str) -> tuple[int, ...]:
        """Return a list of integers, empty if it is missing."""
        value = self._get(name, [], "a list of integers", list, tuple)
        if not all(type(item) is int for item in value):
            raise self._error(name, value, "a list of integers")
        return tuple(value)

    def attention_window(self, memory_length: int, *, extra_keys: int) -> int | None:
        """Return how many keys each query attends to, its own included, or None if all of them.

        Args:
            memory_length: number of memory slots.
            extra_keys: with `same_length`, a query of that program attends to this many keys more than memory slots.

        Raises:
            UserError: `same_length` leaves no key.
        """
        if not self.get("same_length", False):
            return None
        if memory_length + extra_keys < 1:
            raise UserError(f"{self.source}: same_length with mem_len {memory_length} leaves no key to attend to")
        return memory_length + extra_keys

    def check_supported(self) -> None:
        """Check that this package can express the settings.

        Raises:
            UserError: another type of attention, an extended context, or a sampled softmax.
        """
        for name, supported, meaning in (  # the values that can be converted; the first is the default
            ("attn_type", (0,), "0, the paper's attention"),
            ("ext_len", (0,), "0, no extended context"),
            ("sample_softmax", (-1, 0), "-1, the full softmax"),
        ):
            value = self.get(name, supported[0])
            if value not in supported:
                raise UserError(f"{self.source}: {name} {value} cannot be converted; only {meaning}, can")

    def model_config(self, *, extra_keys: int = 0, attend_empty_memory: bool = False) -> TransformerXLConfig:
        """Return the settings of the model in this package.

        Args:
            extra_keys: as in `attention_window`.
            attend_empty_memory: whether that program's queries attend to empty memory slots, which are zeros.

        Raises:
            UserError: a setting has the wrong type or value, or cannot be expressed in this package.
        """
        self.check_supported()
        cutoffs, clamp_length = self.get_ints("cutoffs"), self.get("clamp_len", -1)
        check_counts(self.source, n_layers=self.get("n_layer"), num_cutoffs=len(cutoffs))
        values = {ours: self.get(theirs, default) for theirs, (ours, default) in SHARED_SETTINGS.items()}
        d_embed = self.get("d_embed", values["d_model"])
        is_projected = values["div_val"] > 1 or d_embed != values["d_model"]
        values |= {
            "final_norm": False,
            "d_embed": d_embed,
            "cutoffs": cutoffs,
            "tie_projections": self._tied_projections(len(cutoffs) + 1) if is_projected else "all",
            "tie_attention_biases": not self.get("untie_r", False),
            "attend_empty_memory": attend_empty_memory,
            "attention_window": self.attention_window(self.get("mem_len"), extra_keys=extra_keys),
            "clamp_length": clamp_length if clamp_length > 0 else None,
        }
        return check_settings(TransformerXLConfig, values, self.source)

    def lengths(self) -> dict[str, int]:
        """Return the settings of TrainConfig for the lengths of a segment and of the memory, in tokens."""
        return {"segment_length": self.get("tgt_len"), "memory_length": self.get("mem_len")}

    def _tied_projections(self, num_clusters: int) -> str:
        """Return the value of our setting `tie_projections`; flags missing at the end of `tie_projs` are false."""
        value = self._get("tie_projs", [], "a list", list, tuple)
        flags = [*value, *[False] * (num_clusters - len(value))]
        for name, pattern in tied_projection_flags(num_clusters).items():
            if flags == pattern:
                return name
        raise UserError(
            f"{self.source}: tie_projs {format_value(value)} cannot be expressed; only all, all but the first, or none"
        )

    def _get(self, name: str, default: object, expected: str, *types: type) -> Any:
        """Return a setting of one of these types, or the default if it is missing or None."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) not in types:
            raise self._error(name, value, expected)
        return value

    def _error(self, name: str, value: object, expected: str) -> UserError:
        return UserError(f"{self.source}: {name} is {format_value(value)}; expected {expected}")


@dataclass(frozen=True)
class ImportedModel:
    """A model of another program: settings, weights and tokenizer in this package's names."""

    model: dict[str, Any]
    """Settings of TransformerXLConfig."""
    train: dict[str, Any]
    """segment_length and memory_length of TrainConfig, if known."""
    evaluation: dict[str, Any]
    """segment_length, memory_length, attention_window and clamp_length of EvaluationConfig, if known."""
    weights: dict[str, Tensor]
    """Tensors by the names of TransformerXL.state_dict()."""
    tokenizer: Tokenizer | None
    """The tokenizer, or None if the checkpoint has none and the user has to pass one."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about what was left out or deliberately differs."""


def check_counts(source: str, *, n_layers: int, num_cutoffs: int) -> None:
    """Check that a model has no more layers and cutoffs than a real one can have, before anything is made for each.

    Raises:
        UserError: it has more; a small file can give the same weight to any number of layers.
    """
    for name, count, limit in (("layers", n_layers, _MAX_LAYERS), ("cutoffs", num_cutoffs, _MAX_CUTOFFS)):
        if count > limit:
            raise UserError(f"{source}: {count:,} {name}; a model with {limit:,} at most can be converted")


def tied_projection_flags(num_clusters: int) -> dict[str, list[bool]]:
    """Return the other programs' `tie_projs` for each value of our setting `tie_projections`.

    A cluster is a part of the vocabulary in the adaptive softmax; its flag says whether the softmax shares the
    projection of the embedding.
    """
    all_but_first = [False, *[True] * (num_clusters - 1)]
    return {"none": [False] * num_clusters, "all": [True] * num_clusters, "all_but_first": all_but_first}
