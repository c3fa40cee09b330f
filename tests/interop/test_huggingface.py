"""Hugging Face's folders: the numbers of transformers 4.37.2, and the same folder back again.

The fixtures are made by golden_huggingface.py.

Letters: B rows, T tokens, V vocabulary, L layers, M memory slots, D width.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interop.checkpoints import CASES, WORDS, golden, greedy, hugging_face_folder, scores_of
from interop.golden_huggingface import SEGMENTS
from safetensors.torch import load_file, save_file

from transformer_xl.config import UserError, run_settings
from transformer_xl.interop.convert import convert
from transformer_xl.interop.tokenizers import tokenizer_from_words, words_of
from transformer_xl.model.build import build_model
from transformer_xl.run_folder import Run, RunFolder, load
from transformer_xl.text.tokenizers.word import WordTokenizer

MakeRun = Callable[..., Run]


@pytest.fixture
def make_run() -> MakeRun:
    """Makes a run folder of a small model with clusters and gives what is loaded from it; settings as keywords."""

    def make(path: Path, **settings: Any) -> Run:
        small = {
            "vocab_size": 23, "n_layers": 2, "d_model": 8, "n_heads": 2, "d_head": 3, "d_ff": 7,
            "cutoffs": (5, 11), "div_val": 2, "attend_empty_memory": True, "attention_window": 9,
        }  # fmt: skip
        evaluation, tokenizer = settings.pop("evaluation", {}), settings.pop("tokenizer", None)
        model = {name: value for name, value in {**small, **settings}.items() if value is not None}
        values = {"model": model, "train": {"memory_length": 9}, "evaluation": evaluation}
        config = run_settings(values, "test")
        folder = RunFolder.create(path, config, tokenizer or tokenizer_from_words(WORDS, "test", pre_tokenizer="moses"))
        torch.manual_seed(3)
        folder.save_weights(build_model(config.model).state_dict(), step=0, nats=None)
        return load(path, device="cpu")

    return make


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    config, weights, expected = golden(case)
    convert(hugging_face_folder(tmp_path / "hub", config, weights), tmp_path / "run")
    model = load(tmp_path / "run", device="cpu").model
    tokens_BT = expected["tokens_BT"]
    scores_BTV, memory = scores_of(model, tokens_BT, SEGMENTS)
    torch.testing.assert_close(scores_BTV, expected["scores_BTV"], atol=1e-5, rtol=0)
    if config["mem_len"]:
        torch.testing.assert_close(
            torch.stack([cache.hidden_BMD for cache in memory.layers]),
            expected["memory_LMBD"].transpose(1, 2),
            atol=1e-5,
            rtol=0,
        )
    with torch.no_grad():
        hidden_BTD, _ = model(tokens_BT[:, :-1], model.initial_memory(len(tokens_BT)))
        nats_BT = model.nats(hidden_BTD, tokens_BT[:, 1:])
    torch.testing.assert_close(nats_BT.mean(), expected["loss"], atol=1e-5, rtol=0)
    assert torch.equal(greedy(model, tokens_BT[0, :4], 17), expected["greedy_T"])


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_bit_identical(case: str, tmp_path: Path) -> None:
    config, weights, _ = golden(case)
    convert(hugging_face_folder(tmp_path / "hub", config, weights), tmp_path / "run")
    done = convert(tmp_path / "run", tmp_path / "back", to="huggingface")
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
    convert(tmp_path / "back", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()


def test_a_missing_projection_is_written_as_an_identity(make_run: MakeRun, tmp_path: Path) -> None:
    """Test 8: One Billion Word's model does not project the cluster that is as wide as the model."""
    for tied in ("all", "all_but_first", "none"):
        run = make_run(tmp_path / tied, project_same_width=False, tie_projections=tied)
        assert "embedding.projections.0" not in run.model.state_dict()
        convert(tmp_path / tied, tmp_path / f"{tied}-there", to="huggingface")
        convert(tmp_path / f"{tied}-there", tmp_path / f"{tied}-back")
        back = load(tmp_path / f"{tied}-back", device="cpu").model
        tokens_BT = torch.randint(0, 23, (2, 19), generator=torch.Generator().manual_seed(1))
        expected_BTV, _ = scores_of(run.model, tokens_BT, SEGMENTS)
        assert torch.equal(scores_of(back, tokens_BT, SEGMENTS)[0], expected_BTV)


@pytest.mark.parametrize(
    "settings",
    [
        {"architecture": "shaw"},
        {
            "architecture": "lstm",
            **dict.fromkeys(("attention_window", "attend_empty_memory", "n_heads", "d_head", "d_ff")),
        },
    ],
)
def test_other_architectures_are_not_written(settings: dict[str, Any], make_run: MakeRun, tmp_path: Path) -> None:
    make_run(tmp_path / "run", **settings)
    with pytest.raises(UserError, match=f"{settings['architecture']} has no form in TransfoXL"):
        convert(tmp_path / "run", tmp_path / "there", to="huggingface")
    assert not (tmp_path / "there").exists()


def test_an_empty_memory_that_is_not_attended_is_said_to_differ(make_run: MakeRun, tmp_path: Path) -> None:
    make_run(tmp_path / "run", attend_empty_memory=False)
    remarks = convert(tmp_path / "run", tmp_path / "there", to="huggingface").remarks
    assert [remark for remark in remarks if "first segments will differ" in remark]


@pytest.mark.parametrize(
    ("window", "evaluation", "written", "remark"),
    [
        (9, {"clamp_length": 7}, (9, True, 7), None),
        (9, {"attention_window": 9, "memory_length": 9}, (9, True, 5), None),
        (None, {"attention_window": 9}, (9, True, 5), None),
        (9, {"attention_window": 30, "memory_length": 30}, (30, True, 5), None),
        (None, {"attention_window": 4}, (9, False, 5), "attention_window 4, .* mem_len 9"),
        (9, {"attention_window": 4}, (9, True, 5), "attention_window 4, .* mem_len 9"),
    ],
)
def test_what_the_run_is_evaluated_with_goes_along(
    window: int | None, evaluation: dict[str, int], written: tuple[Any, ...], remark: str | None,
    make_run: MakeRun, tmp_path: Path,
) -> None:  # fmt: skip
    make_run(tmp_path / "run", attention_window=window, clamp_length=5, evaluation=evaluation)
    remarks = convert(tmp_path / "run", tmp_path / "there", to="huggingface").remarks
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    assert (config["mem_len"], config["same_length"], config["clamp_len"]) == written
    assert len(remarks) == (remark is not None)
    assert remark is None or re.search(remark, remarks[0])


@pytest.mark.parametrize(
    ("words", "settings", "lower_case", "remark"),
    [
        (WORDS, {"pre_tokenizer": "moses"}, False, None),
        (WORDS, {"pre_tokenizer": "moses", "lowercase": True}, True, None),
        (WORDS, {}, False, "does not split text as 'whitespace'"),
        (
            ["_", *"abcdefghijklmnopqrstuv"],
            {},
            False,
            "splits text into words, .*char",
        ),
        (["caf\xa0e", "caf", *WORDS[2:]], {"pre_tokenizer": "moses"}, False, "are cut in vocab.txt"),
    ],
)
def test_how_text_becomes_tokens_goes_along(
    words: list[str], settings: dict[str, Any], lower_case: bool, remark: str | None, make_run: MakeRun, tmp_path: Path
) -> None:
    make_run(tmp_path / "run", tokenizer=tokenizer_from_words(words, "test", **settings))
    remarks = convert(tmp_path / "run", tmp_path / "there", to="huggingface").remarks
    tokenizer = json.loads((tmp_path / "there" / "tokenizer_config.json").read_text())
    assert tokenizer == {"tokenizer_class": "TransfoXLTokenizer", "lower_case": lower_case}
    assert len(remarks) == (remark is not None)
    assert remark is None or re.search(remark, remarks[0])
    convert(tmp_path / "there", tmp_path / "again")
    back = RunFolder.open(tmp_path / "again").tokenizer
    assert words_of(back) == tuple(words)
    if isinstance(back, WordTokenizer):
        assert back.pre_tokenizer.lowercase == lower_case


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_the_tokenizers_settings_win_over_a_pickled_vocabulary(pickled: bool, told: bool, tmp_path: Path) -> None:
    config, weights, _ = golden("clusters")
    folder = hugging_face_folder(tmp_path / "hub", config, weights)
    (folder / "vocab.json").unlink()
    (folder / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": WORDS, "lower_case": pickled}))
    convert(folder, tmp_path / "silent")
    (folder / "tokenizer_config.json").write_text(json.dumps({"lower_case": told}))
    convert(folder, tmp_path / "told")
    for name, folded in (("silent", pickled), ("told", told)):
        tokenizer = RunFolder.open(tmp_path / name).tokenizer
        assert isinstance(tokenizer, WordTokenizer)
        assert tokenizer.pre_tokenizer.lowercase == folded


def test_weights_may_be_shared_out_over_files_and_stand_under_their_other_name(tmp_path: Path) -> None:
    config, weights, expected = golden("tied-biases")
    hugging_face_folder(tmp_path / "hub", config, weights)
    (tmp_path / "hub" / "model.safetensors").unlink()
    for name in ("r_w_bias", "r_r_bias"):
        weights[f"transformer.layers.1.dec_attn.{name}"] = weights.pop(f"transformer.{name}")
    weights["crit.out_layers.0.weight"] = weights.pop("transformer.word_emb.emb_layers.0.weight")
    places = {name: f"part-{place % 2}.safetensors" for place, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({name: weights[name].clone() for name in places if places[name] == file}, tmp_path / "hub" / file)
    (tmp_path / "hub" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    convert(tmp_path / "hub", tmp_path / "run")
    scores_BTV, _ = scores_of(load(tmp_path / "run", device="cpu").model, expected["tokens_BT"], SEGMENTS)
    torch.testing.assert_close(scores_BTV, expected["scores_BTV"], atol=1e-5, rtol=0)


def test_settings_that_are_missing_are_those_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text('{"model_type": "transfo-xl", "untie_r": true}')
    save_file({"crit.cluster_bias": torch.zeros(3)}, tmp_path / "hub" / "model.safetensors")
    with pytest.raises(UserError, match=r"has 1 weights, and its settings ask for 18 layers"):
        convert(tmp_path / "hub", tmp_path / "run")
