"""The pre-tokenizer `moses`: English as the tokenizer of the Hub's transfo-xl-wt103 splits it.

    the “well-known” map (1.80m by 23,000 km) isn’t his.
    the " well @-@ known " map ( 1 @.@ 80m by 23 @,@ 000 km ) isn 't his .

Text is normalized, split by the Moses rules, and numbers are split at commas and full stops. A model converted from
Hugging Face needs this to get the same token ids. They are not quite those of WikiText, which that model was trained on
(`punctuation.py` has its rules): quotation marks and dashes are normalized, and text that is already split is split
again. Each line is a text of its own, as in a call of their `tokenize`.

Detokenizing follows the rules of the Moses detokenizer, one word at a time. What was normalized is not restored.
Commas and full stops of numbers are joined at the ends of a line too, where theirs keeps @,@ and @.@. Theirs also keeps
special tokens in other letters (`<UNK>`) whole.

Sources: Moses' normalize-punctuation.perl, tokenizer.perl and detokenizer.perl as sacremoses 0.2.0 has them, with
aggressive hyphens and without escapes, and TransfoXLTokenizer of transformers 4.37.2. The tests compare both ways with
what those gave.
"""

from __future__ import annotations

import re
from itertools import zip_longest

from transformer_xl.text.tokenizers.moses_characters import DIGITS, LETTERS, NUMBERS

_SPECIAL_TOKEN = re.compile("(<unk>|<eos>|<formula>)")

_NORMALIZATION = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("\r", ""),
        (r"\(", " ("),
        (r"\)", ") "),
        (" +", " "),
        (r"\) (?=[.!:?;,])", ")"),
        (r"\( ", "("),
        (r" \)", ")"),
        (r"(?<=\d) %", "%"),
        (" (?=[:;])", ""),
        ("`", "'"),
        ("''", ' " '),
        ("[„“”]", '"'),
        ("–", "-"),
        ("—", " - "),
        ("[´‘‚’]", "'"),
        ("''", '"'),
        ("…", "..."),
        ("\xa0«\xa0|«\xa0?|\xa0»\xa0|\xa0?»", '"'),
        ("\xa0(?=[%:?!;])", ""),
        ("(?<=nº)\xa0|(?<=,)\xa0|\xa0(?=ºC|cm)", " "),
        (" +", " "),
        ('"([,.]+)', r'\1"'),
        (r"(\d)\xa0(\d)", r"\1.\2"),
    )
]
"""Replacements that normalize a line, each applied to the whole line, in this order."""

_SEPARATED = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+", " "),
        (r"[\x00-\x1f]", ""),
        (r"^ | $", ""),
        (rf"([^{LETTERS}{DIGITS}\s.'`,-])", r" \1 "),
        (rf"(?<=[{LETTERS}{DIGITS}])-(?=[{LETTERS}{DIGITS}])", " @-@ "),
        (r"(\.{2,})", r" \1 "),
        # twice, since the character between two commas can be in one match only
        (rf"([^{NUMBERS}]),", r"\1 , "),
        (rf",([^{NUMBERS}])", r" , \1"),
        (rf"(?<=[{NUMBERS}]),$", " , "),
        (rf"([^{LETTERS}])'([^{LETTERS}])", r"\1 ' \2"),
        (rf"([^{LETTERS}{NUMBERS}])'([{LETTERS}])", r"\1 ' \2"),
        (rf"([{LETTERS}])'([^{LETTERS}])", r"\1 ' \2"),
        (rf"([{LETTERS}])'([{LETTERS}])", r"\1 '\2"),
        (rf"([{NUMBERS}])'s", r"\1 's"),
    )
]
"""Replacements that put white space around punctuation, each applied to the whole line, in this order. A match consumes
its neighbours, so that of `a'b'c` only the first apostrophe is found."""

_HAS_LETTER = re.compile(f"[{LETTERS}]")
_IN_NUMBER = re.compile(r"(?<=\d)([,.])(?=\d)")
_KEEPS_FULL_STOP = re.compile(
    r"[A-Z]|Adj|Adm|Adv|Asst|Bart|Bldg|Brig|Bros|Capt|Cmdr|Col|Comdr|Con|Corp|Cpl|DR|Drs?|Ens|Gen|Gov|Hon|Hr|Hosp|Insp"
    r"|Lt|MM|MRS?|MS|Maj|Messrs|Mlle|Mme|Mrs?|Ms|Msgr|Op|Ord|Pfc|Ph|Prof|Pvt|Reps?|Res|Rev|Rt|Sens?|Sfc|Sgt|Sr|St|Supt"
    r"|Surg|vs?|i\.e|rev|e\.g|Rs|Nos|Nr|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
)
_KEEPS_IT_BEFORE_NUMBERS = frozenset({"No", "Art", "pp"})


def split_line(line: str) -> list[str]:
    """Return the words of one line; `<unk>`, `<eos>` and `<formula>` stay whole."""
    words: list[str] = []
    for part in _SPECIAL_TOKEN.split(line):
        words += [part] if _SPECIAL_TOKEN.fullmatch(part) else _split_part(part)
    return words


def _split_part(text: str) -> list[str]:
    text = text.strip()
    for pattern, replacement in _NORMALIZATION:
        text = pattern.sub(replacement, text)
    text = text.strip()
    for pattern, replacement in _SEPARATED:
        text = pattern.sub(replacement, text)
    words = text.split()
    kept = [
        word if _keeps_full_stop(word, following) else f"{word[:-1]} ."
        for word, following in zip_longest(words, words[1:], fillvalue="")
    ]
    text = re.sub(r"\.'$", " . ' ", " ".join(kept))
    return [part for word in text.split() for part in _IN_NUMBER.sub(r" @\1@ ", word).split()]


def _keeps_full_stop(word: str, following: str) -> bool:
    """Whether a full stop at the end of a word, if there is one, is part of it."""
    stem = word[:-1]
    if not word.endswith(".") or not stem.strip("."):
        return True
    return bool(
        ("." in stem and _HAS_LETTER.search(stem))
        or _KEEPS_FULL_STOP.fullmatch(stem)
        or following[:1].islower()
        or (stem in _KEEPS_IT_BEFORE_NUMBERS and re.match("[0-9]", following))
    )


_JOINERS = {"@-@": "-", "@,@": ",", "@.@": "."}
_OPENING = re.compile(r"[$¢-¥֏؋৲৳৻૱௹฿៛₠-₽꠸﷼﹩＄￠￡￥￦(\[{¿¡]+")
_CLOSING = re.compile(r"[,.?!:;\\%}\])]+")
_QUOTES = re.compile("['\"„“`]+")
_CONTRACTED = re.compile(f"'[{LETTERS}]")
_IDEOGRAPH = re.compile(
    "[\u1100-\u11ff\u2e80-\ua4cf\ua840-\ua87f\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc"
    "\U00017000-\U00018aff\U0001b000-\U0001b0ff\U0001b130-\U0001b16f\U00020000-\U0002ffff]"
)


class MosesDetokenizer:
    """Puts together what `split_line` split, by the words before in the same line."""

    def __init__(self) -> None:
        self.finish()

    def push(self, word: str) -> str:
        """Return the word as it is written, after white space if there is some."""
        tight = self._tight
        self._tight = False
        if word in _JOINERS:
            self._tight = tight = True
        elif _IDEOGRAPH.match(word):
            tight = tight or _IDEOGRAPH.match(self._last[-1:]) is not None
        elif _OPENING.fullmatch(word):
            self._tight = True
        elif _CLOSING.fullmatch(word) or (self._last and _CONTRACTED.match(word)):
            tight = True
        elif _QUOTES.fullmatch(word):
            tight = self._quote(word) or tight
        self._last = word
        return " " * (not tight) + _JOINERS.get(word, word)

    def finish(self) -> str:
        """Return nothing, since nothing is held back; the next word begins a line."""
        self._last = ""
        self._tight = True  # no white space before the next word
        self._open: set[str] = set()  # quotation marks that were opened
        return ""

    def _quote(self, word: str) -> bool:
        """Whether there is no space before a quotation mark; after an opening one there is none either."""
        kind = '"' if set(word) <= set("„“”") else word
        if kind in self._open:
            self._open.remove(kind)
            return True
        if word == "'" and self._last.endswith("s"):  # the players' names
            return True
        self._open.add(kind)
        self._tight = True
        return False
