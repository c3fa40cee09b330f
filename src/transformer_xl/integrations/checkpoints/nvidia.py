"""Read checkpoint_best.pt and checkpoint_last.pt of NVIDIA's Transformer-XL (DeepLearningExamples).

The file is a dictionary, saved with torch.save: `model_state` (weights by name), `model_config` (settings), `args`
(command line) and `vocab`. The state of training (optimizer, schedule, random state) is not imported.

NVIDIA's code differs from the authors' in two ways. With `same_length` a query attends to mem_len + 1 keys
instead of mem_len; and evaluation changes the segment length to `eval_tgt_len`, but keeps the sum of memory and
segment length.
"""

from __future__ import annotations

import re
from pathlib import Path

from transformer_xl.config import UserError
from transformer_xl.integrations.checkpoints.source_config import ImportedModel, SourceConfig
from transformer_xl.integrations.checkpoints.tokenizers import CORPUS_CLASSES, first_existing, tokenizer_from_object
from transformer_xl.integrations.checkpoints.torch_file import TorchFile
from transformer_xl.integrations.checkpoints.unpickler import PickledObject
from transformer_xl.integrations.checkpoints.weight_names import NVIDIA, import_weights

# the best and the newest weights; from a folder, the first of these files that exists is read
_FILES = ("checkpoint_best.pt", "checkpoint_last.pt")
_FILE = re.compile(r"checkpoint_(best|last|\d+)\.pt")  # or checkpoint_STEP.pt
ALLOWED_CLASSES = CORPUS_CLASSES | {"argparse.Namespace"}
"""Classes that the pickle may name; none of them is imported."""
_EXTRA_KEYS = 1  # with `same_length`, a query attends to this many keys more than memory slots


def recognizes(path: Path) -> bool:
    """Return whether the path is a checkpoint file of NVIDIA's code, or a folder that contains one."""
    return (_FILE.fullmatch(path.name) is not None and path.is_file()) or first_existing(path, _FILES) is not None


def read(path: Path) -> ImportedModel:
    """Read a checkpoint; from a folder, checkpoint_best.pt if it exists, else checkpoint_last.pt.

    Raises:
        UserError: the file is damaged, is not a checkpoint of NVIDIA's code, names a class that is not allowed, or
            cannot be expressed in this package.
    """
    file = first_existing(path, _FILES) or path
    content = TorchFile(file, ALLOWED_CLASSES)
    checkpoint = content.value if isinstance(content.value, dict) else {}
    weights, values = checkpoint.get("model_state"), checkpoint.get("model_config")
    if not isinstance(weights, dict) or not isinstance(values, dict):
        raise UserError(f"{file} is not a checkpoint of NVIDIA's train.py: it contains no model_state and model_config")
    # as Hugging Face names them; the other settings have the same names
    renamed = {"vocab_size": values.get("n_token"), "tie_word_embeddings": values.get("tie_weight")}
    settings = SourceConfig({**values, **renamed}, str(file))
    config = settings.model_config(extra_keys=_EXTRA_KEYS)
    train = settings.lengths()
    arguments = checkpoint.get("args")
    evaluation = SourceConfig(arguments.attributes if isinstance(arguments, PickledObject) else {}, str(file))
    segment = evaluation.get("eval_tgt_len", train["segment_length"])
    # a model without memory is also evaluated without one
    memory = max(0, train["memory_length"] + train["segment_length"] - segment) if train["memory_length"] else 0
    window = settings.attention_window(memory, extra_keys=_EXTRA_KEYS)
    tensors = content.tensors(weights)
    tokenizer = checkpoint.get("vocab")
    return ImportedModel(
        model=config.model_dump(),
        train=train,
        evaluation={"segment_length": segment, "memory_length": memory, "attention_window": window},
        weights=import_weights(config, NVIDIA, tensors, str(file)),
        tokenizer=None if tokenizer is None else tokenizer_from_object(tokenizer, str(file)),
    )
