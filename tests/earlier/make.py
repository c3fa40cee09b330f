"""Make files of this version in tests/earlier/VERSION, which later versions must open (tests/test_earlier.py):

    python tests/earlier/make.py

The files are of tiny models: a corpus of bytes and one of words, a trained run, a run that was stopped and can be
resumed, an adapter, the state of a stream, a session of the server, and a folder for transformers. expected.json has
the version, the commit and what PARTS computes from the files. Make them before a release or a change of a format, and
never again with another commit: a version's files stay as that version wrote them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import transformer_xl
from transformer_xl import (
    Callback,
    Corpus,
    SurprisalStream,
    convert,
    evaluate,
    finetune,
    generate,
    load,
    load_adapter,
    prepare,
    resume,
    score,
    train,
)

# the runs are made here, since they record the absolute paths of their corpus and base; nothing is there later
WORKPLACE = Path("/var/tmp/earlier")
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "progress": False}
MODEL = {"n_layers": 2, "d_model": 24, "n_heads": 2, "d_head": 12, "d_ff": 40, "dropout": 0.0}
TRAIN: dict[str, Any] = {
    "segment_length": 16, "memory_length": 24, "batch_size": 4, "max_steps": 60, "learning_rate": 0.01,
    "warmup_steps": 4, "dtype": "float32", "log_interval": 1, "eval_interval": 30, "checkpoint_interval": 100,
}  # fmt: skip
# every part of the format: tables of n-grams and Muon's state; and cutoffs, and an average of the weights
N_GRAMS = {"max_ngram": 3, "ngram_buckets": 211, "d_ngram": 6, "qk_norm": True, "norm_first": True}
CUTOFFS = {"cutoffs": (5, 12), "div_val": 2, "tie_projections": "all_but_first"}
STOP_STEP = 8
LINES = ("the cat sat on the mat", "a dog ran to the red house", "one of them saw the old moon", "we had tea")
PROMPT = f"{LINES[0]}\n{LINES[1]}\n{LINES[2][:9]}"


class StopAt(Callback):
    """Stops training after STOP_STEP."""

    def on_step(self, trainer: Any, num_tokens: int) -> None:
        """Stop where the step is reached."""
        if trainer.state.step == STOP_STEP:
            trainer.stop()


def text(num_lines: int) -> str:
    """Return lines in an order that repeats late."""
    return "".join(f"{LINES[number * number % 7 % 4]}\n" for number in range(num_lines))


def nats(values: Any) -> list[float]:
    """Return the losses of tokens in nats as plain numbers."""
    return [float(value) for value in values]


def greedy(run: Any) -> str:
    """Return the most likely continuation of PROMPT."""
    return generate(run, PROMPT, greedy=True, max_new_tokens=30 if run.tokenizer.kind == "byte" else 8).text


@contextmanager
def server(run: Path) -> Iterator[Callable[..., bytes]]:
    """Start a server of a run, and yield a function that sends a request: path, and a JSON body or bytes."""
    words = [sys.executable, "-m", "transformer_xl", "serve", str(run), "--port=0", "--threads=1"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)

    def ask(path: str, body: Any = None) -> bytes:
        kind = "octet-stream" if isinstance(body, bytes) else "json"
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/v1/{path}", data, {"Content-Type": f"application/{kind}"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read()

    try:
        url = next(match[1] for line in process.stderr or () if (match := re.search(r"on (http://\S+)", line)))
        yield ask
    finally:
        process.kill()
        process.communicate()


def completed(ask: Callable[..., bytes], session: str, prompt: str) -> dict[str, Any]:
    """Continue a session greedily, and return the answer."""
    body = {"model": "trained", "prompt": prompt, "session": session, "max_tokens": 20, "temperature": 0, "logprobs": 0}
    return json.loads(ask("completions", body))


def read_corpora(folder: Path, scratch: Path) -> dict[str, Any]:
    """Open the corpora."""
    found: dict[str, Any] = {}
    for name in ("bytes", "words"):
        corpus = Corpus.open(folder / name)
        ids = corpus.split("test").tokens[:60].tolist()
        found |= {f"{name} ids": ids, f"{name} text": corpus.tokenizer.decode(ids)}
        found[f"{name} sizes"] = [len(corpus.split(split).tokens) for split in ("train", "valid", "test")]
    return found


def read_trained(folder: Path, scratch: Path) -> dict[str, Any]:
    """Load the trained run."""
    run = load(folder / "trained", device="cpu")
    result = evaluate(run, Corpus.open(folder / "bytes").split("test"))
    return {
        "loss": result.nats_per_token,
        "memory length": result.plan.context_limits.memory_length,
        "greedy": greedy(run),
    }


def read_resumable(folder: Path, scratch: Path) -> dict[str, Any]:
    """Resume the stopped run in a copy; slowly, as the precision of Muon depends on the processor."""
    run = shutil.copytree(folder / "resumable", scratch / "resumable")
    resume(run, folder / "words", train={"max_steps": STOP_STEP + 4, "learning_rate": 1e-4}, **OPTIONS)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {
        f"{split} loss": [line["nats_per_token"] for line in lines if line["split"] == split and line["step"]]
        for split in ("train", "valid")
    }
    return {**found, "steps": [line["step"] for line in lines], "greedy": greedy(load(run, device="cpu"))}


def read_adapter(folder: Path, scratch: Path) -> dict[str, Any]:
    """Load the adapter, merged and beside its base."""
    base = folder / "trained"
    merged = load(folder / "adapter", device="cpu", base=base)
    beside = load_adapter(load(base, device="cpu"), folder / "adapter")
    (first,), (second,) = score(merged, text(3)), score(beside, text(3))
    return {"merged": nats(first.nats_K), "beside": nats(second.nats_K), "greedy": greedy(merged)}


def read_stream(folder: Path, scratch: Path) -> dict[str, Any]:
    """Continue the stream."""
    stream, extra = SurprisalStream.load(load(folder / "trained", device="cpu"), folder / "stream.safetensors")
    before, rest = stream.num_tokens, [stream.read(text(9)[40:]), stream.finish()]
    return {"before": before, "extra": extra, "losses": [value for part in rest for value in nats(part.nats_K)]}


def read_session(folder: Path, scratch: Path) -> dict[str, Any]:
    """Import the session into a server, and continue it."""
    with server(folder / "trained") as ask:
        session = json.loads(ask("sessions/import", (folder / "session.safetensors").read_bytes()))
        (choice,) = completed(ask, session["id"], LINES[3])["choices"]
    logprobs = nats(choice["logprobs"]["token_logprobs"])
    return {"tokens": session["tokens"], "text": choice["text"], "logprobs": logprobs}


def read_transformers(folder: Path, scratch: Path) -> dict[str, Any]:
    """Open the folder for transformers there, and convert it to a run."""
    from transformer_xl.integrations.huggingface import TransformerXLForCausalLM, TransformerXLTokenizer

    model = TransformerXLForCausalLM.from_pretrained(folder / "transformers")
    ids = torch.tensor([TransformerXLTokenizer.from_pretrained(folder / "transformers").encode(PROMPT)])
    with torch.no_grad():
        logits = nats(model(ids).logits[0].logsumexp(-1))
    tokens = model.generate(ids, do_sample=False, max_new_tokens=20)[0].tolist()
    convert(folder / "transformers", scratch / "converted")
    return {"logits": logits, "tokens": tokens, "greedy": greedy(load(scratch / "converted", device="cpu"))}


PARTS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "corpora": read_corpora,
    "trained": read_trained,
    "resumable": read_resumable,
    "adapter": read_adapter,
    "stream": read_stream,
    "session": read_session,
    "transformers": read_transformers,
}
"""What is computed from the files of a version, given their folder and an empty one."""


def write(folder: Path) -> None:
    """Write the files of this version to a new folder."""
    documents = {
        split: [text(lines), text(lines // 2)] for split, lines in {"train": 60, "valid": 14, "test": 9}.items()
    }
    prepare(out=folder / "bytes", documents=documents, tokenizer="byte")
    prepare(out=folder / "words", documents=documents, tokenizer="word")
    muon = {"optimizer": "muon", "weight_decay": 0.01}
    train(None, folder / "bytes", folder / "trained", model={**MODEL, **N_GRAMS}, train={**TRAIN, **muon}, **OPTIONS)
    average = {"weight_average": "ema", "ema_decay": 0.8, "eval_interval": 4}
    groups = {"model": {**MODEL, **CUTOFFS}, "train": {**TRAIN, **muon, **average}}
    train(None, folder / "words", folder / "resumable", **groups, callbacks=[StopAt()], **OPTIONS)
    few = {"max_steps": 6, "warmup_steps": 2, "learning_rate": 0.01}
    finetune(folder / "trained", folder / "bytes", folder / "adapter", lora_rank=2, train=few, **OPTIONS)
    # these are not resumed
    for checkpoints in ("trained/checkpoints", "adapter/checkpoints", "resumable/checkpoints/step-00000000"):
        shutil.rmtree(folder / checkpoints)
    convert(folder / "trained", folder / "transformers", to="huggingface")
    stream = SurprisalStream(load(folder / "trained", device="cpu"))
    stream.read(text(9)[:40])
    stream.flush()
    stream.save(folder / "stream.safetensors", {"name": "earlier"})
    with server(folder / "trained") as ask:
        session = completed(ask, "new", PROMPT)["session"]
        (folder / "session.safetensors").write_bytes(ask(f"sessions/{session}/export"))


def main() -> None:
    """Write the files and expected.json."""
    here = Path(__file__).parent
    version = transformer_xl.__version__
    if (here / version).exists():
        raise SystemExit(f"{here / version} is there; its files stay as they are")
    WORKPLACE.mkdir()  # fails if it is there
    folder = WORKPLACE / version
    try:
        write(folder)
        words = ["git", "-C", str(here), "describe", "--always", "--abbrev=12", "--exclude=*"]
        commit = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
        parts = {name: part(folder, WORKPLACE) for name, part in PARTS.items()}
        expected = {"version": version, "commit": commit, "torch": torch.__version__, "parts": parts}
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
        shutil.copytree(folder, here / version)
    finally:
        shutil.rmtree(WORKPLACE)


if __name__ == "__main__":
    main()
