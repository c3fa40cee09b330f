"""Settings of `txl reading-times`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from transformer_xl.config.settings import INT32_MAX, Settings


def _split(value: Any) -> Any:
    """Split several numbers in one string, such as `4,16`, as a flag gives them; None is none of them."""
    return value.split(",") if isinstance(value, str) else () if value is None else value


_Lengths = Annotated[tuple[Annotated[int, Field(ge=0, le=INT32_MAX)], ...], BeforeValidator(_split)]
_Counts = Annotated[tuple[Annotated[int, Field(ge=1, le=INT32_MAX)], ...], BeforeValidator(_split)]


class TableLayout(Settings):
    """The columns of a table of reading times, and how its values are written."""

    item_column: str = "item"
    """Column of what identifies a text."""
    word_number_column: str = "word_number"
    """Column of the position of the word in its text."""
    word_column: str = "word"
    """Column of the word, with the punctuation that touches it."""
    time_column: str = "time"
    """Column of the reading time in milliseconds."""
    reader_column: str | None = "reader"
    """Column of what identifies a reader; none: all rows are of one reader, such as means."""
    first_word_number: int = Field(default=1, ge=0, le=INT32_MAX)
    """The number of the first word of a text."""
    match: Literal["exact", "letters"] = "exact"
    """How words of the table must match those of the texts. exact: all characters; letters: letters and digits, whose
    case does not count."""
    decimal: Literal["point", "comma"] = "point"
    """What separates decimals in times."""
    quotes: bool = True
    """Whether quotation marks enclose values; otherwise they are characters of words."""
    min_time: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Shorter times are left out, in milliseconds."""
    max_time: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Longer times are left out, in milliseconds."""


class ReadingTimeSweep(Settings):
    """What the model sees in each fit to reading times, and what is fitted."""

    memory_lengths: _Lengths = (4, 16, 64, 256)
    """Memory lengths in tokens. Unless segment_length is given, each token sees exactly so many before it in each
    layer, wherever it is in its segment; none: only attention windows are compared."""
    attention_windows: _Counts = ()
    """Numbers of tokens that alone each token is predicted from, without memory (method sliding-window)."""
    ngram_orders: _Counts = ()
    """The longest n-grams whose embeddings are added, each with all lengths and windows; 1: none of them. The model was
    trained with all, so this takes away, as a lesion does. none: all of the model."""
    spillover: int = Field(default=1, ge=0, le=100)
    """Number of words before each whose predictors are used too."""
    log_times: bool = False
    """Fit the natural logarithm of the times."""
    mixed: bool = False
    """Also fit mixed models with random intercepts of readers and words."""
