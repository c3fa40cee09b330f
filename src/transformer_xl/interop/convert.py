"""Convert checkpoints of other programs to run folders, and runs to the Hugging Face layout.

    convert(source, out)                       reader (see FORMATS) -> ImportedModel -> run folder
    convert(run, out, to="huggingface")

A folder appears whole or not at all. Nothing in a checkpoint is executed: see unpickler.py.
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
from transformer_xl.interop.imported import ImportedModel
from transformer_xl.interop.tokenizers import bytes_from_decimal_words
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
"""The formats, in the order in which they are tried."""


class Reader(Protocol):
    """The interface of a format's module."""

    def recognizes(self, path: Path) -> bool:
        """Return whether the path looks like this format; cheap, never raises."""
        ...

    def read(self, path: Path) -> ImportedModel:
        """Read the model; UserError says what cannot be read or expressed."""
        ...


@dataclass(frozen=True)
class ConversionResult:
    """The result of a conversion."""

    format: str
    """Format that was read, or written."""
    parameters: int
    """Number of parameters, shared ones counted once."""
    tokenizer: Tokenizer
    remarks: tuple[str, ...]
    """What was left out or differs, for the user."""


def convert(
    source: Path | str,
    out: Path | str,
    *,
    to: Literal["run", "huggingface"] = "run",
    source_format: Format | None = None,
    tokenizer: str | Path | None = None,
    pre_tokenizer: PreTokenizerName | None = None,
) -> ConversionResult:
    """Convert a checkpoint of another program to a run folder, or a run to the Hugging Face layout.

    Nothing in a checkpoint is executed. The output folder appears whole or not at all.

    Args:
        source: the checkpoint's file or folder; with `to="huggingface"`, a run folder.
        out: folder to make; it must not exist.
        to: what to write: a run folder, or the layout that transformers 4.37.2 and older load.
        source_format: one of `FORMATS`; None: told from the files.
        tokenizer: a run, a corpus or a txl_tokenizer.json whose tokenizer the model uses, or "byte"; needed where the
            checkpoint comes without one.
        pre_tokenizer: how a word tokenizer splits text; None: as in the program that the checkpoint comes from.

    Returns:
        the format, the number of parameters, the tokenizer, and remarks on what was left out or differs.

    Raises:
        UserError: the source is missing, damaged, not recognized or cannot be expressed; its tokenizer is missing or of
            another size; or an argument does not apply.
    """
    source, out = Path(source), Path(out)
    _refuse_existing(out)
    if to == "huggingface":
        options = {"source_format": source_format, "tokenizer": tokenizer, "pre_tokenizer": pre_tokenizer}
        given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
        if given:
            raise UserError(
                f"{', '.join(given)}: only for checkpoints of other programs; leave out with --to huggingface"
            )
        return _to_huggingface(source, out)
    return _to_run(source, out, source_format, tokenizer, pre_tokenizer)


def _to_run(
    source: Path,
    out: Path,
    source_format: str | None,
    tokenizer: str | Path | None,
    pre_tokenizer: PreTokenizerName | None,
) -> ConversionResult:
    chosen = _choose_format(source, source_format)
    imported = bytes_from_decimal_words(_reader(chosen).read(source))
    found = _choose_tokenizer(imported, source, tokenizer)
    if pre_tokenizer is not None:
        if not isinstance(found, WordTokenizer):
            raise UserError(f"--pre-tokenizer {pre_tokenizer} is for word tokenizers, and this one is {found.kind}")
        found = replace(found, pre_tokenizer=replace(found.pre_tokenizer, name=pre_tokenizer))
    evaluation = {name: value for name, value in imported.evaluation.items() if value is not None}
    values = {"model": imported.model, "train": imported.train, "evaluation": evaluation}
    config = run_settings(values, str(source))
    parameters = _check_weights(config, imported.weights, source)
    with atomic_folder(out) as aside:
        write_text(aside / "config.yaml", config_text(config))
        save_tokenizer(found, aside / "txl_tokenizer.json")
        (aside / "checkpoints").mkdir()
        save_tensors(aside / "model.safetensors", imported.weights, {"step": "0"})
    return ConversionResult(chosen, parameters, found, imported.remarks)


def _to_huggingface(source: Path, out: Path) -> ConversionResult:
    from transformer_xl.interop import huggingface

    folder = RunFolder.open(source)
    weights, _ = load_tensors(folder.weights_file())
    parameters = _check_weights(folder.config, weights, source)
    remarks = huggingface.write(out, folder.config, weights, folder.tokenizer)
    return ConversionResult("huggingface", parameters, folder.tokenizer, remarks)


def _refuse_existing(out: Path) -> None:
    with as_user_error(f"writing {out}"):
        if out.exists() or out.is_symlink():
            raise UserError(f"{out} exists already; choose another folder or delete it first")


def _reader(format: Format) -> Reader:
    return cast(Reader, import_module(f"transformer_xl.interop.{format}"))


def _choose_format(source: Path, format: str | None) -> Format:
    """Return the format that was asked for, or the first whose reader recognizes the path."""
    with as_user_error(f"reading {source}"):
        if (source / "config.yaml").exists():
            raise UserError(
                f"{source} is a run already; 'txl convert {source} TO --to huggingface' writes it for others"
            )
        if format is not None and format not in FORMATS:
            raise UserError(f"no format '{format}'{nearest(format, FORMATS)}; known: {', '.join(sorted(FORMATS))}")
        found = [name for name in FORMATS if _reader(name).recognizes(source)]
        if not source.exists() and not found:
            raise UserError(f"{source}: no such file or folder; wanted {_wanted()}")
        if not found and format in (None, "huggingface") and (source.parent / "config.json").is_file():
            raise UserError(f"{source} is not recognised alone; give its folder, {source.parent}")
    if format is not None:
        return cast(Format, format)
    if not found:
        raise UserError(f"{source} is not recognised; wanted {_wanted()}; --source-format NAME says which it is")
    return found[0]


def _wanted() -> str:
    return ", or ".join(FORMATS.values())


def _choose_tokenizer(imported: ImportedModel, source: Path, asked: str | Path | None) -> Tokenizer:
    """Return the tokenizer that was asked for, or the checkpoint's own; it must have the model's vocabulary size."""
    size = imported.model["vocab_size"]
    if asked is not None:
        found, where = ByteTokenizer() if asked == "byte" else load_tokenizer(asked), f"--tokenizer {asked}"
    elif imported.tokenizer is not None:
        found, where = imported.tokenizer, f"the tokenizer of {source}"
    else:
        raise UserError(
            f"{source} comes without a tokenizer for its vocabulary of {size:,} tokens; give --tokenizer and the "
            "folder of a run or corpus that has it, or byte"
        )
    if found.vocab_size != size:
        raise UserError(
            f"{where} has {found.vocab_size:,} tokens and the model {size:,}; the two do not belong together"
        )
    return found


def _check_weights(config: RunConfig, weights: Mapping[str, Tensor], source: Path) -> int:
    """Compare names, shapes and values with what the settings need; return the number of parameters.

    Raises:
        UserError: a weight is missing, unknown, of the wrong shape, or not finite.
    """
    with torch.device("meta"):
        model = build_model(config.model)
    own: dict[str, Any] = dict(model.state_dict())
    odd = sorted(own.keys() ^ weights.keys()) or [name for name in own if own[name].shape != weights[name].shape]
    if odd:
        raise UserError(f"{source}: weight '{odd[0]}' is missing, unexpected or of the wrong shape for its settings")
    for name, weight in weights.items():
        if not bool(weight.isfinite().all()):
            raise UserError(
                f"{source}: weight '{name}' is not finite (it holds nan or infinity); get another checkpoint"
            )
    return model.num_parameters()
