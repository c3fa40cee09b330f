"""Settings of a user's text: which files are read, and how it is split. The fields are also flags of `txl prepare`."""

from __future__ import annotations

from io import BytesIO, TextIOWrapper
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from transformer_xl.config import INT32_MAX, Settings

InputFormat = Literal["text", "csv", "tsv", "jsonl", "json", "parquet", "arrow"]
"""What a file holds: a text, or a table with a text in each row."""

BINARY = "binary"
"""The encoding of files whose bytes are used as they are."""


class TextConfig(Settings):
    """Which files of folders and patterns are read, how they are decoded, and how their text is split."""

    valid_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of the text that becomes valid."""
    test_fraction: float = Field(default=0.05, ge=0, lt=1)
    """Fraction of the text that becomes test."""
    split_method: Literal["random", "end"] = "random"
    """random draws valid and test from all over the text: whole files or, where those are few or of very unequal size,
    blocks; end takes the end of the joined text."""
    seed: int = Field(default=1, ge=-INT32_MAX, le=INT32_MAX)
    """Seed of the random split."""
    include: tuple[str, ...] = ()
    """Pattern of the files to read in folders, such as '*.txt'; can be repeated."""
    exclude: tuple[str, ...] = ()
    """Pattern of files and folders to leave out, such as '*.log' or drafts; can be repeated."""
    encoding: str = "utf-8"
    """Encoding of the files, such as latin-1, cp1252 or utf-16; or binary, for the bytes of any file. Other files of a
    folder are left out."""
    input_format: InputFormat | None = None
    """What all files hold; text reads them as they are. If not set, what the content (or suffix) of each one says."""
    text_column: str | None = None
    """Column of the text in files with a document in each row; if not set, text, else the only one that has texts."""
    document_unit: Literal["file", "line"] | None = None
    """Whether each file (of a table, each row) or each line is a document; if not set, that of the data set, else
    file."""

    @field_validator("include", "exclude", mode="before")
    @classmethod
    def _one_pattern(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.valid_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"valid_fraction={self.valid_fraction:g} and test_fraction={self.test_fraction:g} leave nothing to "
                "train on; their sum must be below 1"
            )
        if self.split_method == "end" and "seed" in self.model_fields_set:
            raise ValueError(f"seed={self.seed} is for split_method=random, and end draws nothing; leave it out")
        if self.encoding != BINARY:
            try:
                TextIOWrapper(BytesIO(), self.encoding)
            except (LookupError, ValueError):
                raise ValueError(
                    f"encoding={self.encoding} is no encoding of text; give one such as utf-8, latin-1, cp1252 or "
                    f"utf-16, or {BINARY} for the bytes as they are"
                ) from None
        return self
