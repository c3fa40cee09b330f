"""From tokens to the text shown: it goes on from the prompt, comes in whole characters, and ends before a stop string.

A stop string may lie across tokens, and across the bytes of a character, so text that could be the beginning of one is
held back until it is known. Of several the one that is whole first ends the text, as nothing more is made then.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformer_xl.text.tokenizer import Tokenizer


class Continuation:
    """The text of tokens made after a prompt, piece by piece."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        """`prompt` is what the text goes on from: with the space between two words, say."""
        self._vocabulary, self._decoder = tokenizer, tokenizer.stream_decoder()
        certain = "".join(map(self._decoder.push, prompt))
        # what the decoder holds back of the prompt comes with the first token, but was said; not so half a character
        self._said = tokenizer.decode(prompt).removeprefix(certain).rstrip("\ufffd")
        self._stops = stops
        self._held = ""
        self.stopped = False
        """Whether a stop string was found: the text ended before it."""

    def push(self, token: int, *, stopping: bool = True) -> str:
        """The text that became certain with this token; unless `stopping`, no stop string is looked for in it."""
        return self._shown(self._decoder.push(token), stopping=stopping)

    def end(self, token: int, *, stopping: bool = True) -> str:
        """The rest, once a token came that ends the text; of one that ends a line only its line end is not shown.

        Byte pairs may join the last signs of a line with its end, as in ");\\n".
        """
        line = self._decoder.push(token).removesuffix("\n") if self._vocabulary.is_newline_V[token] else ""
        text = self._shown(line, stopping=stopping)
        return text if self.stopped else text + self.finish(stopping=stopping)

    def finish(self, *, stopping: bool = True) -> str:
        """The rest, once no token follows."""
        text = self._shown(self._decoder.finish(), stopping=stopping)
        return text if self.stopped else text + self._held

    def _shown(self, text: str, *, stopping: bool) -> str:
        # a dash that was said after a space may stand without one, now that the next word is known
        text = text.removeprefix(self._said if text.startswith(self._said) else self._said.lstrip())
        if text:
            self._said = ""
        text = self._held + text
        places = [text.find(stop) for stop in self._stops if stop in text] if stopping else []
        if places:
            self.stopped = True
            return text[: min(places)]
        length = self._beginning(text) if stopping else 0
        self._held = text[len(text) - length :]
        return text[: len(text) - length]

    def _beginning(self, text: str) -> int:
        """How long an end of the text could be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
