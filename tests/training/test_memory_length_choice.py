"""When training ends, the best weights are measured at several memory lengths, and used with the best one by default.

The run is trained with a memory of 2; the choice is replaced by 4 where it must differ from that.
"""

from __future__ import annotations

import copy
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import txl
from training_runs import MODEL, TRAIN, StopAt, StopInValidation, letters_corpus

from transformer_xl import Corpus, EvaluationConfig, UserError, evaluate, generate, load, resume, save, score
from transformer_xl import train as train_run
from transformer_xl.evaluation.plan import EvaluationPlan, TokenizedText
from transformer_xl.generation.generate import memory_plan
from transformer_xl.integrations.checkpoints.convert import convert
from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import load_tensors, save_tensors
from transformer_xl.training import memory_length_choice

OPTIONS: dict[str, Any] = {"model": MODEL, "device": "cpu", "progress": False}
# 64 steps of 64 tokens; 1 token in 64 of them is 64, which the longest of 8 tokens fits into 8 times
SETTINGS = TRAIN | {"segment_length": 4, "memory_length": 2, "batch_size": 16, "max_steps": 64, "eval_interval": 40}
BEST_OF = "chosen from 1, 2, 4, 8 on the validation text"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return letters_corpus(tmp_path_factory.mktemp("corpus") / "corpus", num_train=1031, num_valid=101)


@pytest.fixture(scope="module")
def path(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, for which a memory of 4 was chosen."""
    path = tmp_path_factory.mktemp("runs") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_length_choice, "choose_length", lambda *_: 4)
        patch.setattr(memory_length_choice, "is_worse", lambda *_: False)
        train_run(None, corpus, path, train=SETTINGS, **OPTIONS)
    return path


def test_measured_losses_are_those_of_evaluation(path: Path) -> None:
    run = load(path, device="cpu")
    measured = run.memory_lengths
    assert measured is not None
    assert (measured.chosen, measured.num_tokens, list(measured.nats_per_token)) == (4, 64, [1, 2, 4, 8])
    for length, nats in measured.nats_per_token.items():
        assert evaluate(run, "valid", memory_length=length, max_tokens=64).nats_per_token == nats
    assert len(set(measured.nats_per_token.values())) == 4
    dynamic = replace(run, config=run.config.model_copy(update={"evaluation": EvaluationConfig(method="dynamic")}))
    again = memory_length_choice.measure_memory_lengths(dynamic, run.open_corpus().split("valid"), 64, [1, 2, 4, 8])
    assert again.nats_per_token.items() <= measured.nats_per_token.items()  # perhaps without the longest


def test_evaluation_scoring_and_generation_use_the_chosen_length(path: Path) -> None:
    run = load(path, device="cpu")
    for default, given in (
        (evaluate(run, "valid"), evaluate(run, "valid", memory_length=4)),
        (score(run, "a text")[0].sums, score(run, "a text", memory_length=4)[0].sums),
    ):
        assert default.nats_per_token == given.nats_per_token
    assert evaluate(run, "valid", method="dynamic").plan.context_limits.memory_length == 4
    settings: dict[str, Any] = {"max_new_tokens": 20, "greedy": True, "logprobs": True}
    assert generate(run, "abc", **settings).logprobs == generate(run, "abc", memory_length=4, **settings).logprobs
    assert generate(run, "abc", **settings).logprobs != generate(run, "abc", memory_length=2, **settings).logprobs


def test_length_of_a_run_that_is_evaluated_to_both_sides_is_that_of_reading_with_memory(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Method both-sides reads segments of half a block, 3 tokens, and lengths are measured with those of training."""
    model = MODEL | {"architecture": "xlnet", "perm_size": 6, "max_gram": 2}
    options = OPTIONS | {"model": model, "evaluation": {"method": "both-sides"}}
    run = train_run(None, corpus, tmp_path / "run", train=SETTINGS, **options).run
    assert run.memory_lengths is not None
    assert run.memory_lengths.segment_length == 4
    assert memory_plan(run, None).memory_length_reason == run.memory_lengths.describe()
    assert EvaluationPlan.of_run(run).memory_length_reason.startswith("as trained; another was chosen")


def test_old_transformers_get_the_chosen_length(path: Path, tmp_path: Path) -> None:
    convert(path, tmp_path / "hub", to="huggingface-4.37")
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["mem_len"] == 4


def test_settings_that_are_given_or_of_the_run_precede_the_chosen_length(path: Path) -> None:
    run = load(path, device="cpu")
    stated = replace(run, config=run.config.model_copy(update={"evaluation": EvaluationConfig(memory_length=3)}))
    other_lengths = "as trained; another was chosen with another segment, window or clamp length"
    for model, given, expected in (
        (run, {}, (4, BEST_OF)),
        (run, {"memory_length": 7}, (7, "given")),
        (stated, {}, (3, "evaluation.memory_length of the run")),
        (stated, {"memory_length": 7}, (7, "given")),
        (stated, {"memory_length": None}, (4, BEST_OF)),
        (run, {"segment_length": 5}, (2, other_lengths)),
        (run, {"attention_window": 5}, (2, other_lengths)),
        (run, {"clamp_length": 5}, (2, other_lengths)),
        (replace(run, weights=None), {}, (2, "as trained")),  # such as a model that was never trained here
    ):
        plan = evaluate(model, run.open_corpus().split("valid"), max_tokens=9, **given).plan
        assert (plan.context_limits.memory_length, plan.memory_length_reason) == expected
    assert memory_plan(run, 7).context_limits.memory_length == 7


def test_commands_say_which_length_is_used_and_why(path: Path) -> None:
    line = f"memory length 4: {BEST_OF}\n"
    printed = txl("evaluate", path, "--split", "valid", "--json")
    assert line in printed.err
    assert (printed.object["memory_length"], printed.object["memory_length_reason"]) == (4, BEST_OF)
    assert line in txl("generate", path, "--max-new-tokens", "1").err
    assert "memory length" not in txl("evaluate", path, "--split", "valid", "--sweep-memory-length", "0,2").err
    facts = txl("info", path, "--json", "--verify").object["run"]["memory_lengths"]
    measured = load(path, device="cpu").memory_lengths
    assert measured is not None
    assert facts == measured.model_dump(mode="json")


def test_measurement_belongs_to_the_weights(path: Path, corpus: Corpus, tmp_path: Path) -> None:
    """It is kept by `save`, shared with the last weights if these are the best, and lost with other best weights."""
    best, last = (load(path, device="cpu", checkpoint=name) for name in ("best", "last"))
    assert best.memory_lengths is not None
    assert last.memory_lengths == best.memory_lengths
    assert load(save(best, tmp_path / "saved"), device="cpu").memory_lengths == best.memory_lengths
    copied = copy.deepcopy(best)
    for changed in (best, copied):
        with torch.no_grad():
            next(changed.model.parameters()).mul_(1.01)
        assert changed.memory_lengths is None
    assert load(save(best, tmp_path / "changed"), device="cpu").memory_lengths is None
    averaged = SETTINGS | {"weight_average": "ema", "ema_decay": 0.5}
    train_run(None, corpus, tmp_path / "run", train=averaged, **OPTIONS)
    assert load(tmp_path / "run", device="cpu").memory_lengths is not None
    assert load(tmp_path / "run", device="cpu", checkpoint="last").memory_lengths is None
    RunFolder.open(tmp_path / "run").save_weights(best.model.state_dict(), step=70, nats=1.0)
    assert load(tmp_path / "run", device="cpu").memory_lengths is None


def test_damaged_measurement_is_refused(path: Path, tmp_path: Path) -> None:
    copy = save(load(path, device="cpu"), tmp_path / "copy")
    weights, metadata = load_tensors(copy / "model.safetensors")
    for entry in ("{", "{}"):
        save_tensors(copy / "model.safetensors", weights, metadata | {"memory_lengths": entry})
        with pytest.raises(UserError, match="damaged"):
            load(copy, device="cpu")


def test_stopped_and_resumed_runs_are_measured(corpus: Corpus, tmp_path: Path) -> None:
    settings = SETTINGS | {"max_steps": 80}
    train_run(None, corpus, tmp_path / "run", train=settings, callbacks=[StopAt(70)], **OPTIONS)
    stopped = load(tmp_path / "run", device="cpu").memory_lengths
    assert stopped is not None
    assert stopped.num_tokens == 70
    resume(tmp_path / "run", device="cpu", progress=False)
    resumed = load(tmp_path / "run", device="cpu").memory_lengths
    assert resumed is not None
    assert resumed.num_tokens == 80
    # a stop in the validation that follows a stop is a wish to end now
    train_run(None, corpus, tmp_path / "hurry", train=settings, callbacks=[StopInValidation(80)], **OPTIONS)
    assert load(tmp_path / "hurry", device="cpu").memory_lengths is None


def test_interrupted_measurement_leaves_the_run_as_it_is(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = memory_length_choice.stream_losses

    def interrupted(model: Any, text: TokenizedText, plan: EvaluationPlan, progress: Any) -> Any:
        if plan.context_limits.memory_length == 1:  # the first: a second signal would end the process
            signal.raise_signal(signal.SIGINT)
        yield from stream(model, text, plan, progress)

    monkeypatch.setattr(memory_length_choice, "stream_losses", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_run(None, corpus, tmp_path / "run", train=SETTINGS, **OPTIONS)
    run = load(tmp_path / "run", device="cpu")
    assert run.weights is not None
    assert (run.weights.used.step, run.memory_lengths) == (64, None)


def test_failed_measurement_is_no_failure_of_training(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(memory_length_choice, "stream_losses", fails)
    result = train_run(None, corpus, tmp_path / "run", train=SETTINGS, **OPTIONS | {"progress": True})
    assert (result.finished, result.run.memory_lengths) == (True, None)
    assert "uses the memory length of training, because measuring others failed: no room" in capsys.readouterr().err


def test_nothing_is_measured_without_validation_text_or_choice(corpus: Corpus, tmp_path: Path) -> None:
    without_text = letters_corpus(tmp_path / "corpus", num_train=1031, num_valid=0)
    train_run(None, without_text, tmp_path / "no text", train=SETTINGS, **OPTIONS)
    train_run(None, corpus, tmp_path / "stated", train=SETTINGS, evaluation={"memory_length": 5}, **OPTIONS)
    for name in ("no text", "stated"):
        assert load(tmp_path / name, device="cpu").memory_lengths is None


def test_harmful_lengths_end_the_measurement_and_are_not_chosen(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of each token is raised by 1% of the number of slots beyond the trained 2."""
    run = load(path, device="cpu")
    stream = memory_length_choice.stream_losses

    def worse_beyond_training(model: Any, text: TokenizedText, plan: EvaluationPlan, progress: Any = None) -> Any:
        beyond = max(0, plan.context_limits.memory_length - 2)
        trained = replace(plan, context_limits=replace(plan.context_limits, memory_length=2))
        for losses in stream(model, text, trained, progress):
            yield replace(losses, nats_K=losses.nats_K * (1 + 0.01 * beyond))

    monkeypatch.setattr(memory_length_choice, "stream_losses", worse_beyond_training)
    measured = memory_length_choice.measure_memory_lengths(run, run.open_corpus().split("valid"), 64, [1, 2, 4, 8])
    assert (measured.chosen, list(measured.nats_per_token)) == (2, [1, 2, 4])
