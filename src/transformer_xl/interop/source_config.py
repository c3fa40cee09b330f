"""Settings of other programs, with each value checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformer_xl.config import UserError


def format_value(value: object) -> str:
    """Format a value for a message, shortened; of a nested value only its type, since a file can nest without end."""
    plain = str, bytes, int, float, type(None)
    inside = value if isinstance(value, (list, tuple)) else [value]
    if all(isinstance(part, plain) for part in inside[:60]):
        return ascii(inside[:60] if inside is value else value)[:60]
    return f"of type {type(value).__name__}"


@dataclass(frozen=True)
class SourceConfig:
    """Settings by the other program's names."""

    values: Mapping[str, Any]
    source: str
    """The file they were read from, for messages."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value unchecked; `default` where it is missing or None."""
        value = self.values.get(name)
        return default if value is None else value

    def get_int(self, name: str, default: int | None = None) -> int:
        """Return an integer."""
        value = self.get(name, default)
        if type(value) is not int:
            raise self._error(name, value, "an integer")
        return value

    def get_float(self, name: str, default: float) -> float:
        """Return a number as a float."""
        value = self.get(name, default)
        if type(value) not in (int, float):
            raise self._error(name, value, "a number")
        return float(value)

    def get_bool(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        value = self.get(name, default)
        if type(value) is not bool:
            raise self._error(name, value, "true or false")
        return value

    def get_ints(self, name: str) -> tuple[int, ...]:
        """Return a list of integers; empty where it is missing."""
        value = self.get(name, [])
        if not isinstance(value, (list, tuple)) or not all(type(number) is int for number in value):
            raise self._error(name, value, "a list of integers")
        return tuple(value)

    def attention_window(self, memory: int, *, keys_beside_memory: int) -> int | None:
        """Return how many keys `same_length` shows each query, its own included; None: all there are.

        Args:
            memory: memory slots.
            keys_beside_memory: how many keys that program shows beyond the memory length.
        """
        if not self.get_bool("same_length", default=False):
            return None
        if memory + keys_beside_memory < 1:
            raise UserError(
                f"{self.source}: same_length with mem_len {memory} lets no query see a key; no model can be run so"
            )
        return memory + keys_beside_memory

    def _error(self, name: str, value: object, wanted: str) -> UserError:
        return UserError(f"{self.source}: {name} is {format_value(value)}; wanted {wanted}")


def check_supported(settings: SourceConfig) -> None:
    """Refuse settings that this package cannot express.

    Raises:
        UserError: another type of attention, an extended context, or a sampled softmax.
    """
    kind = settings.get_int("attn_type", 0)
    if kind != 0:
        raise UserError(
            f"{settings.source}: attn_type {kind} cannot be expressed here; only 0, the paper's attention, can"
        )
    extended = settings.get_int("ext_len", 0)
    if extended > 0:
        raise UserError(
            f"{settings.source}: ext_len {extended} cannot be expressed here; only 0, no extended context, can"
        )
    sampled = settings.get_int("sample_softmax", -1)
    if sampled > 0:
        raise UserError(
            f"{settings.source}: sample_softmax {sampled} cannot be expressed here; only a full softmax (-1) can"
        )


Tied = Literal["all", "all_but_first", "none"]


def parse_tied_projections(given: object, clusters: int, source: str) -> Tied:
    """Return for which clusters the softmax shares the embedding's projection, from a list of booleans.

    Raises:
        UserError: the pattern cannot be expressed here.
    """
    pattern = list(given) if isinstance(given, (list, tuple)) else [None]
    missing: Sequence[bool] = [False] * (clusters - len(pattern))
    pattern += missing
    if all(tied is False for tied in pattern):
        return "none"
    if all(tied is True for tied in pattern):
        return "all"
    if len(pattern) == clusters and pattern == [False] + [True] * (clusters - 1):
        return "all_but_first"
    raise UserError(
        f"{source}: tie_projs {format_value(given)} cannot be expressed here; only all, all but the first, or none can"
    )


def length_settings(*, segment: int, memory: int, window: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of training and of evaluation for these lengths."""
    return {"segment_length": segment, "memory_length": memory}, {
        "segment_length": segment,
        "memory_length": memory,
        "attention_window": window,
    }
