"""Fine-tuning begins with the weights of a run, and is otherwise a training like every other."""

from __future__ import annotations

import json
import re
import shutil
from bisect import bisect
from pathlib import Path
from typing import Any

import pytest
import torch
from library_tokenizers import word_piece
from refusals import txl
from small_runs import make_run
from tensors import assert_same_tensors
from training_runs import MODEL, OPTIONS, SHORT, TRAIN, StopAt, make_base, make_corpus, new_corpus

from transformer_xl import Corpus, Run, TrainConfig, UserError, evaluate, finetune, load, prepare, resume, save
from transformer_xl import train as train_run
from transformer_xl.config import ARCHITECTURES
from transformer_xl.integrations.int8 import to_int8
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import load_tensors
from transformer_xl.training.optimizers import build_optimizers
from transformer_xl.training.schedules import set_step_rates


def first_weights(path: Path) -> dict[str, torch.Tensor]:
    return load_tensors(path / "checkpoints" / "step-00000000" / "model.safetensors")[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_begin_as_those_of_the_base_and_losses_are_those_of_evaluate(architecture: str, tmp_path: Path) -> None:
    base, corpus = make_base(tmp_path, architecture=architecture), new_corpus(tmp_path)
    before = {file: file.read_bytes() for file in base.rglob("*") if file.is_file()}
    objects = {"model": ARCHITECTURES[architecture](dropout=0.0), "train": TrainConfig(**SHORT)}
    result = finetune(base, corpus, tmp_path / "tuned", **objects, **OPTIONS)
    assert {file: file.read_bytes() for file in base.rglob("*") if file.is_file()} == before
    weights = load(base, device="cpu").model.state_dict()
    assert_same_tensors(first_weights(result.path), weights)
    assert result.run.config.finetune.base == str(base)
    assert result.run.config.train.learning_rate == 0.01  # the base's
    assert [(loss.text, loss.split) for loss in result.losses] == [("new", "valid"), ("old", "valid")]
    for loss, text in zip(result.losses, (corpus, Corpus.open(tmp_path / "old")), strict=True):
        assert loss.num_tokens == text.record.splits["valid"].num_tokens
        assert loss.before == evaluate(load(base, device="cpu"), text.split("valid")).nats_per_token
        assert loss.after == evaluate(result.run, text.split("valid")).nats_per_token
    assert result.losses[0].after < result.losses[0].before


def test_settings_of_the_model_that_change_what_its_weights_mean_are_refused(tmp_path: Path) -> None:
    """Although the weights have the same shapes."""
    base, corpus = word_runs(tmp_path, cutoffs=(4, 7), n_heads=2, learned_attention_biases=False)
    for model in ({"cutoffs": (3, 7)}, {"n_heads": 4}, {"d_head": MODEL["d_model"]}, {"architecture": "shaw"}):
        with pytest.raises(UserError, match=f"model.{next(iter(model))} cannot change in fine-tuning"):
            finetune(base, corpus, tmp_path / "tuned", model=model, replace_tokenizer=True, train=SHORT, **OPTIONS)
    assert not (tmp_path / "tuned").exists()


@pytest.mark.parametrize(
    ("architecture", "shorter", "longer"),
    [
        ("shaw", {"segment_length": 4}, {}),
        ("shaw", {"memory_length": 5}, {}),
        ("al-rfou", {"segment_length": 4}, {"segment_length": 8}),
    ],
)
def test_learned_positions_may_be_more_than_needed_and_not_fewer(
    architecture: str, shorter: dict[str, int], longer: dict[str, int], tmp_path: Path
) -> None:
    base, corpus = make_base(tmp_path, architecture=architecture), new_corpus(tmp_path)
    result = finetune(base, corpus, tmp_path / "tuned", train=SHORT | shorter, **OPTIONS)
    assert_same_tensors(first_weights(result.path), load(base, device="cpu").model.state_dict())
    again = finetune(result.path, corpus, tmp_path / "again", train=SHORT, **OPTIONS)  # of its own settings
    assert next(iter(shorter.items())) in again.run.config.train
    new = train_run(str(result.path), corpus, tmp_path / "new-model", train=SHORT, **OPTIONS)
    assert new.run.model.num_parameters() < result.run.model.num_parameters()
    if longer:
        with pytest.raises(UserError, match="max_position_embeddings"):
            finetune(base, corpus, tmp_path / "longer", train=SHORT | longer, **OPTIONS)


def test_rate_with_weight_averaging_is_that_of_the_new_run(tmp_path: Path) -> None:
    """The recipe ptb has another learning rate while it averages."""
    corpus = make_corpus(tmp_path / "old", b"abcdefgh" * 30)
    train = {**TRAIN, "weight_average": "uniform", "average_start_step": 9, "average_learning_rate": 0.3}
    base = train_run(None, corpus, tmp_path / "base", model=MODEL, train=train, **OPTIONS).path
    given = SHORT | {"weight_average": "uniform", "learning_rate": 0.001}
    result = finetune(base, new_corpus(tmp_path), tmp_path / "tuned", train=given, **OPTIONS)
    assert result.run.config.train.average_learning_rate is None


@pytest.mark.parametrize(
    "evaluation", [{"memory_length": 3, "segment_length": 4, "softmax_temperature": 1.5}, {"method": "dynamic"}]
)
def test_losses_are_measured_with_the_settings_and_training_text_of_the_new_run(
    evaluation: dict[str, Any], tmp_path: Path
) -> None:
    base, corpus = make_base(tmp_path), new_corpus(tmp_path)
    result = finetune(base, corpus, tmp_path / "tuned", evaluation=evaluation, train=SHORT, **OPTIONS)
    for loss, text in zip(result.losses, (corpus, Corpus.open(tmp_path / "old")), strict=True):
        for run, nats in ((load(base, device="cpu"), loss.before), (result.run, loss.after)):
            expected = evaluate(run, text.split("valid"), train_split=corpus.split("train"), **evaluation)
            assert nats == expected.nats_per_token


def test_text_that_cannot_be_scored_after_training_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rate of method dynamic is too high, which shows only when the text is read."""
    base, corpus = make_base(tmp_path), new_corpus(tmp_path)
    evaluation = {"method": "dynamic", "dynamic": {"optimizer": "sgd", "learning_rate": 1e30}}
    options = {**OPTIONS, "progress": True}
    result = finetune(base, corpus, tmp_path / "tuned", evaluation=evaluation, train=SHORT, **options)
    assert (result.finished, result.losses) == (True, ())
    assert "the loss of the new text is unknown: dynamic.learning_rate 1e+30" in capsys.readouterr().err


def test_loaded_base_stays_in_the_mode_that_it_had(tmp_path: Path) -> None:
    base = load(make_base(tmp_path), device="cpu")
    base.model.train()
    assert finetune(base, new_corpus(tmp_path), tmp_path / "tuned", train=SHORT, **OPTIONS).losses
    assert base.model.training


def test_old_text_that_was_replaced_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, corpus = make_base(tmp_path), new_corpus(tmp_path)
    shutil.rmtree(tmp_path / "old")
    make_corpus(tmp_path / "old", b"xyz" * 60, b"zyx" * 20)
    result = finetune(base, corpus, tmp_path / "tuned", train=SHORT, device="cpu")
    assert [loss.text for loss in result.losses] == ["new"]
    reason = "what was lost on the base's own text is unknown: .*old has another text now"
    assert re.search(reason, capsys.readouterr().err)


@pytest.mark.parametrize("replaced", [False, True])
def test_stopped_run_resumes_bit_for_bit_to_the_same_losses(replaced: bool, tmp_path: Path) -> None:
    base, corpus = word_runs(tmp_path) if replaced else (make_base(tmp_path), new_corpus(tmp_path))
    options = {"train": {**SHORT, "optimizer": "muon"}, "layer_rate_decay": 0.5, "freeze": ["embedding.*"], **OPTIONS}
    options["replace_tokenizer"] = replaced
    whole = finetune(base, corpus, tmp_path / "whole", **options)
    stopped = finetune(base, corpus, tmp_path / "parts", callbacks=[StopAt(4)], **options)
    assert (stopped.step, stopped.losses) == (4, ())
    result = txl("train", "--resume", str(tmp_path / "parts"), "--device", "cpu")
    assert (result.status, "new text, valid" in result.out) == (0, True)
    assert_same_tensors(load(tmp_path / "parts", device="cpu").model, whole.run.model)
    assert resume(tmp_path / "parts", **OPTIONS).losses == whole.losses != ()  # no step is left


@pytest.mark.parametrize("change", ["removed", "trained further"])
def test_resumed_run_says_why_it_cannot_measure_what_was_gained(
    change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, corpus = make_base(tmp_path), new_corpus(tmp_path)
    finetune(base, corpus, tmp_path / "tuned", callbacks=[StopAt(4)], train=SHORT, **OPTIONS)
    if change == "removed":
        shutil.rmtree(base)
    else:
        resume(base, train={"max_steps": 9}, **OPTIONS)
    assert resume(tmp_path / "tuned", device="cpu").losses == ()
    reason = "base: no such folder" if change == "removed" else "no longer has the weights of step 5"
    assert re.search(f"what was gained and lost is unknown: .*{reason}", capsys.readouterr().err)


def test_frozen_parameters_stay_and_all_others_change(tmp_path: Path) -> None:
    base, corpus = make_base(tmp_path), new_corpus(tmp_path)
    freeze = ["embedding.*", "layers.0.attention.?_proj.weight"]
    result = finetune(base, corpus, tmp_path / "tuned", freeze=freeze, train={**SHORT, "optimizer": "muon"}, **OPTIONS)
    before, after = first_weights(result.path), result.run.model.state_dict()
    same = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    projections = {f"layers.0.attention.{name}_proj.weight" for name in "qkvro"}
    assert same == {"embedding.tables.0", *projections}


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "muon"])
def test_each_layer_below_has_a_lower_rate(optimizer: str, tmp_path: Path) -> None:
    """A step of Adam and Muon has the size of the rate, whatever the gradient."""
    run = load(make_base(tmp_path, n_layers=3), device="cpu")
    config = run.config.train.model_copy(update={"optimizer": optimizer, "learning_rate": 0.1, "warmup_steps": 0})
    steps = {}
    for decay in (1.0, 0.5):
        model: LanguageModel = load(run.path, device="cpu").model.train()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        optimizers = build_optimizers(model, config, layer_rate_decay=decay)
        set_step_rates(optimizers, 0, config)
        hidden_BTD, _ = model(torch.tensor([[97, 98, 99, 97]]))
        model.nats(hidden_BTD, torch.tensor([[98, 99, 97, 98]])).sum().backward()
        for each in optimizers:
            each.step()
        steps[decay] = {name: tensor - before[name] for name, tensor in model.state_dict().items()}
    factors = {"layers.2": 1.0, "layers.1": 0.5, "layers.0": 0.25, "embedding": 0.125, "content_bias": 1.0}
    for start, factor in factors.items():
        names = [name for name in steps[1.0] if name.startswith(f"{start}.") or name == start]
        assert names
        for name in names:
            torch.testing.assert_close(steps[0.5][name], factor * steps[1.0][name], rtol=1e-4, atol=1e-6)


def test_models_without_a_corpus_are_fine_tuned_at_a_low_rate(tmp_path: Path) -> None:
    base, corpus = load(make_base(tmp_path), device="cpu"), new_corpus(tmp_path)
    config = base.config.model_copy(update={"corpus": None})
    converted = save(Run(base.model, base.tokenizer, config), tmp_path / "converted")
    result = finetune(converted, corpus, tmp_path / "tuned", train=SHORT, **OPTIONS)
    assert (result.run.config.train.learning_rate, result.run.config.finetune.base_step) == (1e-4, 0)
    assert [loss.text for loss in result.losses] == ["new"]


TEXTS = ("the cat sat on a mat\n" * 9 + "dogs bark\n" * 3, "a dog sat on the rug\n" * 7 + "birds sing\n")


def word_runs(folder: Path, **model: Any) -> tuple[Path, Corpus]:
    """Return a run on words, and a corpus with some other words."""
    for name, text in zip(("old", "new"), TEXTS, strict=True):
        for split in ("train", "valid"):
            (folder / f"{name}-{split}.txt").write_text(text)
        files = {split: folder / f"{name}-{split}.txt" for split in ("train", "valid")}
        prepare(**files, out=folder / name, tokenizer="word")
    train = {**TRAIN, "max_steps": 5, "segment_length": 5}
    if model.get("architecture") == "al-rfou":
        train["memory_length"] = 0
    run = train_run(None, folder / "old", folder / "base", model={**MODEL, **model}, train=train, **OPTIONS)
    return run.path, Corpus.open(folder / "new")


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tie_word_embeddings": False, "d_embed": 6},
        {"cutoffs": (4, 7)},
        {"cutoffs": (4, 7), "div_val": 2},
        {"max_ngram": 3, "ngram_buckets": 11, "d_ngram": 5},
        {"value_embeddings": True},
    ],
)
def test_shared_words_keep_their_rows_and_others_begin_with_the_mean(model: dict[str, Any], tmp_path: Path) -> None:
    base, corpus = word_runs(tmp_path, **model)
    result = finetune(base, corpus, tmp_path / "tuned", replace_tokenizer=True, train=SHORT, **OPTIONS)
    old_run, new = load(base, device="cpu"), result.run
    old_words, new_words = old_run.tokenizer.to_json()["words"], new.tokenizer.to_json()["words"]
    shared = [word for word in new_words if word in old_words]
    assert 3 < len(shared) < len(new_words)
    cutoffs = model.get("cutoffs", ()) if "div_val" in model else ()
    clusters = [[bisect(cutoffs, words.index(word)) for words in (new_words, old_words)] for word in shared]
    num_moved = sum(cluster != old_cluster for cluster, old_cluster in clusters)
    assert (num_moved > 0) == ("div_val" in model)
    assert new.config.finetune.kept_tokens == len(shared) - num_moved
    new.model.load_state_dict(first_weights(result.path))
    with torch.no_grad():
        for word in new_words:
            index = new_words.index(word)
            vector = new.model.embedding(torch.tensor([[index]]))[0, 0]
            bias = new.model.softmax.bias[index]
            if word in shared:
                old_index = old_words.index(word)
                expected = old_run.model.embedding(torch.tensor([[old_index]]))[0, 0]
                clusters = [sum(i >= cutoff for cutoff in model.get("cutoffs", ())) for i in (index, old_index)]
                if "div_val" not in model or clusters[0] == clusters[1]:
                    torch.testing.assert_close(vector, expected)
                torch.testing.assert_close(bias, old_run.model.softmax.bias[old_index])
            else:
                torch.testing.assert_close(bias, old_run.model.softmax.bias.mean())
                if "div_val" not in model:
                    mean_E = old_run.model.embedding.tables[0].mean(0)
                    torch.testing.assert_close(new.model.embedding.tables[0][index], mean_E)
        for name, tensor in old_run.model.state_dict().items():
            if name.endswith("value_embedding.table.weight"):
                mean_E, table_VE = tensor.mean(0), new.model.state_dict()[name]
                for word, row_E in zip(new_words, table_VE, strict=True):
                    torch.testing.assert_close(row_E, tensor[old_words.index(word)] if word in shared else mean_E)
            elif name.startswith(("layers.", "embedding.projections", "softmax.cluster", "content_bias")):
                torch.testing.assert_close(new.model.state_dict()[name], tensor)
    assert [loss.text for loss in result.losses] == ["new"]
    assert result.losses[0].after < result.losses[0].before


@pytest.mark.parametrize("num_words", [2, 9])  # fewer and more than the base has
def test_auxiliary_losses_of_al_rfou_keep_the_rows_of_shared_words(num_words: int, tmp_path: Path) -> None:
    base, _ = word_runs(tmp_path, architecture="al-rfou", intermediate_layer_losses=True, num_targets=2)
    words = ["zebra", *["mat", "cat", "sat", "the", "emu", "yak", "gnu", "elk", "ape", "eel", "owl"][:num_words]]
    (tmp_path / "zoo.txt").write_text("\n".join(" ".join(words) for _ in range(30)))
    corpus = prepare(train=tmp_path / "zoo.txt", out=tmp_path / "zoo", tokenizer="word")
    result = finetune(base, corpus, tmp_path / "tuned", replace_tokenizer=True, train=SHORT, **OPTIONS)
    old_run = load(base, device="cpu")
    new, old = first_weights(result.path), old_run.model.state_dict()
    new_words, old_words = (run.tokenizer.to_json()["words"] for run in (result.run, old_run))
    heads = [name for name in new if name.startswith(("next_heads.", "second_heads."))]
    assert len(heads) == 6
    for name in heads:
        for index, word in enumerate(new_words):
            expected = old[name][old_words.index(word)] if word in old_words else old[name].mean(0)
            torch.testing.assert_close(new[name][index], expected)


def test_cutoffs_beyond_a_smaller_vocabulary_are_dropped(tmp_path: Path) -> None:
    base, _ = word_runs(tmp_path, cutoffs=(4, 7))
    (tmp_path / "small.txt").write_text("the cat sat on\n" * 30)
    corpus = prepare(train=tmp_path / "small.txt", out=tmp_path / "small", tokenizer="word")
    result = finetune(base, corpus, tmp_path / "tuned", replace_tokenizer=True, train=SHORT, **OPTIONS)
    assert result.run.config.model.cutoffs == (4,)
    old, new = load(base, device="cpu").model, first_weights(result.path)
    torch.testing.assert_close(new["softmax.cluster_weight"], old.state_dict()["softmax.cluster_weight"][:1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"freeze": ["layers.7.*"]}, r"freeze 'layers.7.\*' matches no parameter; .* embedding\*, .*layers.1\*"),
        ({"freeze": ["*"]}, r"freeze \* leaves no parameter to train"),
        ({"freeze": "embedding.*"}, "give a list of patterns"),
        ({"lora_rank": 2, "lora_targets": None}, "lora_targets is None; give a list of names"),
        ({"model": [1]}, "model .*give a dict"),
        ({"layer_rate_decay": 1.5}, "layer_rate_decay"),
        ({"model": {"architecture": "lstm"}}, "model.architecture cannot change in fine-tuning"),
        ({"model": {"input_dropout": 2}}, "input_dropout: Input should be less than"),
        ({"model": {"n_layers": 3}}, r"model.n_layers cannot change .*; leave it out. Only .* dropout"),
        ({"model": {"norm_first": True, "final_norm": False}}, "model.norm_first cannot change"),  # equal shapes
        ({"train": {"batch_size": 99}}, "too short|tokens"),
        ({"checkpoint": "newest"}, "no checkpoint 'newest'"),
        ({"evaluation": {"method": "dynamic", "batch_size": 2}}, "batch_size 2: method dynamic"),
    ],
)
def test_wrong_arguments_leave_no_folder(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    base, corpus = make_base(tmp_path), new_corpus(tmp_path)
    with pytest.raises(UserError, match=message):
        finetune(base, corpus, tmp_path / "tuned", **{"train": SHORT, **OPTIONS, **arguments})
    assert not (tmp_path / "tuned").exists()


def test_weights_that_are_not_those_of_the_folder_are_refused(tmp_path: Path) -> None:
    """The run would record them as what it began with."""
    base, corpus = make_base(tmp_path), new_corpus(tmp_path)
    loaded = load(base, device="cpu")
    with torch.no_grad():
        loaded.model.softmax.bias += 1
    message = r"other weights than .*base \(at softmax.bias\).* save it"
    with pytest.raises(UserError, match=message):
        finetune(loaded, corpus, tmp_path / "tuned", train=SHORT, **OPTIONS)
    assert not (tmp_path / "tuned").exists()
    finetune(load(base, device="cpu"), corpus, tmp_path / "tuned", train=SHORT, **OPTIONS)


def test_8_bit_weights_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    base = load(make_base(tmp_path), device="cpu")
    with pytest.raises(UserError, match=r"8-bit weights .* cannot be fine-tuned; take the run"):
        finetune(to_int8(base), new_corpus(tmp_path), tmp_path / "tuned", train=SHORT, **OPTIONS)


def test_objective_of_xlnet_follows_segments_and_tokenizer_of_the_new_run(tmp_path: Path) -> None:
    """Its separators are those of the new tokenizer, and lengths that the base's segment decided are decided anew."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(word_piece()))
    texts = {"documents": {"train": ["the cat sat on the mat the dog sat there the cat here"] * 12}}
    old = prepare(**texts, out=tmp_path / "old", tokenizer=tmp_path / "tokenizer.json")
    words = prepare(**texts, out=tmp_path / "words", tokenizer="word")
    model = {**MODEL, "architecture": "xlnet", "max_gram": 2}
    short = {**TRAIN, "max_steps": 1, "segment_length": 14}
    base = train_run(None, old, tmp_path / "base", model=model, train=short, **OPTIONS).path
    assert len(load(base).config.model.functional_tokens) == 2
    tuned = finetune(base, words, tmp_path / "tuned", replace_tokenizer=True, train=SHORT, **OPTIONS).run.config
    again = train_run(base, words, tmp_path / "again", train={"max_steps": 1}, **OPTIONS).run.config
    assert tuned.model.functional_tokens == again.model.functional_tokens == ()
    longer = {**SHORT, "segment_length": 28, "batch_size": 2}
    long = finetune(base, old, tmp_path / "long", train=longer, **OPTIONS).run.config.model
    assert (long.reuse_length, long.num_predict) == (14, 4)
    assert long.functional_tokens == load(base).config.model.functional_tokens
    shorter = finetune(base, old, tmp_path / "shorter", train={**SHORT, "segment_length": 10}, **OPTIONS).run.config
    assert shorter.model.reuse_length == 5


def test_another_tokenizer_needs_the_option(tmp_path: Path) -> None:
    base, corpus = word_runs(tmp_path)
    with pytest.raises(UserError, match=r"another tokenizer .*txl prepare FILES --tokenizer .*replace_tokenizer"):
        finetune(base, corpus, tmp_path / "tuned", **OPTIONS)
    (tmp_path / "numbers.txt").write_text("1 2 3\n" * 50)
    numbers = prepare(train=tmp_path / "numbers.txt", out=tmp_path / "numbers", tokenizer="integer")
    with pytest.raises(UserError, match="no token in common"):
        finetune(base, numbers, tmp_path / "tuned", replace_tokenizer=True, **OPTIONS)
    loaded = load(base, device="cpu")
    with pytest.raises(UserError, match="model in no folder"):
        finetune(Run(loaded.model, loaded.tokenizer, loaded.config), corpus, tmp_path / "tuned", **OPTIONS)
    assert not (tmp_path / "tuned").exists()


def test_run_killed_before_its_first_checkpoint_does_not_resume_from_random_weights(tmp_path: Path) -> None:
    corpus = new_corpus(tmp_path)
    result = finetune(make_base(tmp_path), corpus, tmp_path / "tuned", train=SHORT, **OPTIONS)
    folder = RunFolder.open(result.path)
    RunFolder.create(tmp_path / "killed", folder.config, folder.tokenizer)
    advice = "stopped before its first checkpoint: remove the folder and fine-tune anew"
    with pytest.raises(UserError, match=f"contains no checkpoint; it was {advice}"):
        resume(tmp_path / "killed", **OPTIONS)
    with pytest.raises(UserError, match=f"no weights yet; it was {advice}"):
        load(tmp_path / "killed", device="cpu")
    with pytest.raises(UserError, match=f"holds a run already; it was {advice}"):
        finetune(tmp_path / "base", corpus, tmp_path / "killed", train=SHORT, **OPTIONS)


def test_command_prints_what_was_gained_and_lost(tmp_path: Path) -> None:
    base, corpus = make_base(tmp_path), new_corpus(tmp_path)
    words = ["finetune", str(base), "--corpus", str(corpus.path), "--run", str(tmp_path / "tuned")]
    result = txl(*words, "--freeze", "embedding.*", "--freeze", "softmax.*", "--train.max-steps", "6")
    assert result.status == 0
    assert "new text, valid" in result.out
    assert "gained" in result.out
    assert load(tmp_path / "tuned", device="cpu").config.finetune.freeze == ("embedding.*", "softmax.*")
    again = txl(*words)
    assert (again.status, again.out) == (2, "")
    assert "holds a run already" in again.err


def test_an_unknown_setting_of_a_resumed_run_is_answered_with_the_nearest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(UserError, match=r"train has no setting 'max_step' .did you mean 'max_steps'"):
        resume(run.path, train={"max_step": 2})
