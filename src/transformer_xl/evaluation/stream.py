"""Surprisal of a text as it comes: the losses of `score`, with memory carried on, for a text without an end.

    stream = SurprisalStream(run)
    for chunk in chunks:
        tokens = stream.read(chunk)     # the tokens whose losses are known now
    tokens = stream.finish()

A text is read in the segments of `score`. The stream holds the memory before the current segment and the tokens of that
segment; once the segment is complete, it is read and replaced by the next memory. `flush` reads an incomplete segment:
the losses of its tokens are returned, and they are read again with the tokens that follow, since a memory is a value
and the one before the segment is still there. So what the stream holds has a fixed size, no loss depends on how the
text is divided into chunks, except for rounding where `flush` divides a segment, and every architecture works.

Shape suffixes: K tokens of the stream, T those of the segment, X = T and the tokens before it that are read with it, B
batch size (1), D model width.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import Unpack

from transformer_xl.config import EvaluationConfig, UserError, check_type
from transformer_xl.evaluation.evaluate import check_weights, override_config
from transformer_xl.evaluation.plan import EvaluationPlan
from transformer_xl.files import as_path, parse_json
from transformer_xl.inference import require_reading_memory
from transformer_xl.reader import Reader
from transformer_xl.run import Run, check_run, weights_digest
from transformer_xl.run_folder import first_difference
from transformer_xl.tensor_file import load_tensors, read_metadata, read_shapes, save_tensors
from transformer_xl.text.tokenizers import document_errors, fingerprint, to_bytes

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import EvaluationSettings

MAX_HELD_BYTES = 2**20
"""Text that the tokenizer cannot split for so long is split at its end, so that what is held stays bounded."""

_MAX_EXTRA_CHARACTERS = 2**20


@dataclass(frozen=True, eq=False)
class ScoredTokens:
    """Consecutive tokens of a stream and their losses."""

    position: int
    """Number of tokens of the stream before these."""
    ids_K: npt.NDArray[np.int64]
    """Token ids."""
    nats_K: npt.NDArray[np.float64]
    """Loss of each token in nats: minus its log-probability."""

    @property
    def nats(self) -> float:
        """Sum of the losses in nats."""
        return float(self.nats_K.sum())

    def __len__(self) -> int:
        return len(self.ids_K)


class SurprisalStream:
    """Reads a text chunk by chunk, and returns the loss of each token; what it holds does not grow.

    The losses are those of `score` for the whole text, with the same settings. They are bit-equal where segments are
    read whole; the tokens of a segment that `flush` divided, or that follow the first `memory_length` tokens of a
    stream, may differ by rounding.
    """

    def __init__(
        self, run: Run, config: EvaluationConfig | None = None, **overrides: Unpack[EvaluationSettings]
    ) -> None:
        """Begin a stream with empty memory.

        Args:
            run: a loaded run.
            config: settings that override individual evaluation settings of the run. Only method memory reads a stream,
                which is one sequence and one document, whatever `batch_size` and `reset_memory` are.
            overrides: settings by name, which override those of `config`.

        Raises:
            UserError: settings contradict each other or do not apply to a stream, the memory certainly needs more than
                there is, or weights are not finite.
        """
        check_run(run)
        plan = EvaluationPlan.for_reading(run, override_config(config, overrides, "run"))
        if plan.method != "memory":
            raise UserError(f"method {plan.method} cannot read a stream; give method memory")
        check_weights(run.model)
        self.run, self.plan = run, plan
        self._model = run.inference(plan.dtype)
        require_reading_memory(
            self._model,
            "a stream",
            num_rows=1,
            num_slots=plan.context_limits.memory_length,
            advice="lower memory_length",
        )
        self._memory = self._model.initial_memory(1, plan.context_limits)  # before the current segment
        self._before_X = np.array([run.tokenizer.bos_token_id], dtype=np.int64)  # tokens before it that are read again
        self._segment_T = np.zeros(0, dtype=np.int64)
        self._num_returned = 0  # of the current segment
        self._num_tokens = 0  # of all earlier segments
        self._held = b""  # text that is not encoded yet, because what follows can change its tokens
        self._num_encoded = 0  # bytes
        self._is_within_line = False  # at the end of what is encoded
        # bytes that are not UTF-8 become U+FFFD, as where a text is displayed; only byte tokenizers can encode them
        self._decoder = None if run.tokenizer.kind == "byte" else codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose losses were returned."""
        return self._num_tokens + self._num_returned

    @property
    def num_waiting(self) -> int:
        """Number of tokens of the current segment whose losses `flush` would return."""
        return len(self._segment_T) - self._num_returned

    def read(self, text: str | bytes) -> ScoredTokens:
        """Read more of the text, and return the tokens of all segments that are complete now.

        Args:
            text: any part of a text; characters may be divided between two parts. In bytes that are not UTF-8, each
                error becomes U+FFFD unless the tokens are bytes.

        Raises:
            UserError: the tokenizer cannot encode the text; the stream is as it was before.
        """
        return self._read_text(to_bytes(text), is_end=False)

    def read_tokens(self, token_ids: npt.ArrayLike) -> ScoredTokens:
        """Read token ids, and return the tokens of all segments that are complete now.

        Raises:
            UserError: an id is not in the vocabulary, or the last part of a text waits for its continuation.
        """
        if self._held or (self._decoder is not None and self._decoder.getstate()[0]):
            raise UserError("text was read, whose last part is not encoded yet; call finish before token ids are read")
        return self._read_ids(self.run.tokenizer.check_ids(token_ids), everything=False)

    def flush(self) -> ScoredTokens:
        """Return the tokens that wait for the end of their segment; text that is not encoded yet goes on waiting."""
        return self._read_ids(np.zeros(0, dtype=np.int64), everything=True)

    def finish(self) -> ScoredTokens:
        """End the text, and return its last tokens; a tokenizer that ends each line with an EOS token adds it.

        A text that is read afterwards follows with the memory of this one.

        Raises:
            UserError: the tokenizer cannot encode the end of the text.
        """
        return self._read_text(b"", is_end=True)

    def save(self, path: Path | str, extra: Mapping[str, Any] | None = None) -> None:
        """Write the state to a safetensors file with a checksum, from which `load` continues the stream.

        Args:
            path: the file; an existing one is replaced once the new one is complete.
            extra: JSON values to store with it.

        Raises:
            UserError: the file system refuses, or the weights of the run have changed; an existing file is unchanged.
        """
        if self.run.inference(self.plan.dtype) is not self._model:
            raise UserError("the weights of the run have changed since the stream began; begin a new stream")
        values = {
            **self._identity(),
            "num_before": len(self._before_X),
            "num_returned": self._num_returned,
            "num_tokens": self._num_tokens,
            "num_encoded": self._num_encoded,
            "is_within_line": self._is_within_line,
            "held": self._held.hex(),
            "undecoded": "" if self._decoder is None else self._decoder.getstate()[0].hex(),
            "extra": dict(extra or {}),
        }
        tokens_K = torch.from_numpy(np.concatenate([self._before_X, self._segment_T]))
        tensors = {**self._memory.tensors(), "stream_tokens": tokens_K}
        save_tensors(as_path(path, "path", "give the path of a file"), tensors, {"stream": json.dumps(values)})

    @classmethod
    def load(
        cls, run: Run, path: Path | str, config: EvaluationConfig | None = None, **overrides: Unpack[EvaluationSettings]
    ) -> tuple[Self, dict[str, Any]]:
        """Continue a stream that was saved, and return it with the values that were stored with it.

        Args:
            run: the run of the stream, with the same weights.
            path: the file.
            config: as for a new stream; the settings must be those of the saved one.
            overrides: settings by name, which override those of `config`.

        Raises:
            UserError: the file is no saved stream, is damaged, or belongs to other weights, settings or another
                tokenizer.
        """
        path, stream = as_path(path, "path", "give the path of a file"), cls(run, config, **overrides)
        extra = stream._restore(path)
        return stream, extra

    def _read_text(self, content: bytes, *, is_end: bool) -> ScoredTokens:
        tokenizer, decoder = self.run.tokenizer, self._decoder
        decoder_state = decoder.getstate() if decoder else None
        try:
            if decoder:
                content = decoder.decode(content, final=is_end).encode("utf-8")
            text = self._held + content
            if is_end and tokenizer.adds_final_newline and _is_within_line(text, self._is_within_line):
                text += b"\n"
            end = len(text) if is_end else tokenizer.last_boundary(text)
            if not end and len(text) > MAX_HELD_BYTES:
                end = len(text)
            with document_errors("the stream", self._num_encoded):
                ids_K = tokenizer.encode_chunk(text[:end]).ids if end else np.zeros(0, dtype=np.int64)
        except UserError:
            if decoder and decoder_state:
                decoder.setstate(decoder_state)
            raise
        self._held, self._num_encoded = text[end:], self._num_encoded + end
        self._is_within_line = _is_within_line(text[:end], self._is_within_line)
        return self._read_ids(ids_K.astype(np.int64), everything=is_end)

    def _read_ids(self, ids_K: npt.NDArray[np.int64], *, everything: bool) -> ScoredTokens:
        """Append tokens, and read all complete segments; with `everything` also the incomplete one."""
        length, position = self.plan.segment_length, self.num_tokens
        self._segment_T = np.concatenate([self._segment_T, ids_K])
        ids, nats = [np.zeros(0, dtype=np.int64)], list[Tensor]()
        while len(self._segment_T) >= length or (everything and self.num_waiting):
            segment_T = self._segment_T[:length]
            nats.append(self._read_segment(segment_T)[self._num_returned :])
            ids.append(segment_T[self._num_returned :])
            self._num_returned = len(segment_T)
            if len(segment_T) == length:
                self._segment_T, self._num_returned = self._segment_T[length:], 0
                self._num_tokens += length
        self._segment_T = self._segment_T.copy()  # a view would keep all tokens
        nats_K = torch.cat(nats).cpu().numpy() if nats else np.zeros(0)
        return ScoredTokens(position, np.concatenate(ids), nats_K.astype(np.float64))

    def _read_segment(self, segment_T: npt.NDArray[np.int64]) -> Tensor:
        """Return the losses of a segment, shape (T,); after a complete one, the memory and its tokens advance."""
        plan, reader = self.plan, Reader(self._model, self._memory, segment_length=self.plan.num_inputs)
        hidden_BXD = reader.step(torch.from_numpy(np.concatenate([self._before_X, segment_T[:-1]]))[None])
        hidden_BTD, targets_BT = hidden_BXD[:, -len(segment_T) :], torch.from_numpy(segment_T.copy())[None]
        nats_BT = self._model.nats(hidden_BTD, targets_BT, temperature=plan.softmax_temperature)
        if len(segment_T) == plan.segment_length:
            self._memory = reader.memory
            self._before_X = np.concatenate([self._before_X, segment_T])[-1 - plan.extended_context_length :]
        return nats_BT[0]

    def _identity(self) -> dict[str, Any]:
        """Return what a saved stream must have in common with the one that continues it."""
        settings = self.plan.as_dict()
        names = ("segment_length", "memory_length", "attention_window", "clamp_length")
        names += ("extended_context_length", "softmax_temperature", "dtype")
        return {
            "weights_sha256": weights_digest(self.run, self.plan.dtype),
            "tokenizer_sha256": fingerprint(self.run.tokenizer),
            "settings": {name: settings[name] for name in names},
        }

    def _restore(self, path: Path) -> dict[str, Any]:
        """Replace the state by a saved one; header and shapes are checked before any tensor is read."""
        try:
            values = parse_json(read_metadata(path)["stream"])
            identity = {name: values[name] for name in ("weights_sha256", "tokenizer_sha256", "settings")}
            counts = {name: values[name] for name in ("num_before", "num_returned", "num_tokens", "num_encoded")}
            held, undecoded = bytes.fromhex(values["held"]), bytes.fromhex(values["undecoded"])
            is_within_line, extra = values["is_within_line"], values["extra"]
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path} is not the state of a stream; give the file that a stream was saved to") from None
        own = self._identity()
        for name, what in (("weights_sha256", "other weights"), ("tokenizer_sha256", "another tokenizer")):
            if identity[name] != own[name]:
                raise UserError(f"{path} is the state of a stream with {what}; give its run, or another file")
        if identity["settings"] != own["settings"]:
            check_type(identity["settings"], dict, f"{path}: settings", "give another file")
            difference = first_difference(identity["settings"], own["settings"])
            raise UserError(f"{path} is the state of a stream with other settings: {difference}")
        _check(path, type(is_within_line) is bool)
        _check(path, type(extra) is dict and len(json.dumps(extra)) <= _MAX_EXTRA_CHARACTERS)
        _check(path, all(type(count) is int and 0 <= count < 2**62 for count in counts.values()))
        _check(path, len(held) <= MAX_HELD_BYTES and len(undecoded) < 4 and not (undecoded and self._decoder is None))
        self._restore_tensors(path, counts["num_before"], counts["num_returned"])
        self._num_returned, self._num_tokens = counts["num_returned"], counts["num_tokens"]
        self._num_encoded, self._held = counts["num_encoded"], held
        self._is_within_line = is_within_line
        if self._decoder is not None:
            self._decoder.setstate((undecoded, 0))
        return extra

    def _restore_tensors(self, path: Path, num_before: int, num_returned: int) -> None:
        memory, vocab_size = self._memory, self.run.model.config.vocab_size
        expected, shapes = {name: tuple(tensor.shape) for name, tensor in memory.tensors().items()}, read_shapes(path)
        num_tokens = shapes.pop("stream_tokens", ())
        _check(path, shapes == expected and len(num_tokens) == 1)
        _check(path, 0 < num_before <= 1 + self.plan.extended_context_length)
        _check(path, num_returned <= num_tokens[0] - num_before < self.plan.segment_length)
        tensors, _ = load_tensors(path)
        like = {**memory.tensors(), "stream_tokens": torch.zeros(0, dtype=torch.int64)}
        for name, tensor in tensors.items():
            _check(path, tensor.is_floating_point() == like[name].is_floating_point())
            _check(path, bool(tensor.isfinite().all()))
            if not tensor.is_floating_point() and name not in ("valid", "position"):  # ids of tokens
                # those for other embeddings are one higher
                bound = vocab_size + name.startswith(("recent", "ids_"))
                _check(path, bool(((tensor >= 0) & (tensor < bound)).all()))
        valid, position = int(tensors["valid"]), int(tensors["position"])
        _check(path, 0 <= position < 2**62 and valid == min(position, memory.length))
        tokens_K = tensors.pop("stream_tokens").long().numpy()
        # keys and values have the dtype of matrix products
        dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
        self._memory = memory.to(dtype=dtypes.pop() if len(dtypes) == 1 else None).with_tensors(tensors)
        self._before_X, self._segment_T = tokens_K[:num_before], tokens_K[num_before:]


def _is_within_line(text: bytes, before: bool) -> bool:
    """Return whether a text ends within a line; `before` says it of the text before, if this one is empty."""
    return not text.endswith(b"\n") if text else before


def _check(path: Path, is_right: bool) -> None:
    if not is_right:
        raise UserError(f"{path} is not a state that a stream of this run can have; give another file")
