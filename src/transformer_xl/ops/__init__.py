"""Operations on tensors with several implementations: attention, linear layers, dropout, losses; and C++ for CPUs."""

from transformer_xl.ops.relative_attention import SegmentTerm, relative_attention

__all__ = ["SegmentTerm", "relative_attention"]
