"""`txl convert` as a user meets it: one command for a checkpoint, then evaluate and generate as for any run."""

from __future__ import annotations

import json
import pickle
from collections import Counter, OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interop.checkpoints import golden, hugging_face_folder
from interop.old_modules import Old, nvidia_checkpoint, old_corpus, old_model, old_modules
from refusals import txl
from safetensors.torch import load_file

from transformer_xl.run_folder import RunFolder
from transformer_xl.text.tokenizers.word import WordTokenizer

WORDS = [
    "<eos>", "the", ",", ".", "<unk>", "@-@", "@,@", "@.@", "cat", "sat", "on", "mat", "well", "known", "'s", "1", "80",
    "23", "000", "(", ")", "Hello", "dog",
]  # fmt: skip
TEXT = 'Hello, the well-known cat (1.80) sat on the mat.\nThe dog\'s mat: 23,000 "mats".\n' * 5


def hub_folder(place: Path, tokenizer: str) -> Path:
    """As on the Hub: configuration, pytorch_model.bin, and a tokenizer's attributes, pickled."""
    config, weights, _ = golden("tied-biases")
    folder = hugging_face_folder(place / "hub", config, weights)
    (folder / "vocab.json").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    attributes = {
        "counter": Counter({word: 50 - place for place, word in enumerate(WORDS)}), "special": ["<eos>"], "min_freq": 0,
        "max_size": None, "lower_case": False, "delimiter": None, "vocab_file": None, "never_split": None,
        "idx2sym": WORDS, "sym2idx": OrderedDict((word, place) for place, word in enumerate(WORDS)), "eos_idx": 0,
    }  # fmt: skip
    if tokenizer == "vocab.pkl":
        (folder / tokenizer).write_bytes(pickle.dumps(attributes, 3))
    else:
        torch.save(attributes, folder / tokenizer, _use_new_zipfile_serialization=False)
    return folder


@pytest.mark.parametrize("tokenizer", ["vocab.pkl", "vocab.bin"])
def test_a_folder_of_the_hub_converts_evaluates_and_generates(tokenizer: str, tmp_path: Path) -> None:
    hub_folder(tmp_path, tokenizer)
    (tmp_path / "text.txt").write_text(TEXT)
    done = txl("convert", tmp_path / "hub", tmp_path / "run", "--json")
    assert done.status == 0
    assert done.err == ""
    assert done.object["format"] == "huggingface"
    assert done.object["tokenizer"] == "word, 23 tokens"
    how = ("--tokenizer", tmp_path / "run", "--test-fraction", "0.5", "--out", tmp_path / "corpus")
    assert txl("prepare", tmp_path / "text.txt", *how).status == 0
    scored = txl("evaluate", tmp_path / "run", "--corpus", tmp_path / "corpus", "--json")
    assert scored.status == 0, scored.err
    assert scored.object["memory_length"] == 9
    assert scored.object["segment_length"] == 128
    assert scored.object["attention_window"] == 9
    wanted = "Hello , the well @-@ known cat ( 1 @.@ 80 ) sat on the mat . <eos>"
    tokenizer_read = RunFolder.open(tmp_path / "run").tokenizer
    assert isinstance(tokenizer_read, WordTokenizer)
    ids = tokenizer_read.encode(TEXT.splitlines()[0] + "\n")
    assert " ".join(WORDS[place] for place in ids) == wanted
    written = txl("generate", tmp_path / "run", "--prompt", "the cat", "--max-new-tokens", "11", "--json")
    assert written.status == 0
    assert written.object["text"]
    told = txl("info", tmp_path / "run", "--verify", "--json")
    assert told.status == 0
    assert told.object["run"]["parameters"] == done.object["parameters"]
    assert told.object["run"]["checksums"] == "valid"


def test_what_is_printed_and_the_way_back(tmp_path: Path) -> None:
    config, weights, _ = golden("clusters")
    hugging_face_folder(tmp_path / "hub", config, weights)
    there = txl("convert", tmp_path / "hub", tmp_path / "run")
    assert (there.status, there.err) == (0, "")
    assert f"next: txl prepare FILES --tokenizer {tmp_path / 'run'} --out CORPUS" in there.out
    back = txl("convert", tmp_path / "run", tmp_path / "back", "--to", "huggingface")
    assert (back.status, back.err) == (0, "")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == weights.keys()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_projs"] == [True, True, True]


def test_kinds_are_recognised_and_can_be_named(tmp_path: Path) -> None:
    """A folder with several kinds in it: the first is taken, and --source-format chooses."""
    old = Old()
    (tmp_path / "both").mkdir()
    with old_modules():
        torch.save(old_model(old), tmp_path / "both" / "model.pt")
        torch.save(old_corpus(WORDS), tmp_path / "both" / "cache.pt")
        checkpoint = nvidia_checkpoint(old, old_model(replace(old, nvidia=True)), WORDS)
        torch.save(checkpoint, tmp_path / "both" / "checkpoint_last.pt")
    for name, words in {
        "nvidia": (),
        "official": ("--source-format", "official"),
    }.items():
        done = txl("convert", tmp_path / "both", tmp_path / name, *words, "--json")
        assert done.status == 0, done.err
        assert done.object["format"] == name
    file = txl("convert", tmp_path / "both" / "checkpoint_last.pt", tmp_path / "file", "--json")
    assert file.object["format"] == "nvidia"


def test_another_tokenizer_of_the_same_size_can_be_given(tmp_path: Path) -> None:
    config, weights, _ = golden("clusters")
    hugging_face_folder(tmp_path / "hub", config, weights)
    (tmp_path / "hub" / "vocab.json").unlink()
    (tmp_path / "hub" / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    assert txl("convert", tmp_path / "hub", tmp_path / "one").status == 0
    (tmp_path / "hub" / "vocab.txt").unlink()
    named = txl("convert", tmp_path / "hub", tmp_path / "two", "--tokenizer", tmp_path / "one")
    assert named.status == 0
    assert (tmp_path / "one/txl_tokenizer.json").read_bytes() == (tmp_path / "two/txl_tokenizer.json").read_bytes()


def test_the_pre_tokenizer_can_be_chosen(tmp_path: Path) -> None:
    hub_folder(tmp_path, "vocab.pkl")
    for pre_tokenizer, words in (("moses", ["the", "well", "@-@", "known"]), ("whitespace", ["the", "<unk>"])):
        run = tmp_path / pre_tokenizer
        assert txl("convert", tmp_path / "hub", run, "--pre-tokenizer", pre_tokenizer).status == 0
        tokenizer = RunFolder.open(run).tokenizer
        assert isinstance(tokenizer, WordTokenizer)
        assert [tokenizer.words[place] for place in tokenizer.encode("the well-known")] == words
