"""lm-evaluation-harness: its clients of our server, and its model `hf` on an exported folder, as ours on the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from clients.texts import SENTENCES, TOKENIZERS
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from refusals import do, txl
from small_runs import make_run

import transformer_xl.integrations.huggingface  # noqa: F401 (registers our models)
from transformer_xl import generate, score
from transformer_xl.integrations.lm_eval.model import TxlLM
from transformer_xl.integrations.lm_eval.wikitext import write_task

pytestmark = pytest.mark.client("lm-eval")
PAGE = " \n = {0} = \n \n {0} is a town in {1} . It has 1 @,@ 234 people ( in 2001 ) . \n \n No one knows it . \n"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """WikiText of a local file, multiple choice and generation."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "wiki.test.raw").write_text(PAGE.format("Aa", "Oz") + PAGE.format("Bb Cc", "Narnia") + " \n")
    assert write_task(folder / "wiki.test.raw", folder / "tasks") == 2
    rows = [{"question": text, "choices": [" low", " an offer", " x"], "label": 1} for text in SENTENCES]
    (folder / "tasks" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "tasks" / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}"}
    generation = {
        "output_type": "generate_until",
        "doc_to_target": "{{label}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 9, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    for name, settings in (("choice", choice), ("generation", generation)):
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **settings}))
    return TaskManager(include_path=str(folder / "tasks"), include_defaults=False)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def evaluated(tasks: TaskManager, names: list[str], model: Any, **arguments: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the answers to all requests of the tasks, and the metrics of each task."""
    results = simple_evaluate(model=model, tasks=names, task_manager=tasks, bootstrap_iters=0, **arguments)
    assert results is not None
    answers = [answer for name in names for sample in results["samples"][name] for answer in sample["filtered_resps"]]
    metrics = {
        (name, metric): value
        for name in names
        for metric, value in results["results"][name].items()
        if isinstance(value, float)
    }
    return answers, metrics


def assert_alike(theirs: tuple[list[Any], dict[str, Any]], ours: tuple[list[Any], dict[str, Any]]) -> None:
    """Check the answers (texts, and log-likelihoods with whether they are greedy) and the metrics."""
    assert len(theirs[0]) == len(ours[0]) > 0
    for one, other in zip(theirs[0], ours[0], strict=True):
        assert one == (other if isinstance(other, str) else pytest.approx(other, abs=1e-3))
    assert theirs[1] == pytest.approx(ours[1], rel=1e-5)


def test_local_completions(server, tasks: TaskManager) -> None:
    arguments = f"model=mine,base_url={server.base_url}/completions,tokenizer_backend=remote,max_length=100000"
    names = ["choice", "generation"]
    theirs = evaluated(tasks, names, "local-completions", model_args=arguments)
    assert_alike(theirs, evaluated(tasks, names, TxlLM(server.run)))


def test_local_completions_reads_the_first_token_of_a_document_twice(server) -> None:
    """Perplexity of documents: lm_eval puts that token before them itself, and the server before every prompt."""
    model = LocalCompletionsAPI(
        base_url=f"{server.base_url}/completions", model="mine", tokenizer_backend="remote", max_length=100_000
    )
    texts = [*SENTENCES, " ".join(SENTENCES) * 3]
    theirs = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (one,), 0) for one in texts])
    begin = server.run.tokenizer.decode([server.run.tokenizer.bos_token_id])
    ours = [-score(server.run, begin + text)[0].nats_K[1 : 1 + len(text)].sum() for text in texts]
    assert theirs == pytest.approx(ours, abs=1e-3)


def test_local_chat_completions(server, tasks: TaskManager) -> None:
    arguments = f"model=mine,base_url={server.base_url}/chat/completions,seed=3"
    sampling = {"apply_chat_template": True, "gen_kwargs": "do_sample=True,temperature=1.0"}
    answers, _ = evaluated(tasks, ["generation"], "local-chat-completions", model_args=arguments, **sampling)
    prompts = [f"user: {text}\nassistant: " for text in SENTENCES]
    own = {"max_new_tokens": 9, "seed": 3, "top_k": None, "stop": "\n"}
    assert answers == [generate(server.run, one, **own).text for one in prompts]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_model_hf_on_an_exported_folder(tmp_path: Path, tasks: TaskManager, kind: str) -> None:
    run = make_run(tmp_path / "run", tokenizer=TOKENIZERS[kind], noise=0.3)
    do(f"convert {run.path} {tmp_path / 'hub'} --to huggingface")
    names = ["wikitext_local", "choice"]
    theirs = evaluated(tasks, names, "hf", model_args=f"pretrained={tmp_path / 'hub'},max_length=64", device="cpu")
    assert_alike(theirs, evaluated(tasks, names, TxlLM(run, windows="harness", max_length=64)))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_model_hf_generates_until_a_named_token(tmp_path: Path, tasks: TaskManager, kind: str) -> None:
    """It asks for the text of the token that ends a text; without one it failed."""
    run = make_run(tmp_path / "run", tokenizer=TOKENIZERS[kind], noise=0.3)
    assert txl("convert", run.path, tmp_path / "hub", "--to", "huggingface", "--eos-token", NAMES[kind]).status == 0
    theirs = evaluated(
        tasks, ["generation"], "hf", model_args=f"pretrained={tmp_path / 'hub'},max_length=64", device="cpu"
    )
    own = {"max_new_tokens": 9, "greedy": True, "stop": "\n"}
    texts = [generate(run, text, add_bos_token=False, **own).text for text in SENTENCES]
    # a first word after a prompt has no space of its own in transformers
    assert [one.strip() for one in theirs[0]] == [one.strip() for one in texts]


NAMES = {"bytes": "\\n", "bpe": "\\n", "words": "<eos>"}
