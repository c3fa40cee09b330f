"""SourceConfig of other programs, checked one by one, and what none of ours can express."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformer_xl.config import UserError


def format_value(value: object) -> str:
    """A value for a message; of what is nested only the kind, as a file can nest without end."""
    plain = str, bytes, int, float, type(None)
    inside = value if isinstance(value, (list, tuple)) else [value]
    if all(isinstance(part, plain) for part in inside[:60]):
        return ascii(inside[:60] if inside is value else value)[:60]
    return f"of type {type(value).__name__}"


@dataclass(frozen=True)
class SourceConfig:
    """SourceConfig by the other program's names."""

    values: Mapping[str, Any]
    source: str
    """Where they come from, for messages."""

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is; `default` where it is missing or none."""
        value = self.values.get(name)
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.get(name, default)
        if type(value) is not int:
            raise self._wrong(name, value, "a whole number")
        return value

    def share(self, name: str, default: float) -> float:
        """A number."""
        value = self.get(name, default)
        if type(value) not in (int, float):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Yes or no."""
        value = self.get(name, default)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers; empty where it is missing."""
        value = self.get(name, [])
        if not isinstance(value, (list, tuple)) or not all(type(number) is int for number in value):
            raise self._wrong(name, value, "a list of whole numbers")
        return tuple(value)

    def window(self, memory: int, *, keys_beside_memory: int) -> int | None:
        """How many keys a query sees, itself included; none: all there are.

        Args:
            memory: memory slots.
            keys_beside_memory: how many more keys than those `same_length` shows in that program.
        """
        if not self.flag("same_length", default=False):
            return None
        if memory + keys_beside_memory < 1:
            raise UserError(
                f"{self.source}: same_length with mem_len {memory} lets no query see a key; there is no such model"
            )
        return memory + keys_beside_memory

    def _wrong(self, name: str, value: object, wanted: str) -> UserError:
        return UserError(f"{self.source}: {name} is {format_value(value)}; wanted {wanted}")


def check_supported(settings: SourceConfig) -> None:
    """Refuses what this package cannot express.

    Raises:
        UserError: another kind of attention, an extended context, or a sampled softmax.
    """
    kind = settings.number("attn_type", 0)
    if kind != 0:
        raise UserError(
            f"{settings.source}: attn_type {kind} cannot be expressed here; only 0, the paper's attention, can"
        )
    extended = settings.number("ext_len", 0)
    if extended > 0:
        raise UserError(
            f"{settings.source}: ext_len {extended} cannot be expressed here; only 0, no extended context, can"
        )
    sampled = settings.number("sample_softmax", -1)
    if sampled > 0:
        raise UserError(
            f"{settings.source}: sample_softmax {sampled} cannot be expressed here; only a full softmax (-1) can"
        )


Tied = Literal["all", "all_but_first", "none"]


def parse_tied_projections(given: object, clusters: int, source: str) -> Tied:
    """Which clusters' projections the softmax takes from the embedding, out of a list of yes and no.

    Raises:
        UserError: a pattern that cannot be expressed.
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
    """SourceConfig of training and evaluation for these lengths."""
    return {"segment_length": segment, "memory_length": memory}, {
        "segment_length": segment,
        "memory_length": memory,
        "attention_window": window,
    }
