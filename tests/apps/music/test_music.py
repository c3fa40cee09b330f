"""A run on MIDI files: prepared, trained and loaded by the commands, it writes its tokens as a MIDI file."""

from __future__ import annotations

import shutil
import subprocess
import wave
from pathlib import Path

import numpy as np
import pytest
from forced_tokens import ForcedTokens
from melodies import MELODIES, melody, notes_of
from refusals import Capture, assert_refused, do, txl

from transformer_xl import Corpus, Run, UserError, generate, generate_midi, load
from transformer_xl.apps.music.midi import midi_codec
from transformer_xl.text.tokenizers.integer import IntegerTokenizer

pytest.importorskip("miditok")

SMALL = (
    "--model.n-layers 1 --model.d-model 14 --model.n-heads 2 --model.d-head 5 --model.d-ff 19 --model.ngram-buckets 97 "
    "--train.batch-size 2 --train.segment-length 7 --train.memory-length 11 --train.max-steps 2"
)
SOUND_FONTS = [Path("/usr/share/sounds/sf2") / name for name in ("default-GM.sf2", "TimGM6mb.sf2", "FluidR3_GM.sf2")]
SOUND_FONT = next((path for path in SOUND_FONTS if path.exists()), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pieces, a corpus of them and a run on it."""
    folder = tmp_path_factory.mktemp("music") / "w"
    (folder / "pieces").mkdir(parents=True)
    for name in MELODIES:
        (folder / "pieces" / f"{name}.mid").write_bytes(melody(name))
    (folder / "pieces" / "notes.txt").write_text("what the pieces are\n")
    (folder / "damaged.mid").write_bytes(melody()[:-9])
    (folder / "text.txt").write_text("words " * 97)
    minuet = folder / "pieces" / "minuet.mid"
    result = txl(
        "prepare", "--train", folder / "pieces", "--valid", minuet, "--tokenizer", "midi", "--out", folder / "corpus"
    )
    assert result.status == 0
    assert "left out 1 of" in result.err
    do(f"prepare {folder}/text.txt --out {folder}/text-corpus")
    do(f"train music-tiny --corpus {folder}/corpus --run {folder}/run {SMALL}")
    do(f"train fast-tiny --corpus {folder}/text-corpus --run {folder}/text-run {SMALL}")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return load(folder / "run", device="cpu")


def piece_of(run: Run, path: Path) -> list[int]:
    assert isinstance(run.tokenizer, IntegerTokenizer)
    return midi_codec(run.tokenizer).encode_file(path)


def test_generated_tokens_become_a_midi_file(folder: Path, run: Run, tmp_path: Path) -> None:
    """The tokens of a melody, in another run's corpus, give the notes of the melody."""
    ids = piece_of(run, folder / "pieces" / "minuet.mid")
    forced = ForcedTokens([*ids, run.tokenizer.vocab_size - 1])
    piece = generate_midi(run, tmp_path / "piece.mid", max_new_tokens=997, logits_processor=forced)
    assert piece.completion.finish_reason == "eos"
    assert piece.num_notes == len(notes_of(MELODIES["minuet"][1]))
    assert piece_of(run, piece.path) == ids
    forced = ForcedTokens([*ids, run.tokenizer.vocab_size - 1])
    settings = {"max_new_tokens": len(ids) + 1, "eos_token_ids": (), "logits_processor": forced}
    unended = generate_midi(run, tmp_path / "unended.mid", **settings)
    assert (unended.completion.finish_reason, unended.num_notes) == ("length", piece.num_notes)
    # a piece that is continued is in the file, whether it is given as a file or as tokens
    forced = ForcedTokens([*ids, *ids])
    continued, from_ids = (
        generate_midi(run, tmp_path / f"{index}.mid", prompt, max_new_tokens=len(ids), logits_processor=forced)
        for index, prompt in enumerate((piece.path, ids))
    )
    assert continued.num_notes == 2 * piece.num_notes
    assert continued.path.read_bytes() == from_ids.path.read_bytes()


def test_the_command_continues_a_piece(folder: Path, run: Run, tmp_path: Path) -> None:
    minuet = folder / "pieces" / "minuet.mid"
    words = ["generate", folder / "run", "--prompt-file", minuet, "--max-new-tokens", "31"]
    result = txl(*words, "--out", tmp_path / "a.mid", "--json")
    completion = generate(run, piece_of(run, minuet), max_new_tokens=31)
    assert result.object["num_notes"] == generate_midi(run, tmp_path / "b.mid", minuet, max_new_tokens=31).num_notes
    assert result.object["num_tokens"] == len(completion.token_ids)
    assert (tmp_path / "a.mid").read_bytes() == (tmp_path / "b.mid").read_bytes()
    printed = txl(*words, "--out", tmp_path / "c.mid").out
    assert printed == f"{tmp_path}/c.mid: {result.object['num_notes']} notes; 31 new tokens\n"


def test_a_few_pieces_are_split_and_a_damaged_one_is_left_out(folder: Path, tmp_path: Path) -> None:
    """Where they are named one by one, as by the shell's *.mid; a piece is one line, which cannot be cut."""
    pieces = [*(folder / "pieces").glob("*.mid"), folder / "damaged.mid"]
    result = txl("prepare", *pieces, "--tokenizer", "midi", "--out", tmp_path / "new")
    assert result.status == 0, result.err
    assert "left out 1 of 7 files: none is MIDI" in result.err
    splits = Corpus.open(tmp_path / "new").record.splits
    assert [splits[name].num_documents for name in ("train", "valid", "test")] == [4, 1, 1]
    with_nothing = txl("prepare", folder / "damaged.mid", folder / "text.txt", "--tokenizer=midi", "--out", "none")
    assert with_nothing.status == 2
    assert "none of the files is MIDI" in with_nothing.err


def test_another_corpus_is_made_with_the_tokens_of_a_run(folder: Path, run: Run, tmp_path: Path) -> None:
    minuet = folder / "pieces" / "minuet.mid"
    do(f"prepare --train {folder}/pieces --valid {minuet} --tokenizer {folder}/run --out {tmp_path}/new")
    tokens = (folder / "corpus" / "train-00000.tokens").read_bytes()
    assert (tmp_path / "new" / "train-00000.tokens").read_bytes() == tokens


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        ("generate run --out new.mid --max-new-tokens 3", "the 3 generated tokens contain no whole note, so new.mid"),
        ("generate run --out new.wav", "new.wav: the name of a MIDI file must end in .mid or .midi"),
        ("generate run --out damaged.mid", "damaged.mid exists already"),
        ("generate run --out gone/new.mid", "folder gone does not exist"),
        ("generate run --out new.mid --prompt 7", "--out writes one piece of music; leave --prompt"),
        ("generate run --out new.mid --num-samples 2", "leave --prompt, --num-samples"),
        ("generate run --out new.mid --max-new-tokens none", "none never ends; give a number"),
        ("generate run --out new.mid --prompt-file damaged.mid", "damaged.mid: not a valid MIDI file .*; leave it out"),
        ("generate run --out new.mid --prompt-file text.txt", "text.txt: not a MIDI file, which begins with MThd"),
        ("generate run --prompt-file damaged.mid", "damaged.mid is a MIDI file; give --out NEW.mid too"),
        ("generate text-run --out new.mid", "this run was not trained on MIDI files"),
        ("prepare pieces/minuet.mid --out new", "minuet.mid is a MIDI file; give --tokenizer midi"),
        ("prepare damaged.mid --tokenizer midi --out new", "damaged.mid: not a valid MIDI file"),
        ("prepare text.txt --tokenizer midi --out new", "text.txt: not a MIDI file, which begins with MThd"),
        ("prepare text-run --tokenizer midi --out new", "no file of text-run is MIDI"),
        ("prepare pieces --tokenizer midi --encoding latin-1 --out new", "--encoding 'latin-1' cannot be used"),
        ("prepare pieces --tokenizer midi --vocab-size 97 --out new", "trained already; leave --vocab-size 97 out"),
        ("score run damaged.mid", "damaged.mid"),
    ],
)  # fmt: skip
def test_bad_command_is_refused(
    folder: Path, words: str, pattern: str, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.chdir(folder)
    assert_refused(folder, words, pattern, capfd)


def test_a_prompt_of_another_type_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"prompt is of type float .*; give a MIDI file, token ids or None"):
        generate_midi(run, tmp_path / "new.mid", 0.5)  # type: ignore[arg-type]


@pytest.mark.skipif(
    shutil.which("fluidsynth") is None or SOUND_FONT is None,
    reason="needs FluidSynth and a sound font: apt-get install fluidsynth timgm6mb-soundfont",
)
def test_a_piece_can_be_heard(folder: Path, run: Run, tmp_path: Path) -> None:
    """The audio is as long as the piece, and not silent."""
    minuet, end = folder / "pieces" / "minuet.mid", ForcedTokens([run.tokenizer.vocab_size - 1])
    piece = generate_midi(run, tmp_path / "a.mid", minuet, logits_processor=end)
    command = ["fluidsynth", "-ni", "-g", "1", "-F", str(tmp_path / "a.wav"), str(SOUND_FONT), str(piece.path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with wave.open(str(tmp_path / "a.wav")) as audio:
        samples = np.frombuffer(audio.readframes(audio.getnframes()), np.int16)
        seconds = audio.getnframes() / audio.getframerate()
    assert 8 * 3 * 60 / 100 <= seconds < 8 * 3 * 60 / 100 + 5  # eight bars of three quarters, 100 in a minute
    assert np.abs(samples).max() > 1000
