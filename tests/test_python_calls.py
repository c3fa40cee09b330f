"""The public functions as a notebook calls them: short calls work, and wrong arguments raise one clear line."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import MODEL, TRAIN, letters
from typing_extensions import override

from transformer_xl import (
    Callback,
    ContextLimits,
    Corpus,
    EvaluationConfig,
    GenerationConfig,
    MinimalPair,
    Run,
    TrainConfig,
    UserError,
    beam_search,
    build_model,
    convert,
    corpus_word_counts,
    embed,
    evaluate,
    fit_reading_times,
    generate,
    load,
    minimal_pairs,
    prepare,
    read_reading_times,
    resume,
    save,
    score,
    stream,
    surprisal,
    train,
)
from transformer_xl.inference import prepare_inference


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare(documents=[letters(997, seed=1)], out=tmp_path_factory.mktemp("corpora") / "letters")


@pytest.fixture(scope="module")
def run(corpus: Corpus) -> Run:
    settings: dict[str, Any] = {"model": MODEL, "train": TRAIN, "progress": False, "device": "cpu"}
    return train(None, corpus, corpus.path.parent / "run", **settings).run


def test_evaluate_takes_the_name_of_a_split_and_settings_by_name(run: Run, corpus: Corpus) -> None:
    config = EvaluationConfig(memory_length=5)
    expected = evaluate(run, corpus.split("test"), config)
    assert evaluate(run, memory_length=5).nats == expected.nats  # the test split is the default
    assert evaluate(run, "test", EvaluationConfig(memory_length=3), memory_length=5).nats == expected.nats
    valid = evaluate(run, corpus.split("valid"), config, max_tokens=7)
    assert evaluate(run, "valid", config, max_tokens=7).nats == valid.nats
    dynamic = EvaluationConfig(method="dynamic")
    by_name = evaluate(run, method="dynamic", dynamic={"gradient_stats_tokens": 100})
    with pytest.raises(UserError, match="training text"):  # which only a split's name can find
        evaluate(run, corpus.split("test"), dynamic)
    assert by_name.plan.dynamic.gradient_stats_tokens == 100


def test_score_takes_settings_by_name(run: Run) -> None:
    (by_name,), (by_object,) = score(run, "abc", memory_length=1), score(run, "abc", EvaluationConfig(memory_length=1))
    assert by_name.nats_K.tolist() == by_object.nats_K.tolist()


@pytest.mark.parametrize("convert_ids", [np.array, torch.tensor, list, tuple, lambda ids: np.array(ids, np.uint8)])
def test_token_ids_are_prompts(run: Run, convert_ids: Any) -> None:
    prompt = convert_ids(list(b"the"))
    expected = generate(run, "the", max_new_tokens=5)
    assert generate(run, prompt, max_new_tokens=5) == expected
    assert generate(run, [prompt, "the"], max_new_tokens=5)[0] == expected
    assert "".join(stream(run, prompt, max_new_tokens=5)) == expected.text
    assert beam_search(run, prompt, max_new_tokens=5, num_beams=2) == beam_search(
        run, "the", max_new_tokens=5, num_beams=2
    )


def test_loaded_run_resumes(run: Run) -> None:
    assert resume(run, progress=False).step == TRAIN["max_steps"]


def test_torch_devices_are_devices(run: Run) -> None:
    assert run.path is not None
    assert load(run.path, device=torch.device("cpu")).config == run.config


WRONG_CALLS = {  # what the message must say: a call
    "run is of type TransformerXL; give a loaded run": lambda run, corpus, path: generate(run.model, "a"),
    "run is of type float (1.5); give the folder of a run": lambda run, corpus, path: resume(1.5),
    "this run is in no folder": lambda run, corpus, path: resume(Run(run.model, run.tokenizer, run.config)),
    "corpus is of type NoneType; give a corpus or its folder": lambda run, corpus, path: train("tiny", None, path),
    "corpus is of type int (5); give the folder of a corpus": lambda run, corpus, path: Corpus.open(5),
    "path is of type NoneType": lambda run, corpus, path: save(run, None),
    "source is of type int (5); give the path of a checkpoint": lambda run, corpus, path: convert(5, path),
    "split is of type Corpus; give a name": lambda run, corpus, path: evaluate(run, corpus),
    "no split 'tset' (did you mean 'test'?)": lambda run, corpus, path: evaluate(run, "tset"),
    "max_tokens is of type str ('5'); give an integer": lambda run, corpus, path: evaluate(run, max_tokens="5"),
    "config is of type dict; give EvaluationConfig(...), or its settings": lambda run, corpus, path: evaluate(
        run, "test", {"memory_length": 3}
    ),
    "no argument 'memory_lenght' (did you mean 'memory_length'?)": lambda run, corpus, path: evaluate(
        run, memory_lenght=3
    ),
    "no argument 'reset' (did you mean 'reset_memory'?)": lambda run, corpus, path: score(run, "a", reset=True),
    "no argument 'max_length' (did you mean 'max_new_tokens'?)": lambda run, corpus, path: generate(
        run, "a", max_length=3
    ),
    "no argument 'memry' (did you mean 'memory'?)": lambda run, corpus, path: stream(run, "a", memry=None),
    "train has no argument 'lr' (did you mean train={'learning_rate': 5}?)": lambda run, corpus, path: train(
        "tiny", corpus, path, lr=5
    ),
    "unknown setting 'steps' (did you mean 'max_steps'?)": lambda run, corpus, path: train(
        "tiny", corpus, path, train={"steps": 5}
    ),
    "prepare has no argument 'vocab' (did you mean 'vocab_size'?)": lambda run, corpus, path: prepare(
        documents=["a"], out=path, vocab=3
    ),
    "prompts is of type int (7); give text, token ids": lambda run, corpus, path: generate(run, 7),
    "the prompt is of type float; give text, token ids": lambda run, corpus, path: generate(run, [1.5]),
    "the prompt is of type int; give text": lambda run, corpus, path: beam_search(run, 7),
    "token id 256 is not in this byte vocabulary": lambda run, corpus, path: generate(run, [1, 256]),
    "memory is of type int (3); give a memory": lambda run, corpus, path: generate(run, "a", memory=3),
    "the text is of type int (5); give str or bytes": lambda run, corpus, path: score(run, [5]),
    "the text is of type int (6); give str or bytes": lambda run, corpus, path: prepare(documents=["a", 6], out=path),
    "seed: Input should be a valid integer (given: True": lambda run, corpus, path: prepare(
        documents=["a"], out=path, seed=True
    ),
    "documents is of type int (5); give texts": lambda run, corpus, path: prepare(documents=5, out=path),
    "config is of type TrainConfig; give a recipe": lambda run, corpus, path: train(TrainConfig(), corpus, path),
    "a callback is of type type; give objects": lambda run, corpus, path: train(
        "tiny", corpus, path, callbacks=[Callback]
    ),
    "config is of type dict; give the settings of a model": lambda run, corpus, path: build_model({"n_layers": 2}),
    "memory is of type int (3); give the memory that": lambda run, corpus, path: run.model([1], 3),
    "the text is of type bytearray; give str": lambda run, corpus, path: run.tokenizer.encode(bytearray(b"a")),
    "token ids are of type float64; give integers": lambda run, corpus, path: run.tokenizer.decode([97.5]),
    "memory_length is of type str ('3'); give an integer": lambda run, corpus, path: ContextLimits("3"),
    "include: Input should be a valid tuple (given: 5)": lambda run, corpus, path: prepare("a", path, include=5),
    "top_k -3: must be 1 or more": lambda run, corpus, path: GenerationConfig(top_k=-3),
    "progress is of type bool (True); give a function": lambda run, corpus, path: score(run, "a", progress=True),
    "progress is of type int (1); give a function": lambda run, corpus, path: evaluate(run, progress=1),
    "progress is of type bool (False); give a function": lambda run, corpus, path: embed(run, "a", progress=False),
    "progress is of type int (2); give a function": lambda run, corpus, path: surprisal(run, "a", progress=2),
    "progress is of type int (3); give a function": lambda run, corpus, path: minimal_pairs(run, [PAIR], progress=3),
    "progress is of type int; give a function": lambda run, corpus, path: prepare(
        documents=["a"], out=path, progress=4
    ),
    "threads is of type str ('2'); give an integer": lambda run, corpus, path: resume(run, threads="2"),
    "no dtype torch.bfloat16; give auto, float32 or bfloat16": lambda run, corpus, path: run.inference(torch.bfloat16),
    "no dtype None; give auto, float32 or bfloat16": lambda run, corpus, path: run.inference(None),
    "no dtype 'fp32'; give auto": lambda run, corpus, path: prepare_inference(run.model, "fp32"),
    "pairs is of type int (5); give a list": lambda run, corpus, path: minimal_pairs(run, 5),
    "pair 2 is of type tuple; give MinimalPair": lambda run, corpus, path: minimal_pairs(run, [PAIR, ("a", "b")]),
    "pair 1 has an empty sentence": lambda run, corpus, path: minimal_pairs(run, [MinimalPair("", "b")]),
    "context is of type int (5); give a text": lambda run, corpus, path: minimal_pairs(run, [PAIR], context=5),
    "content is of type str (''); give the content": lambda run, corpus, path: read_reading_times("a", ""),
    "layout is of type dict; give TableLayout": lambda run, corpus, path: read_reading_times("a", b"", {}),
    "texts is of type int (5); give a list": lambda run, corpus, path: read_reading_times("a", b"", texts=5),
    "corpus is of type str ('a'); give run.open_corpus()": lambda run, corpus, path: corpus_word_counts("a"),
    "times is of type int (5); give read_reading_times": lambda run, corpus, path: fit_reading_times(run, 5, {}),
}
PAIR = MinimalPair("a", "b")


@pytest.mark.parametrize("message", WRONG_CALLS)
def test_wrong_arguments_raise_one_clear_line(run: Run, corpus: Corpus, tmp_path: Path, message: str) -> None:
    with pytest.raises(UserError, match=rf"^[^\n]*{re.escape(message)}[^\n]*$"):
        WRONG_CALLS[message](run, corpus, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_numbers_of_numpy_are_taken(tmp_path: Path) -> None:
    corpus = prepare(documents=["b a a b"] * 30, out=tmp_path / "corpus", num_workers=np.int64(1))
    train_ = {**TRAIN, "max_steps": np.int64(2)}
    run = train(None, corpus, tmp_path / "run", model=MODEL, train=train_, threads=np.int64(1), progress=False).run
    assert run.path is not None
    assert resume(run, from_step=np.int64(2), progress=False).step == 2
    assert evaluate(run, max_tokens=np.int64(7)).nats == evaluate(run, max_tokens=7).nats
    with pytest.raises(UserError, match="threads is of type bool"):
        resume(run, threads=np.bool_(True))


@pytest.fixture(scope="module")
def shown(run: Run, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that a notebook prints, each with much in it: long texts, a large vocabulary and a large batch."""
    words = [f"word{number}" for number in range(5000)]
    vocabulary = prepare(documents=[" ".join(words)], out=tmp_path_factory.mktemp("w") / "words", tokenizer="word")
    long = "<b>a & b</b>\n\u20ac " * 10_000
    training, inference = run.model.initial_memory(257), run.inference().initial_memory(257)
    (completion,) = generate(run, [long], max_new_tokens=3, max_prompt_tokens=5, logprobs=True)
    return {
        "run": run,
        "corpus": corpus,
        "words": vocabulary.tokenizer,
        "split": corpus.split("train"),
        "result": resume(run, progress=False),
        "evaluation": evaluate(run, max_tokens=31),
        "scores": score(run, [long[:2000]] * 12),
        "line": next(score(run, "a\nb")[0].lines()),
        "completion": completion,
        "hidden states": training,
        "keys and values": inference,
    }


def test_reprs_are_short(shown: dict[str, Any]) -> None:
    for value in shown.values():
        for item in value if isinstance(value, list) else [value]:
            text = repr(item)
            assert "\n" not in text
            assert len(text) <= 600, text
    assert "hidden=float32[257, 11, 14]" in repr(shown["hidden states"])
    run = (
        r"Run\(path='.*/run', model='transformer-xl, [0-9,]+ parameters', weights='best, step [0-9]+ \(validation loss"
    )
    assert re.match(run, repr(shown["run"]))
    assert repr(shown["words"]) == f"WordTokenizer(vocab_size={shown['words'].vocab_size})"
    assert re.search("train='[0-9,]+ tokens of [0-9,]+ bytes, documents: [0-9]+'", repr(shown["corpus"]))


class TagCounter(HTMLParser):
    """Counts the tags that are open, and collects the text and the tooltips of the rest."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.tooltips = "", list[str | None]()
        self.feed(html)
        self.close()

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tooltips += [value for name, value in attrs if name == "title"]

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    @override
    def handle_data(self, data: str) -> None:
        self.text += data


def test_notebooks_show_bounded_and_escaped_html(shown: dict[str, Any]) -> None:
    for value in shown.values():
        html = value._repr_html_()
        page = TagCounter(html)
        assert page.open == []
        assert len(html) < 1_000_000
        assert "<script" not in html
    text = TagCounter(shown["scores"][:1][0]._repr_html_())
    assert "<b>a & b</b>\u21b5\n\u20ac <b>" in text.text
    assert "more tokens" in text.text
    assert len(text.tooltips) <= 1000
    # the tooltip has the loss of the tokens in nats
    (line,) = score(shown["run"], "\u20ac")
    assert TagCounter(line._repr_html_()).tooltips == [
        f"3 tokens, {line.sums.nats:.2f} nats, probability {math.exp(-line.sums.nats):.3g}"
    ]
    assert "and 7 more texts" in shown["scores"]._repr_html_()
    assert len(shown["scores"]._repr_html_()) < 150_000
    assert "bits_per_byte" in shown["evaluation"]._repr_html_()
