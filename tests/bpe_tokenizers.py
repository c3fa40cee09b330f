"""BPE tokenizers for tests whose tokens cross the spaces between words."""

from __future__ import annotations

from transformer_xl.text.tokenizers.bpe import BPETokenizer, train_bpe


def bpe_across_spaces(*merges: str) -> BPETokenizer:
    """Return a tokenizer of bytes and of merged pairs, such as "a| b" for the token "a b"."""
    values = train_bpe([["a\n"]], 256).to_json()["tokenizer"]
    pairs = [merge.replace(" ", "\u0120").replace("\n", "\u010a").split("|") for merge in merges]
    vocab = {**values["model"]["vocab"]}
    vocab |= {"".join(pair): len(vocab) + index for index, pair in enumerate(pairs)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {**values["model"], "vocab": vocab, "merges": pairs}
    return BPETokenizer.from_json({"tokenizer": {**values, "pre_tokenizer": level, "model": model}})
