"""Convert checkpoints of other programs to run folders, and runs to folders for Hugging Face's transformers.

    convert(source, out)                       reader of the format -> ImportedModel -> run folder
    convert(run, out, to="huggingface")

`txl convert` calls this. Nothing in a checkpoint is executed (see unpickler.py), and the output folder appears only
when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from transformer_xl.architectures import build_model
from transformer_xl.checkpoint_record import ChosenWeights
from transformer_xl.config import RunConfig, UserError, check_type, checked_names, nearest, run_settings
from transformer_xl.display import Displayed
from transformer_xl.files import as_path, as_user_error, check_is_new, quoted
from transformer_xl.integrations.checkpoints import huggingface, nvidia, official, pretrained, tensorflow, xlnet
from transformer_xl.integrations.checkpoints.model_card import model_card
from transformer_xl.integrations.checkpoints.source_config import ImportedModel
from transformer_xl.integrations.checkpoints.tokenizers import bytes_from_decimal_words, read_checkpoint_json
from transformer_xl.integrations.int8 import to_int8
from transformer_xl.model.lora import PEFT_CONFIG_FILE
from transformer_xl.run import Run, load, save
from transformer_xl.run_folder import CLASSIFIER_FILE, HEAD, RunFolder
from transformer_xl.tensor_file import load_tensors
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer, describe_difference, load_tokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizerName
from transformer_xl.text.tokenizers.word import WordTokenizer

FormatName = Literal["huggingface", "official", "nvidia", "tensorflow"]
OutputName = Literal["run", "int8", "huggingface", "huggingface-4.37"]


class Format(NamedTuple):
    """A checkpoint format of another program."""

    description: str
    recognizes: Callable[[Path], bool]
    """Returns whether a path looks like this format; it reads little and never raises."""
    read: Callable[[Path], ImportedModel]
    """Reads a checkpoint; raises UserError if it is damaged or cannot be expressed in this package."""


FORMATS: dict[FormatName, Format] = {
    "nvidia": Format("checkpoint_best.pt of NVIDIA's code", nvidia.recognizes, nvidia.read),
    "official": Format("model.pt of the authors' PyTorch code", official.recognizes, official.read),
    "huggingface": Format("a folder of Hugging Face's transformers", huggingface.recognizes, huggingface.read),
    "tensorflow": Format(
        "a checkpoint of the authors' TensorFlow code (or XLNet's)", tensorflow.recognizes, tensorflow.read
    ),
}
"""All formats, in the order in which they are tried."""
_OUTPUTS = [name for name in get_args(OutputName) if name != "run"]


@dataclass(frozen=True, repr=False)
class ConversionResult(Displayed):
    """The result of a conversion."""

    format: str
    """Name of the format that was read, or of the one that was written."""
    parameters: int
    """Number of parameters; shared ones count once."""
    tokenizer: Tokenizer
    notes: tuple[str, ...]
    """Sentences for the user about what was left out or differs."""
    weights: ChosenWeights | None = None
    """Which weights of a run were written, if a run was the source."""
    readers: str | None = None
    """Which programs read what was written, or None for a run."""


@checked_names
def convert(
    source: Path | str,
    out: Path | str,
    *,
    to: OutputName = "run",
    source_format: FormatName | None = None,
    tokenizer: str | Path | Tokenizer | None = None,
    pre_tokenizer: PreTokenizerName | None = None,
    base: Path | str | None = None,
    eos_token: str | None = None,
    add_bos_token: bool = False,
    license: str | None = None,
) -> ConversionResult:
    """Convert a checkpoint of another program to a run folder, or a run to a folder for Hugging Face's transformers.

    An adapter (of `finetune` with `lora_rank`) is merged into the weights of its base. Nothing in a checkpoint is
    executed. The output folder appears only when it is complete.

    Args:
        source: the checkpoint's file or folder, or the folder of an adapter; unless `to` is "run", any run folder.
        out: folder to create; it must not exist.
        to: what to write: a run folder; "int8", one with 8-bit weights (see `to_int8`); "huggingface", a folder that
            transformers 5 opens with this package, or without it if the model is XLNet; or "huggingface-4.37", one in
            the layout that transformers 4.37.2 and older load without it.
        source_format: one of `FORMATS`, or None to detect it from the files.
        tokenizer: the model's tokenizer or its path (a run folder, a corpus or a txl_tokenizer.json file), or "byte"
            for a byte tokenizer, also where the checkpoint's words are byte values in decimal, or "integer" if tokens
            are the model's ids themselves, 0 to V - 1, written as integers; required if the checkpoint has none.
        pre_tokenizer: how a word tokenizer splits text into words: "whitespace", "punctuation" (with punctuation split
            from words, as in WikiText) or "moses" (as TransfoXLTokenizer does); or None to split it as the program that
            wrote the checkpoint does.
        base: for an adapter, the folder of its base, or None for where it was. Its checksum must be the recorded one.
        eos_token: for "huggingface", the token at which their programs end a text: a word, or the text of a token such
            as "\n"; None for the token that ends documents, if the tokenizer has one.
        add_bos_token: for "huggingface", whether its tokenizer begins each text with the beginning-of-sequence token,
            so that programs score the first token of a text too.
        license: for "huggingface", the identifier of the model's licence on the Hub, such as "apache-2.0", for the
            model card (README.md); None says in it that none was given.

    Returns:
        the format, the number of parameters, the tokenizer, who can read the result, and notes on what was left out or
        differs.

    Raises:
        UserError: the source is missing, damaged, not recognized or cannot be expressed in this package; its tokenizer
            is missing or has another vocabulary size than the model; or an argument does not apply to the conversion.
    """
    if to not in get_args(OutputName):
        raise UserError(f"no output format '{to}'{nearest(to, get_args(OutputName))}; known: {', '.join(_OUTPUTS)}")
    source, out = as_path(source, "source", "give the path of a checkpoint"), as_path(out, "out")
    known = (str, Path, Tokenizer, type(None))
    check_type(tokenizer, known, "tokenizer", "give a path, 'byte', 'integer' or a Tokenizer")
    check_is_new(out)
    for name, value in (
        ("eos_token", eos_token),
        ("add_bos_token", add_bos_token or None),
        ("license", license),
    ):
        if value is not None and to != "huggingface":
            raise UserError(f"{name}={value} is for to=huggingface; leave it out")
    is_adapter = (source / PEFT_CONFIG_FILE).exists() and (source / "config.yaml").exists()
    if to != "run" or is_adapter:
        options = {"source_format": source_format, "tokenizer": tokenizer, "pre_tokenizer": pre_tokenizer}
        if inapplicable := [f"{name}={value}" for name, value in options.items() if value is not None]:
            other = f"to={to}" if to != "run" else "an adapter"
            raise UserError(f"{', '.join(inapplicable)} cannot be combined with {other}; leave the former out")
        return _export(source, out, to, base, eos_token, add_bos_token, license)
    if base is not None:
        raise UserError(f"{source} is no adapter; leave out base={base}")

    format_name = _choose_format(source, source_format)
    imported = FORMATS[format_name].read(source)
    run_tokenizer = _requested_tokenizer(tokenizer, imported)
    # the authors' enwik8 models have a vocabulary of words, each of which is a byte value in decimal
    imported = bytes_from_decimal_words(imported, run_tokenizer)
    run_tokenizer, notes = _choose_tokenizer(imported, source, run_tokenizer, tokenizer)
    if pre_tokenizer is not None:
        if not isinstance(run_tokenizer, WordTokenizer):
            raise UserError(f"leave out pre_tokenizer: it is for word tokenizers, and this one is {run_tokenizer.kind}")
        run_tokenizer = replace(run_tokenizer, pre_tokenizer=replace(run_tokenizer.pre_tokenizer, name=pre_tokenizer))
    settings = {"model": imported.model, "train": imported.train, "evaluation": imported.evaluation}
    config = run_settings(settings, str(source))
    parameters = _check_weights(config, imported.weights, source)
    RunFolder.create(out, config, run_tokenizer, imported.weights)
    return ConversionResult(format_name, parameters, run_tokenizer, (*imported.notes, *notes))


def _export(
    source: Path,
    out: Path,
    to: OutputName,
    base: Path | str | None,
    eos_token: str | None,
    add_bos_token: bool,
    license: str | None,
) -> ConversionResult:
    """Write a run as a folder for transformers, or an adapter, merged into its base, as a run."""
    run = load(source, device="cpu", base=base)
    run.model.check_plain("converted")
    weights = run.model.state_dict()
    parameters = _check_weights(run.config, weights, source)
    notes: tuple[str, ...] = ()
    readers: str | None = None
    if to in ("run", "int8"):
        save(run if to == "run" else to_int8(run), out)
    elif to == "huggingface":
        is_classifier = (source / CLASSIFIER_FILE).exists()
        record = read_checkpoint_json(source / CLASSIFIER_FILE) if is_classifier else None
        head = _classifier_head(run, record) if record else None
        try:
            card = model_card(run, out.name, license, record)
        except (KeyError, TypeError) as error:
            raise UserError(f"{source / CLASSIFIER_FILE} is damaged ({error}); get the classifier again") from None
        if run.config.model.architecture == xlnet.MODEL_TYPE and head is None:
            if eos_token is not None or add_bos_token:
                raise UserError("transformers' XLNet has no such settings; leave out eos_token and add_bos_token")
            notes = xlnet.write(out, run.config, weights, run.tokenizer, card)
            readers = xlnet.READERS
        else:
            lengths = run.memory_lengths
            pretrained.write(out, run.config, weights, run.tokenizer, lengths, eos_token, add_bos_token, head, card)
            readers = pretrained.READERS
    else:
        notes = huggingface.write(out, run.config, weights, run.tokenizer, run.memory_lengths)
        readers = huggingface.READERS
    temperature = run.config.evaluation.softmax_temperature
    if temperature != 1 and readers is not None:
        notes += (
            f"evaluation.softmax_temperature {temperature:g} of the run is not in the folder: its loss is without",
        )
    return ConversionResult("adapter" if to == "run" else to, parameters, run.tokenizer, notes, run.weights, readers)


def _classifier_head(run: Run, record: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Return the settings of a classifier's head by the names of config.json, and its weights.

    Raises:
        UserError: classifier.json is damaged.
    """
    assert run.path is not None
    assert run.weights is not None
    file = run.path / CLASSIFIER_FILE
    try:
        labels = dict(enumerate(record["labels"]))
        settings = {"classifier_pooling": record["pooling"], "classifier_segments": record["loss_segments"]}
    except (KeyError, TypeError):
        raise UserError(f"{file} has no labels; get the classifier again") from None
    if not record.get("validations"):
        raise UserError(f"{run.path} is not trained yet; go on with: txl train --resume {quoted(run.path)}")
    settings |= {"id2label": labels, "label2id": {label: index for index, label in labels.items()}}
    return settings, load_tensors(run.weights.used.file)[0][HEAD]


def _choose_format(source: Path, requested: FormatName | None) -> FormatName:
    """Return the requested format, or the first one that recognizes the path."""
    if requested is not None and requested not in FORMATS:
        raise UserError(f"no format '{requested}'{nearest(requested, FORMATS)}; known: {', '.join(sorted(FORMATS))}")
    with as_user_error(f"reading {source}"):
        if (source / "config.yaml").exists():
            raise UserError(f"{source} is a run already; add to=huggingface to write it for other programs")
        recognized = next((name for name, format in FORMATS.items() if format.recognizes(source)), None)
        expected = "expected " + ", or ".join(format.description for format in FORMATS.values())
        if recognized is None:
            if not source.exists():
                raise UserError(f"{source}: no such file or folder; {expected}")
            if requested in (None, "huggingface") and (source.parent / "config.json").is_file():
                raise UserError(f"{source} is one file of a checkpoint; pass its folder, {source.parent}")
    format_name = requested or recognized
    if format_name is None:
        raise UserError(f"{source} is not recognized; {expected}; source_format=NAME sets the format")
    return format_name


def _requested_tokenizer(requested: str | Path | Tokenizer | None, imported: ImportedModel) -> Tokenizer | None:
    """Return the tokenizer that the user gives or names, or None."""
    if requested is None or isinstance(requested, Tokenizer):
        return requested
    match str(requested):
        case "byte":
            return ByteTokenizer()
        case "integer":
            return IntegerTokenizer(imported.model["vocab_size"], add_eos=False)
    return load_tokenizer(requested)


def _choose_tokenizer(
    imported: ImportedModel, source: Path, tokenizer: Tokenizer | None, requested: object
) -> tuple[Tokenizer, tuple[str, ...]]:
    """Return the requested tokenizer, or else the checkpoint's, and a note if the first differs from the second.

    Raises:
        UserError: there is no tokenizer, or its vocabulary size is not that of the model.
    """
    vocab_size, own = imported.model["vocab_size"], imported.tokenizer
    origin = f"the tokenizer of {source}" if requested is None else f"tokenizer={requested}"
    chosen = tokenizer or own
    if chosen is None:
        raise UserError(
            f"{source} has no tokenizer for its {vocab_size:,} tokens; pass tokenizer=PATH of a run or corpus, "
            "tokenizer=byte, or tokenizer=integer if its tokens are plain ids (music, numbers)"
        )
    if chosen.vocab_size != vocab_size:
        raise UserError(f"{origin} has {chosen.vocab_size:,} tokens, but the model has {vocab_size:,}; pass its own")
    difference = describe_difference(chosen, own) if own else None
    return chosen, ((f"{origin} is not the checkpoint's own: {difference}",) if difference else ())


def _check_weights(config: RunConfig, weights: Mapping[str, Tensor], source: Path) -> int:
    """Compare weights with the settings, and return the number of parameters.

    Raises:
        UserError: a weight is missing, unknown, of the wrong shape, or not finite.
    """
    with torch.device("meta"):  # tensors with shapes only, without contents
        model = build_model(config.model)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name in sorted(shapes.keys() | weights.keys()):
        weight = weights.get(name)
        if weight is None or weight.shape != shapes.get(name):
            raise UserError(f"{source}: weight '{name}' is missing, unknown or of another shape than the settings need")
        if not bool(weight.isfinite().all()):
            raise UserError(f"{source}: weight '{name}' contains nan or infinity; get another checkpoint")
    return model.num_parameters()
