"""Answers in OpenAI's form: texts and log-probabilities of completions and chat completions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from operator import itemgetter
from typing import Any

from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from transformer_xl.apps.serve.jobs import ScoredToken, TextJob, TokenLogprobs
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
        self.tokenizer = tokenizer
        self.text_of = lru_cache(maxsize=65_536)(self._text_of)
        r"""Returns the text of a token id by itself; of bytes that are no character, `bytes:\xe2\x80`."""
        self.text_after = lru_cache(maxsize=65_536)(self._text_after)
        """Returns what a token id adds to the text of another one, or of none."""

    def bytes_of(self, token_id: int, name: str) -> list[int]:
        """Return the bytes of a token with a name."""
        return list(self.tokenizer.decode_bytes([token_id]) if self.tokenizer.is_lossless else name.encode())

    def _text_after(self, previous: int | None, token_id: int) -> str:
        decoder = self.tokenizer.stream_decoder()
        if previous is not None:
            decoder.push(previous)
        return decoder.push(token_id) + decoder.finish()

    def _text_of(self, token_id: int) -> str:
        content = self.tokenizer.decode_bytes([token_id])
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def in_place(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token; where that depends on those before it, what it adds to their text."""
        if self.tokenizer.is_lossless:
            return [*map(self.text_of, token_ids)]
        decoder = self.tokenizer.stream_decoder()
        texts = [*map(decoder.push, token_ids)]
        return [*texts[:-1], texts[-1] + decoder.finish()] if texts else []

    def parts_of(self, text: str, token_ids: Sequence[int]) -> list[str]:
        """Return the part of a text that each of its tokens stands for, together all of it, as it was given.

        White space is a part of the token after it, unless it ends a line. Of the tokens of a word that they do not
        restore, the last one has all, and the others have nothing.
        """
        if self.tokenizer.is_lossless:
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
        texts = self.in_place(self.tokenizer.encode(line).tolist())
        if "".join(texts) == line:
            return texts
        ends = [*(word.end() for word in _WORD.finditer(line)), len(line)]
        try:
            words = self.tokenizer.word_indices(to_bytes(line)).tolist()
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


class NamesInPlace:
    """Names tokens that follow one another: by their texts or, if these depend on others, by what they add to them."""

    def __init__(self, names: TokenNames, before: Iterable[int] = ()) -> None:
        """Begin after the tokens `before`."""
        self.names, self._previous = names, None
        self._decoder = None if names.tokenizer.is_lossless else names.tokenizer.stream_decoder()
        if self._decoder is not None:
            for token_id in before:
                self._previous = token_id
                self._decoder.push(token_id)

    def copy(self) -> NamesInPlace:
        """Return another one at the same place."""
        return deepcopy(self, {id(shared): shared for shared in (self.names, self.names.tokenizer)})

    def next(self, token: ScoredToken, *, is_last: bool) -> tuple[str, list[str]]:
        """Return the names of the next token, and of its alternatives as if only the token before were before them."""
        if self._decoder is None:
            return self.names.text_of(token.token_id), [self.names.text_of(token_id) for token_id, _ in token.top]
        own = self._decoder.push(token.token_id) + (self._decoder.finish() if is_last else "")
        others = [self.names.text_after(self._previous, token_id) for token_id, _ in token.top]
        self._previous = token.token_id
        return own, [own if pair[0] == token.token_id else other for pair, other in zip(token.top, others, strict=True)]


class SampleNames:
    """Names the tokens of samples, each after those of its prompt."""

    def __init__(self, names: TokenNames, jobs: Sequence[TextJob]) -> None:
        self.names, self._jobs = names, jobs
        self._of_jobs, self._of_samples = dict[int, NamesInPlace](), dict[tuple[int, int], NamesInPlace]()

    def of(self, job: int, sample: int) -> NamesInPlace:
        """Return what names the tokens of a sample, of a job by its index; the first time reads the prompt."""
        if job not in self._of_jobs:
            self._of_jobs[job] = NamesInPlace(self.names, self._jobs[job].input_ids)
        if (job, sample) not in self._of_samples:
            self._of_samples[job, sample] = self._of_jobs[job].copy()
        return self._of_samples[job, sample]


def text_offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Return the index of the character where the text of each token begins."""
    decoder, offsets, length = tokenizer.stream_decoder(), list[int](), 0
    for token_id in token_ids:
        offsets.append(length + decoder.num_ended_by(token_id))
        length += len(decoder.push(token_id))
    return offsets


def completion_logprobs(
    names: NamesInPlace | None, tokens: TokenLogprobs, offsets: Sequence[int], *, is_end: bool
) -> dict[str, Any]:
    """Return the `logprobs` of a completion; each token is among the most likely ones, with the same number.

    Args:
        names: names the tokens; None: as `token_id:5`.
        tokens: the tokens.
        offsets: the index of the character where each begins.
        is_end: whether the text ends with them.
    """
    own_names, tops = list[str](), list[dict[str, float] | None]()
    for index, token in enumerate(tokens):
        if names is None:
            own, others = f"token_id:{token.token_id}", [f"token_id:{token_id}" for token_id, _ in token.top]
        else:
            own, others = names.next(token, is_last=is_end and index == len(tokens) - 1)
        own_names.append(own)
        if token.logprob is None:
            tops.append(None)
            continue
        top: dict[str, float] = {}
        for text, logprob in (*zip(others, (pair[1] for pair in token.top), strict=True), (own, token.logprob)):
            top[text] = max(logprob, top.get(text, logprob))  # tokens with the same text: the most likely one counts
        tops.append(top)
    return {
        "tokens": own_names,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def chat_logprobs(names: NamesInPlace, tokens: TokenLogprobs, *, is_end: bool) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion; arguments are those of `completion_logprobs`."""

    def entry(name: str, token_id: int, logprob: float | None) -> dict[str, Any]:
        return {"token": name, "logprob": logprob, "bytes": names.names.bytes_of(token_id, name)}

    content = list[dict[str, Any]]()
    for index, token in enumerate(tokens):
        own, others = names.next(token, is_last=is_end and index == len(tokens) - 1)
        top = [entry(name, *pair) for name, pair in zip(others, token.top, strict=True)]
        content.append({**entry(own, token.token_id, token.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}
