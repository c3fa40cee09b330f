"""Where text comes from: corpora known by name (`named_corpora`), and one's own files (`own_files`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from glob import has_magic
from pathlib import Path

from transformer_xl.config import UserError, nearest
from transformer_xl.files import as_user_error
from transformer_xl.text.documents import SPLITS, SplitName
from transformer_xl.text.sources.named_corpora import CORPUS_NAMES, open_corpus
from transformer_xl.text.sources.own_files import cut_splits, given_splits, list_texts
from transformer_xl.text.sources.source_files import ANYWHERE, Origin
from transformer_xl.text.sources.text_source import TextSource

DEFAULT_FRACTION = 0.05
"""Share of one's own text kept for valid, and as much for test, unless told otherwise."""


def find_text(
    sources: Sequence[str],
    *,
    given: Mapping[SplitName, Sequence[str]],
    fractions: Mapping[SplitName, float | None] | None = None,
    kind: str | None = None,
    origin: Origin = ANYWHERE,
) -> TextSource:
    """The text that a command line names.

    Args:
        sources: one name of `CORPUS_NAMES`, or files, folders and patterns whose joined text is cut into the three
            splits, in order.
        given: files, folders and patterns of each split, instead of `sources`.
        fractions: shares of the joined text, in [0, 1), that become valid and test (the end of the text); none:
            `DEFAULT_FRACTION`.
        kind: the kind of vocabulary that will read the text; none: the one the text is normally read with.
        origin: where the files of a named corpus are, and who is told how far reading them is.

    Raises:
        UserError: something is missing, unreadable, empty, unknown, out of range or contradictory.
    """
    given = {split: given[split] for split in SPLITS if given.get(split)}
    asked = {split: share for split, share in (fractions or {}).items() if share is not None}
    if sources and given:
        raise UserError(
            f"both text to cut ({list_texts(sources)}) and --{next(iter(given))} were given; "
            "write --train before the files to train on, or leave the split options out"
        )
    if not sources and not given:
        raise UserError(
            f"no text was given; name files, folders, --train FILE, or a corpus ({', '.join(CORPUS_NAMES)})"
        )
    named = [source for source in sources if source in CORPUS_NAMES]
    if origin.source and not named:
        raise UserError(
            f"--source {origin.source} is for a corpus known by name ({', '.join(CORPUS_NAMES)}); files of your own "
            "are named without it"
        )
    if given:
        if asked:
            raise UserError("fractions cut one text into splits, but the splits are given; leave the fractions out")
        return given_splits(given, kind)
    if not named:
        _refuse_unknown(sources)
        return cut_splits(sources, {"valid": DEFAULT_FRACTION, "test": DEFAULT_FRACTION, **asked}, kind)
    if len(sources) > 1:
        raise UserError(
            f"the corpus {named[0]} stands alone, but {len(sources)} sources were given; leave the others out, or "
            f"write ./{named[0]} for a file of that name"
        )
    if asked:
        raise UserError(f"the splits of {named[0]} are fixed; leave the fractions out")
    return open_corpus(named[0], origin, kind=kind)


def _refuse_unknown(sources: Sequence[str]) -> None:
    """Offers the nearest corpus for what is no file."""
    for source in sources:
        with as_user_error(f"reading {source}"):
            there = not source or Path(source).exists() or has_magic(source)
        if not there:
            raise UserError(
                f"'{source}' is neither a file nor a folder nor a known corpus{nearest(source, CORPUS_NAMES)}; check "
                f"the spelling (known corpora: {', '.join(CORPUS_NAMES)})"
            )
