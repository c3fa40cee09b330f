"""`txl convert` from end to end: one command for a checkpoint, then prepare, evaluate and generate as for any run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from integrations.checkpoints.checkpoints import HUB_WORDS, golden, hub_folder, hugging_face_folder
from integrations.checkpoints.old_modules import OldConfig, nvidia_checkpoint, old_corpus, old_model, old_modules
from refusals import txl

from transformer_xl.run_folder import RunFolder
from transformer_xl.text.tokenizers.word import WordTokenizer

TEXT = 'Hello, the well-known cat (1.80) sat on the mat.\nThe dog\'s mat: 23,000 "mats".\n' * 5


def words_of_text(run: Path, text: str) -> str:
    """Return the tokens of a text, separated by spaces."""
    tokenizer = RunFolder.open(run).tokenizer
    assert isinstance(tokenizer, WordTokenizer)
    return " ".join(tokenizer.words[token_id] for token_id in tokenizer.encode(text))


def test_hub_folder_converts_evaluates_and_generates(tmp_path: Path) -> None:
    run, corpus = tmp_path / "run", tmp_path / "corpus"
    converted = txl("convert", hub_folder(tmp_path / "hub", "vocab.pkl"), run, "--json")
    assert (converted.status, converted.err) == (0, "")
    assert (converted.object["format"], converted.object["tokenizer"]) == ("huggingface", "word, 23 tokens")
    expected = "Hello , the well @-@ known cat ( 1 @.@ 80 ) sat on the mat . <eos>"
    assert words_of_text(run, TEXT.splitlines()[0] + "\n") == expected
    (tmp_path / "text.txt").write_text(TEXT)
    options = ("--tokenizer", run, "--test-fraction", "0.5", "--out", corpus)
    assert txl("prepare", tmp_path / "text.txt", *options).status == 0
    evaluated = txl("evaluate", run, "--corpus", corpus, "--json").object
    # mem_len of the checkpoint, the default segment length, and the window that same_length gives: as long as mem_len
    assert (evaluated["memory_length"], evaluated["segment_length"], evaluated["attention_window"]) == (9, 128, 9)
    generated = txl("generate", run, "--prompt", "the cat", "--max-new-tokens", "11", "--json")
    assert generated.object["text"]
    info = txl("info", run, "--verify", "--json").object["run"]
    assert (info["parameters"], info["checksums"]) == (converted.object["parameters"], "valid")


def test_model_of_plain_ids_converts_evaluates_and_goes_back(tmp_path: Path) -> None:
    """A model of music or other numbers has no vocabulary: its tokens are the ids 0 to V - 1."""
    config, weights, _ = golden("clusters")
    folder = hugging_face_folder(tmp_path / "hub", config, weights)
    (folder / "vocab.json").unlink()
    refused = txl("convert", folder, tmp_path / "run")
    assert refused.status == 2
    assert "no tokenizer for its 23 tokens; pass --tokenizer" in refused.err
    assert "integer" in refused.err
    run, corpus, text = tmp_path / "run", tmp_path / "corpus", tmp_path / "text.txt"
    converted = txl("convert", folder, run, "--tokenizer", "integer", "--json").object
    assert converted["tokenizer"] == "integer, 23 tokens"
    text.write_text("".join(f"{index % 23} {index * index % 23}\n" for index in range(200)))
    assert txl("prepare", text, "--tokenizer", run, "--out", corpus).status == 0
    evaluated = txl("evaluate", run, "--corpus", corpus, "--json").object
    scored = txl("score", run, text, "--json").object
    assert (scored["tokens"], evaluated["nats_per_token"] > 0) == (400, True)
    generated = txl("generate", run, "--prompt", "7 22", "--max-new-tokens", "9", "--json").object["text"]
    assert len(generated.split()) == 9
    assert all(0 <= int(word) < 23 for word in generated.split())
    back = txl("convert", run, tmp_path / "back", "--to", "huggingface-4.37", "--json").object
    assert "TransfoXL has no integer tokenizer: encode text with" in back["notes"][-1]
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] is None
    assert txl("convert", tmp_path / "back", tmp_path / "again", "--tokenizer", "integer").status == 0
    for name in ("model.safetensors", "txl_tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (run / name).read_bytes()


def test_format_is_detected_or_selected(tmp_path: Path) -> None:
    config = OldConfig()
    folder = tmp_path / "two formats"
    folder.mkdir()
    with old_modules():
        torch.save(old_model(config), folder / "model.pt")
        torch.save(old_corpus(HUB_WORDS), folder / "cache.pt")
        checkpoint = nvidia_checkpoint(config, old_model(replace(config, nvidia=True)), HUB_WORDS)
        torch.save(checkpoint, folder / "checkpoint_last.pt")
    for source, options, expected in (
        (folder, [], "nvidia"),
        (folder, ["--source-format", "official"], "official"),
        (folder / "checkpoint_last.pt", [], "nvidia"),
    ):
        result = txl("convert", source, tmp_path / f"{source.name} {expected}", *options, "--json")
        assert result.object["format"] == expected


def test_result_is_printed_for_people(tmp_path: Path) -> None:
    folder, run = hub_folder(tmp_path / "hub", "vocab.pkl"), tmp_path / "run"
    assert f"next: txl prepare FILES --tokenizer {run} --out CORPUS" in txl("convert", folder, run).out
    back = txl("convert", run, tmp_path / "back", "--to", "huggingface-4.37")
    assert (back.status, back.err) == (0, "")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_projs"] == [False, False, False]


def test_pre_tokenizer_can_be_selected(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path / "hub", "vocab.bin")
    for pre_tokenizer, expected in (("moses", "the well @-@ known"), ("whitespace", "the <unk>")):
        run = tmp_path / pre_tokenizer
        assert txl("convert", folder, run, "--pre-tokenizer", pre_tokenizer).status == 0
        assert words_of_text(run, "the well-known") == expected
