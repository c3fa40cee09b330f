"""The pre-tokenizer `punctuation`: splits English as the data set WikiText is split, and joins the words again.

    the well-known "Map" (1.80 m by 23,000 km) isn't his.
    the well @-@ known " Map " ( 1 @.@ 80 m by 23 @,@ 000 km ) isn 't his .

The rules are those of the tokenizer of Moses, a machine translation toolkit, for English (with its option for
aggressive hyphen splitting), with WikiText's replacements inside numbers. Hyphens between letters or digits become @-@,
commas and full stops between digits @,@ and @.@. Dashes, quotation marks, brackets, slashes, currency signs and other
symbols become separate words. An apostrophe is joined to the letters that follow it (isn 't, he 's), but is a separate
word at the start or end of a word (the players ' names, ' so ').

A full stop stays with its word if the word contains another full stop (U.S.), is a single letter or one of the
abbreviations below, or if the next word begins with a lowercase letter; otherwise it is a separate word. Special tokens
such as <unk> stay whole, and so do @-@ and 's between whitespace, so that text that is already split stays unchanged,
except for rare words. Whitespace is ASCII whitespace.

The detokenizer joins words from left to right and has to guess: every second quotation mark closes a quote, a slash and
an en dash between numbers have no spaces around them, and an apostrophe after a final s belongs to that word. Splitting
the result again gives the same words, except in rare cases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest

from transformer_xl.text.tokenizers.chunking import last_match_in_line
from transformer_xl.text.tokenizers.moses import JOINERS

_ATOM = re.compile(
    r"<[A-Za-z]+>"  # a special token such as <unk>
    r"|(?:[^\W_]|[\u0300-\u036f])+"  # letters and digits, with combining accents
    r"|\.{2,}"
    r"|.",
    flags=re.DOTALL,
)
"""The smallest parts of a text that are never split."""
_ABBREVIATIONS = re.compile(
    r"[A-Z]|Adj|Adm|Adv|Asst|Bart|Bldg|Brig|Bros|Capt|Cmdr|Col|Comdr|Con|Corp|Cpl|Drs?|Ens|Gen|Gov|Hon|Hosp|Insp|Lt|Maj"
    r"|Messrs|Mlle|Mme|Mrs?|Ms|Msgr|Nos|Nr|Op|Ord|Pfc|Ph|Prof|Pvt|Reps?|Res|Rev|Rt|Sens?|Sfc|Sgt|Sr|St|Supt|Surg|vs?"
)
"""Words that keep the full stop after them."""
_ABBREVIATIONS_BEFORE_NUMBERS = frozenset({"No", "Art", "pp", "p"})
"""Words that keep the full stop after them only if a number follows."""
_CONTRACTIONS = frozenset({"s", "t", "m", "d", "re", "ve", "ll"})  # after an apostrophe
_MAX_CACHED_BYTES = 40  # longer parts of a line are rarely repeated


def split_line(line: bytes) -> list[bytes]:
    """Return the words of one line of UTF-8 text."""
    words: list[bytes] = []
    chunks = line.split()
    for chunk, next_chunk in zip_longest(chunks, chunks[1:], fillvalue=b""):
        if chunk.isalnum():
            words.append(chunk)
        else:
            split = _split_cached if len(chunk) <= _MAX_CACHED_BYTES else _split_chunk
            words += split(chunk, _kind_of_start(next_chunk.decode("utf-8")) if chunk.endswith(b".") else "")
    return words


def _split_chunk(chunk: bytes, next_start: str) -> tuple[bytes, ...]:
    """Return the words of a part of the line between whitespace.

    Args:
        chunk: UTF-8 text without ASCII whitespace.
        next_start: `_kind_of_start` of the next chunk.
    """
    text = chunk.decode("utf-8")
    if text in JOINERS or (text[0] == "'" and text[1:] in _CONTRACTIONS):  # it was split before
        return (chunk,)
    words = ["".join(atoms) for atoms in _group_atoms(_ATOM.findall(text))]
    starts_after = [*map(_kind_of_start, words[1:]), next_start]
    split: list[str] = []
    for word, start_after in zip(words, starts_after, strict=True):
        split += [word[:-1], "."] if _ends_sentence(word, start_after) else [word]
    return tuple(word.encode("utf-8") for word in split)


_split_cached = lru_cache(maxsize=2**17)(_split_chunk)  # most words of a text are repeated


def _group_atoms(atoms: Sequence[str]) -> list[list[str]]:
    """Return the atoms that make up each word; full stops are not separated from the ends of words yet."""
    words: list[list[str]] = []
    word_is_open = False  # whether the last word may take more atoms
    for before, atom, after in zip(["", *atoms], atoms, [*atoms[1:], ""], strict=False):
        continues = _is_wordlike(atom) and not _is_special(before)
        if (atom in (",", ".") and _ends_number(before) and _starts_number(after)) or (
            atom == "-" and _is_wordlike(before) and _is_wordlike(after)
        ):
            words.append([f"@{atom}@"])
            word_is_open = False
        elif word_is_open and not _is_special(atom) and (continues or atom in ("-", ".")):
            words[-1].append(atom)
        else:
            words.append([atom])
            word_is_open = (
                continues or _is_special(atom) or atom in ("-", ".") or (atom == "'" and _contracts(before, after))
            )
    return words


def _is_special(atom: str) -> bool:
    """Return whether the atom is a special token."""
    return len(atom) > 2 and atom[0] == "<"


def _is_wordlike(atom: str) -> bool:
    """Return whether the atom starts with a letter, digit or combining accent, or is a special token."""
    return _is_special(atom) or atom[:1].isalnum() or "\u0300" <= atom[:1] <= "\u036f"


def _ends_number(atom: str) -> bool:
    return _is_special(atom) or atom[-1:].isnumeric()  # a special token may replace a number


def _starts_number(atom: str) -> bool:
    return _is_special(atom) or atom[:1].isnumeric()


def _contracts(before: str, after: str) -> bool:
    """Return whether an apostrophe between these atoms belongs to the second, as in isn 't and 1980 's."""
    return after.startswith("s") if before[-1:].isnumeric() else _is_wordlike(before) and after[:1].isalpha()


def _ends_sentence(word: str, next_start: str) -> bool:
    """Return whether the word ends in a full stop that is a separate word.

    Args:
        word: a word, possibly with a full stop at its end.
        next_start: `_kind_of_start` of the next word.
    """
    stem = word[:-1]
    if not stem or word[-1] != "." or stem[-1] == "." or next_start == "lowercase":
        return False
    if ("." in stem and any(map(str.isalpha, stem))) or _ABBREVIATIONS.fullmatch(stem):
        return False
    return not (stem in _ABBREVIATIONS_BEFORE_NUMBERS and next_start == "number")


def _kind_of_start(text: str) -> str:
    """Return whether a text begins with a "lowercase" letter, a "number" or special token, or anything else ("")."""
    first = text[:1]
    return "lowercase" if first.islower() else "number" if first.isdigit() or first == "<" else ""


_NO_SPACE_AFTER = frozenset("([{“‘«$£€¥#")
_NO_SPACE_BEFORE = frozenset(")]}”’»,.;:!?%°′″")
_NO_SPACE_AROUND = frozenset("/⁄—‑_")


class PunctuationDetokenizer:
    """Joins the words of a line, as `split_line` returns them, to text; spacing depends on the preceding words."""

    def __init__(self) -> None:
        self._previous = ""
        self._omit_next_space = True
        self._open_quotes: set[str] = set()
        self._after_hour = False  # whether the last two words can be the hour and the colon of a time such as 16:00
        self._withholds_dash = False

    def push(self, word: str) -> str:
        """Return the text of the word, with a space before it if one belongs there.

        An en dash after a number is withheld until the next word, which determines its spacing.
        """
        text = self._flush_dash(between_numbers=_starts_number(word)) if self._withholds_dash else ""
        if word == "–" and _ends_number(self._previous):
            self._withholds_dash = True
            return text
        space_before, space_after = self._spaces(word)
        text += " " * (space_before and not self._omit_next_space) + JOINERS.get(word, word)
        self._after_hour = word == ":" and self._previous.isnumeric()
        self._omit_next_space, self._previous = not space_after, word
        return text

    def finish(self) -> str:
        """Return a withheld en dash, or an empty string."""
        return self._flush_dash(between_numbers=False) if self._withholds_dash else ""

    def _flush_dash(self, *, between_numbers: bool) -> str:
        self._withholds_dash, self._previous, self._omit_next_space = False, "–", between_numbers
        return "–" if between_numbers else " –"

    def _spaces(self, word: str) -> tuple[bool, bool]:
        """Update the open quotes, and return whether a space may precede the word, and whether one may follow it."""
        if word in JOINERS or word in _NO_SPACE_AROUND or not word.isprintable():
            return False, False
        if word in self._open_quotes:
            self._open_quotes.remove(word)
            return False, True
        if word == "'" and self._previous.endswith("s"):  # the players' names
            return False, True
        if word in ('"', "'"):
            self._open_quotes.add(word)
            return True, False
        closes = word in _NO_SPACE_BEFORE or word.startswith(("'", ".."))
        closes = closes and not (word[0] == self._previous[-1:] == ".")
        is_contraction = self._previous == "’" and word in _CONTRACTIONS
        is_minutes = self._after_hour and len(word) == 2 and word.isnumeric()
        return not (closes or is_contraction or is_minutes), word not in _NO_SPACE_AFTER


_BOUNDARY = re.compile(
    rb"(?<=[^\s.])[ \t\r\v\f]"
    # after a full stop, a lowercase letter (or one that is lowercased) or a number would change the preceding word
    rb"|(?<=\.)[ \t\r\v\f](?=[ \t\r\v\f]*[^\sA-Za-z0-9<\x80-\xff])"
)


def last_boundary(text: bytes) -> int:
    """Return the last position where splitting changes no word: after a newline or before whitespace; 0 if none."""
    return last_match_in_line(_BOUNDARY, text)
