"""The model `txl` of lm_eval: its three kinds of requests, its command line, and the task made from a local file.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model, model_registry
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from refusals import txl
from small_runs import make_run

from transformer_xl import (
    UserError,
    generate,
    load,
    save,
    score,
)
from transformer_xl.integrations.huggingface import from_run
from transformer_xl.integrations.lm_eval.model import TxlLM
from transformer_xl.integrations.lm_eval.wikitext import write_task
from transformer_xl.text.corpus_writer import write_corpus
from transformer_xl.text.documents import Document
from transformer_xl.text.tokenizers.word import WordTokenizer

ROOT = Path(__file__).parents[2]
PAGE = (
    " \n = {0} = \n \n {0} is a town in {1} . It has 1 @,@ 234 people ( in 2001 ) . \n"
    " \n = = History = = \n \n No one knows it . \n"
)
WIKITEXT = "".join(PAGE.format(*names) for names in (("Aa", "Oz"), ("Bb Cc", "Narnia"), ("Dd", "Ruritania"))) + " \n"
TEXTS = ["A first text, longer than memory and segment together.\n" * 3, "Another.", "", "\n", "Gr\u00fc\u00dfe!\n"]


@pytest.fixture(scope="module")
def run_path(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "mine", n_layers=3, noise=0.3).path


def ask(lm: TxlLM, kind: str, *arguments):
    """Return the answers of a model to requests of one kind."""
    return getattr(lm, kind)([Instance(kind, {}, each, index) for index, each in enumerate(arguments)])


@pytest.mark.parametrize("batch_size", ["auto", 2, "3"])
def test_loglikelihood_is_that_of_the_whole_text(run_path: Path, batch_size) -> None:
    """Also of a context that ends in a space, which goes to the continuation."""
    run, lm = load(run_path), TxlLM(run_path, batch_size=batch_size)
    pairs = [("A long context in which a", " word"), ("A long context in which a ", "x"), ("", "\nb"), ("a", " " * 20)]
    for (context, continuation), (logprob, is_greedy) in zip(pairs, ask(lm, "loglikelihood", *pairs), strict=True):
        (text,) = score(run, context + continuation)
        assert logprob == pytest.approx(-text.nats_K[len(context.rstrip()) :].sum(), abs=1e-5)
        assert not is_greedy


@pytest.mark.parametrize("settings", [{}, {"memory_length": 29, "segment_length": 5}, {"batch_size": 2}])
def test_rolling_equals_evaluation_with_memory_reset(run_path: Path, tmp_path: Path, settings) -> None:
    documents = [Document(str(index), [text.encode()]) for index, text in enumerate(TEXTS) if text]
    run = load(run_path)
    write_corpus(
        tmp_path / "c", {"train": documents, "test": documents}, name="c", source="a test", tokenizer=run.tokenizer
    )
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    expected = txl("evaluate", run_path, "--corpus", tmp_path / "c", "--reset-memory", "--json", *flags).object
    results = ask(TxlLM(run, **settings), "loglikelihood_rolling", *[(text,) for text in TEXTS])
    assert results[2] == 0.0
    tokens = expected["tokens"]
    assert -sum(results) / tokens == pytest.approx(expected["nats_per_token"], abs=1e-6)


def test_words_are_scored_as_they_are_written(tmp_path: Path) -> None:
    """No line end is added to a text, and a context of whitespace, which has no word, is an empty one."""
    tokenizer = WordTokenizer(("<eos>", "<unk>", "an", "b"), eos_token="<eos>", unk_token="<unk>")
    run = make_run(tmp_path / "run", tokenizer=tokenizer)
    first, *_ = losses = score(run, "an b\nb\n")[0].nats_K
    for windows in ("memory", "harness"):
        lm = TxlLM(run, windows=windows)
        assert ask(lm, "loglikelihood_rolling", ("an b\nb",)) == [pytest.approx(-sum(losses[:-1]), abs=1e-5)]
        assert ask(lm, "loglikelihood", ("  ", "an"))[0][0] == pytest.approx(-first, abs=1e-5)


@pytest.mark.filterwarnings("default")  # of transformers
@pytest.mark.parametrize("max_length", [5, 16, 100])
def test_windows_equal_the_model_hf(run_path: Path, max_length: int) -> None:
    """The harness's own model `hf`, with the same run as a model of transformers."""
    model, tokenizer = from_run(run_path)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=max_length, batch_size=3, device="cpu")
    ours = TxlLM(run_path, windows="harness", max_length=max_length)
    texts = [(text,) for text in TEXTS if text]
    expected = ask(theirs, "loglikelihood_rolling", *texts)
    assert ask(ours, "loglikelihood_rolling", *texts) == pytest.approx(expected, rel=1e-7, abs=1e-4)
    pairs = [("A long context in which a", " word"), ("", "\nb"), ("a", " " * 4)]
    for answer, expected in zip(ask(ours, "loglikelihood", *pairs), ask(theirs, "loglikelihood", *pairs), strict=True):
        assert answer == (pytest.approx(expected[0], abs=1e-4), expected[1])


@pytest.mark.filterwarnings("default")  # of transformers
def test_the_model_hf_generates(run_path: Path) -> None:
    """It decodes the end-of-sequence token, which the tokens of bytes lack: a newline is named here."""
    model, tokenizer = from_run(run_path)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(10)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2, device="cpu")
    contexts = ["A context", "Another, longer context of a text"]
    arguments = {"until": ["\n"], "max_gen_toks": 7, "do_sample": False}
    made = ask(theirs, "generate_until", *((context, arguments) for context in contexts))
    run = load(run_path)
    expected = [generate(run, one, max_new_tokens=7, greedy=True, add_bos_token=False).text for one in contexts]
    assert made == [text.split("\n")[0] for text in expected]


def test_generation_stops_at_strings_and_does_not_depend_on_the_batch(run_path: Path) -> None:
    run = load(run_path)
    contexts = [*TEXTS, "A context that is shared", "A context that is shared"]
    greedy = [(context, {"until": [], "max_gen_toks": 9}) for context in contexts]
    texts = ask(TxlLM(run, batch_size=3), "generate_until", *greedy)
    single = [generate(run, context or None, max_new_tokens=9, greedy=True).text for context in contexts]
    assert texts == single
    without = ask(TxlLM(run, memory_length=0), "generate_until", *greedy)
    assert without == [
        generate(run, one or None, max_new_tokens=9, greedy=True, memory_length=0).text for one in contexts
    ]
    first = next(text for text in texts if len(set(text)) > 1)
    until = {"until": [first[-1], ""], "max_tokens": 9, "do_sample": False}
    (stopped,) = ask(TxlLM(run), "generate_until", (contexts[texts.index(first)], until))
    assert stopped == first[: first.index(first[-1])]
    settings = {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    sampling = [(context, {**settings, "max_gen_toks": 9}) for context in contexts]
    sampled = [ask(TxlLM(run, batch_size=size), "generate_until", *sampling) for size in (2, 3, "auto")]
    assert sampled[0] == sampled[1] == sampled[2]
    assert sampled[0] != texts
    assert sampled[0][-1] != sampled[0][-2]  # a repeated request is another sample


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A folder of tasks: WikiText, multiple choice and generation."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "wiki.test.raw").write_text(WIKITEXT)
    assert write_task(folder / "wiki.test.raw", folder / "tasks") == 3
    rows = [{"question": f"What is {n}?", "choices": ["a", "bb", "c"], "label": n % 3, "text": "x"} for n in range(4)]
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
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5},
        "metric_list": [{"metric": "exact_match"}],
    }
    for name, settings in (("choice", choice), ("generation", generation)):
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **settings}))
    return folder / "tasks"


@pytest.fixture
def offline(monkeypatch, tmp_path) -> None:
    """Keep the data sets of lm_eval's tasks in a folder of the test, and download nothing."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("default")  # of lm_eval and its dependencies
def test_tasks_run(run_path: Path, tasks: Path) -> None:
    """WikiText's losses are divided by the words and bytes of the file; the model reads the detokenized text."""
    results = simple_evaluate(
        model=TxlLM(run_path, batch_size="auto"),
        tasks=["wikitext_local", "choice", "generation"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    values = results["results"]
    pages = [json.loads(line)["page"] for line in (tasks / "test.jsonl").read_text().splitlines()]
    assert len(pages) == 3
    assert "".join([" \n", *pages]) == WIKITEXT
    read = pages[0].replace(" @,@ ", ",").replace(" . ", ". ")  # some of the rules
    assert "1,234" in read
    samples = results["samples"]["wikitext_local"]
    texts = [sample["arguments"][0][0] for sample in samples]
    assert "1,234 people (in 2001)." in texts[0]
    nats = sum(text.sums.nats for text in score(load(run_path), texts))
    num_bytes = sum(len(page.encode()) for page in pages)
    assert values["wikitext_local"]["bits_per_byte,none"] == pytest.approx(nats / math.log(2) / num_bytes, abs=1e-6)
    assert 0 <= values["choice"]["acc,none"] <= 1
    assert values["generation"]["exact_match,none"] == 0


def test_registered_under_its_name() -> None:
    """Also where a later version of lm_eval has the entry point, whose placeholder the class replaces."""
    assert get_model("txl") is TxlLM
    (line,) = re.findall(r"lm_eval\.models\"\]\ntxl = \"(.+)\"", (ROOT / "pyproject.toml").read_text())
    model_registry.register("txl-plugin", target=line)
    assert get_model("txl-plugin") is TxlLM


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"no run was given; give its folder: --model_args run=DIR"),
        ({"run": "none"}, r"none: no such folder; expected a folder made by 'txl train --run DIR' or 'txl convert'"),
        ({"run": "x", "memroy_length": 3}, r"no model argument 'memroy_length'.*memory_length.*are run, checkpoint"),
        ({"run": "x", "pretrained": "gpt2"}, r"no model argument 'pretrained'"),
        ({"run": "x", "memory_length": -1}, r"model argument: memory_length: .*greater than or equal to 0"),
        ({"run": "x", "windows": "rolling"}, r"no windows 'rolling'; give memory or harness"),
        ({"run": "x", "max_length": 0}, r"max_length 0: give a whole number above 0"),
        ({"run": "x", "batch_size": "many"}, r"model argument: batch_size: .* .given: 'many'"),
        ({"run": "x", "checkpoint": "worst"}, r"no checkpoint|x: no such folder"),
    ],
)
def test_wrong_model_arguments_are_refused(arguments, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TxlLM(**arguments)


def test_wrong_requests_are_refused(run_path: Path) -> None:
    lm = TxlLM(run_path)
    with pytest.raises(UserError, match=r"no generation setting 'num_beams'.*until, max_gen_toks"):
        ask(lm, "generate_until", ("a", {"until": ["b"], "num_beams": 3}))
    with pytest.raises(UserError, match="the continuation '' of 'a' has no token of its own"):
        ask(lm, "loglikelihood", ("a", ""))
    with pytest.raises(UserError, match="no chat template; leave out --apply_chat_template"):
        lm.apply_chat_template([])


def python(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, with this package."""
    everything = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_DATASETS_OFFLINE": "1", **environment}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=everything)


def test_without_lm_eval_one_line_says_what_to_install(tmp_path: Path) -> None:
    hidden = "import sys; from importlib import util; find = util.find_spec; "
    hidden += "util.find_spec = lambda name, *rest: None if name == 'lm_eval' else find(name, *rest); "
    hidden += "import runpy; runpy.run_module('transformer_xl.integrations.lm_eval', run_name='__main__')"
    result = python("-c", hidden, folder=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"lm-eval: error: lm_eval is not installed; install it: pip install '.+'\n", result.stderr)


DAMAGED = gzip.compress(b" = Title = \n" + bytes(range(256)) * 9)
DAMAGED = DAMAGED[:30] + b"\xff\xff" + DAMAGED[32:]


@pytest.mark.parametrize("content", [b"no page\n", b"\xff\xfe", b"\x1f\x8b\x00", DAMAGED])
def test_files_that_are_not_wikitext_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UserError, match="give a file of WikiText"):
        write_task(tmp_path / "a", tmp_path / "tasks")
    assert not (tmp_path / "tasks").exists()


@pytest.mark.usefixtures("offline")
@pytest.mark.filterwarnings("default")  # of lm_eval and its dependencies
def test_commands_of_the_documentation_run(run_path: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Every command of the page, in order, with a small run and a file of three pages in place of the reader's.

    The first is a process of its own. The others run in this one, and without the index of lm_eval's own tasks, which
    takes seconds to read.
    """
    page = (ROOT / "docs" / "lm-eval.md").read_text(encoding="utf-8")
    save(load(run_path), tmp_path / "runs" / "mine")
    (tmp_path / "wiki.test.raw").write_text(WIKITEXT)
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.replace("\\\n", "").splitlines()]
    assert commands.pop(0) == ["pip", "install", ".[lm-eval]"]
    result = python(*commands.pop(0)[1:], folder=tmp_path)
    assert result.returncode == 0, result.stderr
    monkeypatch.chdir(tmp_path)
    initialize = TaskManager.__init__
    own_tasks = {"include_defaults": False}
    monkeypatch.setattr(TaskManager, "__init__", lambda self, **given: initialize(self, **given | own_tasks))
    assert len(commands) == 3
    for words in commands:
        assert words[:2] == ["python", "-m"]
        monkeypatch.setattr(sys, "argv", words[2:])
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_module(words[2], run_name="__main__")
        assert "wikitext_local" in capsys.readouterr().out
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "block.py").write_text(block)
    runpy.run_path(str(tmp_path / "block.py"))
    assert float(capsys.readouterr().out.splitlines()[-1]) > 0
