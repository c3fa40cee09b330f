"""Requests that run together give the texts of `generate` and the log-probabilities of `score`, as each does alone.

The runs have random weights; their memory of 11 tokens is shorter than most texts here.

Shape suffixes: B batch size (1), D model width, V vocabulary.
"""

from __future__ import annotations

import queue
import time
import tracemalloc
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from servers import make_run
from small_runs import MEMORY, MODELS

from transformer_xl.apps.analyze.attention_maps import trace_attention
from transformer_xl.apps.serve import engine as engine_module
from transformer_xl.apps.serve.config import ServerConfig
from transformer_xl.apps.serve.engine import Engine
from transformer_xl.apps.serve.jobs import AnswerSize, Delta, Failed, Finished, ScoredToken, TextJob
from transformer_xl.apps.serve.served_model import ServedModel
from transformer_xl.evaluation.score import score
from transformer_xl.generation.generate import generate
from transformer_xl.generation.generation_config import GenerationConfig
from transformer_xl.generation.sampling import sample
from transformer_xl.model.memory import Memory
from transformer_xl.run import Run

LONG = "This prompt is much longer than the memory of the model, and is read in several slices. " * 4
TEXTS = ["Once upon a time", "x", LONG, "no", "another text", LONG[:140]]
SETTINGS: list[dict[str, Any]] = [{"top_k": None}, {}, {"greedy": True}, {"top_p": 0.9, "temperature": 1.3}]


class Listener:
    """Collects the events of a job."""

    def __init__(self) -> None:
        self.lists: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()

    def wait(self) -> tuple[str, list[ScoredToken], Finished | Failed]:
        """Return the text and the tokens of the only sample, and how the job ended."""
        events: list[Any] = []
        while not events or isinstance(events[-1], Delta):
            events += self.lists.get(timeout=60)
        deltas = [event for event in events if isinstance(event, Delta)]
        return (
            "".join(delta.text for delta in deltas),
            [token for delta in deltas for token in delta.tokens],
            events[-1],
        )


def make_job(served: ServedModel, text: str, max_tokens: int = 20, **options: Any) -> tuple[TextJob, Listener]:
    listener = Listener()
    settings = {name: options.pop(name) for name in list(options) if name in GenerationConfig.model_fields}
    options |= {name: settings.pop(name) for name in ("memory_length", "num_samples") if name in settings}
    options = {"memory_length": served.check_memory_length(None), "num_logprobs": 1, **options}
    config = GenerationConfig(max_new_tokens=max(1, max_tokens), **{"top_k": None, **settings})
    ids = served.run.tokenizer.encode(text).tolist()
    return TextJob(served, ids, config, max_tokens, listener.lists.put, **options), listener


def plainly_generated(
    served: ServedModel, token_ids: list[int], config: GenerationConfig, number: int, memory: Memory | None = None
) -> tuple[list[int], list[float], Memory]:
    """Read tokens segment by segment, and generate after them; the memory has not read the newest token yet."""
    inference, plan, tokens, logprobs = served.inference, served.plan, list[int](), list[float]()
    if memory is None:
        memory = inference.generation_memory(1, plan.context_limits, segment_length=served.run.config.train.num_inputs)
    width = plan.segment_length if inference.limits_visible else 512
    for start in range(0, len(token_ids), width):
        hidden_BTD, memory = inference(torch.tensor([token_ids[start : start + width]]), memory)
        hidden_B1D = hidden_BTD[:, -1:]
    generator = np.random.default_rng(config.seed)
    for index in range(number):
        if index:
            hidden_B1D, memory = inference(torch.tensor([tokens[-1:]]), memory)
        logits_BV = inference.logits(hidden_B1D)[:, 0]
        chosen_BV, ids_BV = logits_BV.topk(config.num_candidates or logits_BV.shape[1], sorted=True)
        if config.num_candidates is None:
            chosen_BV, ids_BV = logits_BV, torch.arange(logits_BV.shape[1])[None]
        tokens.append(int(ids_BV[0, sample(chosen_BV, config, [generator])]))
        logprobs.append(float(logits_BV.log_softmax(-1)[0, tokens[-1]]))
    return tokens, logprobs, memory


def ids_of(tokens: list[ScoredToken]) -> list[int]:
    return [token.token_id for token in tokens]


def logprobs_of(tokens: list[ScoredToken]) -> Any:
    return pytest.approx([token.logprob for token in tokens], abs=1e-4)


@pytest.fixture
def engines(tmp_path: Path):
    """Returns a function that makes a run with a name of MODELS, and starts an engine for it."""
    started: list[Engine] = []

    def make(name: str = "transformer-xl", run: Run | None = None, **options: Any) -> tuple[Run, ServedModel, Engine]:
        run = run or make_run(tmp_path / f"run-{len(started)}", name)
        served = ServedModel("model", run)
        started.append(Engine([served], **options))
        started[-1].start()
        return run, served, started[-1]

    yield make
    for engine in started:
        engine.stop()


@pytest.mark.parametrize("name", MODELS)
def test_requests_together_equal_generate(engines, name: str) -> None:
    """Texts of other lengths and settings join and leave all the time; more of them than rows wait for their turn."""
    run, served, engine = engines(name, max_rows=5)
    made = [
        make_job(served, text, 15 + 7 * index, seed=index, **SETTINGS[index % len(SETTINGS)])
        for index, text in enumerate(TEXTS * 2)
    ]
    engine.submit(*(job for job, _ in made))
    for job, listener in made:
        text, tokens, end = listener.wait()
        assert isinstance(end, Finished)
        expected_ids, logprobs, _ = plainly_generated(served, job.input_ids, job.config, job.max_tokens)
        assert ids_of(tokens) == expected_ids
        assert logprobs == logprobs_of(tokens)
        if len(job.input_ids) <= MEMORY or not served.inference.limits_visible:
            expected = generate(run, job.prompt_ids, job.config, logprobs=True)
            assert (text, ids_of(tokens)) == (expected.text, list(expected.token_ids))
        assert all(token.logprob <= token.top[0][1] for token in tokens)
    assert engine.counters.step_rows / engine.counters.steps > 2, "they did not run together"


@pytest.mark.parametrize("rate", [1e-3, 1e9])
def test_stream_gets_pieces_no_more_often_than_there_is_time_for(
    engines, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token at once, and the others when the rate allows, or at the end."""
    monkeypatch.setattr(engine_module, "_MAX_NEWS", rate)
    monkeypatch.setattr(engine_module, "_MIN_PAUSE", 0.0)
    run, served, engine = engines()
    job, listener = make_job(served, TEXTS[0], 20, streams=True)
    engine.submit(job)
    pieces: list[list[Any]] = []
    while not pieces or not isinstance(pieces[-1][-1], Finished):
        pieces.append(listener.lists.get(timeout=60))
    assert len(pieces) == 2 if rate < 1 else len(pieces) > 10  # bytes of one character come together
    deltas = [event for piece in pieces for event in piece if isinstance(event, Delta)]
    assert [delta.finish_reason for delta in deltas] == [None] * (len(pieces) - 1) + ["length"]
    expected = generate(run, job.prompt_ids, job.config, logprobs=True)
    assert ids_of(list(deltas[0].tokens)) == [expected.token_ids[0]]
    assert "".join(delta.text for delta in deltas) == expected.text
    assert [token.token_id for delta in deltas for token in delta.tokens] == list(expected.token_ids)
    offsets = [offset for delta in deltas for offset in delta.offsets]
    assert len(offsets) == 20
    assert offsets == sorted(offsets)


def test_stream_does_not_wait_for_the_step_of_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_MAX_NEWS", 1e9)
    monkeypatch.setattr(engine_module, "_MIN_PAUSE", 0.0)
    run = make_run(tmp_path / "run")
    fast, slow = ServedModel("fast", run), ServedModel("slow", run)
    engine, step, untold = Engine([fast, slow]), Engine._step, list[bool]()
    (job, listener), (other, end) = make_job(fast, TEXTS[0], 60, streams=True), make_job(slow, TEXTS[0], 50)

    def noted(engine: Engine, served: ServedModel, batch: Any) -> None:
        if served is slow:
            untold.append(job.has_news)
        step(engine, served, batch)

    monkeypatch.setattr(Engine, "_step", noted)
    engine.submit(job, other)  # before it starts, so that both begin in one round
    engine.start()
    assert [isinstance(one.wait()[-1], Finished) for one in (listener, end)] == [True, True]
    engine.stop()
    assert untold == [False] * 49


def test_jobs_that_do_not_stream_leave_streams_as_they_are(engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is read."""
    seconds = count()
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=float))
    monkeypatch.setattr(engine_module, "_MAX_NEWS", 0.25)
    _, served, engine = engines()
    others = [make_job(served, "other", 10**6, num_samples=8)[0] for _ in range(4)]
    job, listener = make_job(served, TEXTS[0], 60, streams=True)
    engine.submit(*others, job)
    num_pieces = 0
    while not isinstance(listener.lists.get(timeout=60)[-1], Finished):
        num_pieces += 1
    for other in others:
        engine.cancel(other)
    assert num_pieces > 10


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("memory_length", [None, 0])
def test_prompts_are_scored_as_by_score(engines, name: str, memory_length: int | None) -> None:
    run, served, engine = engines(name)
    options = {} if memory_length is None else {"memory_length": memory_length}
    made = [make_job(served, text, length, score_prompt=True, **options) for text in TEXTS for length in (0, 3)]
    engine.submit(*(job for job, _ in made))
    for job, listener in made:
        _, tokens, end = listener.wait()
        assert isinstance(end, Finished)
        assert len(tokens) == job.max_tokens
        (expected,) = score(run, run.tokenizer.decode_bytes(job.prompt_ids), **options)
        assert [token.token_id for token in job.prompt_tokens] == job.prompt_ids
        assert [token.logprob for token in job.prompt_tokens] == pytest.approx(list(-expected.nats_K), abs=1e-4)


def test_softmax_temperature_of_the_run_is_that_of_prompts_alone(engines, tmp_path: Path) -> None:
    run, served, engine = engines(run=make_run(tmp_path / "warm", evaluation={"softmax_temperature": 1.5}))
    job, listener = make_job(served, LONG, 3, score_prompt=True, num_logprobs=2)
    engine.submit(job)
    _, tokens, _ = listener.wait()
    (expected,) = score(run, LONG)
    prompt = list(job.prompt_tokens)
    assert [token.logprob for token in prompt] == pytest.approx(list(-expected.nats_K), abs=1e-4)
    assert all(dict(token.top).get(token.token_id, token.logprob) == token.logprob for token in prompt)
    _, logprobs, _ = plainly_generated(served, job.input_ids, job.config, 3)
    assert logprobs_of(tokens) == logprobs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("memory_length", [None, 0])
def test_completion_is_the_same_whatever_else_is_asked_for(engines, name: str, memory_length: int | None) -> None:
    """And the prompt is read once, unless `score` and `generate` see different tokens."""
    _, served, engine = engines(name)
    length = served.check_memory_length(memory_length)
    for index, text in enumerate(TEXTS):
        found: list[tuple[list[ScoredToken], int]] = []
        for options in ({}, {"score_prompt": True}, {"score_prompt": True, "keep_state": True}):
            num_before = engine.counters.prompt_tokens
            job, listener = make_job(served, text, 9, seed=index, memory_length=length, **options)
            engine.submit(job)
            found.append((listener.wait()[1], engine.counters.prompt_tokens - num_before))
        num_inputs = len(job.input_ids)
        is_twice = not length or name == "attends to empty memory"
        assert [number for _, number in found] == [num_inputs] + 2 * [num_inputs + is_twice * (num_inputs - 1)]
        assert found[0][0] == found[1][0] == found[2][0]


@pytest.mark.parametrize("name", ["transformer-xl", "n-grams", "window"])
def test_slices_of_any_size_give_the_same(engines, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, served, engine = engines(name)
    found: list[tuple[list[ScoredToken], list[ScoredToken]]] = []
    for size in (128, 1, 3, 7, 50):
        monkeypatch.setattr(engine_module, "READING_SLICE", size)
        job, listener = make_job(served, LONG, 9, score_prompt=True)
        engine.submit(job)
        found.append((listener.wait()[1], job.prompt_tokens))
    for parts in found[1:]:
        for actual, expected in zip(parts, found[0], strict=True):
            assert ids_of(actual) == ids_of(expected)
            assert [token.logprob for token in actual] == logprobs_of(expected)


@pytest.mark.parametrize("name", ["transformer-xl", "n-grams", "window", "shaw", "attends to empty memory"])
@pytest.mark.parametrize("memory_length", [None, 0])
def test_attention_is_that_of_the_analysis(engines, name: str, memory_length: int | None) -> None:
    """Of tokens at the beginning, in the middle and at the end of segments, before the memory is full and after."""
    run, served, engine = engines(name)
    length = served.check_memory_length(memory_length)
    plan = replace(served.plan, context_limits=replace(served.plan.context_limits, memory_length=length))
    for number in (1, 6, 7, 8, 40, 200):
        job, listener = make_job(served, LONG[:number], 0, memory_length=length, shows_attention=True)
        engine.submit(job)
        end = listener.wait()[2]
        assert isinstance(end, Finished), end
        layers: list[Any] = []
        trace_attention(run.model, job.input_ids, plan, [layers.append])
        for layer, found_NP in zip(layers[-run.config.model.n_layers :], job.attention_LNP, strict=True):
            expected_NS = layer.terms.probabilities_BNTS[0, :, -1].flip(-1)
            num_distances = found_NP.shape[1]
            torch.testing.assert_close(found_NP, expected_NS[:, :num_distances], atol=1e-5, rtol=1e-4)
            if name != "attends to empty memory":
                assert not expected_NS[:, num_distances:].any()


def run_with(engines, run: Run, others: list[str]) -> tuple[str, list[ScoredToken]]:
    _, served, engine = engines(run=run)
    made = [make_job(served, text, 30, seed=index) for index, text in enumerate(["the first text", *others])]
    engine.submit(*(job for job, _ in made))
    results = [listener.wait() for _, listener in made]
    return results[0][:2]


@pytest.mark.parametrize("name", ["transformer-xl", "lstm", "vaswani", "n-grams", "key offset"])
def test_contents_of_neighbours_change_no_bit(engines, tmp_path: Path, name: str) -> None:
    """At the same batch shape; with another batch size, log-probabilities differ by less than 1e-4."""
    run = make_run(tmp_path / "run", name)
    text, tokens = run_with(engines, run, ["ab", "cdefghij", "the third one of them"])
    same_text, same_tokens = run_with(engines, run, ["xy", "01234567", "another, of 21 bytes."])
    assert (text, tokens) == (same_text, same_tokens)
    alone_text, alone_tokens = run_with(engines, run, [])
    assert text == alone_text
    logprobs = [token.logprob for token in alone_tokens]
    assert [token.logprob for token in tokens] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize(
    "name", ["transformer-xl", "attends to empty memory", "n-grams", "lstm", "qrnn", "vaswani", "key offset"]
)
def test_state_continues_its_text(engines, name: str) -> None:
    """Its newest token is the first of a segment, also after many other rows have moved."""
    _, served, engine = engines(name, max_rows=4)
    for first_length in (0, 1, 25):
        others = [make_job(served, text, 3 + 5 * index, seed=9) for index, text in enumerate(TEXTS)]
        job, listener = make_job(served, "A first line", first_length, seed=4, keep_state=True)
        engine.submit(others[0][0], job, *(other for other, _ in others[1:]))
        state = listener.wait()[2].state
        read = job.input_ids if first_length else job.input_ids[:-1]
        first_ids, _, memory = plainly_generated(served, read, job.config, first_length)
        assert state.newest == [*job.input_ids, *first_ids][-1]
        next_job, listener = make_job(served, LONG[:60], 25, seed=5, state=state, score_prompt=True)
        engine.submit(next_job)
        _, tokens, _ = listener.wait()
        expected_ids, logprobs, _ = plainly_generated(
            served, [state.newest, *next_job.prompt_ids], next_job.config, 25, memory
        )
        assert ids_of(tokens) == expected_ids
        assert logprobs == logprobs_of(tokens)
        assert ids_of(next_job.prompt_tokens) == next_job.prompt_ids


def test_long_prompt_does_not_stall_others(engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is read in slices, a text that was running goes on, and a short prompt is read and finished."""
    _, served, engine = engines()
    long_job, long_listener = make_job(served, LONG * 20, 1)
    short_job, short_listener = make_job(served, "short", 5)
    numbers = [0]
    next_round = engine._round
    monkeypatch.setattr(
        engine, "_round", lambda admitted: (next_round(admitted), numbers.append(engine.counters.prompt_tokens))
    )
    engine.submit(long_job, short_job)
    short_listener.wait()
    assert long_listener.lists.empty()
    long_listener.wait()
    assert max(after - before for before, after in pairwise(numbers)) < 2 * engine_module.READING_SLICE


def test_owners_take_turns(engines, monkeypatch: pytest.MonkeyPatch) -> None:
    _, served, engine = engines(max_rows=1)
    many = [make_job(served, "a", 40, owner="many") for _ in range(8)]
    one, listener = make_job(served, "b", 4, owner="one")
    engine.submit(*(job for job, _ in many))
    engine.submit(one)
    listener.wait()
    assert many[-1][1].lists.empty()


@pytest.mark.parametrize("name", ["transformer-xl", "attends to empty memory", "n-grams", "lstm", "key offset"])
@pytest.mark.parametrize("max_rows", [1, 4])
def test_rows_are_shared_by_owner_and_by_request(engines, name: str, max_rows: int) -> None:
    """A sample whose row is taken back, at its first tokens or later, gives the same text and the same memory."""
    _, served, engine = engines(name, max_rows=max_rows)
    endless = [make_job(served, "endless", 10**6, owner="a", num_samples=max_rows, streams=True)[0] for _ in range(2)]
    engine.submit(*endless)
    deadline = time.monotonic() + 60
    while not endless[0].num_generated:
        assert time.monotonic() < deadline
    made = [
        make_job(served, TEXTS[index % 2], 150 + 11 * index, owner=owner, seed=index, keep_state=True)
        for index, owner in enumerate(["a", "b", "b", "b", "c"])
        if owner != "a" or max_rows > 1
    ]
    for job, _ in made:
        engine.submit(job)
    for job, listener in made:
        _, tokens, end = listener.wait()
        assert isinstance(end, Finished), end
        expected_ids, logprobs, _ = plainly_generated(served, job.input_ids, job.config, job.max_tokens)
        assert ids_of(tokens) == expected_ids
        assert logprobs == logprobs_of(tokens)
        assert end.state.num_read == len(job.input_ids) + job.max_tokens - 1
    assert len(engine._rows._holding) <= max_rows
    for job in endless:
        engine.cancel(job)


def test_prompts_are_read_in_turns_of_their_owners(engines) -> None:
    """A short one need not wait for a slice of each of many long ones."""
    _, served, engine = engines(max_rows=16)
    many = [make_job(served, LONG * 10, 1, owner="many") for _ in range(16)]
    one, listener = make_job(served, "b", 1, owner="one")
    engine.submit(*(job for job, _ in many))
    deadline = time.monotonic() + 60
    while not engine.counters.prompt_tokens:
        assert time.monotonic() < deadline
    engine.submit(one)
    listener.wait()
    assert all(other.lists.empty() for _, other in many)
    for job, _ in many:
        engine.cancel(job)


def test_tokens_with_alternatives_take_little_memory(engines) -> None:
    """Those of a job that does not stream, until it is finished: 8 bytes for each alternative."""
    _, served, _ = engines()
    job, _ = make_job(served, "a", 3000, num_logprobs=20)
    tracemalloc.start()
    try:
        for index in range(3000):
            top = tuple((index * 20 + rank, -0.5 - index - rank / 20) for rank in range(20))
            tokens = [(index, ScoredToken(index, -0.5 - index, top))]
            job.add(0, "a", tokens, "length" if index == 2999 else None)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 3000 * 400
    (delta,) = job.take_news()
    assert isinstance(delta, Delta)
    assert (delta.text, ids_of(list(delta.tokens))) == ("a" * 3000, list(range(3000)))
    assert list(delta.tokens)[7].top[3] == (143, pytest.approx(-7.65))


def test_answers_of_an_owner_have_room_until_they_are_sent(engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs of one request share it; of another owner, a request at least begins."""
    monkeypatch.setattr(engine_module, "MAX_VALUES", 10)
    _, served, engine = engines()
    first, second, other = AnswerSize("a", 15), AnswerSize("a", 6), AnswerSize("b", 10)
    made = [
        make_job(served, "x", 3, owner=size.owner, answer_size=size) for size in (first, first, second, other, other)
    ]
    engine.submit(*(job for job, _ in made[:3]))
    engine.submit(*(job for job, _ in made[3:]))
    for index in (0, 1, 3, 4):
        made[index][1].wait()
    assert engine.num_waiting == 1
    assert made[2][1].lists.empty()
    next_round, rounds = engine._round, list[int]()
    monkeypatch.setattr(engine, "_round", lambda admitted: (rounds.append(1), next_round(admitted)))
    time.sleep(0.1)
    assert len(rounds) < 50, "the engine does not wait for room, but goes round and round"
    engine.release(first)
    made[2][1].wait()
    engine.release(second)
    engine.release(other)
    assert not engine._sizes


def test_failure_of_a_step_ends_its_jobs_only(engines, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The listener gets a plain message, the log the traceback; later jobs run."""
    _, served, engine = engines()
    job, listener = make_job(served, "a", 50)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_step", lambda *_: 1 / 0)
        engine.submit(job)
        end = listener.wait()[2]
    assert isinstance(end, Failed)
    assert "ZeroDivision" not in end.message
    assert "ZeroDivisionError" in capsys.readouterr().err
    job, listener = make_job(served, "a", 50)
    engine.submit(job)
    assert isinstance(listener.wait()[2], Finished)


def test_step_that_fails_half_way_leaves_nothing_for_later_jobs(
    engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there is no more memory: after the first layers have written keys and values."""
    run = make_run(tmp_path / "run", evaluation={"memory_length": 40}, noise=0.3)
    _, served, engine = engines(run=run, max_rows=4)
    norm, calls = served.inference.model.final_norm, count()
    plain = norm.forward
    monkeypatch.setattr(norm, "forward", lambda x_BTD: plain(x_BTD) if next(calls) != 20 else 1 / 0)
    failing = [make_job(served, text, 60) for text in ("somebody's text", "another one")]
    engine.submit(*(job for job, _ in failing))
    assert {type(listener.wait()[2]) for _, listener in failing} == {Failed}
    made = {(text, number): make_job(served, text, number) for text, number in (("Once", 50), ("x", 9), ("yy", 20))}
    engine.submit(*(job for job, _ in made.values()))
    for (text, number), (_, listener) in made.items():
        assert listener.wait()[0] == generate(run, text, max_new_tokens=number, top_k=None).text


def test_job_that_fails_at_one_sample_ends_once(engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another sample of it finishes in the same step."""
    _, served, engine = engines()
    monkeypatch.setattr(engine_module, "_choose_tokens", lambda *_: ({1: 5}, None))
    job, listener = make_job(served, "a", 1, num_samples=2, num_logprobs=None)
    engine.submit(job)
    (failed,) = listener.lists.get(timeout=60)
    assert isinstance(failed, Failed)
    assert "damaged" in failed.message
    engine.stop()
    assert listener.lists.empty()
    assert engine.counters.failed == 1


def test_damaged_memory_of_one_does_not_reach_others(engines) -> None:
    run, served, engine = engines()
    kept, listener = make_job(served, "some text", 5, keep_state=True)
    engine.submit(kept)
    state = listener.wait()[2].state
    state = replace(state, tensors={name: torch.full_like(tensor, 3e38) for name, tensor in state.tensors.items()})
    bad, bad_listener = make_job(served, "x", 20, state=state)
    good, good_listener = make_job(served, "y", 40, seed=2)
    engine.submit(good, bad)
    assert isinstance(bad_listener.wait()[2], Failed)
    assert good_listener.wait()[0] == generate(run, "y", max_new_tokens=40, seed=2, top_k=None).text


@torch.inference_mode()
@pytest.mark.parametrize("name", ["transformer-xl", "attends to empty memory"])
def test_what_an_earlier_sequence_left_reaches_no_other(engines, name: str) -> None:
    """Not even infinite keys and values, in the rows of texts of all lengths that join, leave and move."""
    run, served, engine = engines(name, max_rows=4)
    texts = []
    for _ in range(2):
        made = [make_job(served, "a" + "b" * index, 3 + 40 * index, seed=index) for index in range(6)]
        engine.submit(*(job for job, _ in made))
        texts.append([listener.wait()[0] for _, listener in made])
        while not engine.is_idle:
            pass
        (batch,) = engine._batches.values()  # it stays for the next requests
        for tensor in (tensor for pair in batch._storage for tensor in pair):
            tensor.fill_(torch.inf)
        batch._num_zeros = [0] * 4
    expected = [
        generate(run, "a" + "b" * index, seed=index, max_new_tokens=3 + 40 * index, top_k=None).text
        for index in range(6)
    ]
    assert texts == [expected, expected]


@torch.inference_mode()
def test_stop_string_cuts_text_and_tokens(engines) -> None:
    run, served, engine = engines()
    free = generate(run, "abc", max_new_tokens=40, seed=1, top_k=None)
    stop = free.text[7:9]
    job, listener = make_job(served, "abc", 40, seed=1, stop=(stop,), streams=True)
    engine.submit(job)
    text, tokens, _ = listener.wait()
    assert text == free.text[: free.text.index(stop)]
    assert [token.token_id for token in tokens] == list(free.token_ids[: len(tokens)])
    assert run.tokenizer.decode([token.token_id for token in tokens]) == text


def test_a_memory_length_for_a_model_without_memory_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served = ServedModel("plain", make_run(tmp_path / "run", "vaswani"), ServerConfig(memory_length=64))
    assert served.max_memory_length == 0
    assert "plain has no memory, so the memory length of the server is not for it" in capsys.readouterr().err
