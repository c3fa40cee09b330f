"""A conversation with a model, whose memory continues from turn to turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from transformer_xl.generation.generate import GenerationStream, resolve_config, stream
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.model.memory import Memory
from transformer_xl.run import Run

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import GenerationSettings


class Chat:
    """A conversation. A reply ends at a newline or a `stop` string; reply i is sampled with seed + i."""

    def __init__(
        self, run: Run, config: GenerationConfig | None = None, **overrides: Unpack[GenerationSettings]
    ) -> None:
        """Begin a conversation; `config` and `overrides` are as for `stream`.

        Raises:
            UserError: a setting that is out of range.
        """
        config = resolve_config(run.tokenizer, config, overrides)
        self._end_of_reply = (config.stop or ("\n",))[0]
        # `resolve_config` adds the tokens that end with a newline to eos_token_ids if stop_at_newline is set; tokens in
        # eos_token_ids end a reply themselves, so the default stop string, a newline, is not needed then (but beside
        # the end of a document)
        if {*config.eos_token_ids} <= {None if run.tokenizer.document_end is None else run.tokenizer.document_end.id}:
            config = config.model_copy(update={"stop": config.stop or ("\n",)})
        self._run, self._config = run, config
        self._memory: Memory | None = None
        self._text_before_line = ""  # what a truncated reply lacks of its end

    def reply(self, line: str) -> Iterator[str]:
        """Prefill a line (without its newline) and stream the reply; iterate to its end before the next line.

        Raises:
            UserError: the line cannot be encoded. The conversation can continue with another line.
        """
        self._run.tokenizer.encode(line)  # first check the line alone, so that positions in errors count from its start
        reply = stream(self._run, f"{self._text_before_line}{line}\n", self._config, memory=self._memory)
        return self._remember(reply)

    def _remember(self, reply: GenerationStream) -> Iterator[str]:
        last = ""
        for text in reply:
            last = (last + text)[-len(self._end_of_reply) :]
            yield text
        self._memory = reply.memory()
        # terminate a reply that was truncated by max_new_tokens before the next line
        self._text_before_line = rest_of_end(last, self._end_of_reply) if reply.finish_reason == "length" else ""
        self._config = self._config.model_copy(update={"seed": self._config.seed + 1})


def rest_of_end(text: str, end: str) -> str:
    """Return what `text` lacks to end with `end`."""
    return end[next(size for size in range(len(end), -1, -1) if text.endswith(end[:size])) :]
