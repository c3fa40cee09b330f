"""The command lines and Python blocks of the documents, run in their order, with small models and few steps.

Run are lines that begin with `txl`, and Python blocks, those of one document in one namespace. Numbers of SMALL are
lowered in them and in the recipes; what a document takes for granted is in GIVEN. What exists already is replaced, as
lines are often alternatives. Left out are blocks under `<!-- not run: REASON -->`, data sets that would be downloaded,
and the commands that do not end.
"""

from __future__ import annotations

import gzip
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import labelled
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from refusals import txl

from transformer_xl import UserError, load
from transformer_xl.config import run_config
from transformer_xl.text.sources.named_datasets import DOWNLOADABLE
from transformer_xl.training import finetune

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "apps" / "serve"))
# the log is of its time; tests/integrations/test_export.py and test_lm_eval.py run two pages
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [path for path in DOCUMENTS if path.name not in ("log.md", "export.md", "lm-eval.md")]
# the largest value of each setting
SMALL = {
    "reuse_length": 8, "perm_size": 8, "num_predict": 4,
    "n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "d_ff": 16, "d_embed": 16, "max_ngram": 3,
    "ngram_buckets": 64, "d_ngram": 4, "segment_length": 16, "memory_length": 32, "batch_size": 2, "max_steps": 6,
    "warmup_steps": 2, "eval_interval": 3, "checkpoint_interval": 3, "eval_tokens": 100, "max_tokens": 300,
    "max_new_tokens": 20, "max_prompt_tokens": 64, "min_new_tokens": 4, "max_distance": 16, "average_start_step": 4,
    "num_positions": 20, "max_context": 40, "context_step": 20, "page_tokens": 20, "finetune_from_step": 4,
    "tasks": 4, "workers": 1,
}  # fmt: skip
# what `txl analyze context` is given where a line does not say it
FEWER = {"--max-context": 40, "--context-step": 20, "--num-positions": 20}
NOT_RUN = re.compile(r"<!-- not run: \S.* -->\n\Z")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
EXISTS = re.compile(r"(?:error: |^)(\S+) (?:exists already|holds a run already)", flags=re.MULTILINE)
TEXT = "Once upon a time a judge heard the workers, and the union received an offer. It was too low.\n\nThen:\n"
CSV = "story,condition,sentence,text\na,x,1,the union received an offer\na,x,2,the union found the offer was too low\n"
# the paths that a document takes for granted; their names say what they are (see `give`)
GIVEN = {
    "README.md": "pages.jsonl",
    "attention.md": "corpora/mine runs/mine enwik-run page.txt",
    "babylm.md": "train_10M/ dev/ test/",
    "baselines.md": "corpora/mine corpora/enwik8",
    "classification.md": "runs/mine topics.jsonl new.jsonl report.txt",
    "context.md": "corpora/mine runs/xl runs/shaw runs/lstm runs/mine runs/al-rfou",
    "data.md": "book.txt data/a.txt data/b.txt data/c.txt data/train/a.txt v.txt.gz t.txt.gz songs.npy more.txt runs/a "
    "project/a.md project/b.md project/c.md old.txt proteins.txt variants.txt novels/ pages.jsonl shards/a.jsonl "
    "held-out.csv dump/",
    "evaluation.md": "corpora/mine runs/mine runs/enwik8-12l page.txt other.txt",
    "finetuning.md": "runs/mine letters/ runs/words new-words runs/mails corpora/enwik8-4mb corpora/shakespeare ptb "
    "wt.train wt.valid wt.test OLD-MODEL train.txt valid.txt test.txt",
    "generation.md": "runs/demo/run page.txt",
    "migrating.md": "runs/mine=word runs/xlnet downloads/transfo-xl-wt103 book.txt corpora/enwik8",
    "minimal-pairs.md": "runs/ptb",
    "music.md": "melodies/ start.mid",
    "penn-treebank.md": "corpora/ptb",
    "quickstart.md": "my-texts/",
    "reading-times.md": "corpora/ptb times.csv",
    "runs.md": "corpora/mine runs/rate-0.016 runs/rate-0.004 runs/rate-0.001 page.txt",
    "scaling.md": "corpora/mine runs/mine crawl/a.jsonl crawl/b.jsonl",
    "serving-api.md": "runs/mine",
    "sessions.md": "runs/mine",
    "speed.md": "corpora/mine benchmarks/results/",
    "streams.md": "runs/service logs/march.log logs/april-1.log",
    "surprisal.md": "corpora/ptb garden-paths.csv",
    "training.md": "my-recipe.yaml corpora/mine train.txt valid.txt test.txt",
    "transformers.md": "runs/mine hub/transfo-xl",
    "xlnet.md": "corpora/mine page.txt topics.jsonl",
}
# files of programs that are not here; tests/integrations/checkpoints reads what they write
ELSEWHERE = ("LM-TFM", "pretrained_xl", "downloads/xlnet")


def smaller(text: str) -> str:
    """Return the text with lower numbers: `max_steps: 400`, `--train.max-steps 400` and `max_steps=400` become 6."""

    def lower(match: re.Match[str]) -> str:
        return match[1] + str(min(int(match[3].replace("_", "")), SMALL[match[2].replace("-", "_")]))

    text = re.sub(r"--from \d+", "--from 3", re.sub(r"--heads \S+", "--heads 0:1,1:0", text))
    names = "|".join(name.replace("_", "[-_]") for name in SMALL)
    return re.sub(rf"(\b({names})[\"']?(?:: | ?= ?| ))([\d_]+)\b(?!\.)", lower, text)


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Lower the numbers of all recipes and of fine-tuning, and draw no pictures, which the tests of each look at."""
    whole = run_config.recipe_text
    patch.setattr(run_config, "recipe_text", lambda name: smaller(whole(name)))
    patch.setattr(Figure, "savefig", lambda self, path, **_: Path(path).touch())
    patch.setitem(finetune._SCHEDULE, "max_steps", 6)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the language and the text of each block that is to be run."""
    for match in BLOCK.finditer(text):
        if not NOT_RUN.search(text[: match.start()]):
            yield match[1], match[2]


def commands(block: str) -> Iterator[list[str]]:
    """Yield the words of the command lines that this package runs, and that end."""
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        downloads = words[:2] == ["txl", "prepare"] and DOWNLOADABLE.keys() & set(words)
        is_ours = words[:1] == ["txl"]
        endless = words[1:2] in (["serve"], ["watch"]) or "none" in words
        if is_ours and not downloads and not endless and not any(name in line for name in ELSEWHERE):
            yield words


def run_command(words: list[str]) -> None:
    words, file = (words[:-2], words[-1]) if words[-2:-1] == [">"] else (words, None)
    fewer = FEWER if words[1:3] == ["analyze", "context"] else {}
    result = txl(*words[1:], *(f"{flag}={value}" for flag, value in fewer.items() if flag not in words))
    if result.status:
        raise UserError(f"{shlex.join(words)}\n{result.err}")
    if file:
        Path(file).write_text(smaller(result.out))


def run_block(language: str, block: str, namespace: dict[str, Any]) -> None:
    steps = [block] if language == "python" else list(commands(block))
    for step in steps:
        for _ in range(3):
            try:
                if isinstance(step, str):
                    exec(compile(step, step, "exec"), namespace)
                else:
                    run_command(step)
                break
            except UserError as error:
                found = EXISTS.search(str(error))
                if not found:
                    raise
                path = Path(found[1])
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpora and runs of bytes and of words, and a checkpoint of old transformers."""
    folder = tmp_path_factory.mktemp("documents")
    (folder / "text.txt").write_text(TEXT * 60)
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        patch.chdir(folder)
        # two layers, as some lines name the second one
        for kind, recipe in {"byte": "fast-small", "word": "wikitext-103-standard --model.cutoffs 9"}.items():
            run_command(shlex.split(f"txl prepare text.txt --tokenizer {kind} --out corpus-{kind}"))
            run_command(shlex.split(f"txl train {recipe} --corpus corpus-{kind} --run run-{kind}"))
    return folder


def give(name: str, world: Path) -> None:
    """Make a path that a document takes for granted in the current folder."""
    name, _, kind = name.partition("=")
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = kind or ("word" if path.name in ("ptb", "words", "new-words", "hub") else "byte")
    if name.startswith("corpora/") or name in ("ptb", "new-words"):
        shutil.copytree(world / f"corpus-{kind}", path)
    elif name == "runs/mails":
        line = f"finetune {world / 'run-byte'} --corpus {world / 'corpus-byte'} --run runs/mails --lora-rank 8"
        assert txl(*line.split()).status == 0
    elif name.startswith("runs/") or name == "enwik-run":
        shutil.copytree(world / f"run-{kind}", path)
    elif name in ("OLD-MODEL", "downloads/transfo-xl-wt103", "hub/transfo-xl"):
        assert txl("convert", world / "run-word", path, "--to", "huggingface-4.37").status == 0
    elif name == "melodies/":
        runpy.run_path(str(ROOT / "examples" / "melodies.py"))["main"](path)
    elif name.endswith("/"):
        path.mkdir()
        (path / "a.txt").write_text(TEXT * 40)
    elif path.suffix == ".yaml":
        path.write_text(smaller(run_config.recipe_text("small")))
    elif name == "times.csv":
        words = [(number, word) for number, word in enumerate((TEXT * 3).split(), start=1)]
        rows = [f'r{reader},t,{number},"{word}",{300 + number % 7}' for reader in range(3) for number, word in words]
        path.write_text("\n".join(["reader,item,word_number,word,time", *rows]))
    elif path.suffix == ".csv":
        path.write_text(CSV)
    elif path.suffix == ".jsonl":
        labelled.write_lines(path, *labelled.documents(40))
    elif path.suffix == ".npy":
        np.save(path, np.arange(3000) * 7 % 388)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(TEXT.encode() * 20))
    else:
        path.write_text(TEXT * 40)


def names_for(document: str) -> dict[str, Any]:
    """Return what the Python blocks of a document use without saying where it comes from."""
    if document == "README.md":
        ids_BT = torch.randint(0, 256, (2, 5))
        return {"tokens": ids_BT, "targets": ids_BT}
    if document == "reinforcement-learning.md":
        from recall_env import RecallEnv

        return {"env": RecallEnv()}
    return {"text": TEXT, "__name__": "__main__"}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # by transformers' Trainer
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_blocks_run(document: Path, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in GIVEN.get(document.name, "").split():
        give(name, world)
    namespace, text = names_for(document.name), document.read_text(encoding="utf-8")
    with ExitStack() as stack:
        if document.name in ("serving-api.md", "sessions.md"):
            from openai import OpenAI
            from servers import running

            server, _ = stack.enter_context(running({"mine": load("runs/mine")}, max_memory_length=512))
            address = str(server.base_url).rstrip("/")
            text = text.replace("http://127.0.0.1:8000", address)
            namespace["client"] = OpenAI(base_url=f"{address}/v1", api_key="none")
            stack.callback(lambda: namespace["client"].close())
        for language, block in blocks(text):
            run_block(language, smaller(block), namespace)
