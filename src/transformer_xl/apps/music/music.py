"""Pieces of music from a run on MIDI files (the command `txl generate RUN --out piece.mid`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from transformer_xl.apps.music.midi import check_midi_path, midi_codec
from transformer_xl.config import UserError, check_type
from transformer_xl.files import as_path, atomic_file
from transformer_xl.generation.completion import Completion
from transformer_xl.generation.generate import generate, resolve_config
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.generation.sampling import LogitsProcessor
from transformer_xl.run import Run, check_run
from transformer_xl.text.sources.text_files import codec_ids
from transformer_xl.text.tokenizers.integer import IntegerTokenizer

if TYPE_CHECKING:
    from transformer_xl.config.typed_settings import GenerationSettings

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Piece:
    """A generated piece of music."""

    path: Path
    """The MIDI file."""
    num_notes: int
    """Number of notes of the file, with those of the prompt."""
    completion: Completion
    """The generated tokens."""


def generate_midi(
    run: Run,
    out: StrPath,
    prompt: StrPath | Sequence[int] | None = None,
    config: GenerationConfig | None = None,
    *,
    logits_processor: LogitsProcessor | None = None,
    **overrides: Unpack[GenerationSettings],
) -> Piece:
    """Generate a piece of music and write it as a MIDI file.

    Args:
        run: a loaded run that was trained on MIDI files (`prepare` with tokenizer `midi`).
        out: the MIDI file to create; its name ends in .mid or .midi.
        prompt: MIDI file or token ids of a piece to continue, or None to begin a new piece.
        config: settings of the generation, or None for the defaults. Without `eos_token_ids`, the token that ends a
            piece ends it.
        logits_processor: changes the logits before each token is sampled.
        overrides: settings by name, which override those of `config`.

    Raises:
        UserError: the run is not one of MIDI files; the prompt is not a MIDI file; the file exists or cannot be
            written; a setting is out of range; or the tokens contain no note. No file is left behind.
    """
    check_run(run)
    out = as_path(out, "out", "give the path of a new MIDI file")
    check_midi_path(out)
    tokenizer = run.tokenizer
    if not isinstance(tokenizer, IntegerTokenizer) or not tokenizer.midi:
        raise UserError(
            "this run was not trained on MIDI files, so it cannot write one; make a corpus of them with "
            "txl prepare FILES --tokenizer midi"
        )
    check_type(prompt, (str, os.PathLike, Sequence, type(None)), "prompt", "give a MIDI file, token ids or None")
    config = resolve_config(tokenizer, config, overrides)
    if "eos_token_ids" not in config.model_fields_set and tokenizer.eos_token_id is not None:
        config = config.model_copy(update={"eos_token_ids": (tokenizer.eos_token_id,)})
    codec = midi_codec(tokenizer)
    is_ids = prompt is None or (isinstance(prompt, Sequence) and not isinstance(prompt, str))
    prompt_ids = prompt if is_ids else codec_ids(codec, Path(prompt))
    completion = generate(run, prompt_ids, config, logits_processor=logits_processor)
    content, num_notes = codec.decode([*(prompt_ids or ()), *completion.token_ids])
    if not num_notes:
        raise UserError(
            f"the {len(completion.token_ids):,} generated tokens contain no whole note, so {out} was not written; "
            "generate more, or train the run longer"
        )
    with atomic_file(out) as temporary:
        temporary.write_bytes(content)
    return Piece(out, num_notes, completion)
