"""The pre-tokenizer `punctuation`: English split into words in the forms of WikiText, and put together again.

    the well-known "Map" (1.80 m by 23,000 km) isn't his.
    the well @-@ known " Map " ( 1 @.@ 80 m by 23 @,@ 000 km ) isn 't his .

The rules are those of the Moses tokenizer for English (with aggressive hyphen splitting), with the joiners that
WikiText has inside numbers. Hyphens between letters or digits become @-@, commas and full stops between digits @,@ and
@.@. Dashes, quotation marks, brackets, slashes, currency signs and the like become words of their own. An apostrophe
goes with the letters after it (isn 't, he 's), and is a word of its own after or before a word (the players ' names,
' so ').

A full stop stays with a word that has another one inside (U.S.), with a single letter, with the abbreviations listed
below, and if the next word begins with a lowercase letter; anywhere else it is a word of its own. Special tokens such
as <unk> stay whole, and so do @-@ and 's between white space, so that text that was split before stays as it is, except
for rare words. White space is ASCII white space.

Detokenizing reads from left to right and has to guess: quotation marks open and close in turns, a slash and an en dash
between numbers have no white space around them, and an apostrophe after a final s belongs to that word. Splitting the
result again gives the same words, except in rare cases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest

from transformer_xl.text.tokenizers.chunking import last_match_in_line

_ATOM = re.compile(
    r"<[A-Za-z]+>"  # a special token such as <unk>
    r"|(?:[^\W_]|[\u0300-\u036f])+"  # letters and digits, with combining accents
    r"|\.{2,}"
    r"|.",
    flags=re.DOTALL,
)
_ABBREVIATIONS = re.compile(
    r"[A-Z]|Adj|Adm|Adv|Asst|Bart|Bldg|Brig|Bros|Capt|Cmdr|Col|Comdr|Con|Corp|Cpl|Drs?|Ens|Gen|Gov|Hon|Hosp|Insp|Lt|Maj"
    r"|Messrs|Mlle|Mme|Mrs?|Ms|Msgr|Nos|Nr|Op|Ord|Pfc|Ph|Prof|Pvt|Reps?|Res|Rev|Rt|Sens?|Sfc|Sgt|Sr|St|Supt|Surg|vs?"
)
_BEFORE_NUMBERS = frozenset({"No", "Art", "pp", "p"})
_CACHED_BYTES = 40
_JOINERS = {"@-@": "-", "@,@": ",", "@.@": "."}
_CONTRACTED = frozenset({"s", "t", "m", "d", "re", "ve", "ll"})


def split_line(line: bytes) -> list[bytes]:
    """Return the words of one line of UTF-8 text, in the forms of WikiText."""
    words: list[bytes] = []
    chunks = line.split()
    for chunk, following in zip_longest(chunks, chunks[1:], fillvalue=b""):
        if chunk.isalnum():
            words.append(chunk)
        else:
            split = _split_cached if len(chunk) <= _CACHED_BYTES else _split_chunk
            words += split(chunk, _begins(following) if chunk.endswith(b".") else "")
    return words


def _split_chunk(chunk: bytes, following: str) -> tuple[bytes, ...]:
    """The words of what is between white space.

    Args:
        chunk: UTF-8 text without ASCII white space.
        following: what the next one begins with: "lowercase", "number" (or a special token), or "" for all else.
    """
    text = chunk.decode("utf-8")
    if text in _JOINERS or (text[0] == "'" and text[1:] in _CONTRACTED):  # it was split before
        return (chunk,)
    words = ["".join(parts) for parts in _separated(_ATOM.findall(text))]
    found: list[str] = []
    for index, word in enumerate(words):
        after = _begins(words[index + 1].encode()) if index + 1 < len(words) else following
        found += [word[:-1], "."] if _ends_sentence(word, after) else [word]
    return tuple(word.encode("utf-8") for word in found)


_split_cached = lru_cache(maxsize=2**17)(_split_chunk)  # most words of a text are repeated


def _separated(atoms: Sequence[str]) -> list[list[str]]:
    """The atoms that make up each word; full stops are still at the ends of words."""
    words: list[list[str]] = []
    open_word = False  # whether the last word may take more atoms
    for index, atom in enumerate(atoms):
        before = atoms[index - 1] if index else ""
        after = atoms[index + 1] if index + 1 < len(atoms) else ""
        continues = _is_wordlike(atom) and not _is_special(before)
        if (atom in (",", ".") and _ends_number(before) and _starts_number(after)) or (
            atom == "-" and _is_wordlike(before) and _is_wordlike(after)
        ):
            words.append([f"@{atom}@"])
            open_word = False
        elif open_word and not _is_special(atom) and (continues or atom in ("-", ".")):
            words[-1].append(atom)
        else:
            words.append([atom])
            open_word = (
                continues or _is_special(atom) or atom in ("-", ".") or (atom == "'" and _contracts(before, after))
            )
    return words


def _is_special(atom: str) -> bool:
    return len(atom) > 2 and atom[0] == "<"


def _is_wordlike(atom: str) -> bool:
    return _is_special(atom) or atom[:1].isalnum() or "\u0300" <= atom[:1] <= "\u036f"


def _ends_number(atom: str) -> bool:
    return _is_special(atom) or atom[-1:].isnumeric()  # a special token may stand for a number


def _starts_number(atom: str) -> bool:
    return _is_special(atom) or atom[:1].isnumeric()


def _contracts(before: str, after: str) -> bool:
    """Whether an apostrophe between these two goes with the second."""
    if before[-1:].isnumeric():
        return after.startswith("s")
    return _is_wordlike(before) and after[:1].isalpha()


def _ends_sentence(word: str, following: str) -> bool:
    """Whether the full stop at the end of `word` is not part of it."""
    stem = word[:-1]
    if not stem or word[-1] != "." or stem[-1] == "." or following == "lowercase":
        return False
    if "." in stem and any(map(str.isalpha, stem)):
        return False
    if _ABBREVIATIONS.fullmatch(stem):
        return False
    return not (stem in _BEFORE_NUMBERS and following == "number")


def _begins(chunk: bytes) -> str:
    first = chunk[:4].decode("utf-8", errors="ignore")[:1]
    return "lowercase" if first.islower() else "number" if first.isdigit() or first == "<" else ""


_OPENING = frozenset("([{“‘«$£€¥#")
_CLOSING = frozenset(")]}”’»,.;:!?%°′″")
_INNER = frozenset("/⁄—‑_")


class PunctuationDetokenizer:
    """Puts together what `split_line` split, by the words before in the same line."""

    def __init__(self) -> None:
        self._begin()

    def push(self, word: str) -> str:
        """Return the word as it is written; an en dash after a number is held back until the next word."""
        text = self._dash(between_numbers=_starts_number(word)) if self._held_dash else ""
        if word == "–" and _ends_number(self._last):
            self._held_dash = True
            return text
        before, after = self._white_space(word)
        text += " " * (before and not self._tight) + _JOINERS.get(word, word)
        self._clock = word == ":" and self._last.isnumeric()
        self._tight, self._last = not after, word
        return text

    def finish(self) -> str:
        """Return a dash that was held back; the next word begins a line."""
        text = self._dash(between_numbers=False) if self._held_dash else ""
        self._begin()
        return text

    def _begin(self) -> None:
        self._last = ""
        self._tight = True  # no white space before the next word
        self._open: set[str] = set()  # quotation marks that were opened
        self._clock = False  # after the colon of 16:00
        self._held_dash = False

    def _dash(self, *, between_numbers: bool) -> str:
        self._held_dash, self._last, self._tight = False, "–", between_numbers
        return "–" if between_numbers else " –"

    def _white_space(self, word: str) -> tuple[bool, bool]:
        """Whether white space may stand before and after it."""
        if word in _JOINERS or word in _INNER or not word.isprintable():
            return False, False
        if word in self._open:
            self._open.remove(word)
            return False, True
        if word == "'" and self._last.endswith("s"):  # the players' names
            return False, True
        if word in ('"', "'"):
            self._open.add(word)
            return True, False
        closes = word in _CLOSING or word.startswith(("'", ".."))
        closes = closes and not (word[0] == self._last[-1:] == ".")
        contracted = self._last == "’" and word in _CONTRACTED
        minutes = self._clock and len(word) == 2 and word.isnumeric()
        return not (closes or contracted or minutes), word not in _OPENING


_BOUNDARY = re.compile(
    rb"(?<=[^\s.])[ \t\r\v\f]"
    # after a full stop, a lowercase letter (or one that is lowercased) or a number would change the word before it
    rb"|(?<=\.)[ \t\r\v\f](?=[ \t\r\v\f]*[^\sA-Za-z0-9<\x80-\xff])"
)


def last_boundary(text: bytes) -> int:
    """Return the last position where cutting changes no word: after a newline, or before white space; 0 if none."""
    return last_match_in_line(_BOUNDARY, text)
