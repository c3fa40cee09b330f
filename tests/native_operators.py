"""What tests of the native operators share: they are skipped, with the reason, where the operators are not built."""

import pytest

from transformer_xl.ops.native import operators, status

needs_native = pytest.mark.skipif(operators() is None, reason=f"native operators: {status().text}")
NATIVE = pytest.param("native", marks=needs_native)
"""The name of the attention kernel, for a parametrized test."""
