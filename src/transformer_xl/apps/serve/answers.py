"""Answers in OpenAI's form: texts and log-probabilities of completions and chat completions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from transformer_xl.apps.serve.jobs import ScoredToken
from transformer_xl.apps.serve.protocol import ApiError
from transformer_xl.text.tokenizers import Tokenizer, to_bytes
from transformer_xl.text.tokenizers.base import EncodingError
from transformer_xl.text.tokenizers.bpe import lines_of

_PART_BYTES = 2**18  # of a large answer
_WORD = re.compile(r"[^ \t\n\r\v\f]+")  # as `word_indices` counts them


class LargeAnswer(JSONResponse):
    """An answer that may be large, to be made in another thread than the event loop's."""

    @override
    def render(self, content: Any) -> bytes:
        return to_json(content)  # no other thread runs meanwhile, and the encoder of Python takes seven times as long

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it in parts, so that it has ended only when the client has read it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), _PART_BYTES):
            end = start + _PART_BYTES
            part = bytes(self.body[start:end])
            await send({"type": "http.response.body", "body": part, "more_body": end < len(self.body)})


def error_answer(error: ApiError) -> JSONResponse:
    """Return the answer of an error."""
    return JSONResponse(error.body(), error.status, headers=error.headers)


def finish_reason(reason: str | None) -> str | None:
    """Return OpenAI's name of the reason why a text ended."""
    return "stop" if reason == "eos" else reason


class TokenNames:
    """The text of each token, by itself and in its place."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text_of = lru_cache(maxsize=65_536)(self._text_of)
        r"""Returns the text of a token id by itself; of bytes that are no character, `bytes:\xe2\x80`."""

    def bytes_of(self, token_id: int) -> list[int]:
        """Return the bytes of a token."""
        return list(self._tokenizer.decode_bytes([token_id]))

    def _text_of(self, token_id: int) -> str:
        content = self._tokenizer.decode_bytes([token_id])
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def in_place(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token; where that depends on those before it, what it adds to their text."""
        if self._tokenizer.is_lossless:
            return [*map(self.text_of, token_ids)]
        decoder = self._tokenizer.stream_decoder()
        texts = [*map(decoder.push, token_ids)]
        return [*texts[:-1], texts[-1] + decoder.finish()] if texts else []

    def parts_of(self, text: str, token_ids: Sequence[int]) -> list[str]:
        """Return the part of a text that each of its tokens stands for, together all of it, as it was given.

        White space is a part of the token after it, unless it ends a line. Of the tokens of a word that they do not
        restore, the last one has all, and the others have nothing.
        """
        if self._tokenizer.is_lossless:
            return self.in_place(token_ids)
        parts, first = list[str](), ""
        for line in lines_of(text):
            if in_line := self._parts_of_line(line):
                parts += in_line
            elif parts:
                parts[-1] += line
            else:
                first += line
        return [first + parts[0], *parts[1:]] if parts else []

    def _parts_of_line(self, line: str) -> list[str]:
        texts = self.in_place(self._tokenizer.encode(line).tolist())
        if "".join(texts) == line:
            return texts
        ends = [*(word.end() for word in _WORD.finditer(line)), len(line)]
        try:
            words = self._tokenizer.word_indices(to_bytes(line)).tolist()
        except EncodingError:  # a token has parts of two words
            words = [len(ends) - 1] * len(texts)
        parts, start = list[str](), 0
        for word, group in groupby(zip(words, texts, strict=True), itemgetter(0)):
            part = line[start : ends[word]]
            sizes = [len(text.strip()) for _, text in group]
            cuts = [len(part) - len(part.lstrip()) + size for size in accumulate(sizes)]
            if not sizes[-1] or cuts[-1] != len(part):
                cuts = [*[0] * (len(sizes) - 1), len(part)]
            parts += [part[begin:end] for begin, end in pairwise([0, *cuts])]
            start = max(start, ends[word])
        return [*parts[:-1], parts[-1] + line[start:]] if parts else []


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Return the index of the character where the text of each token begins."""
    decoder, offsets, length = tokenizer.stream_decoder(), list[int](), 0
    for token_id in token_ids:
        offsets.append(length)
        length += len(decoder.push(token_id))
    return offsets


def completion_logprobs(
    names: TokenNames, tokens: Iterable[ScoredToken], offsets: Sequence[int], *, as_ids: bool
) -> dict[str, Any]:
    """Return the `logprobs` of a completion; each token is among the most likely ones, with the same number.

    Args:
        names: the text of each token.
        tokens: the tokens.
        offsets: the index of the character where each begins.
        as_ids: whether tokens are named `token_id:5` instead of their text.
    """

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else names.text_of(token_id)

    tops: list[dict[str, float] | None] = []
    for token in tokens:
        if token.logprob is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            text = name(token_id)  # tokens with the same text: the most likely one counts
            top[text] = max(logprob, top.get(text, logprob))
        tops.append(top)
    return {
        "tokens": [name(token.token_id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def chat_logprobs(names: TokenNames, tokens: Iterable[ScoredToken]) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        return {"token": names.text_of(token_id), "logprob": logprob, "bytes": names.bytes_of(token_id)}

    content = [
        {**entry(token.token_id, token.logprob), "top_logprobs": [entry(*pair) for pair in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}
