"""Between English as it is written and words with white space around each, as in WikiText.

    the well-known "Map" (1.80 m by 23,000 km) isn't his.
    the well @-@ known " Map " ( 1 @.@ 80 m by 23 @,@ 000 km ) isn 't his .

The rules are those of the Moses tokenizer for English (aggressive about hyphens), with the marks that WikiText has
inside numbers. Hyphens between letters or digits become @-@, commas and full stops between digits @,@ and @.@.
Dashes, quotation marks, brackets, slashes, currency signs and the like stand alone. An apostrophe goes with the
letters after it (isn 't, he 's), and stands alone after or before a word (the players ' names, ' so ').

A full stop stays with a word that has another one inside (U.S.), with a single letter, with the abbreviations listed
below, and where the next word begins with a small letter; anywhere else it stands alone. Marks such as <unk> stay
whole, and so do @-@ and 's where they stand alone, so that text split before stays as it is, but for rare words.
White space is ASCII white space.

Joining reads from left to right and cannot know everything: it takes a quotation mark as opening and closing in turns,
a slash, and an en dash between numbers, as written without white space, and an apostrophe after a final s as belonging
to that word. The words can be found again in what it writes, but for rare cases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Protocol

_ATOM = re.compile(
    r"<[A-Za-z]+>"  # a mark such as <unk>
    r"|(?:[^\W_]|[\u0300-\u036f])+"  # letters and digits, with accents that are characters of their own
    r"|\.{2,}"
    r"|.",
    flags=re.DOTALL,
)
_ABBREVIATIONS = re.compile(
    r"[A-Z]|Adj|Adm|Adv|Asst|Bart|Bldg|Brig|Bros|Capt|Cmdr|Col|Comdr|Con|Corp|Cpl|Drs?|Ens|Gen|Gov|Hon|Hosp|Insp|Lt|Maj"
    r"|Messrs|Mlle|Mme|Mrs?|Ms|Msgr|Nos|Nr|Op|Ord|Pfc|Ph|Prof|Pvt|Reps?|Res|Rev|Rt|Sens?|Sfc|Sgt|Sr|St|Supt|Surg|vs?"
)
_BEFORE_NUMBERS = frozenset({"No", "Art", "pp", "p"})
_REMEMBERED_BYTES = 40
_JOINTS = {"@-@": "-", "@,@": ",", "@.@": "."}
_CONTRACTED = frozenset({"s", "t", "m", "d", "re", "ve", "ll"})


def split_line(line: bytes) -> list[bytes]:
    """The words of one line of UTF-8 text, in the forms of WikiText."""
    words: list[bytes] = []
    chunks = line.split()
    for chunk, following in zip_longest(chunks, chunks[1:], fillvalue=b""):
        if chunk.isalnum():
            words.append(chunk)
        else:
            split = _split_again if len(chunk) <= _REMEMBERED_BYTES else _split_chunk
            words += split(chunk, _begins(following) if chunk.endswith(b".") else "")
    return words


def _split_chunk(chunk: bytes, following: str) -> tuple[bytes, ...]:
    """The words of what stands between white space.

    Args:
        chunk: UTF-8 text without ASCII white space.
        following: what the next one begins with: a `small` letter, a `number` (or a mark), or nothing that matters.
    """
    text = chunk.decode("utf-8")
    if text in _JOINTS or (text[0] == "'" and text[1:] in _CONTRACTED):  # it was split before
        return (chunk,)
    words = ["".join(parts) for parts in _separated(_ATOM.findall(text))]
    found: list[str] = []
    for place, word in enumerate(words):
        after = _begins(words[place + 1].encode()) if place + 1 < len(words) else following
        found += [word[:-1], "."] if _ends_sentence(word, after) else [word]
    return tuple(word.encode("utf-8") for word in found)


_split_again = lru_cache(maxsize=2**17)(_split_chunk)  # text says the same things again and again


def _separated(atoms: Sequence[str]) -> list[list[str]]:
    """The atoms that make up each word; full stops still stand at the ends of words."""
    words: list[list[str]] = []
    glue = False  # the last word may take more
    for place, atom in enumerate(atoms):
        before = atoms[place - 1] if place else ""
        after = atoms[place + 1] if place + 1 < len(atoms) else ""
        kept = _is_wordlike(atom) and not _is_mark(before)
        if (atom in (",", ".") and _ends_number(before) and _starts_number(after)) or (
            atom == "-" and _is_wordlike(before) and _is_wordlike(after)
        ):
            words.append([f"@{atom}@"])
            glue = False
        elif glue and not _is_mark(atom) and (kept or atom in ("-", ".")):
            words[-1].append(atom)
        else:
            words.append([atom])
            glue = kept or _is_mark(atom) or atom in ("-", ".") or (atom == "'" and _contracts(before, after))
    return words


def _is_mark(atom: str) -> bool:
    return len(atom) > 2 and atom[0] == "<"


def _is_wordlike(atom: str) -> bool:
    return _is_mark(atom) or atom[:1].isalnum() or "\u0300" <= atom[:1] <= "\u036f"


def _ends_number(atom: str) -> bool:
    return _is_mark(atom) or atom[-1:].isnumeric()  # a mark may stand for a number


def _starts_number(atom: str) -> bool:
    return _is_mark(atom) or atom[:1].isnumeric()


def _contracts(before: str, after: str) -> bool:
    """Whether an apostrophe between these goes with what comes after."""
    if before[-1:].isnumeric():
        return after.startswith("s")
    return _is_wordlike(before) and after[:1].isalpha()


def _ends_sentence(word: str, following: str) -> bool:
    """Whether the full stop at the end of `word` is not part of it."""
    stem = word[:-1]
    if not stem or word[-1] != "." or stem[-1] == "." or following == "small":
        return False
    if "." in stem and any(map(str.isalpha, stem)):
        return False
    if _ABBREVIATIONS.fullmatch(stem):
        return False
    return not (stem in _BEFORE_NUMBERS and following == "number")


def _begins(chunk: bytes) -> str:
    first = chunk[:4].decode("utf-8", errors="ignore")[:1]
    return "small" if first.islower() else "number" if first.isdigit() or first == "<" else ""


class Detokenizer(Protocol):
    """Turns words back into text, one at a time."""

    def push(self, word: str) -> str:
        """What is certain once this word came: white space where there is some, and as a rule the word."""
        ...

    def finish(self) -> str:
        """What was held back; the next word begins a line."""
        ...


class WhitespaceDetokenizer:
    """One space between the words of a line."""

    def __init__(self) -> None:
        self._space = ""

    def push(self, word: str) -> str:
        """The word, after a space if it is not the first."""
        space, self._space = self._space, " "
        return space + word

    def finish(self) -> str:
        """Nothing is held back."""
        self._space = ""
        return ""


_OPENING = frozenset("([{“‘«$£€¥#")
_CLOSING = frozenset(")]}”’»,.;:!?%°′″")
_INNER = frozenset("/⁄—‑_")


class PunctuationDetokenizer:
    """Puts together what `split_line` took apart; it goes by the words of the line that came before."""

    def __init__(self) -> None:
        self._begin()

    def push(self, word: str) -> str:
        """The word as it is written; an en dash after a number is held back until the next word came."""
        text = self._dash(between_numbers=_starts_number(word)) if self._dashed else ""
        if word == "–" and _ends_number(self._last):
            self._dashed = True
            return text
        before, after = self._white_space(word)
        text += " " * (before and not self._tight) + _JOINTS.get(word, word)
        self._clock = word == ":" and self._last.isnumeric()
        self._tight, self._last = not after, word
        return text

    def finish(self) -> str:
        """A dash that was held back; the next word begins a line."""
        text = self._dash(between_numbers=False) if self._dashed else ""
        self._begin()
        return text

    def _begin(self) -> None:
        self._last = ""
        self._tight = True  # no white space before the next word
        self._open: set[str] = set()  # quotation marks that wait for their other half
        self._clock = False  # after the colon of 16:00
        self._dashed = False

    def _dash(self, *, between_numbers: bool) -> str:
        self._dashed, self._last, self._tight = False, "–", between_numbers
        return "–" if between_numbers else " –"

    def _white_space(self, word: str) -> tuple[bool, bool]:
        """Whether white space may stand before and after it."""
        if word in _JOINTS or word in _INNER or not word.isprintable():
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


def last_whitespace(text: bytes) -> int:
    """The place after the last ASCII white space of `text`; 0: there is none."""
    return 1 + max(text.rfind(character) for character in b" \n\t\r\v\f")


_SPACE = re.compile(
    rb" (?=[\x00-\x08\x0e-\x1b!-\x7f]|[\x80-\xff].{2})"  # three bytes tell the white space of other scripts
    rb"(?!\xc2[\x85\xa0]|\xe1(?:\x9a\x80|\xa0\x8e)|\xe2(?:\x80[\x80-\x8a\xa8\xa9\xaf]|\x81\x9f)|\xe3\x80\x80)",
    flags=re.DOTALL,
)
_CHUNK_END = re.compile(
    rb"(?<=[^\s.])[ \t\r\v\f]"
    # a small letter (or one made small) or a number after a full stop has a say in its word
    rb"|(?<=\.)[ \t\r\v\f](?=[ \t\r\v\f]*[^\sA-Za-z0-9<\x80-\xff])"
)
_LOOKED_THROUGH = 256


def last_word_space(text: bytes) -> int:
    """The place after the last line end, or before the last space with a word or sign after it; 0: neither.

    No match of GPT-2's pattern reaches over the start of such a space, and none looks back.
    """
    return _last_in_line(_SPACE, text)


def last_chunk_end(text: bytes) -> int:
    """The place after the last line end, or before the last white space that `split_line` can be cut at; 0: neither."""
    return _last_in_line(_CHUNK_END, text)


def _last_in_line(pattern: re.Pattern[bytes], text: bytes) -> int:
    line = text.rfind(b"\n") + 1
    start, width = len(text), _LOOKED_THROUGH
    place = line
    while place == line and start > line:  # from the end, since most often it is there
        start, width = max(line, len(text) - width), 2 * width
        place = max((found.start() for found in pattern.finditer(text, start)), default=line)
    return place
