"""The pre-tokenizer `moses`: splits English as TransfoXLTokenizer of transformers does.

    the “well-known” map (1.80m by 23,000 km) isn’t his.
    the " well @-@ known " map ( 1 @.@ 80m by 23 @,@ 000 km ) isn 't his .

After conversion, the model transfo-xl-wt103 of the Hugging Face Hub needs this pre-tokenizer to get the same token ids.
The text is normalized, split by the rules of the Moses machine translation toolkit, and then numbers are split at
commas and full stops. Each line is split as if TransfoXLTokenizer were called on it alone. The words differ slightly
from those of WikiText, on which that model was trained (`punctuation.py` has these): quotation marks and dashes are
normalized, and text that is already split is split again.

The detokenizer follows the Moses detokenizer, one word at a time; it does not undo the normalization. There are two
differences from TransfoXLTokenizer. The detokenizer joins the commas and full stops of numbers at the ends of a line
too, where TransfoXLTokenizer leaves @,@ and @.@. Special tokens in uppercase, such as <UNK>, are split.

Sources: normalize-punctuation.perl, tokenizer.perl and detokenizer.perl of Moses, as ported by sacremoses 0.2.0, with
its options for aggressive hyphen splitting and without XML escapes such as &quot;, and TransfoXLTokenizer of
transformers 4.37.2, whose output for many texts is in tests/text/tokenizers/moses.json.
"""

from __future__ import annotations

import json
import re
from importlib import resources
from itertools import zip_longest

_RANGES: dict[str, list[str]] = json.loads(
    (resources.files("transformer_xl.text.tokenizers") / "moses_characters.json").read_text(encoding="utf-8")
)
"""Code points in hexadecimal of the characters that Moses treats as letters, decimal digits and numbers.

Copied from IsAlpha, IsAlnum and IsN of sacremoses 0.2.0, which are properties of an older Unicode version. They are not
taken from Python's unicodedata, because newer versions have more letters and would change the tokens of a text. Letters
include combining vowel signs, but not ideographs and Hangul syllables, each of which is a word. Numbers include
fractions and Roman numerals; some are letters too.
"""


def _character_class(ranges: list[str]) -> str:
    """Return the inside of a regular expression's [...] that matches these code points."""
    bounds = (code_points.split("-") for code_points in " ".join(ranges).split())
    return "".join(f"\\U{int(first_last[0], 16):08x}-\\U{int(first_last[-1], 16):08x}" for first_last in bounds)


_LETTERS = _character_class(_RANGES["letters"])
_DIGITS = _character_class(_RANGES["digits"])
_NUMBERS = _character_class(_RANGES["numbers"])


def _compile(*rules: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), replacement) for pattern, replacement in rules]


SPECIAL_TOKENS = (b"<unk>", b"<eos>", b"<formula>")
"""The special tokens that TransfoXLTokenizer never splits."""
_SPECIAL_TOKEN = re.compile("(<unk>|<eos>|<formula>)")
_NORMALIZE = _compile(
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
"""Replacements that normalize a line; each is applied to the whole line, in this order."""

_SEPARATE = _compile(
    (r"\s+", " "),
    (r"[\x00-\x1f]", ""),
    (r"^ | $", ""),
    (rf"([^{_LETTERS}{_DIGITS}\s.'`,-])", r" \1 "),
    (rf"(?<=[{_LETTERS}{_DIGITS}])-(?=[{_LETTERS}{_DIGITS}])", " @-@ "),
    (r"(\.{2,})", r" \1 "),
    # two rules, since matches cannot overlap in the character between two commas
    (rf"([^{_NUMBERS}]),", r"\1 , "),
    (rf",([^{_NUMBERS}])", r" , \1"),
    (rf"(?<=[{_NUMBERS}]),$", " , "),
    (rf"([^{_LETTERS}])'([^{_LETTERS}])", r"\1 ' \2"),
    (rf"([^{_LETTERS}{_NUMBERS}])'([{_LETTERS}])", r"\1 ' \2"),
    (rf"([{_LETTERS}])'([^{_LETTERS}])", r"\1 ' \2"),
    (rf"([{_LETTERS}])'([{_LETTERS}])", r"\1 '\2"),
    (rf"([{_NUMBERS}])'s", r"\1 's"),
)
"""Replacements that put spaces around punctuation; each is applied to the whole line, in this order.

A match includes the characters around the apostrophe, so only the first apostrophe of `a'b'c` is matched.
"""

_FINAL_QUOTE = re.compile(r"\.'$")
_HAS_LETTER = re.compile(f"[{_LETTERS}]")
_IN_NUMBER = re.compile(r"(?<=\d)([,.])(?=\d)")
_ABBREVIATIONS = re.compile(
    r"[A-Z]|Adj|Adm|Adv|Asst|Bart|Bldg|Brig|Bros|Capt|Cmdr|Col|Comdr|Con|Corp|Cpl|DR|Drs?|Ens|Gen|Gov|Hon|Hr|Hosp|Insp"
    r"|Lt|MM|MRS?|MS|Maj|Messrs|Mlle|Mme|Mrs?|Ms|Msgr|Op|Ord|Pfc|Ph|Prof|Pvt|Reps?|Res|Rev|Rt|Sens?|Sfc|Sgt|Sr|St|Supt"
    r"|Surg|vs?|i\.e|rev|e\.g|Rs|Nos|Nr|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
)
"""Words that keep the full stop after them."""
_ABBREVIATIONS_BEFORE_NUMBERS = frozenset({"No", "Art", "pp"})
"""Words that keep the full stop after them only if a number follows."""


def split_line(line: str) -> list[str]:
    """Return the words of one line; `<unk>`, `<eos>` and `<formula>` stay whole."""
    words: list[str] = []
    for part in _SPECIAL_TOKEN.split(line):
        words += [part] if _SPECIAL_TOKEN.fullmatch(part) else _split_text(part)
    return words


def _split_text(text: str) -> list[str]:
    """Return the words of text without special tokens."""
    text = text.strip()
    for pattern, replacement in _NORMALIZE:
        text = pattern.sub(replacement, text)
    text = text.strip()
    for pattern, replacement in _SEPARATE:
        text = pattern.sub(replacement, text)
    words = text.split()
    words = [
        word if _keeps_full_stop(word, next_word) else f"{word[:-1]} ."
        for word, next_word in zip_longest(words, words[1:], fillvalue="")
    ]
    text = _FINAL_QUOTE.sub(" . ' ", " ".join(words))
    return [part for word in text.split() for part in _IN_NUMBER.sub(r" @\1@ ", word).split()]


def _keeps_full_stop(word: str, next_word: str) -> bool:
    """Return whether the word has no full stop at its end, or one that belongs to it, as in an abbreviation."""
    stem = word[:-1]
    if not word.endswith(".") or not stem.strip("."):
        return True
    return bool(
        ("." in stem and _HAS_LETTER.search(stem))
        or _ABBREVIATIONS.fullmatch(stem)
        or next_word[:1].islower()
        or (stem in _ABBREVIATIONS_BEFORE_NUMBERS and re.match("[0-9]", next_word))
    )


JOINERS = {"@-@": "-", "@,@": ",", "@.@": "."}
"""The words that replace a hyphen, comma or full stop inside a word or number, and the character each stands for."""
_NO_SPACE_AFTER = re.compile(r"[$¢-¥֏؋৲৳৻૱௹฿៛₠-₽꠸﷼﹩＄￠￡￥￦(\[{¿¡]+")
_NO_SPACE_BEFORE = re.compile(r"[,.?!:;\\%}\])]+")
_QUOTES = re.compile("['\"„“`]+")
_CONTRACTION = re.compile(f"'[{_LETTERS}]")
_IDEOGRAPH = re.compile(  # characters of Chinese, Japanese and Korean, which have no spaces between them
    "[\u1100-\u11ff\u2e80-\ua4cf\ua840-\ua87f\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff65-\uffdc"
    "\U00017000-\U00018aff\U0001b000-\U0001b0ff\U0001b130-\U0001b16f\U00020000-\U0002ffff]"
)


class MosesDetokenizer:
    """Joins the words of a line, as `split_line` returns them, to text; spacing depends on the preceding words."""

    def __init__(self) -> None:
        self._previous = ""
        self._omit_next_space = True
        self._open_quotes: set[str] = set()

    def push(self, word: str) -> str:
        """Return the text of the word, with a space before it if one belongs there."""
        omit_space = self._omit_next_space
        self._omit_next_space = False
        if word in JOINERS:
            self._omit_next_space = omit_space = True
        elif _IDEOGRAPH.match(word):
            omit_space = omit_space or _IDEOGRAPH.match(self._previous[-1:]) is not None
        elif _NO_SPACE_AFTER.fullmatch(word):
            self._omit_next_space = True
        elif _NO_SPACE_BEFORE.fullmatch(word) or (self._previous and _CONTRACTION.match(word)):
            omit_space = True
        elif _QUOTES.fullmatch(word):
            omit_space = self._closes_quote(word) or omit_space
        self._previous = word
        return " " * (not omit_space) + JOINERS.get(word, word)

    def finish(self) -> str:
        """Return an empty string, since no text is withheld."""
        return ""

    def _closes_quote(self, word: str) -> bool:
        """Update the open quotes, and return whether this quotation mark closes one, so that no space precedes it."""
        mark = '"' if set(word) <= set("„“”") else word
        if mark in self._open_quotes:
            self._open_quotes.remove(mark)
            return True
        if word == "'" and self._previous.endswith("s"):  # the players' names
            return True
        self._open_quotes.add(mark)
        self._omit_next_space = True
        return False
