"""The public names, which `__init__.py` reads here: each is imported at its first use."""

from transformer_xl.apps.classify.classifier import (
    Classification as Classification,
    Classifier as Classifier,
    classify as classify,
    load_classifier as load_classifier,
)
from transformer_xl.apps.classify.embedding import embed as embed
from transformer_xl.apps.classify.training import (
    finetune_classifier as finetune_classifier,
    resume_classifier as resume_classifier,
)
from transformer_xl.apps.runs.compare import (
    CommonText as CommonText,
    RunComparison as RunComparison,
    compare_runs as compare_runs,
)
from transformer_xl.apps.runs.curves import draw_curves as draw_curves
from transformer_xl.apps.runs.records import RunRecord as RunRecord, list_runs as list_runs
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
from transformer_xl.apps.surprisal.minimal_pairs import (
    MinimalPair as MinimalPair,
    MinimalPairScores as MinimalPairScores,
    minimal_pairs as minimal_pairs,
    read_minimal_pairs as read_minimal_pairs,
)
from transformer_xl.apps.surprisal.reading_time_config import (
    ReadingTimeSweep as ReadingTimeSweep,
    TableLayout as TableLayout,
)
from transformer_xl.apps.surprisal.reading_time_fits import (
    ReadingTimeFits as ReadingTimeFits,
    fit_reading_times as fit_reading_times,
)
from transformer_xl.apps.surprisal.reading_times import (
    ReadingTimes as ReadingTimes,
    corpus_word_counts as corpus_word_counts,
    read_reading_times as read_reading_times,
    read_word_counts as read_word_counts,
)
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
from transformer_xl.text.sources.items import ItemColumns as ItemColumns
from transformer_xl.text.prepare import prepare as prepare
from transformer_xl.text.ranks import join_ranks as join_ranks
from transformer_xl.text.token_store import Corpus as Corpus
from transformer_xl.training.callbacks import Callback as Callback
from transformer_xl.training.find_rate import (
    LearningRateResult as LearningRateResult,
    find_learning_rate as find_learning_rate,
)
from transformer_xl.training.finetune import finetune as finetune
from transformer_xl.training.train import TrainResult as TrainResult, resume as resume, train as train

__version__: str
