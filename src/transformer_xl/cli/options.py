"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import CoercionError, Parameter, Token, convert

from transformer_xl.config import UserError, whole_number
from transformer_xl.text.text_config import InputFormat

if TYPE_CHECKING:
    import torch


def _convert_integer(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert the value of a flag; 1e3 is 1000, and 1.5 is no integer (cyclopts would round it)."""
    number = str(whole_number(tokens[0].value))
    with suppress(CoercionError):  # which does not have the name of the flag
        if "." not in number:
            return convert(kind, [number])
    raise ValueError(f'unable to convert "{tokens[0].value}" into int.')


Integer = Parameter(converter=_convert_integer, n_tokens=1)
"""Annotation of a flag that takes an integer."""

Int8 = Annotated[
    bool,
    Parameter(negative=(), help="Store the matrices of linear layers in 8 bits, with torchao: smaller and less exact."),
]
Json = Annotated[bool, Parameter(negative=(), help="Print one JSON object and nothing else on standard output.")]
JsonLines = Annotated[bool, Parameter(negative=(), help="Print only JSON on standard output, one object per line.")]


@dataclass(frozen=True)
class DeviceOptions:
    """The device and the number of CPU threads that a command uses."""

    device: str = "auto"
    """cuda, mps or cpu; auto: the fastest that is available."""
    threads: Annotated[int | None, Integer] = None
    """Number of CPU threads for one operation. [default: torch's]"""

    def choose(self) -> torch.device:
        """Set the number of threads and return the device.

        Raises:
            UserError: the device does not exist, or the number of threads is out of range.
        """
        from transformer_xl.device import choose_device, set_threads

        set_threads(self.threads)
        return choose_device(self.device)


DeviceFlags = Annotated[DeviceOptions, Parameter(name="*")]
DEFAULT_DEVICE = DeviceOptions()


@dataclass(frozen=True)
class WordOptions:
    """Options of `--per word` alone, except out."""

    whitespace: Literal["leading", "trailing"] | None = None
    """Whether the space between two words belongs to the second, or to the first, which it ends. [default: leading]"""
    sweep_memory_length: str | None = None
    """Several memory lengths, such as 0,64,512; each gives a column. [default: only that of --memory-length]"""
    input_format: InputFormat | None = None
    """Each line of a text is an item, or each row of a table. [default: by the content of the file, or its suffix]"""
    text_column: str | None = None
    """Column of the text in a table. [default: text]"""
    item_columns: str | None = None
    """Columns that together identify an item, separated by commas, such as item,condition. [default: item]"""
    document_column: str | None = None
    """Column of the document, at whose start memory is empty. [default: a file is a document]"""
    out: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None
    """New CSV file, also by token, line or file; - is standard output."""
    plot: Path | None = None
    """New file for a plot of the first items, .svg or .png."""

    @property
    def is_on_stdout(self) -> bool:
        """Whether the table is printed as CSV."""
        return self.out == Path("-")


WordFlags = Annotated[WordOptions, Parameter(name="*")]
NO_WORD_OPTIONS = WordOptions()


@dataclass(frozen=True)
class DocumentOptions:
    """What is a document, in files that are read as documents."""

    per: Literal["file", "line"] | None = None
    """Of a text, whether the file is a document, or each line. [default: file; of a table, each row]"""
    input_format: InputFormat | None = None
    """A text, or a table with a document in each row. [default: by the content of the file, or its suffix]"""
    text_column: str | None = None
    """Column of the text in a table. [default: text]"""


DocumentFlags = Annotated[DocumentOptions, Parameter(name="*")]
NO_DOCUMENT_OPTIONS = DocumentOptions()


@dataclass(frozen=True)
class ClassifierOptions:
    """Options of `--task classification` alone."""

    labels: str | None = None
    """With classification, the column of the labels in a table."""
    valid: Annotated[tuple[Path, ...], Parameter(negative=())] = ()
    """With classification, a file of documents to validate with; may be repeated. [default: some of the documents]"""
    valid_fraction: float | None = None
    """With classification, the fraction of the documents to validate with. [default: 0.1]"""
    pooling: Literal["last", "mean"] | None = None
    """With classification, what the label is predicted from: the hidden state of the last token, or the mean of those
    of all tokens. [default: last]"""
    loss_segments: Annotated[int | None, Integer] = None
    """With classification, number of segments at the end of a document that are read with gradients. [default: 2]"""


ClassifierFlags = Annotated[ClassifierOptions, Parameter(name="*")]
NO_CLASSIFIER_OPTIONS = ClassifierOptions()


def parse_integers(flag: str, text: str, *, minimum: int = 1) -> tuple[int, ...]:
    """Parse integers separated by commas, such as 800,1800.

    Raises:
        UserError: the text is not a list of integers, or one is below `minimum`.
    """
    parts = [str(whole_number(part.strip())) for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and minimum <= int(part) < 10**7 for part in parts):
        raise UserError(f"{flag} {text}: must be integers of at least {minimum} separated by commas, such as 800,1800")
    return tuple(int(part) for part in parts)
