"""Hugging Face's TransfoXL folders: the outputs of transformers 4.37.2, and conversion there and back.

Shape suffixes: B batch rows, T tokens, V vocabulary, L layers, M memory slots, D model width.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from integrations.checkpoints.checkpoints import WORDS, generate_greedily, golden, hugging_face_folder, log_probs_of
from integrations.checkpoints.golden_huggingface import CASES, SEGMENTS
from safetensors.torch import load_file, save_file

from transformer_xl.architectures import build_model
from transformer_xl.config import UserError, run_settings
from transformer_xl.integrations.checkpoints import huggingface
from transformer_xl.integrations.checkpoints.convert import convert
from transformer_xl.integrations.checkpoints.tokenizers import tokenizer_from_object, words_of
from transformer_xl.run import Run, load
from transformer_xl.run_folder import RunFolder
from transformer_xl.text.tokenizers.word import WordTokenizer


def make_run(
    path: Path, *, tokenizer: Any = None, evaluation: dict[str, Any] | None = None, **model_settings: Any
) -> Run:
    """Write the run folder of a small model with an adaptive softmax, and load it.

    Args:
        path: the folder to create.
        tokenizer: tokenizer of the run, or None for a word tokenizer with WORDS.
        evaluation: settings of evaluation.
        model_settings: settings of the model that replace those below; None stands for the default of a setting.
    """
    # attend_empty_memory: queries attend to slots that are not filled yet, which are zeros, as in transformers
    small = {
        "vocab_size": 23, "n_layers": 2, "d_model": 8, "n_heads": 2, "d_head": 3, "d_ff": 7,
        "cutoffs": (5, 11), "div_val": 2, "attend_empty_memory": True, "attention_window": 9,
    }  # fmt: skip
    model = {name: value for name, value in {**small, **model_settings}.items() if value is not None}
    config = run_settings({"model": model, "train": {"memory_length": 9}, "evaluation": evaluation or {}}, "test")
    torch.manual_seed(3)
    weights = build_model(config.model).state_dict()
    moses = tokenizer_from_object({"idx2sym": WORDS}, "", pre_tokenizer="moses")
    RunFolder.create(path, config, tokenizer or moses, weights)
    return load(path, device="cpu")


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    config, weights, expected = golden(case)
    convert(hugging_face_folder(tmp_path / "hub", config, weights), tmp_path / "run")
    model, tokens_BT = load(tmp_path / "run", device="cpu").model, expected["tokens_BT"]
    log_probs_BTV, memory = log_probs_of(model, tokens_BT, SEGMENTS)
    torch.testing.assert_close(log_probs_BTV, expected["scores_BTV"], atol=1e-5, rtol=0)
    if config["mem_len"]:
        memory_LBMD = torch.stack([cache.hidden_BMD for cache in memory.layers])
        torch.testing.assert_close(memory_LBMD, expected["memory_LMBD"].transpose(1, 2), atol=1e-5, rtol=0)
    with torch.no_grad():
        hidden_BTD, _ = model(tokens_BT[:, :-1], model.initial_memory(len(tokens_BT)))
        nats_BT = model.nats(hidden_BTD, tokens_BT[:, 1:])
    torch.testing.assert_close(nats_BT.mean(), expected["loss"], atol=1e-5, rtol=0)
    assert torch.equal(generate_greedily(model, tokens_BT[0, :4], 17), expected["greedy_T"])


def test_settings_missing_in_config_json_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    config, weights, _ = golden("narrow-tails")
    defaults = {
        "untie_r": True,
        "same_length": True,
        "dropout": 0.1,
        "clamp_len": 1000,
        "tie_projs": [False, True, True],
    }
    folder = hugging_face_folder(tmp_path / "hub", {**config, **defaults}, weights)
    expected = huggingface.read(folder)
    values = json.loads((folder / "config.json").read_text())
    for name in defaults:
        del values[name]
    (folder / "config.json").write_text(json.dumps(values))
    found = huggingface.read(folder)
    assert (found.model, found.train, found.evaluation) == (expected.model, expected.train, expected.evaluation)


@pytest.mark.parametrize("case", CASES)
def test_conversion_there_and_back_is_bit_identical(case: str, tmp_path: Path) -> None:
    config, weights, _ = golden(case)
    convert(hugging_face_folder(tmp_path / "hub", config, weights), tmp_path / "run")
    assert convert(tmp_path / "run", tmp_path / "back", to="huggingface-4.37").notes == ()
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    for name, weight in weights.items():
        # the export computes inv_freq, the frequencies of the position encodings, anew
        assert torch.equal(back[name], weight) or name == "transformer.pos_emb.inv_freq", name
    values = json.loads((tmp_path / "back" / "config.json").read_text())
    changed = {name for name in values if name in config and values[name] != config[name]}
    # transformers does not use `adaptive`, and `tie_projs` only where there are projections
    assert changed <= ({"adaptive", "tie_projs"} if config["div_val"] == 1 else {"adaptive"})
    assert (tmp_path / "back" / "vocab.txt").read_text().split() == WORDS[: config["vocab_size"]]
    convert(tmp_path / "back", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()


@pytest.mark.parametrize("tied", ["all", "all_but_first", "none"])
def test_missing_projection_is_exported_as_identity(tied: str, tmp_path: Path) -> None:
    """The One Billion Word model does not project the cluster whose embeddings are as wide as the model.

    `tied` says in which clusters the softmax shares the embedding's projection.
    """
    run = make_run(tmp_path / "run", project_same_width=False, tie_projections=tied)
    assert "embedding.projections.0" not in run.model.state_dict()
    convert(tmp_path / "run", tmp_path / "hub", to="huggingface-4.37")
    convert(tmp_path / "hub", tmp_path / "back")
    tokens_BT = torch.randint(0, 23, (2, 19), generator=torch.Generator().manual_seed(1))
    before, after = (
        log_probs_of(model, tokens_BT, SEGMENTS)[0]
        for model in (run.model, load(tmp_path / "back", device="cpu").model)
    )
    assert torch.equal(before, after)


def test_other_architecture_is_not_exported(tmp_path: Path) -> None:
    make_run(tmp_path / "run", architecture="shaw")
    with pytest.raises(UserError, match="cannot express shaw"):
        convert(tmp_path / "run", tmp_path / "hub", to="huggingface-4.37")
    for source in ("run", "nowhere"):
        with pytest.raises(UserError, match=r"no output format 'onnx'; known: int8, huggingface, huggingface-4\.37"):
            convert(tmp_path / source, tmp_path / "hub", to=cast(Any, "onnx"))
    assert not (tmp_path / "hub").exists()


def exported_values(run: Path, file: str, note: str | None) -> Any:
    """Export a run to the folder `hub` next to it, check the note, and return the contents of a JSON file there."""
    notes = convert(run, run.parent / "hub", to="huggingface-4.37").notes
    assert len(notes) == (note is not None)
    assert note is None or re.search(note, notes[0])
    return json.loads((run.parent / "hub" / file).read_text())


def test_export_notes_that_transformers_attends_to_empty_memory(tmp_path: Path) -> None:
    make_run(tmp_path / "run", attend_empty_memory=False)
    exported_values(tmp_path / "run", "config.json", "first segments will differ")


@pytest.mark.parametrize(
    # window: attention_window of the model, or None for no limit; expected: mem_len, same_length and clamp_len
    ("window", "evaluation", "expected", "note"),
    [
        # same_length means a window of mem_len keys, so no other attention_window can be expressed
        (9, {"clamp_length": 7}, (9, True, 7), None),
        (None, {"attention_window": 9}, (9, True, 5), None),
        (9, {"attention_window": 30, "memory_length": 30}, (30, True, 5), None),
        (None, {"attention_window": 4}, (9, False, 5), "attention_window 4, .* mem_len 9"),
        (9, {"attention_window": 4}, (9, True, 5), "attention_window 4, .* mem_len 9"),
    ],
)
def test_evaluation_lengths_are_exported(
    window: int | None, evaluation: dict[str, int], expected: tuple[Any, ...], note: str | None,
   tmp_path: Path,
) -> None:  # fmt: skip
    make_run(tmp_path / "run", attention_window=window, clamp_length=5, evaluation=evaluation)
    values = exported_values(tmp_path / "run", "config.json", note)
    assert (values["mem_len"], values["same_length"], values["clamp_len"]) == expected


@pytest.mark.parametrize(
    ("words", "settings", "note"),  # settings: the other arguments of tokenizer_from_words
    [
        (WORDS, {"pre_tokenizer": "moses", "lowercase": True}, None),
        (WORDS, {}, r"does not read text as this run's tokenizer \(word\)"),
        # single characters, with _ for the space, give a char tokenizer
        (["_", *"abcdefghijklmnopqrstuv"], {}, r"does not read text as this run's tokenizer \(char\)"),
        # TransfoXLTokenizer splits the lines of vocab.txt at the no-break space too, so it would read "caf" twice
        (["caf\xa0e", "caf", *WORDS[2:]], {"pre_tokenizer": "moses"}, "cut in vocab.txt"),
    ],
)
def test_tokenizer_is_exported(words: list[str], settings: dict[str, Any], note: str | None, tmp_path: Path) -> None:
    make_run(tmp_path / "run", tokenizer=tokenizer_from_object({"idx2sym": words}, "test", **settings))
    values = exported_values(tmp_path / "run", "tokenizer_config.json", note)
    lower_case = settings.get("lowercase", False)
    assert values == {"tokenizer_class": "TransfoXLTokenizer", "lower_case": lower_case}
    convert(tmp_path / "hub", tmp_path / "back")
    tokenizer = RunFolder.open(tmp_path / "back").tokenizer
    assert words_of(tokenizer) == tuple(words)
    assert not isinstance(tokenizer, WordTokenizer) or tokenizer.pre_tokenizer.lowercase == lower_case


@pytest.mark.parametrize("lower_case", [False, True])
def test_tokenizer_config_overrides_pickled_vocabulary(lower_case: bool, tmp_path: Path) -> None:
    config, weights, _ = golden("clusters")
    folder = hugging_face_folder(tmp_path / "hub", config, weights)
    (folder / "vocab.json").unlink()
    (folder / "vocab.pkl").write_bytes(pickle.dumps({"idx2sym": WORDS, "lower_case": not lower_case}))
    convert(folder, tmp_path / "without")
    (folder / "tokenizer_config.json").write_text(json.dumps({"lower_case": lower_case}))
    convert(folder, tmp_path / "with")
    for name, expected in (("without", not lower_case), ("with", lower_case)):
        tokenizer = RunFolder.open(tmp_path / name).tokenizer
        assert isinstance(tokenizer, WordTokenizer)
        assert tokenizer.pre_tokenizer.lowercase == expected


def test_sharded_and_tied_weights_under_alternative_names_are_imported(tmp_path: Path) -> None:
    """A weight that two modules share can be stored under either name, also the one that weight_names.py maps only as
    an alias."""
    config, weights, expected = golden("tied-biases")
    hugging_face_folder(tmp_path / "hub", config, weights)
    (tmp_path / "hub" / "model.safetensors").unlink()
    for name in ("r_w_bias", "r_r_bias"):
        weights[f"transformer.layers.1.dec_attn.{name}"] = weights.pop(f"transformer.{name}")
    weights["crit.out_layers.0.weight"] = weights.pop("transformer.word_emb.emb_layers.0.weight")
    shards = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(weights)}
    for file in set(shards.values()):
        save_file({name: weights[name].clone() for name in shards if shards[name] == file}, tmp_path / "hub" / file)
    (tmp_path / "hub" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    convert(tmp_path / "hub", tmp_path / "run")
    log_probs_BTV, _ = log_probs_of(load(tmp_path / "run", device="cpu").model, expected["tokens_BT"], SEGMENTS)
    torch.testing.assert_close(log_probs_BTV, expected["scores_BTV"], atol=1e-5, rtol=0)
