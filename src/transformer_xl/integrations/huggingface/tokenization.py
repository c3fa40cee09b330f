"""Our tokenizers as tokenizers of transformers: every kind, with the ids of `Tokenizer.encode`.

Two classes, as transformers has two: `TransformerXLTokenizersBackend` where the library `tokenizers` encodes, which
has the place of each token, and `TransformerXLTokenizer`, where our own code does.
"""

from __future__ import annotations

import json
import os
import re
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Any, Self

import tokenizers
from transformers import BatchEncoding, PreTrainedTokenizer, TokenizersBackend
from typing_extensions import override

from transformer_xl.config import UserError
from transformer_xl.files import write_json
from transformer_xl.integrations.checkpoints import huggingface as transfo_xl
from transformer_xl.integrations.checkpoints.pretrained import (
    FAST_TOKENIZER_AUTO_MAP,
    TOKENIZER_AUTO_MAP,
    special_values,
    write_code,
)
from transformer_xl.integrations.checkpoints.transformers_tokenizer import (
    fast_tokenizer,
    pad_token_id,
    token_names,
)
from transformer_xl.integrations.checkpoints.transformers_tokenizer import (
    token_id as id_of_token,
)
from transformer_xl.integrations.huggingface.files import HUB_ARGUMENTS, is_transfo_xl, local_folder
from transformer_xl.text.tokenizers import Tokenizer, load_tokenizer, save_tokenizer
from transformer_xl.text.tokenizers.base import ByteLevelTokenizer, NamedToken
from transformer_xl.text.tokenizers.library import LibraryTokenizer
from transformer_xl.text.tokenizers.storage import LIBRARY_FILE, TOKENIZER_FILE, read_json_object
from transformer_xl.text.tokenizers.word import WordTokenizer


class OwnTokenizer:
    """What both classes have: texts and files are those of our tokenizer."""

    own_tokenizer: Tokenizer  # not `tokenizer`, which programs take for that of a processor
    _is_made = False

    def _load(self, vocab_file: str | None, tokenizer: Tokenizer | None, kwargs: dict[str, Any]) -> Tokenizer:
        if tokenizer is None:
            if vocab_file is None:
                folder = kwargs.get("name_or_path") or "the folder"
                raise UserError(
                    f"{folder} has no {TOKENIZER_FILE}, and no tokenizer was given; convert the run again (txl convert "
                    "RUN DIR --to huggingface), or give vocab_file"
                )
            tokenizer = load_tokenizer(vocab_file)
        self.own_tokenizer = tokenizer
        return tokenizer

    def _named_ids(self) -> dict[int, str]:
        """Return the tokens that a text has by name, unless special tokens are skipped."""
        end = self.own_tokenizer.document_end
        return {} if end is None else {end.id: end.name}

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        ids = [int(token_ids)] if isinstance(token_ids, int) else [int(token_id) for token_id in token_ids]
        named, texts = self._named_ids(), list[str]()
        for is_named, part in groupby(ids, named.__contains__):
            if not is_named:
                texts.append(self.own_tokenizer.decode([*part]))
            elif not skip_special_tokens:
                texts += [named[token_id] for token_id in part]
        return "".join(texts)

    def _encode_plus(self, text: Any, text_pair: Any = None, is_split_into_words: bool = False, **kwargs: Any) -> Any:
        """Encode; words that are given one by one have a space between them, as in a text.

        Raises:
            UserError: a text has an unpaired surrogate.
        """
        kwargs["is_split_into_words"] = is_split_into_words
        if is_split_into_words:
            text, text_pair = _with_spaces(text), text_pair and _with_spaces(text_pair)
        try:
            return super()._encode_plus(text, text_pair, **kwargs)  # pyrefly: ignore[missing-attribute]
        except TypeError:  # what the library says of it
            _check_characters([text, text_pair])
            raise

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Write txl_tokenizer.json, and the module that `auto_map` names."""
        name = f"{filename_prefix}-{TOKENIZER_FILE}" if filename_prefix else TOKENIZER_FILE
        file = Path(save_directory) / name
        save_tokenizer(self.own_tokenizer, file)
        write_code(Path(save_directory))
        return (str(file),)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoTokenizer") -> None:
        """Do nothing: a saved folder has a module that imports this package, not a copy of its code."""


class TransformerXLTokenizer(OwnTokenizer, PreTrainedTokenizer):
    """Any of our tokenizers.

    The ids are those of our tokenizer, but where a text has the name of the beginning-of-sequence token, as programs do
    that put `bos_token` before it: there, it is that token, unless split_special_tokens is set. The name is `<|bos|>`
    where the vocabulary has no token of its own for it. Padding has the first id after the vocabulary, unless pad_token
    names a token of it. The end-of-sequence token of words and integers is the end of a line, unless eos_token names
    another; decoding keeps it, also with skip_special_tokens.
    """

    vocab_files_names: dict[str, str] = {"vocab_file": TOKENIZER_FILE}  # noqa: RUF012 (as in the base class)
    model_input_names: list[str] = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side = "left"
    _auto_map = TOKENIZER_AUTO_MAP

    def __init__(
        self,
        vocab_file: str | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        add_bos_token: bool = False,
        **kwargs: Any,
    ) -> None:
        """Load a tokenizer.

        Args:
            vocab_file: a txl_tokenizer.json.
            tokenizer: the tokenizer itself, in place of the file.
            add_bos_token: whether to put the beginning-of-sequence token before each text, as our `generate` does.
            kwargs: arguments that every tokenizer of transformers has.

        Raises:
            UserError: the file is missing or damaged.
        """
        tokenizer, self.add_bos_token = self._load(vocab_file, tokenizer, kwargs), add_bos_token
        self._tokens: list[str] = []
        self._ids: dict[str, int] = {}
        for token_id, token in enumerate(token_names(tokenizer)):
            name = token if token not in self._ids else f"{token}#{token_id}"  # a BPE vocabulary may spell one twice
            self._tokens.append(name)
            self._ids[name] = token_id
        pad_token, bos_token = "<pad>", "<|bos|>"
        padding = tokenizer.padding if isinstance(tokenizer, LibraryTokenizer) else None
        while padding is None and pad_token in self._ids:
            pad_token = f"<{pad_token}>"
        while bos_token in self._ids:
            bos_token = f"<{bos_token}>"
        end = tokenizer.document_end
        named = {"eos_token": end.id if end else tokenizer.eos_token_id, "unk_token": tokenizer.unk_token_id}
        special = {name: self._tokens[token_id] for name, token_id in named.items() if token_id is not None}
        has_name = "eos_token" in special or (isinstance(tokenizer, LibraryTokenizer) and tokenizer.begins_texts)
        special["bos_token"] = self._tokens[tokenizer.bos_token_id] if has_name else bos_token
        if kwargs.get("eos_token") in self._ids:
            special["eos_token"] = kwargs["eos_token"]
        # settings of this vocabulary, which a tokenizer_config.json may repeat
        kwargs = {name: value for name, value in kwargs.items() if name not in ("added_tokens_decoder", *special)}
        pad_token = padding.name if padding else pad_token
        kwargs = {"clean_up_tokenization_spaces": False, "pad_token": pad_token, **special, **kwargs}
        super().__init__(add_bos_token=add_bos_token, **kwargs)
        self.special_tokens_pattern = "bos" if add_bos_token else "none"
        self.token_type_ids_pattern = "all_zeros"
        self._is_made = True

    @property
    @override
    def vocab_size(self) -> int:
        """V, without padding."""
        return len(self._tokens)

    @override
    def get_vocab(self) -> dict[str, int]:
        return {**self._ids, **self._added_tokens_encoder}

    @override
    def _save_pretrained(self, save_directory: Any, file_names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
        if self.add_bos_token:  # transformers leaves it out, since a tokenizer.json says so elsewhere
            file = Path(file_names[0])
            write_json(file, read_json_object(file) | {"add_bos_token": True})
        return super()._save_pretrained(save_directory, file_names, *args, **kwargs)

    @override
    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        """Add the special tokens; refuse others, which the model could not read.

        Raises:
            UserError: the tokenizer is made already.
        """
        if self._is_made and any(str(token) not in self.get_vocab() for token in new_tokens or ()):
            raise UserError("the vocabulary is fixed, because the model's is; leave added tokens out")
        # a second name of a token of the vocabulary is no token
        return super()._add_tokens([token for token in new_tokens if str(token) != self.bos_token], special_tokens)

    @override
    def tokenize(self, text: str, **kwargs: Any) -> list[str]:
        """Return the tokens of a text as they are written in the vocabulary."""
        if kwargs.get("split_special_tokens", self.split_special_tokens):
            ids = self.own_tokenizer.encode(text).tolist()
        else:
            ids = [token_id for _, part in _parts(text, self.bos_token) for token_id in self._part_ids(part)]
        return [self._tokens[token_id] for token_id in ids]

    def _part_ids(self, part: str) -> list[int]:
        return [self.own_tokenizer.bos_token_id] if part == self.bos_token else self.own_tokenizer.encode(part).tolist()

    @override
    def _convert_token_to_id(self, token: str) -> int | None:
        if token == self.bos_token:
            return self.own_tokenizer.bos_token_id
        return self._ids.get(token, self.own_tokenizer.unk_token_id)

    @override
    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < len(self._tokens):
            self.own_tokenizer.check_ids([index])
        return self._tokens[index]

    @override
    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self._decode([*map(self._convert_token_to_id_with_added_voc, tokens)])

    @override
    def _named_ids(self) -> dict[int, str]:
        added = {index: str(token) for index, token in self._added_tokens_decoder.items() if index >= self.vocab_size}
        padding = self.own_tokenizer.padding if isinstance(self.own_tokenizer, LibraryTokenizer) else None
        return super()._named_ids() | added | ({padding.id: padding.name} if padding else {})

    @override
    def _encode_plus(  # pyrefly: ignore[bad-override]
        self,
        text: Any,
        text_pair: Any = None,
        return_offsets_mapping: bool = False,
        return_tensors: Any = None,
        **kwargs: Any,
    ) -> BatchEncoding:
        """Encode, and add `offset_mapping` if asked: the start and end of each token in the text.

        Raises:
            UserError: the tokenizer changes the text, so its tokens have no place there.
        """
        if not return_offsets_mapping:
            return super()._encode_plus(text, text_pair, return_tensors=return_tensors, **kwargs)
        texts = [text] if isinstance(text, str) else list(text)
        if text_pair is not None or not all(isinstance(one, str) for one in texts):
            raise UserError("return_offsets_mapping is for texts; leave it out with pairs and words")
        encoding = super()._encode_plus(text, None, **kwargs)
        rows = [encoding["input_ids"]] if isinstance(text, str) else encoding["input_ids"]
        side = kwargs.get("padding_side") or self.padding_side
        first = [(0, 0)] if self.add_bos_token and kwargs.get("add_special_tokens", True) else []
        offsets: list[list[tuple[int, int]]] = []
        for one, row in zip(texts, rows, strict=True):
            places = list(first)
            for start, part in _parts(one, self.bos_token):
                is_bos = part == self.bos_token
                offsets_of_part = [(0, len(part))] if is_bos else token_offsets(self.own_tokenizer, part)
                places += [(start + begin, start + end) for begin, end in offsets_of_part]
            count = min(len(row), len(places))
            kept = places[:count] if self.truncation_side == "right" else places[len(places) - count :]
            padding = [(0, 0)] * (len(row) - count)
            offsets.append([*padding, *kept] if side == "left" else [*kept, *padding])
        encoding["offset_mapping"] = offsets[0] if isinstance(text, str) else offsets
        return BatchEncoding(dict(encoding), tensor_type=return_tensors, prepend_batch_axis=isinstance(text, str))

    @classmethod
    @override
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Self:
        """Open the tokenizer of a folder or of a repository of the Hub; arguments are those of transformers.

        Raises:
            UserError: an old TransfoXL vocabulary is missing or damaged.
        """
        if not is_transfo_xl(pretrained_model_name_or_path, kwargs):
            return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        folder = local_folder(pretrained_model_name_or_path, kwargs)
        tokenizer = transfo_xl.read_folder_tokenizer(folder)
        if tokenizer is None:
            raise UserError(f"{folder} has no vocabulary; expected {' or '.join(transfo_xl.VOCABULARIES)}")
        # what is left are arguments of the tokenizer; AutoTokenizer adds some that begin with an underscore
        others = {*HUB_ARGUMENTS, "subfolder", "trust_remote_code", "use_fast"}
        settings = {name: value for name, value in kwargs.items() if name not in others and name[0] != "_"}
        return cls(tokenizer=tokenizer, **settings)


class TransfoXLTokenizer(TransformerXLTokenizer):
    """The same under the old name, which the tokenizer_config.json of old folders has."""


class TransformerXLTokenizersBackend(OwnTokenizer, TokenizersBackend):  # pyrefly: ignore[inconsistent-inheritance]
    """Bytes, characters with bytes, BPE, and words between whitespace, encoded by the library `tokenizers`.

    The ids are those of our tokenizer; only the name of a special token, such as `<|endoftext|>` or `<eos>`, is that
    token where a text has it. The beginning-of-sequence token of other tokenizers is a newline. Padding is the byte
    0xFF, which no text has, and with words the first id after the vocabulary, unless pad_token names a token. Decoding
    keeps newlines, also with skip_special_tokens.
    """

    vocab_files_names: dict[str, str] = {"vocab_file": TOKENIZER_FILE, "tokenizer_file": LIBRARY_FILE}  # noqa: RUF012
    model_input_names: list[str] = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side = "left"
    _auto_map = FAST_TOKENIZER_AUTO_MAP

    def __init__(self, vocab_file: str | None = None, *, tokenizer: Tokenizer | None = None, **kwargs: Any) -> None:
        """Load a tokenizer; arguments are those of `TransformerXLTokenizer`.

        Raises:
            UserError: the file is missing or damaged, or the tokenizer is one that only `TransformerXLTokenizer` has.
        """
        own = self._load(vocab_file, tokenizer, kwargs)
        content = fast_tokenizer(own)
        if content is None:
            raise UserError(
                f"the library tokenizers cannot do as this {own.kind} tokenizer; use TransformerXLTokenizer"
            )
        self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        pad = "<pad>"
        while self._tokenizer.token_to_id(pad) is not None:
            pad = f"<{pad}>"
        self._padding = NamedToken(pad_token_id(own), pad)
        bos = own.document_end.name if own.document_end else own.decode([own.bos_token_id])
        special = {"bos_token": bos, "eos_token": own.document_end.name if own.document_end else None}
        if isinstance(own, WordTokenizer):
            special = {"bos_token": own.eos_token, "eos_token": own.eos_token, "unk_token": own.unk_token}
        file = kwargs.pop("tokenizer_file", None)
        if file is not None and (read_json_object(Path(file)).get("post_processor") or {}).get("special_tokens"):
            kwargs.setdefault("add_bos_token", True)  # in transformers, a tokenizer.json says so
        for name in ("added_tokens_decoder", "bos_token", "unk_token"):
            kwargs.pop(name, None)
        kwargs = {**special, "clean_up_tokenization_spaces": False, "pad_token": pad, **kwargs}
        super().__init__(**kwargs)
        self._is_made = True

    @classmethod
    @override
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        return kwargs  # txl_tokenizer.json has all that is needed

    @override
    def _named_ids(self) -> dict[int, str]:
        return super()._named_ids() | {self._padding.id: self._padding.name}

    @override
    def _convert_token_to_id_with_added_voc(self, token: str) -> int | None:  # pyrefly: ignore[bad-override]
        if token == self._padding.name:
            return self._padding.id
        written = self.backend_tokenizer.token_to_id(token)
        found = id_of_token(self.own_tokenizer, token) if written is None else written
        return self.own_tokenizer.unk_token_id if found is None else found

    @override
    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens as the library writes them, of padding by its name, which others look up."""
        others = {token: index for token, index in super().get_vocab().items() if index != self._padding.id}
        return others | {self._padding.name: self._padding.id}

    @override
    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        tokens = super().convert_ids_to_tokens(ids, skip_special_tokens)  # the library has none for padding
        if tokens is None or isinstance(tokens, str):
            return tokens or self._padding.name
        return [self._padding.name if token is None else token for token in tokens]

    @override
    def _add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        """Add nothing: the tokens that are special have ids already; refuse others, which the model could not read.

        Raises:
            UserError: the vocabulary has no such token.
        """
        names = {str(token) for token in new_tokens or ()} - {str(self._special_tokens_map.get("unk_token"))}
        if {self._convert_token_to_id_with_added_voc(name) for name in names} & {None, self.own_tokenizer.unk_token_id}:
            raise UserError("the vocabulary is fixed, because the model's is; leave added tokens out")
        return 0

    @override
    def _save_pretrained(self, save_directory: Any, file_names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
        written = super()._save_pretrained(save_directory, file_names, *args, **kwargs)
        return written + self.save_vocabulary(str(save_directory), kwargs.get("filename_prefix"))


def transformers_tokenizer(
    tokenizer: Tokenizer, eos_token: str | None = None
) -> TransformerXLTokenizer | TransformerXLTokenizersBackend:
    """Return a tokenizer as one of transformers, by the library `tokenizers` where that gives the same ids.

    Args:
        tokenizer: our tokenizer.
        eos_token: the token that ends a text, as for `convert`.

    Raises:
        UserError: the vocabulary has no such token.
    """
    kind = TransformerXLTokenizer if fast_tokenizer(tokenizer) is None else TransformerXLTokenizersBackend
    return kind(tokenizer=tokenizer, **special_values(tokenizer, eos_token))


def _with_spaces(words: Any) -> Any:
    """Return words, or several lists of them, with a space before each but the first that has no white space there."""
    if not all(isinstance(word, str) for word in words):
        return [_with_spaces(row) for row in words]
    pairs = pairwise(["\n", *words])
    return [word if before[-1:].isspace() or word[:1].isspace() else f" {word}" for before, word in pairs]


def _check_characters(texts: Any) -> None:
    """Check that texts, in lists of any depth, can be UTF-8.

    Raises:
        UserError: one has an unpaired surrogate.
    """
    for text in texts or ():
        if not isinstance(text, str):
            _check_characters(text)
            continue
        bad = re.search("[\ud800-\udfff]", text)
        if bad:
            raise UserError(f"the text has {bad[0]!r} at index {bad.start()}, which UTF-8 cannot represent; remove it")


def _parts(text: str, bos_token: str) -> list[tuple[int, str]]:
    """Return the parts of a text between the names of a token, and these names, each with its place."""
    ends = [match.span() for match in re.finditer(re.escape(bos_token), text)]
    places = [0, *(index for span in ends for index in span), len(text)]
    return [(start, text[start:stop]) for start, stop in pairwise(places) if start < stop]


def token_offsets(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    """Return the start and end of each token in a text, in characters.

    A token that is a part of a character has the place of that character.

    Raises:
        UserError: the tokenizer changes the text before it splits it.
    """
    if isinstance(tokenizer, LibraryTokenizer):
        return tokenizer.places(text)
    if isinstance(tokenizer, ByteLevelTokenizer):
        character_of_byte = [index for index, character in enumerate(text) for _ in character.encode()]
        lengths = (len(tokenizer.token_bytes[token_id]) for token_id in tokenizer.encode(text).tolist())
        ends = list(accumulate(lengths, initial=0))
        return [(character_of_byte[start], character_of_byte[stop - 1] + 1) for start, stop in pairwise(ends)]
    if isinstance(tokenizer, WordTokenizer) and tokenizer.pre_tokenizer.name != "whitespace":
        raise UserError(
            f"the tokenizer splits words by '{tokenizer.pre_tokenizer.name}', so its tokens have no offsets"
        )
    # ASCII whitespace, as in bytes.split
    pattern = r"\n|[^ \t\n\r\x0b\x0c]+" if tokenizer.eos_token_id is not None else r"[^ \t\n\r\x0b\x0c]+"
    return [match.span() for match in re.finditer(pattern, text)]
