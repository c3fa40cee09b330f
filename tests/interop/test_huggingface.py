"""Hugging Face's folders: the numbers of transformers 4.37.2, and the same folder back again.

The fixtures are made by golden_huggingface.py.

Letters: B rows, T tokens, V vocabulary, L layers, M memory slots, D width.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from interop.checkpoints import CASES, WORDS, golden, greedy, hugging_face_folder, scores_of
from interop.golden_huggingface import SEGMENTS
from safetensors.torch import load_file

from transformer_xl.interop.convert import to_huggingface, to_run
from transformer_xl.run_folder import load


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    config, weights, expected = golden(case)
    to_run(hugging_face_folder(tmp_path / "hub", config, weights), tmp_path / "run")
    model = load(tmp_path / "run", device="cpu").model
    tokens_BT = expected["tokens_BT"]
    scores_BTV, memory = scores_of(model, tokens_BT, SEGMENTS)
    torch.testing.assert_close(scores_BTV, expected["scores_BTV"], atol=1e-5, rtol=0)
    if config["mem_len"]:
        torch.testing.assert_close(
            torch.stack(memory.layers_BMD), expected["memory_LMBD"].transpose(1, 2), atol=1e-5, rtol=0
        )
    with torch.no_grad():
        hidden_BTD, _ = model(tokens_BT[:, :-1], model.initial_memory(len(tokens_BT)))
        nats_BT = model.nats(hidden_BTD, tokens_BT[:, 1:])
    torch.testing.assert_close(nats_BT.mean(), expected["loss"], atol=1e-5, rtol=0)
    assert torch.equal(greedy(model, tokens_BT[0, :4], 17), expected["greedy_T"])


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_bit_identical(case: str, tmp_path: Path) -> None:
    config, weights, _ = golden(case)
    to_run(hugging_face_folder(tmp_path / "hub", config, weights), tmp_path / "run")
    done = to_huggingface(tmp_path / "run", tmp_path / "back")
    assert done.remarks == ()
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(back[name], weight) or name == "transformer.pos_emb.inv_freq", name
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    odd = {name for name in written if name in config and written[name] != config[name]}
    assert odd <= {"adaptive", "tie_projs"}  # the one is not used there, the other where nothing is projected
    assert config["div_val"] == 1 or "tie_projs" not in odd
    assert (tmp_path / "back" / "vocab.txt").read_text().split() == WORDS[: config["vocab_size"]]
    to_run(tmp_path / "back", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()
