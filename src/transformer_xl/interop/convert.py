"""Old checkpoints into run folders, and runs into Hugging Face's layout.

    txl convert FROM TO          reader (by FORMATS) -> Foreign -> run folder
    txl convert RUN TO --to huggingface

A folder appears whole or not at all. Nothing in a checkpoint is ever run: see unpickler.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from transformer_xl.config import RunConfig, UserError, nearest, run_settings
from transformer_xl.files import as_user_error, atomic_folder, write_text
from transformer_xl.interop.foreign import Foreign
from transformer_xl.interop.tokenizers import with_bytes
from transformer_xl.model.build import build_model
from transformer_xl.run_folder import RunFolder, config_text
from transformer_xl.tensor_file import load_tensors, save_tensors
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, save_tokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizerName
from transformer_xl.text.tokenizers.word import WordTokenizer

Format = Literal["huggingface", "official", "nvidia", "tensorflow"]

FORMATS: dict[Format, str] = {
    "nvidia": "checkpoint_best.pt of NVIDIA's code",
    "official": "model.pt of the authors' PyTorch code",
    "huggingface": "a folder with Hugging Face's config.json and weights",
    "tensorflow": "a checkpoint of the authors' TensorFlow code",
}
"""The formats in the order in which they are looked for."""


class Reader(Protocol):
    """What a module of a format offers."""

    def recognises(self, path: Path) -> bool:
        """Whether the path looks like this format."""
        ...

    def read(self, path: Path) -> Foreign:
        """The model."""
        ...


@dataclass(frozen=True)
class Converted:
    """What a conversion gave."""

    format: str
    """What was read, or written."""
    parameters: int
    """Numbers in the model, shared ones counted once."""
    tokenizer: Tokenizer
    remarks: tuple[str, ...]
    """What was left out or deliberately differs."""


def to_run(
    source: Path,
    out: Path,
    *,
    format: str | None = None,
    tokenizer: str | None = None,
    splitting: PreTokenizerName | None = None,
) -> Converted:
    """Makes a run folder of another program's model.

    Args:
        source: its file or folder.
        out: the folder to make.
        format: one of `FORMATS`; none: the first that recognises the path.
        vocabulary: the folder of a run or corpus, a txl_tokenizer.json, or byte, for a model that comes without one.
        splitting: how text becomes the words of the vocabulary; none: as it was where the model comes from.

    Raises:
        UserError: nothing is there, it is not recognised, damaged, cannot be expressed, or has no vocabulary; a
            splitting for a vocabulary that is not of words.
    """
    _refuse_existing(out)
    chosen = _chosen(source, format)
    foreign = with_bytes(_reader(chosen).read(source))
    foreign = replace(foreign, tokenizer=_vocabulary(foreign, source, tokenizer))
    assert foreign.tokenizer is not None
    if splitting is not None:
        foreign = replace(foreign, tokenizer=_split(foreign.tokenizer, splitting))
    assert foreign.tokenizer is not None
    evaluation = {name: value for name, value in foreign.evaluation.items() if value is not None}
    values = {"model": foreign.model, "train": foreign.train, "evaluation": evaluation}
    config = run_settings(values, str(source))
    parameters = _check(config, foreign.weights, source)
    with atomic_folder(out) as aside:
        write_text(aside / "config.yaml", config_text(config))
        save_tokenizer(foreign.tokenizer, aside / "txl_tokenizer.json")
        (aside / "checkpoints").mkdir()
        save_tensors(aside / "model.safetensors", foreign.weights, {"step": "0"})
    return Converted(chosen, parameters, foreign.tokenizer, foreign.remarks)


def _split(tokenizer: Tokenizer, splitting: PreTokenizerName) -> Tokenizer:
    if not isinstance(tokenizer, WordTokenizer):
        raise UserError(f"--splitting {splitting} is for words, and this vocabulary has {tokenizer.kind}; leave it out")
    return replace(tokenizer, pre_tokenizer=replace(tokenizer.pre_tokenizer, name=splitting))


def to_huggingface(source: Path, out: Path) -> Converted:
    """Writes the best weights of a run in Hugging Face's layout.

    Raises:
        UserError: not a run, no weights, or a model that TransfoXL cannot express.
    """
    from transformer_xl.interop import huggingface

    _refuse_existing(out)
    folder = RunFolder.open(source)
    weights, _ = load_tensors(folder.weights_file())
    parameters = _check(folder.config, weights, source)
    remarks = huggingface.write(out, folder.config, weights, folder.tokenizer)
    return Converted("huggingface", parameters, folder.tokenizer, remarks)


def _refuse_existing(out: Path) -> None:
    with as_user_error(f"writing {out}"):
        if out.exists() or out.is_symlink():
            raise UserError(f"{out} exists already; choose another place or delete it first")


def _reader(format: Format) -> Reader:
    return cast(Reader, import_module(f"transformer_xl.interop.{format}"))


def _chosen(source: Path, format: str | None) -> Format:
    """The format asked for, or the one that recognises the path."""
    with as_user_error(f"reading {source}"):
        if (source / "config.yaml").exists():
            raise UserError(
                f"{source} is a run already; 'txl convert {source} TO --to huggingface' writes it for others"
            )
        if format is not None and format not in FORMATS:
            raise UserError(f"no format '{format}'{nearest(format, FORMATS)}; known: {', '.join(sorted(FORMATS))}")
        found = [name for name in FORMATS if _reader(name).recognises(source)]
        if not source.exists() and not found:
            raise UserError(f"{source}: no such file or folder; wanted {_wanted()}")
        if not found and format in (None, "huggingface") and (source.parent / "config.json").is_file():
            raise UserError(f"{source} is not recognised alone; give its folder, {source.parent}")
    if format is not None:
        return format
    if not found:
        raise UserError(f"{source} is not recognised; wanted {_wanted()}; --format NAME says which it is")
    return found[0]


def _wanted() -> str:
    return ", or ".join(FORMATS.values())


def _vocabulary(foreign: Foreign, source: Path, asked: str | None) -> Tokenizer:
    """The model's own vocabulary, or the one asked for; of the model's size."""
    size = foreign.model["vocab_size"]
    if asked is None and foreign.tokenizer is None:
        raise UserError(
            f"{source} comes without its vocabulary of {size:,} tokens; give --vocabulary and the folder of a run or "
            "corpus that has it, or byte"
        )
    found = foreign.tokenizer
    if asked is not None:
        found = ByteTokenizer() if asked == "byte" else load_tokenizer(asked)
    assert found is not None
    if found.vocab_size != size:
        where = f"--vocabulary {asked}" if asked is not None else f"the vocabulary of {source}"
        raise UserError(
            f"{where} has {found.vocab_size:,} tokens and the model {size:,}; the two do not belong together"
        )
    return found


def _check(config: RunConfig, weights: Mapping[str, Tensor], source: Path) -> int:
    """Compares names, shapes and numbers with what the settings ask for; gives the number of parameters.

    Raises:
        UserError: a weight is not a number, or has the wrong shape.
    """
    with torch.device("meta"):
        model = build_model(config.model)
    own: dict[str, Any] = dict(model.state_dict())
    odd = sorted(own.keys() ^ weights.keys()) or [name for name in own if own[name].shape != weights[name].shape]
    if odd:
        raise UserError(f"{source}: weight '{odd[0]}' is missing, too many or of the wrong shape for its settings")
    for name, weight in weights.items():
        if not bool(weight.isfinite().all()):
            raise UserError(
                f"{source}: weight '{name}' holds what is no number (nan or infinity); get another checkpoint"
            )
    return model.num_parameters()
