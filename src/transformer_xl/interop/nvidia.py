"""Read checkpoint_best.pt and checkpoint_last.pt of NVIDIA's Transformer-XL (DeepLearningExamples).

The file is a dictionary with weights, settings and vocabulary; the state of training (optimizer, schedule, random
state) is not imported. With `same_length` a query sees one key more than in the authors' code. In evaluation, memory
and segment together are as long as in training.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from transformer_xl.config import TransformerXLConfig, UserError, check_settings
from transformer_xl.interop.imported import ImportedModel
from transformer_xl.interop.source_config import SourceConfig, check_supported, length_settings, parse_tied_projections
from transformer_xl.interop.tokenizers import CORPUS_CLASSES, first_existing, tokenizer_from_object
from transformer_xl.interop.torch_file import TorchFile
from transformer_xl.interop.unpickler import PickledObject
from transformer_xl.interop.weight_names import NVIDIA, import_weights

_FILES = ("checkpoint_best.pt", "checkpoint_last.pt")
_FILE = re.compile(r"checkpoint_(best|last|\d+)\.pt")


def recognizes(path: Path) -> bool:
    """Return whether this is such a file, or a folder with one."""
    return (_FILE.fullmatch(path.name) is not None and path.is_file()) or first_existing(path, _FILES) is not None


def _admits(name: str) -> bool:
    return name == "argparse.Namespace" or name in CORPUS_CLASSES


def read(path: Path) -> ImportedModel:
    """Read a checkpoint; of a folder, checkpoint_best.pt if it is there.

    Raises:
        UserError: the file is damaged, is not such a checkpoint, names other classes, or cannot be expressed here.
    """
    file = (first_existing(path, _FILES) or path) if path.is_dir() else path
    content = TorchFile(file, _admits)
    found = content.value if isinstance(content.value, dict) else {}
    weights, values = found.get("model_state"), found.get("model_config")
    if not isinstance(weights, dict) or not isinstance(values, dict):
        raise UserError(f"{file} is no checkpoint of NVIDIA's train.py (no model_state and model_config in it)")
    settings = SourceConfig(values, str(file))
    model = _model(settings)
    arguments = found.get("args")
    evaluation_segment = SourceConfig(
        arguments.attributes if isinstance(arguments, PickledObject) else {}, str(file)
    ).get_int("eval_tgt_len", settings.get_int("tgt_len"))
    memory, segment = settings.get_int("mem_len"), settings.get_int("tgt_len")
    train, _ = length_settings(segment=segment, memory=memory, window=None)
    longer = max(0, memory + segment - evaluation_segment) if memory else 0
    _, evaluation = length_settings(
        segment=evaluation_segment, memory=longer, window=settings.attention_window(longer, keys_beside_memory=1)
    )
    config = check_settings(TransformerXLConfig, model, str(file))
    theirs = {str(name): content.tensor(record) for name, record in weights.items()}
    tokenizer = found.get("vocab")
    return ImportedModel(
        model=model,
        train=train,
        evaluation=evaluation,
        weights=import_weights(config, NVIDIA, theirs, str(file)),
        tokenizer=None if tokenizer is None else tokenizer_from_object(tokenizer, str(file)),
    )


def _model(settings: SourceConfig) -> dict[str, Any]:
    check_supported(settings)
    cutoffs, width = settings.get_ints("cutoffs"), settings.get_int("d_model")
    clamp = settings.get_int("clamp_len", -1)
    div_val, d_embed = settings.get_int("div_val", 1), settings.get_int("d_embed", width)
    projected = div_val > 1 or d_embed != width
    tied = settings.get("tie_projs", [False])
    return {
        "vocab_size": settings.get_int("n_token"),
        "n_layers": settings.get_int("n_layer"),
        "d_model": width,
        "n_heads": settings.get_int("n_head"),
        "d_head": settings.get_int("d_head"),
        "d_ff": settings.get_int("d_inner"),
        "dropout": settings.get_float("dropout", 0.0),
        "attention_dropout": settings.get_float("dropatt", 0.0),
        "norm_first": settings.get_bool("pre_lnorm", default=False),
        "final_norm": False,
        "d_embed": d_embed,
        "cutoffs": cutoffs,
        "div_val": div_val,
        "tie_word_embeddings": settings.get_bool("tie_weight", default=True),
        "tie_projections": parse_tied_projections(tied, len(cutoffs) + 1, settings.source) if projected else "all",
        "attention_window": settings.attention_window(settings.get_int("mem_len"), keys_beside_memory=1),
        "clamp_length": clamp if clamp > 0 else None,
    }
