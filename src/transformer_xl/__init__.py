"""Transformer-XL: train, evaluate with memory far beyond the training length, generate.

    from transformer_xl import TransformerXL, TransformerXLConfig, evaluate, generate, load

A public name is imported at its first use, so that `import transformer_xl` alone imports neither torch nor pydantic.
The names, and the modules that have them, are the imports in `__init__.pyi`, which type checkers read too.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    alias.name: str(node.module) for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'transformer_xl' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
