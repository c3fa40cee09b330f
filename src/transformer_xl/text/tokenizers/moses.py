"""English as the tokenizer of the Hub's transfo-xl-wt103 splits it: made plain, by the Moses rules, numbers apart.

    the “well-known” map (1.80m by 23,000 km) isn’t his.
    the " well @-@ known " map ( 1 @.@ 80m by 23 @,@ 000 km ) isn 't his .

Whoever takes that model over from Hugging Face gets the same token numbers. They are not quite those of WikiText, which
it was trained on (`splitting.py` has its rules): quotation marks and dashes are made plain, and text that is split
already is split again. A line is a text of its own, as a call of their `tokenize` is.

Joining goes by the rules of the Moses detokenizer, one word at a time. What was made plain stays plain. Commas and full
stops of numbers are joined at the edges of a line too, where theirs are left with their marks. Of the marks, theirs
also leaves those whole that are written in other letters (`<UNK>`).

Sources: Moses' normalize-punctuation.perl, tokenizer.perl and detokenizer.perl as sacremoses 0.2.0 has them, with
aggressive hyphens and without escapes, and TransfoXLTokenizer of transformers 4.37.2. The tests compare both ways with
what those gave.
"""

from __future__ import annotations

import re
from itertools import zip_longest

from transformer_xl.text.tokenizers.moses_characters import DIGITS, LETTERS, NUMBERS

_MARK = re.compile("(<unk>|<eos>|<formula>)")

_NORMALISED = [
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
"""What is made plain, in this order, each over the whole line."""

_SEPARATED = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+", " "),
        (r"[\x00-\x1f]", ""),
        (r"^ | $", ""),
        (rf"([^{LETTERS}{DIGITS}\s.'`,-])", r" \1 "),
        (rf"(?<=[{LETTERS}{DIGITS}])-(?=[{LETTERS}{DIGITS}])", " @-@ "),
        (r"(\.{2,})", r" \1 "),
        # twice, since a character between two commas can serve but one of them
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
"""White space that is put around signs, in this order, each over the whole line; words take up what stands beside them,
so that of `a'b'c` only the first apostrophe is found."""

_HAS_LETTER = re.compile(f"[{LETTERS}]")
_IN_NUMBER = re.compile(r"(?<=\d)([,.])(?=\d)")
_KEEPS_FULL_STOP = re.compile(
    r"[A-Z]|Adj|Adm|Adv|Asst|Bart|Bldg|Brig|Bros|Capt|Cmdr|Col|Comdr|Con|Corp|Cpl|DR|Drs?|Ens|Gen|Gov|Hon|Hr|Hosp|Insp"
    r"|Lt|MM|MRS?|MS|Maj|Messrs|Mlle|Mme|Mrs?|Ms|Msgr|Op|Ord|Pfc|Ph|Prof|Pvt|Reps?|Res|Rev|Rt|Sens?|Sfc|Sgt|Sr|St|Supt"
    r"|Surg|vs?|i\.e|rev|e\.g|Rs|Nos|Nr|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
)
_KEEPS_IT_BEFORE_NUMBERS = frozenset({"No", "Art", "pp"})


def split_line(line: str) -> list[str]:
    """The words of one line; `<unk>`, `<eos>` and `<formula>` stay whole."""
    words: list[str] = []
    for part in _MARK.split(line):
        words += [part] if _MARK.fullmatch(part) else _split_part(part)
    return words


def _split_part(text: str) -> list[str]:
    text = text.strip()
    for pattern, replacement in _NORMALISED:
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


_JOINTS = {"@-@": "-", "@,@": ",", "@.@": "."}
_OPENING = re.compile(r"[$¢-¥֏؋৲৳৻૱௹฿៛₠-₽꠸﷼﹩＄￠￡￥￦(\[{¿¡]+")
_CLOSING = re.compile(r"[,.?!:;\\%}\])]+")
_QUOTES = re.compile("['\"„“`]+")
_CONTRACTED = re.compile(f"'[{LETTERS}]")
_IDEOGRAPH = re.compile(
    "[\u1100-\u11ff\u2e80-\ua4cf\ua840-\ua87f\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc"
    "\U00017000-\U00018aff\U0001b000-\U0001b0ff\U0001b130-\U0001b16f\U00020000-\U0002ffff]"
)


class MosesDetokenizer:
    """Puts together what `split_line` took apart; it goes by the words of the line that came before."""

    def __init__(self) -> None:
        self.finish()

    def push(self, word: str) -> str:
        """The word as it is written, with white space before it where there is some."""
        tight = self._tight
        self._tight = False
        if word in _JOINTS:
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
        return " " * (not tight) + _JOINTS.get(word, word)

    def finish(self) -> str:
        """Nothing is held back; the next word begins a line."""
        self._last = ""
        self._tight = True  # no white space before the next word
        self._open: set[str] = set()  # quotation marks that wait for their other half
        return ""

    def _quote(self, word: str) -> bool:
        """Whether a quotation mark stands close to the word before it; an opening one stands close to the next."""
        kind = '"' if set(word) <= set("„“”") else word
        if kind in self._open:
            self._open.remove(kind)
            return True
        if word == "'" and self._last.endswith("s"):  # the players' names
            return True
        self._open.add(kind)
        self._tight = True
        return False
