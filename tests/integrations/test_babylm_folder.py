"""A folder for transformers does what BabyLM's evaluation asks of it: its scores are those of `txl minimal-pairs`.

Shape suffixes: B batch rows, T columns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SEGMENT, make_run
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoProcessor

from transformer_xl import convert, load, minimal_pairs, read_minimal_pairs
from transformer_xl.config import UserError
from transformer_xl.text.tokenizers.bpe import train_bpe

PAIRS = [("the cat sees me", "the cat see me"), ("caf\u00e9s close", "caf\u00e9s closes late"), ("a", "an odd one")]
LINES = "".join(f'{{"sentence_good": "{good}", "sentence_bad": "{bad}"}}\n' for good, bad in PAIRS)
BPE = train_bpe([["the cat sees the dog\n", "  the dogs see me;\n"] * 3], 290)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a run with a BPE tokenizer, and the folder for transformers whose texts begin with a token of their own."""
    make_run(tmp_path / "run", tokenizer=BPE)
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface", eos_token="\n", add_bos_token=True)
    return tmp_path / "hub"


def opened(kind: Any, folder: Path, **arguments: Any) -> Any:
    """Open with a class of transformers as the pipeline does."""
    return kind.from_pretrained(folder, trust_remote_code=True, **arguments)


def causal(is_token_BT: Tensor) -> Tensor:
    """Return the mask that the pipeline makes for causal models (B, T, T)."""
    return is_token_BT.unsqueeze(1).repeat(1, is_token_BT.shape[1], 1).tril(diagonal=0)


@torch.no_grad()
def test_right_padded_sentences_score_as_minimal_pairs(folder: Path, tmp_path: Path) -> None:
    tokenizer = opened(AutoProcessor, folder, padding_side="right")
    assert not hasattr(tokenizer, "tokenizer")  # which would be taken for that of a processor
    model = opened(AutoModelForCausalLM, folder)
    texts = [text for pair in PAIRS for text in pair]
    batch = tokenizer(texts, padding=True, return_tensors="pt", return_offsets_mapping=True)
    for text, offsets, mask in zip(texts, batch["offset_mapping"], batch["attention_mask"], strict=True):
        places = [(start, end) for start, end in offsets[mask == 1].tolist() if end]  # the first token has none
        assert (places[0][0], places[-1][1]) == (0, len(text))
    ids_BT, is_token_BT = batch["input_ids"], batch["attention_mask"]
    logits = model(input_ids=ids_BT[:, :-1], attention_mask=is_token_BT[:, :-1])["logits"]
    logprobs_BT = logits.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    scores = (logprobs_BT * is_token_BT[:, 1:]).sum(1).view(-1, 2)
    own = minimal_pairs(load(tmp_path / "run", device="cpu"), read_minimal_pairs("pairs", LINES.encode()))
    expected = torch.tensor(
        [[row["logprob_good"], row["logprob_bad"]] for row in (own[index] for index in range(len(PAIRS)))]
    )
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_causal_mask_of_each_column_is_that_of_the_columns(folder: Path, side: str) -> None:
    tokenizer = opened(AutoProcessor, folder, padding_side=side)
    batch = tokenizer([f"the dog sees {SEGMENT * 'the cat '}", "me"], padding=True, return_tensors="pt")
    ids_BT, is_token_BT = batch["input_ids"], batch["attention_mask"]
    model = opened(AutoModel, folder)
    expected = model(ids_BT, is_token_BT).last_hidden_state
    for mask_BTT in (causal(is_token_BT), causal(is_token_BT) * is_token_BT[:, :, None], causal(is_token_BT) > 0):
        assert torch.equal(model(ids_BT, mask_BTT).last_hidden_state, expected)
    classifier = opened(AutoModelForSequenceClassification, folder, num_labels=3)
    scores = classifier(ids_BT, causal(is_token_BT)).logits
    assert torch.equal(scores, classifier(ids_BT, is_token_BT).logits)


@pytest.mark.parametrize(
    ("row", "column", "key", "value", "message"),
    [
        (0, 2, 3, 1, "in row 0 column 2 sees column 3"),
        (1, 2, 0, 0, "in row 1 column 2 does not see column 0"),
    ],
)
def test_other_masks_of_columns_are_refused(
    folder: Path, row: int, column: int, key: int, value: int, message: str
) -> None:
    is_token_BT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    mask_BTT = causal(is_token_BT)
    mask_BTT[row, column, key] = value
    model = opened(AutoModel, folder)
    with pytest.raises(UserError, match=message):
        model(torch.ones(2, 5, dtype=torch.long), mask_BTT)
    with pytest.raises(UserError, match="in row 0 column 0 sees column 1"):  # 0 for what is seen, as others have it
        model(torch.ones(2, 5, dtype=torch.long), torch.full((2, 5, 5), -1e9).triu(1))


def test_first_token_is_for_folders_of_transformers(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with pytest.raises(UserError, match="add_bos_token=True is for to=huggingface"):
        convert(tmp_path / "run", tmp_path / "old", to="huggingface-4.37", add_bos_token=True)
