"""Transformer-XL today: train, evaluate with memory far beyond the training length, generate.

    from transformer_xl import TransformerXL, TransformerXLConfig, evaluate, generate, load

Nothing heavy is imported before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformer_xl.config import (
        AlRfouConfig,
        DynamicConfig,
        EvaluationConfig,
        LSTMConfig,
        ModelConfig,
        QRNNConfig,
        RunConfig,
        ShawConfig,
        TrainConfig,
        TransformerXLConfig,
        UserError,
        VaswaniConfig,
    )
    from transformer_xl.evaluation.evaluate import EvaluationResult, evaluate
    from transformer_xl.evaluation.plan import EvaluationPlan
    from transformer_xl.evaluation.score import TextScore, score
    from transformer_xl.generation.beam_search import beam_search
    from transformer_xl.generation.completion import Completion
    from transformer_xl.generation.config import GenerationConfig
    from transformer_xl.generation.generate import GenerationStream, generate, stream
    from transformer_xl.interop.convert import convert
    from transformer_xl.model.build import build_model
    from transformer_xl.model.memory import ContextLimits, Memory
    from transformer_xl.model.transformer_xl import TransformerXL
    from transformer_xl.run_folder import Run, load, save
    from transformer_xl.text.prepare import prepare
    from transformer_xl.text.token_store import Corpus
    from transformer_xl.training.callbacks import Callback
    from transformer_xl.training.train import TrainResult, resume, train

__version__ = "0.1.0"

_HOMES = {
    "AlRfouConfig": "config",
    "Callback": "training.callbacks",
    "Completion": "generation.completion",
    "ContextLimits": "model.memory",
    "Corpus": "text.token_store",
    "DynamicConfig": "config",
    "EvaluationConfig": "config",
    "EvaluationPlan": "evaluation.plan",
    "EvaluationResult": "evaluation.evaluate",
    "GenerationConfig": "generation.config",
    "GenerationStream": "generation.generate",
    "LSTMConfig": "config",
    "Memory": "model.memory",
    "ModelConfig": "config",
    "QRNNConfig": "config",
    "Run": "run_folder",
    "RunConfig": "config",
    "ShawConfig": "config",
    "TextScore": "evaluation.score",
    "TrainConfig": "config",
    "TrainResult": "training.train",
    "TransformerXL": "model.transformer_xl",
    "TransformerXLConfig": "config",
    "UserError": "config",
    "VaswaniConfig": "config",
    "beam_search": "generation.beam_search",
    "build_model": "model.build",
    "convert": "interop.convert",
    "evaluate": "evaluation.evaluate",
    "generate": "generation.generate",
    "load": "run_folder",
    "prepare": "text.prepare",
    "resume": "training.train",
    "save": "run_folder",
    "score": "evaluation.score",
    "stream": "generation.generate",
    "train": "training.train",
}

__all__ = [
    "AlRfouConfig",
    "Callback",
    "Completion",
    "ContextLimits",
    "Corpus",
    "DynamicConfig",
    "EvaluationConfig",
    "EvaluationPlan",
    "EvaluationResult",
    "GenerationConfig",
    "GenerationStream",
    "LSTMConfig",
    "Memory",
    "ModelConfig",
    "QRNNConfig",
    "Run",
    "RunConfig",
    "ShawConfig",
    "TextScore",
    "TrainConfig",
    "TrainResult",
    "TransformerXL",
    "TransformerXLConfig",
    "UserError",
    "VaswaniConfig",
    "beam_search",
    "build_model",
    "convert",
    "evaluate",
    "generate",
    "load",
    "prepare",
    "resume",
    "save",
    "score",
    "stream",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'transformer_xl' has no attribute '{name}'")
    return getattr(import_module(f"transformer_xl.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
