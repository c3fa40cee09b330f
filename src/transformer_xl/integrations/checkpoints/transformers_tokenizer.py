"""Our tokenizers for transformers: the names of tokens, special ones among them, and `tokenizer.json` where the library
`tokenizers` gives exactly our ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformer_xl.config import UserError
from transformer_xl.text.tokenizers import ByteTokenizer, Tokenizer
from transformer_xl.text.tokenizers.base import ByteLevelTokenizer, quoted
from transformer_xl.text.tokenizers.bpe import BPETokenizer, byte_of_character, special_tokens
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.library import LibraryTokenizer
from transformer_xl.text.tokenizers.pre_tokenizer import PreTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

_CHARACTER_OF_BYTE = {byte: character for character, byte in byte_of_character().items()}
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
# pieces that end with a newline, since each line is encoded by itself
_LINES = {"type": "Split", "pattern": {"String": "\n"}, "behavior": "MergedWithPrevious", "invert": False}
_ASCII_WHITESPACE = r"[ \t\n\r\x0b\x0c]+"  # as in bytes.split


def token_names(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield for each id how its token is written in the vocabulary.

    Bytes are written as in GPT-2's vocabulary, the bytes of a character tokenizer as <0x0A>.
    """
    if isinstance(tokenizer, WordTokenizer):
        yield from tokenizer.words
    elif isinstance(tokenizer, LibraryTokenizer):
        yield from tokenizer.names
    elif isinstance(tokenizer, IntegerTokenizer):
        yield from map(str, range(tokenizer.num_values))
        if tokenizer.add_eos:
            yield "<eos>"
    elif isinstance(tokenizer, CharTokenizer):
        yield from tokenizer.characters
        if tokenizer.byte_fallback:
            yield from (f"<0x{byte:02X}>" for byte in range(256))
    else:
        assert isinstance(tokenizer, ByteLevelTokenizer)
        special = dict(special_tokens(tokenizer.to_json().get("tokenizer", {})))
        for token_id, content in enumerate(tokenizer.token_bytes):
            yield special.get(token_id) or "".join(_CHARACTER_OF_BYTE[byte] for byte in content)


def token_id(tokenizer: Tokenizer, name: str) -> int | None:
    """Return the id of the token that has this text, such as "\\n", or that the vocabulary writes so; None without one.

    A text of bytes or characters is a token if it is encoded as that token alone.
    """
    if isinstance(tokenizer, BPETokenizer):
        named = {token.name: token.id for token in special_tokens(tokenizer.to_json()["tokenizer"])}
        if name in named:
            return named[name]
    if not isinstance(tokenizer, ByteLevelTokenizer):
        return next((index for index, one in enumerate(token_names(tokenizer)) if one == name), None)
    try:
        ids = tokenizer.encode(name).tolist()
    except UserError:
        return None
    return ids[0] if len(ids) == 1 else None


def eos_token_id(tokenizer: Tokenizer, eos_token: str | None) -> int | None:
    """Return the id of the token that ends a text for other programs: the named one, or what ends documents.

    Raises:
        UserError: the vocabulary has no such token.
    """
    if eos_token is None:
        return None if tokenizer.document_end is None else tokenizer.document_end.id
    found = token_id(tokenizer, eos_token)
    if found is None:
        end, is_text = tokenizer.document_end, isinstance(tokenizer, ByteLevelTokenizer)
        example = end.name if end else "\n" if is_text else next(token_names(tokenizer))
        raise UserError(
            f"eos_token={quoted(eos_token)} is none of the {tokenizer.vocab_size:,} tokens of this {tokenizer.kind} "
            f"vocabulary; give a text that is one token, such as {quoted(example)}"
        )
    return found


def pad_token_id(tokenizer: Tokenizer, eos_token: str | None = None) -> int:
    """Return the id of padding: the byte 0xFF where the vocabulary has it, since no UTF-8 text does.

    Else the padding of a tokenizer of another library, or the named end-of-sequence token, or without one the first id
    after the vocabulary.
    """
    if isinstance(tokenizer, ByteLevelTokenizer) and b"\xff" in tokenizer.token_bytes:
        return tokenizer.token_bytes.index(b"\xff")
    if isinstance(tokenizer, LibraryTokenizer) and tokenizer.padding:
        return tokenizer.padding.id
    named = None if eos_token is None else eos_token_id(tokenizer, eos_token)
    return tokenizer.vocab_size if named is None else named


def fast_tokenizer(tokenizer: Tokenizer, *, add_bos_token: bool = False) -> dict[str, Any] | None:
    """Return the content of a tokenizer.json that gives the ids of a tokenizer for every text, or None.

    With `add_bos_token`, the beginning-of-sequence token is put before each text.

    There is none where the library has not our rules or cannot refuse a text: words that are lowercased or split by
    `moses` or `punctuation`, words without `<unk>` or `<eos>`, characters without bytes, integers, and tokenizers of
    other libraries, which read line by line here.
    """
    vocab = {name: index for index, name in enumerate(token_names(tokenizer))}
    model: dict[str, Any] = {"type": "BPE", "vocab": vocab, "merges": []}
    normalizer, pre_tokenizer, added = None, _BYTE_LEVEL, list[tuple[Any, Any]]()
    if isinstance(tokenizer, BPETokenizer):
        values = tokenizer.to_json()["tokenizer"]
        own, special = values["pre_tokenizer"], {token.name: token.id for token in special_tokens(values)}
        model = {**values["model"], "vocab": values["model"]["vocab"] | special}  # all but the end are text in a text
        if model.get("ignore_merges") and len(special) > (tokenizer.document_end is not None):
            return None  # a text that is spelled like one would be that token
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [_LINES, *own.get("pretokenizers", [own])]}
        added += [tokenizer.document_end] if tokenizer.document_end else ()
    elif isinstance(tokenizer, CharTokenizer) and tokenizer.byte_fallback:
        model["byte_fallback"] = True
        pre_tokenizer = {**_LINES, "pattern": {"Regex": r"\s*\S+|\s+"}, "behavior": "Isolated"}
    elif isinstance(tokenizer, WordTokenizer) and tokenizer.unk_token and tokenizer.eos_token:
        if tokenizer.pre_tokenizer != PreTokenizer():
            return None
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": tokenizer.unk_token}
        normalizer = {"type": "Replace", "pattern": {"String": "\n"}, "content": f" {tokenizer.eos_token} "}
        added = [(tokenizer.eos_token_id, tokenizer.eos_token)]
        pre_tokenizer = {**_LINES, "pattern": {"Regex": _ASCII_WHITESPACE}, "behavior": "Removed"}
    elif not isinstance(tokenizer, ByteTokenizer):
        return None
    post_processor = None
    if add_bos_token:
        bos = next(name for name, index in vocab.items() if index == tokenizer.bos_token_id)
        first, second = (
            [{"SpecialToken": {"id": bos, "type_id": number}}, {"Sequence": {"id": name, "type_id": number}}]
            for number, name in enumerate("AB")
        )
        post_processor = {
            "type": "TemplateProcessing",
            "single": first,
            "pair": [*first, *second],
            "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos_token_id], "tokens": [bos]}},
        }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": name, "special": True, **flags} for index, name in added],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": _BYTE_LEVEL if model["type"] == "BPE" and not model.get("byte_fallback") else None,
        "model": model,
    }
