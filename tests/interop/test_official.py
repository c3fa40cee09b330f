"""model.pt of the authors' PyTorch code and NVIDIA's checkpoints: the losses of a slow loop over their rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.checkpoints import WORDS, number_vocabulary
from interop.old_modules import Old, nvidia_checkpoint, old_corpus, old_model, old_modules, old_nats

from transformer_xl.config import UserError
from transformer_xl.interop.convert import convert
from transformer_xl.run_folder import load
from transformer_xl.text.tokenizers import ByteTokenizer
from transformer_xl.text.tokenizers.char import CharTokenizer
from transformer_xl.text.tokenizers.word import WordTokenizer

CASES = {
    "clusters": Old(same_length=True, clamp_len=4),
    "narrow tails": Old(div_val=2, same_length=True),
    "nothing shared": Old(div_val=2, tie_weight=False, tie_projs=(False, False, False)),
    "all shared": Old(cutoffs=(4, 9, 17), div_val=2, tie_projs=(True, True, True, True)),
    "one softmax": Old(cutoffs=(), tie_projs=(False,)),
    "one softmax, projected": Old(cutoffs=(), tie_projs=(False,), d_embed=6, tie_weight=False),
    "pre-norm": Old(pre_lnorm=True, d_embed=6, same_length=True),
    "longer memory": Old(mem_len=11, same_length=True, clamp_len=3),
}


def save_official(folder: Path, model: Any, corpus: Any = None, **how: Any) -> Path:
    folder.mkdir()
    with old_modules():
        torch.save(model, folder / "model.pt", **how)
        if corpus is not None:
            torch.save(corpus, folder / "cache.pt", **how)
    return folder


def save_nvidia(folder: Path, old: Old, model: Any, words: list[str] | None = WORDS) -> Path:
    folder.mkdir()
    with old_modules():
        torch.save(nvidia_checkpoint(old, model, words), folder / "checkpoint_best.pt")
    return folder


def our_nats(run: Path, old: Old, tokens_T: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    model = load(run, device="cpu").model.double()
    memory = model.initial_memory(1)
    parts = []
    with torch.no_grad():
        for segment in range(0, len(tokens_T), old.tgt_len):
            chosen = slice(segment, segment + old.tgt_len)
            hidden_BTD, memory = model(tokens_T[None, chosen], memory)
            parts.append(model.nats(hidden_BTD, targets_T[None, chosen])[0])
    return torch.cat(parts)


def assert_same_nats(run: Path, old: Old, model: Any) -> None:
    text_T = torch.randint(0, old.n_token, (24,), generator=torch.Generator().manual_seed(2))
    expected_T = old_nats(old, model, text_T[:-1], text_T[1:])
    torch.testing.assert_close(our_nats(run, old, text_T[:-1], text_T[1:]), expected_T, atol=1e-10, rtol=0)


@pytest.mark.parametrize("newer", [True, False], ids=["archive", "stream"])
@pytest.mark.parametrize("case", CASES)
def test_losses_of_the_authors_module(case: str, newer: bool, tmp_path: Path) -> None:
    old = CASES[case]
    model = old_model(old)
    saved = save_official(tmp_path / "old", model, old_corpus(WORDS), _use_new_zipfile_serialization=newer)
    convert(saved if newer else saved / "model.pt", tmp_path / "run")
    assert_same_nats(tmp_path / "run", old, model)
    run = load(tmp_path / "run", device="cpu")
    assert run.config.model.attention_window == (old.mem_len if old.same_length else None)
    assert (run.config.model.dropout, run.config.model.attention_dropout) == (0.1, 0.2)
    assert isinstance(run.tokenizer, WordTokenizer)
    assert list(run.tokenizer.words) == WORDS
    assert (run.tokenizer.eos_token, run.tokenizer.unk_token) == ("<eos>", "<unk>")


@pytest.mark.parametrize("case", CASES)
def test_losses_of_nvidias_module(case: str, tmp_path: Path) -> None:
    old = replace(CASES[case], nvidia=True)
    model = old_model(old)
    convert(save_nvidia(tmp_path / "old", old, model), tmp_path / "run")
    assert_same_nats(tmp_path / "run", old, model)
    config = load(tmp_path / "run", device="cpu").config
    assert config.model.attention_window == (old.mem_len + 1 if old.same_length else None)
    assert (config.evaluation.segment_length, config.evaluation.memory_length) == (old.tgt_len - 2, old.mem_len + 2)
    assert config.evaluation.attention_window == (old.mem_len + 3 if old.same_length else None)


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    old = CASES["clusters"]
    model = old_model(old).half()
    convert(save_official(tmp_path / "old", model, old_corpus(WORDS)), tmp_path / "run")
    assert_same_nats(tmp_path / "run", old, model)


def test_without_a_tokenizer_one_has_to_be_given(tmp_path: Path) -> None:
    model = old_model(CASES["clusters"])
    saved = save_official(tmp_path / "old", model)
    with pytest.raises(UserError, match=r"comes without a tokenizer .* 23 tokens; give --tokenizer"):
        convert(saved, tmp_path / "run")
    named = str(number_vocabulary(tmp_path, 23))
    convert(saved, tmp_path / "run", tokenizer=named)
    assert_same_nats(tmp_path / "run", CASES["clusters"], model)
    with pytest.raises(UserError, match="--tokenizer byte has 256 tokens and the model 23"):
        convert(saved, tmp_path / "other", tokenizer="byte")


def test_byte_numbers_become_bytes(tmp_path: Path) -> None:
    """enwik8 as the authors prepare it: byte values in decimal, in the order of their counts."""
    old = Old(cutoffs=(), tie_projs=(False,))
    numbers = [32, 101, 116, 97, 255, 0, *range(70, 87)]
    model = old_model(old)
    convert(save_official(tmp_path / "old", model, old_corpus([str(number) for number in numbers])), tmp_path / "run")
    run = load(tmp_path / "run", device="cpu")
    assert isinstance(run.tokenizer, ByteTokenizer)
    text_T = torch.randint(0, 23, (24,), generator=torch.Generator().manual_seed(2))
    expected_T = old_nats(old, model, text_T[:-1], text_T[1:])
    bytes_T = torch.tensor(numbers)[text_T]
    torch.testing.assert_close(
        our_nats(tmp_path / "run", old, bytes_T[:-1], bytes_T[1:]), expected_T, atol=1e-10, rtol=0
    )
    never_T = our_nats(tmp_path / "run", old, torch.tensor([32]), torch.tensor([10]))
    assert bool((never_T > 1000).all())
    assert bool(never_T.isfinite().all())


def test_the_letters_of_text8_become_characters(tmp_path: Path) -> None:
    old = Old(cutoffs=(), tie_projs=(False,))
    letters = ["_", *"etaoinshrdlcumwfgypbvk"]
    convert(save_official(tmp_path / "old", old_model(old), old_corpus(letters)), tmp_path / "run")
    tokenizer = load(tmp_path / "run", device="cpu").tokenizer
    assert isinstance(tokenizer, CharTokenizer)
    assert tokenizer.encode("the end").tolist() == [letters.index(letter) for letter in "the_end"]


def test_lower_case_is_kept(tmp_path: Path) -> None:
    saved = save_official(tmp_path / "old", old_model(Old()), old_corpus(WORDS, lower_case=True))
    convert(saved, tmp_path / "run")
    tokenizer = load(tmp_path / "run", device="cpu").tokenizer
    assert tokenizer.encode("The AND\n").tolist() == [1, 5, 0]
