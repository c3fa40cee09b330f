"""Regenerates moses.json: texts, their words, and the words joined again, by TransfoXLTokenizer of transformers.

    python golden_moses.py

Each entry of moses.json is [text, words, joined words].

Needs transformers 4.37.2 and sacremoses 0.2.0, in a separate environment. To add a text, append [text, [], ""] to
moses.json and run this. The last 400 texts are random combinations of words and punctuation of the first ones.
"""

from __future__ import annotations

import json
from pathlib import Path


def main() -> None:
    from transformers.models.deprecated.transfo_xl.tokenization_transfo_xl import TransfoXLTokenizer

    vocab_file = Path("words.txt")
    vocab_file.write_text("<eos>\n<unk>\n")
    tokenizer = TransfoXLTokenizer(vocab_file=str(vocab_file))
    vocab_file.unlink()
    path = Path(__file__).parent / "moses.json"
    entries = []
    for text, _, _ in json.loads(path.read_text()):
        words = tokenizer.tokenize(text)
        entries.append(json.dumps([text, words, tokenizer.convert_tokens_to_string(words)]))
    path.write_text("[\n" + ",\n".join(entries) + "\n]\n")


if __name__ == "__main__":
    main()
