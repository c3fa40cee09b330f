"""model.pt of the authors' PyTorch code and NVIDIA's checkpoints: the losses equal those of old_modules.py, a slow
implementation of what these programs compute.

Shape suffixes: B batch rows, T tokens, D model width.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.checkpoints.checkpoints import WORDS
from integrations.checkpoints.old_modules import (
    OldConfig,
    nvidia_checkpoint,
    old_corpus,
    old_model,
    old_modules,
    old_nats,
)

from transformer_xl.config import UserError
from transformer_xl.integrations.checkpoints.convert import convert
from transformer_xl.run import load
from transformer_xl.text.tokenizers import ByteTokenizer, save_tokenizer
from transformer_xl.text.tokenizers.integer import IntegerTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

# "shared" refers to the softmax, which can share weights and projections with the embedding
CASES = {
    "clusters": OldConfig(same_length=True, clamp_len=4),
    "narrow tails": OldConfig(div_val=2, same_length=True),
    "nothing shared": OldConfig(div_val=2, tie_weight=False, tie_projs=(False, False, False)),
    "all shared": OldConfig(cutoffs=(4, 9, 17), div_val=2, tie_projs=(True, True, True, True)),
    "no clusters": OldConfig(cutoffs=(), tie_projs=(False,)),
    "no clusters, projected": OldConfig(cutoffs=(), tie_projs=(False,), d_embed=6, tie_weight=False),
    "pre-norm": OldConfig(pre_lnorm=True, d_embed=6, same_length=True),
    "longer memory": OldConfig(mem_len=11, same_length=True, clamp_len=3),
}


def save_official(folder: Path, model: Any, corpus: Any = None, **options: Any) -> Path:
    """Write model.pt, and the corpus to cache.pt, as the authors' code does; `options` are those of torch.save."""
    folder.mkdir()
    with old_modules():
        torch.save(model, folder / "model.pt", **options)
        if corpus is not None:
            torch.save(corpus, folder / "cache.pt", **options)
    return folder


def assert_same_nats(run: Path, config: OldConfig, model: Any, token_ids: list[int] | None = None) -> None:
    """Compare the losses of a converted run with the oracle's.

    Args:
        run: folder of the run.
        config: settings of the old model.
        model: the old model.
        token_ids: the run's token id for each of the old ones, if they differ.
    """
    text_T = torch.randint(0, config.n_token, (24,), generator=torch.Generator().manual_seed(2))
    expected_T = old_nats(config, model, text_T[:-1], text_T[1:])
    text_T = text_T if token_ids is None else torch.tensor(token_ids)[text_T]
    converted = load(run, device="cpu").model.double()
    memory, parts = converted.initial_memory(1), []
    with torch.no_grad():
        for start in range(0, len(expected_T), config.tgt_len):
            inputs_T = text_T[start : min(start + config.tgt_len, len(expected_T))]
            targets_T = text_T[start + 1 : start + 1 + len(inputs_T)]
            hidden_BTD, memory = converted(inputs_T[None], memory)
            parts.append(converted.nats(hidden_BTD, targets_T[None])[0])
    torch.testing.assert_close(torch.cat(parts), expected_T, atol=1e-10, rtol=0)


# torch.save writes a zip archive; before torch 1.6 it wrote several pickles and the tensors one after another
@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "stream"])
@pytest.mark.parametrize("case", CASES)
def test_losses_equal_those_of_the_authors_code(case: str, is_archive: bool, tmp_path: Path) -> None:
    config = CASES[case]
    model = old_model(config)
    saved = save_official(tmp_path / "old", model, old_corpus(WORDS), _use_new_zipfile_serialization=is_archive)
    convert(saved if is_archive else saved / "model.pt", tmp_path / "run")
    assert_same_nats(tmp_path / "run", config, model)
    run = load(tmp_path / "run", device="cpu")
    # same_length lets each query of the authors' code attend to mem_len keys, in NVIDIA's code to mem_len + 1
    assert run.config.model.attention_window == (config.mem_len if config.same_length else None)
    assert (run.config.model.dropout, run.config.model.attention_dropout) == (0.1, 0.2)
    assert isinstance(run.tokenizer, WordTokenizer)
    assert list(run.tokenizer.words) == WORDS
    assert (run.tokenizer.eos_token, run.tokenizer.unk_token) == ("<eos>", "<unk>")


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_those_of_nvidias_code(case: str, tmp_path: Path) -> None:
    old = replace(CASES[case], nvidia=True)
    model = old_model(old)
    with old_modules():
        torch.save(nvidia_checkpoint(old, model, WORDS), tmp_path / "checkpoint_best.pt")
    convert(tmp_path / "checkpoint_best.pt", tmp_path / "run")
    assert_same_nats(tmp_path / "run", old, model)
    config = load(tmp_path / "run", device="cpu").config
    assert config.model.attention_window == (old.mem_len + 1 if old.same_length else None)
    # old_modules.py sets eval_tgt_len to tgt_len - 2, which makes the memory of evaluation longer by 2
    assert (config.evaluation.segment_length, config.evaluation.memory_length) == (old.tgt_len - 2, old.mem_len + 2)
    assert config.evaluation.attention_window == (old.mem_len + 3 if old.same_length else None)


def share_module(model: Any) -> None:
    """Let a module contain itself under 1000 names."""
    model._modules |= {str(index): model for index in range(1000)}


def share_parameters(model: Any) -> None:
    """Let 1000 modules share one dictionary of 1000 parameters."""
    shared = {str(index): model.crit.cluster_bias for index in range(1000)}
    for index in range(1000):
        model.drop.add_module(str(index), torch.nn.ReLU())
        model.drop._modules[str(index)]._parameters = shared


@pytest.mark.parametrize("share", [share_module, share_parameters])
def test_modules_that_share_what_they_contain_are_refused(share: Any, tmp_path: Path) -> None:
    """Such a file is small, but names any number of weights."""
    share(model := old_model(CASES["clusters"]))
    with pytest.raises(UserError, match=r"model.pt is damaged \(a module contains itself\)"):
        convert(save_official(tmp_path / "old", model), tmp_path / "run")


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    config = CASES["clusters"]
    model = old_model(config).half()
    convert(save_official(tmp_path / "old", model, old_corpus(WORDS)), tmp_path / "run")
    assert_same_nats(tmp_path / "run", config, model)


def test_checkpoint_without_tokenizer_needs_one(tmp_path: Path) -> None:
    model = old_model(CASES["clusters"])
    saved = save_official(tmp_path / "old", model)
    with pytest.raises(UserError, match=r"no tokenizer .* 23 tokens; pass tokenizer="):
        convert(saved, tmp_path / "run")
    # 22 integers and the end-of-sequence token are the 23 tokens of the model
    save_tokenizer(IntegerTokenizer(num_values=22), tmp_path / "txl_tokenizer.json")
    convert(saved, tmp_path / "run", tokenizer=tmp_path / "txl_tokenizer.json")
    assert_same_nats(tmp_path / "run", CASES["clusters"], model)
    with pytest.raises(UserError, match="tokenizer=byte has 256 tokens, but the model has 23"):
        convert(saved, tmp_path / "other", tokenizer="byte")


def test_words_that_are_byte_values_become_byte_tokenizer(tmp_path: Path) -> None:
    """Bytes prepared by the authors' code are byte values in decimal as words, the most frequent first. Numbers can
    also be something else, such as the pitches of music, so they stay words unless the user says that they are bytes.
    """
    config = CASES["no clusters"]
    byte_values = [32, 101, 116, 97, 255, 0, *range(70, 87)]  # 23 different ones, in any order
    model = old_model(config)
    saved = save_official(tmp_path / "old", model, old_corpus([str(byte) for byte in byte_values]))
    converted = convert(saved, tmp_path / "words")
    assert (converted.tokenizer.kind, converted.tokenizer.encode("0 32 255").tolist()) == ("word", [5, 0, 4])
    assert "23 words are numbers and stay words; if they are bytes" in converted.notes[-1]
    assert_same_nats(tmp_path / "words", config, model)
    # plain ids are not what the words say: a note shows it
    plain = convert(saved, tmp_path / "plain", tokenizer="integer")
    assert plain.notes[-1].endswith("integer is not the checkpoint's own: integer, 23 tokens, not word, 23 tokens")
    assert not any("stay words" in note for note in plain.notes)
    assert not convert(saved, tmp_path / "same", tokenizer=tmp_path / "words").notes[len(converted.notes) - 1 :]
    convert(saved, tmp_path / "run", tokenizer="byte")
    convert(saved, tmp_path / "like", tokenizer=tmp_path / "run")
    given = convert(saved, tmp_path / "given", tokenizer=load(tmp_path / "run", device="cpu").tokenizer)
    assert isinstance(given.tokenizer, ByteTokenizer)
    assert_same_nats(tmp_path / "like", config, model, token_ids=byte_values)
    run = load(tmp_path / "run", device="cpu")
    assert isinstance(run.tokenizer, ByteTokenizer)
    assert_same_nats(tmp_path / "run", config, model, token_ids=byte_values)
    with torch.no_grad():
        nats_BT = run.model.nats(run.model(torch.tensor([[32]]))[0], torch.tensor([[10]]))
    # byte 10 is not among the words, so its softmax bias makes its probability practically zero
    assert 1000 < float(nats_BT) < float("inf")
