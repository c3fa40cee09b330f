"""Transformer-XL: train, evaluate with memory far beyond the training length, generate.

    from transformer_xl import TransformerXL, TransformerXLConfig, evaluate, generate, load

A public name is imported at its first use, so that `import transformer_xl` alone imports neither torch nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `name as name` makes a name public for type checkers
    from transformer_xl.config import (
        AlRfouConfig as AlRfouConfig,
        BackboneConfig as BackboneConfig,
        DynamicConfig as DynamicConfig,
        EvaluationConfig as EvaluationConfig,
        LSTMConfig as LSTMConfig,
        ModelConfig as ModelConfig,
        QRNNConfig as QRNNConfig,
        RunConfig as RunConfig,
        ShawConfig as ShawConfig,
        TrainConfig as TrainConfig,
        TransformerXLConfig as TransformerXLConfig,
        UserError as UserError,
        VaswaniConfig as VaswaniConfig,
    )
    from transformer_xl.evaluation.evaluate import EvaluationResult as EvaluationResult, evaluate as evaluate
    from transformer_xl.evaluation.plan import EvaluationPlan as EvaluationPlan
    from transformer_xl.evaluation.score import TextScore as TextScore, score as score
    from transformer_xl.evaluation.stream import ScoredTokens as ScoredTokens, SurprisalStream as SurprisalStream
    from transformer_xl.apps.surprisal.surprisal import SurprisalTable as SurprisalTable, surprisal as surprisal
    from transformer_xl.generation.beam_search import beam_search as beam_search
    from transformer_xl.generation.completion import Completion as Completion
    from transformer_xl.generation.generation_config import GenerationConfig as GenerationConfig
    from transformer_xl.generation.generate import (
        GenerationStream as GenerationStream,
        generate as generate,
        stream as stream,
    )
    from transformer_xl.apps.music.music import Piece as Piece, generate_midi as generate_midi
    from transformer_xl.integrations.checkpoints.convert import convert as convert
    from transformer_xl.model.backbone import Backbone as Backbone
    from transformer_xl.architectures import build_model as build_model
    from transformer_xl.model.memory import ContextLimits as ContextLimits, Memory as Memory
    from transformer_xl.model.transformer_xl import TransformerXL as TransformerXL
    from transformer_xl.run import Run as Run, load as load, load_adapter as load_adapter, save as save
    from transformer_xl.apps.surprisal.items import ItemColumns as ItemColumns
    from transformer_xl.text.prepare import prepare as prepare
    from transformer_xl.text.token_store import Corpus as Corpus
    from transformer_xl.training.callbacks import Callback as Callback
    from transformer_xl.training.find_rate import (
        LearningRateResult as LearningRateResult,
        find_learning_rate as find_learning_rate,
    )
    from transformer_xl.training.finetune import FinetuneResult as FinetuneResult, finetune as finetune
    from transformer_xl.training.train import TrainResult as TrainResult, resume as resume, train as train

__version__ = "0.2.0"

# module (in this package): its public names, separated by spaces
_NAMES = {
    "config": (
        "AlRfouConfig BackboneConfig DynamicConfig EvaluationConfig LSTMConfig ModelConfig QRNNConfig RunConfig "
        "ShawConfig TrainConfig TransformerXLConfig UserError VaswaniConfig"
    ),
    "evaluation.evaluate": "EvaluationResult evaluate",
    "evaluation.plan": "EvaluationPlan",
    "evaluation.score": "TextScore score",
    "evaluation.stream": "ScoredTokens SurprisalStream",
    "apps.surprisal.items": "ItemColumns",
    "apps.surprisal.surprisal": "SurprisalTable surprisal",
    "generation.beam_search": "beam_search",
    "generation.completion": "Completion",
    "generation.generation_config": "GenerationConfig",
    "generation.generate": "GenerationStream generate stream",
    "apps.music.music": "Piece generate_midi",
    "integrations.checkpoints.convert": "convert",
    "model.backbone": "Backbone",
    "architectures": "build_model",
    "model.memory": "ContextLimits Memory",
    "model.transformer_xl": "TransformerXL",
    "run": "Run load load_adapter save",
    "text.prepare": "prepare",
    "text.token_store": "Corpus",
    "training.callbacks": "Callback",
    "training.find_rate": "LearningRateResult find_learning_rate",
    "training.finetune": "FinetuneResult finetune",
    "training.train": "TrainResult resume train",
}

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'transformer_xl' has no attribute '{name}'")
    return getattr(import_module(f"transformer_xl.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
