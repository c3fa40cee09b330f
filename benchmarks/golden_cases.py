"""The cases of golden.py: tables of models and settings, and a function for each kind of case.

Training begins with random weights; so does `initial`, which tells a change of how weights are drawn from one of how
they are trained. The models of all other cases have weights that are drawn here by name, so that their numbers depend
on neither. A case yields the names of its numbers and the numbers; losses of tokens are stored as sums (`sums`).
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

Entries = Iterator[tuple[str, Any]]
TESTS = Path(__file__).parents[1] / "tests"
NUM_SUMS = 24  # per-token losses are stored as the sums of so many parts of the text

# Models with fixed weights: the corpus, and the settings that differ from SIZES
SIZES = {"n_layers": 2, "d_model": 64, "dropout": 0.1}
HEADS = {"n_heads": 2, "d_head": 32, "d_ff": 128}
LENGTHS = {"segment_length": 24, "memory_length": 48}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer-xl": ("bytes", {}),
    "wide": ("bytes", {"d_model": 192, "n_heads": 3, "d_head": 64, "d_ff": 768, "qk_norm": True, "norm_first": True}),
    "n-grams": ("bytes", {"max_ngram": 4, "ngram_buckets": 997, "d_ngram": 8, "clamp_length": 20}),
    "adaptive": ("words", {"cutoffs": (40, 150), "div_val": 2, "tie_projections": "all_but_first"}),
    "untied": ("bpe", {"tie_word_embeddings": False, "d_embed": 20, "tie_attention_biases": False}),
    "window": ("bytes", {"attention_window": 20, "clamp_length": 12, "attend_empty_memory": True}),
    "tied-keys": ("words", {"learned_attention_biases": False, "tie_key_projections": True}),
    "shaw": ("bytes", {"architecture": "shaw", "max_relative_positions": 60}),
    "vaswani": ("bytes", {"architecture": "vaswani"}),
    **{f"kernel-{name}": ("bytes", {"attn_implementation": name}) for name in ("cpu", "sdpa", "reference")},
    "al-rfou": ("bytes", {"architecture": "al-rfou", "max_position_embeddings": 24, "num_targets": 2}),
    "lstm": ("bytes", {"architecture": "lstm"}),
    "qrnn": ("words", {"architecture": "qrnn", "cutoffs": (40, 150)}),
}
WITHOUT_MEMORY = ("vaswani", "al-rfou")

# Training from random weights: recipe, corpus, settings of model and training
STEPS = {"batch_size": 6, "max_steps": 20, "learning_rate": 2e-3, "warmup_steps": 4, "eval_interval": 10}
STEPS |= {"log_interval": 1, "checkpoint_interval": 10, "eval_tokens": 600, "dtype": "float32"}
PTB = {"n_layers": 3, "d_model": 40, "n_heads": 2, "d_head": 20, "d_ff": 60, "vocab_size": None}
PTB_TRAIN = {"segment_length": 24, "extended_context_length": 24, "warmup_steps": 4, "average_start_step": 10}
BFLOAT16 = {"dtype": "bfloat16"}
# the recipe demo with lengths and parts that it had when files of other processors were written
DEMO = {"value_embeddings": False, "key_offset": False, "attention_sinks": False, "max_ngram": 8}
DEMO_TRAIN = {"segment_length": 64, "memory_length": 128, "batch_size": 32}
TRAINING: dict[str, tuple[str | None, str, dict[str, Any], dict[str, Any]]] = {
    "demo": ("demo", "bytes", DEMO, {**DEMO_TRAIN, "max_steps": 50, "warmup_steps": 5, **BFLOAT16}),
    "demo-float32": (
        "demo", "bytes", {**DEMO, "ngram_buckets": 4096}, {**DEMO_TRAIN, "max_steps": 20, "batch_size": 8},
    ),
    "ptb": ("ptb", "words", PTB, {**PTB_TRAIN, "batch_size": 4}),
    "tiny": ("tiny", "words", {}, {"max_steps": 10}),  # with cutoffs auto
    **{name: (None, corpus, model, {}) for name, (corpus, model) in MODELS.items() if name != "wide"},
    "dropouts": (None, "words", {"embedding_dropout": 0.1, "attention_dropout": 0.1, "qkv_dropout": 0.1}, {}),
    "zoneout": (None, "bytes", {"architecture": "qrnn", "zoneout": 0.2, "qrnn_kernel_size": 1}, {}),
    "intermediate-losses": (None, "bytes", {"architecture": "al-rfou", "intermediate_layer_losses": True}, {}),
    "extended-context": (
        None, "bytes", {"architecture": "vaswani"}, {"extended_context_length": 12, "loss": "half"},
    ),
    "bfloat16": (None, "bytes", {}, BFLOAT16),
    "adaptive-bfloat16": (None, *MODELS["adaptive"], BFLOAT16),
    "muon-ema": (None, "bytes", {}, {"optimizer": "muon", "weight_average": "ema", "ema_decay": 0.9}),
    "adamw-wsd": (
        None, "bytes", {}, {"optimizer": "adamw", "weight_decay": 0.1, "lr_schedule": "wsd", "decay_steps": 5},
    ),
    "micro-batches": (None, "bytes", {}, {"micro_batch_size": 2}),
    "random-lengths": (None, "bytes", {}, {"random_segment_lengths": True}),
    "shuffled": (None, "bytes", {}, {"shuffle_documents": True, "batch_size": 3}),
    "activation-checkpointing": (None, "bytes", {}, {"activation_checkpointing": True}),
}  # fmt: skip
# Fine-tuning of fixed weights: the model, and arguments
FINETUNING: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("transformer-xl", "shaw")},
    "shaw-bfloat16": ("shaw", {"train": BFLOAT16}),
    "frozen": ("transformer-xl", {"freeze": ["layers.0.*"], "layer_rate_decay": 0.8}),
    "lora": ("transformer-xl", {"lora_rank": 3, "lora_dropout": 0.1}),
}

EVALUATION: dict[str, dict[str, Any]] = {
    "defaults": {},
    **{f"memory-length-{length}": {"memory_length": length} for length in (0, 10, 100, 300)},
    "segment-length": {"segment_length": 7},
    "batch-size-1": {"batch_size": 1, "reset_memory": True},
    "batch-size-4": {"batch_size": 4, "warmup_tokens": 30},
    "reset-memory": {"reset_memory": True},
    "attention-window": {"attention_window": 30, "memory_length": 29},
    "clamp-length": {"clamp_length": 10},
    "temperature": {"softmax_temperature": 1.2},
    "extended-context": {"memory_length": 0, "extended_context_length": 20},
    "sliding-window": {"method": "sliding-window", "attention_window": 16, "memory_length": 0},
    "dynamic-rms": {"method": "dynamic", "dynamic": {"gradient_stats_tokens": 480}},
    "dynamic-sgd": {"method": "dynamic", "dynamic": {"optimizer": "sgd", "learning_rate": 0.02, "decay": 0.01}},
    "bfloat16": BFLOAT16,
}
FEW_EVALUATIONS = ("defaults", "reset-memory", "sliding-window", "dynamic-rms", "bfloat16")  # of the other models

PROMPTS = {"no-prompt": None, "short-prompt": 9, "middle-prompt": 40, "long-prompt": 200}  # number of tokens
GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {"greedy": True},
    "sampled": {"num_samples": 3, "seed": 5},
    "top-p": {"top_p": 0.8, "min_p": 0.01, "temperature": 1.3, "seed": 6},
    "penalty": {"greedy": True, "repetition_penalty": 1.4, "repetition_penalty_window": 20},
    "memory-length": {"greedy": True, "memory_length": 17},
    "beam-search": {"num_beams": 3, "length_penalty": 0.8},
    "bfloat16": {"num_samples": 2, **BFLOAT16},
}
FEW_GENERATIONS = ("greedy", "sampled", "beam-search", "bfloat16")

# Requests to the server: paths and bodies; a session of the answer before is continued with "session": "same"
WORDS = ("Once upon a time", " there was", " a long text that is longer than the memory of the model." * 4)
ECHO = {"max_tokens": 0, "echo": True, "logprobs": 2}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "short-prompt/sampled": ("completions", {"prompt": WORDS[0], "max_tokens": 20, "logprobs": 2}),
    "short-prompt/greedy": ("completions", {"prompt": WORDS[0], "max_tokens": 20, "temperature": 0, "logprobs": 0}),
    "short-prompt/batch": ("completions", {"prompt": list(WORDS[:2]), "n": 2, "max_tokens": 20}),
    "short-prompt/best-of": ("completions", {"prompt": WORDS[0], "n": 1, "best_of": 3, "max_tokens": 20}),
    "short-prompt/echo": ("completions", {"prompt": WORDS[0], **ECHO}),
    "long-prompt/sampled": ("completions", {"prompt": WORDS[2], "max_tokens": 20, "logprobs": 2}),
    "long-prompt/greedy": ("completions", {"prompt": WORDS[2], "max_tokens": 20, "temperature": 0, "logprobs": 0}),
    "long-prompt/echo": ("completions", {"prompt": WORDS[2], **ECHO}),
    "long-prompt/echo-memory": ("completions", {"prompt": WORDS[2], "memory_length": 20, **ECHO}),
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "logprobs": True}),
    "session/first": ("completions", {"prompt": WORDS[0], "max_tokens": 20, "session": "new", "logprobs": 0}),
    "session/then": ("completions", {"prompt": WORDS[1], "max_tokens": 20, "session": "same", "logprobs": 0}),
    "session/echo": ("completions", {"prompt": WORDS[1], "session": "same", **ECHO}),
}

# Commands, which print JSON; RUN is a run with fixed weights
TEXT = "Once upon a time there was a text, and it was read."
COMMANDS: dict[str, tuple[str, ...]] = {
    "evaluate": ("evaluate", "RUN", "--corpus=CORPUS", "--memory-length=30", "--reset-memory"),
    "score": ("score", "RUN", "TEXT", "--per", "token"),
    "generate": ("generate", "RUN", "--prompt", TEXT[:20], "--seed=3", "--max-new-tokens=30"),
    "context": ("analyze", "context", "RUN", "--corpus=CORPUS", "--num-positions=20", "--context-step=20"),
    "attention": ("analyze", "attention", "RUN", "--prompt", TEXT * 4, "--out=OUT"),
}


def text_of(num_words: int, seed: int) -> str:
    """Return words, punctuation and lines, drawn so that a word depends on the one before."""
    draw, words, previous = random.Random(seed).random, [], 0  # random() gives the same numbers in every Python
    vowels, consonants = "aeiou", "bcdfghklmnprstvw"
    for number in range(num_words):
        previous = (previous * 7 + 3) % 400 if draw() < 0.5 else int(400 * draw() ** 3)
        syllables = (previous % 80, previous // 5, previous * 3 % 80)[: 1 + previous % 3]
        word = "".join(consonants[part % 16] + vowels[part // 16] for part in syllables)
        end = "\n" if number % 11 == 10 else "" if draw() < 0.8 else ",;."[int(3 * draw())]
        words.append((word.capitalize() if draw() < 0.1 else word) + end)
    return " ".join(words).replace("\n ", "\n") + "\n"


def make_corpora(folder: Path) -> None:
    """Write the corpora: one text as bytes, words and byte pairs."""
    from transformer_xl import prepare

    sizes = {"train": (900, 1400, 300, 4000), "valid": (120, 80), "test": (60, 90, 110)}
    documents = {
        split: [text_of(words, seed=index * 10 + len(split)) for index, words in enumerate(numbers)]
        for split, numbers in sizes.items()
    }
    for name, settings in {
        "bytes": {"tokenizer": "byte"},
        "words": {"tokenizer": "word", "split_punctuation": True},
        "bpe": {"tokenizer": "bpe", "vocab_size": 400},
    }.items():
        prepare(out=folder / name, documents=documents, **settings)


class CaseFolder:
    """Corpora, and the folder for the runs of one process."""

    def __init__(self, corpora: Path, threads: int) -> None:
        """Make a temporary folder, which is deleted at the end of the process."""
        self.corpora, self.threads = corpora, threads
        self._folder = tempfile.TemporaryDirectory(prefix="golden-")
        self.fixed = cache(self._fixed)
        self.run = cache(self._run)

    def new(self, name: str) -> Path:
        """Return a path that does not exist yet."""
        return Path(tempfile.mkdtemp(dir=self._folder.name)) / name

    def empty_recipe(self) -> Path:
        """Write a recipe that leaves all settings to flags."""
        recipe = self.new("empty.yaml")
        recipe.write_text("title: nothing\n")
        return recipe

    def split(self, corpus: str, name: str) -> Any:
        """Return a split of a corpus."""
        from transformer_xl import Corpus

        return Corpus.open(self.corpora / corpus).split(name)

    def _run(self, name: str) -> Any:
        from transformer_xl import load

        return load(self.fixed(name), device="cpu")

    def _fixed(self, name: str) -> Path:
        """Save a model whose weights depend only on their names and shapes, and return the folder.

        If a change renames weights, draw them here by their earlier names, and the numbers stay.
        """
        import torch

        from transformer_xl import Corpus, Run, RunConfig, build_model, save

        corpus, settings = MODELS[name]
        tokenizer = Corpus.open(self.corpora / corpus).tokenizer
        lengths = {**LENGTHS, "memory_length": 0 if name in WITHOUT_MEMORY else LENGTHS["memory_length"]}
        model = {**sizes(settings), "vocab_size": tokenizer.vocab_size, **settings}
        config = RunConfig.model_validate({"model": model, "train": lengths})
        made = build_model(config.model, memory_length=lengths["memory_length"])
        with torch.no_grad():
            for key, parameter in made.named_parameters():
                generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
                base = 1.0 if bool((parameter == 1).all()) else 0.0  # gains of normalization stay about 1
                # the sum of 12 uniform numbers, which are the same everywhere, is about normal
                uniform = torch.rand((12, *parameter.shape), generator=generator, dtype=torch.float64)
                parameter.copy_(base + 0.15 * (uniform.sum(0) - 6))
        return save(Run(made.eval(), tokenizer, config), self.new(name))


def sizes(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of a small model; recurrent ones have no heads."""
    return SIZES if settings.get("architecture") in ("lstm", "qrnn") else {**SIZES, **HEADS}


def sums(values: Any) -> list[float]:
    """Return the sums of NUM_SUMS parts of the values; any changed bit of a value changes one."""
    numbers = [float(value) for value in values]
    edges = [len(numbers) * index // NUM_SUMS for index in range(NUM_SUMS + 1)]
    return [math.fsum(numbers[start:stop]) for start, stop in pairwise(edges)]


def digest(tensors: dict[str, Any]) -> str:
    """Return a checksum of the values of tensors, whatever their names and their order."""
    each = sorted(hashlib.sha256(value.contiguous().float().numpy().tobytes()).digest() for value in tensors.values())
    return hashlib.sha256(b"".join(each)).hexdigest()


def results_of(run: Path) -> Entries:
    """Yield what was logged in training, and the checksums of the weights."""
    from transformer_xl import load

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["split"] == "train"]
    yield "loss", [line["nats_per_token"] for line in steps]
    yield "grad-norm", [line["grad_norm"] for line in steps]
    yield "learning-rate", [line["learning_rate"] for line in steps]
    yield "valid-loss", [line["nats_per_token"] for line in lines if line["split"] == "valid"]
    for checkpoint in ("best", "last"):
        loaded = load(run, device="cpu", checkpoint=checkpoint)
        yield f"{checkpoint}-weights", digest(loaded.model.state_dict())
        if checkpoint == "best" and loaded.memory_lengths:
            yield "memory-lengths", list(loaded.memory_lengths.nats_per_token.values())


def training_settings(name: str) -> tuple[str | None, str, dict[str, Any], dict[str, Any]]:
    """Return recipe, corpus, settings of the model and of training."""
    recipe, corpus, model, train = TRAINING[name]
    if recipe:
        keep = {key: value for key, value in STEPS.items() if key not in ("batch_size", "learning_rate")}
        return recipe, corpus, {key: value for key, value in model.items() if value is not None}, {**keep, **train}
    lengths = LENGTHS if model.get("architecture") not in WITHOUT_MEMORY else {"segment_length": 24}
    return None, corpus, {**sizes(model), **model}, {**lengths, **STEPS, **train}


def training(name: str, work: CaseFolder) -> Entries:
    """Train from random weights."""
    from transformer_xl import train

    recipe, corpus, model, settings = training_settings(name)
    run, groups = work.new(name), {"model": model, "train": settings}
    train(recipe, work.corpora / corpus, run, **groups, device="cpu", threads=work.threads, progress=False)
    yield from results_of(run)


def resumed(name: str, work: CaseFolder) -> Entries:
    """Stop at step 7 of a training, and resume it: the results are those of the uninterrupted one."""
    from transformer_xl import Callback, resume, train

    class Stop(Callback):
        def on_step(self, trainer: Any, num_tokens: int) -> None:
            if trainer.state.step == 7:
                trainer.stop()

    recipe, corpus, model, settings = training_settings(name)
    run, groups = work.new(name), {"model": model, "train": settings}
    options = {"device": "cpu", "threads": work.threads, "progress": False}
    train(recipe, work.corpora / corpus, run, **groups, callbacks=[Stop()], **options)
    resume(run, **options)
    stopped, whole = dict(results_of(run)), dict(training(name, work))
    stopped["valid-loss"].pop(0)  # that of the stop
    yield "equals-uninterrupted", [key for key in whole if whole[key] != stopped[key]] or True
    yield from stopped.items()


def two_processes(parallelism: str, work: CaseFolder) -> Entries:
    """Train in two processes, started by torchrun."""
    _, corpus, model, settings = training_settings("muon-ema" if parallelism == "ddp" else "adaptive")
    run = work.new("run")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "transformer_xl"]
    words += [
        "train",
        str(work.empty_recipe()),
        "--corpus",
        str(work.corpora / corpus),
        "--run",
        str(run),
        f"--threads={work.threads}",
    ]
    groups = {"model": model, "train": {**settings, "max_steps": 10, "parallelism": parallelism}}
    for group, values in groups.items():
        for key, value in values.items():
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words.append(f"--{group}.{key.replace('_', '-')}={text}")
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    yield from results_of(run)


def finetuning(name: str, work: CaseFolder) -> Entries:
    """Train fixed weights on; of an adapter also what it generates beside its base."""
    from transformer_xl import finetune, generate, load_adapter

    base, arguments = FINETUNING[name]
    train, run = {**STEPS, **arguments.get("train", {})}, work.new(name)
    options = {"device": "cpu", "threads": work.threads, "progress": False}
    finetune(work.fixed(base), work.corpora / "bytes", run, **{**arguments, "train": train}, **options)
    yield from results_of(run)
    if "lora_rank" in arguments:
        completion = generate(load_adapter(work.run(base), run), "Once", greedy=True, max_new_tokens=20, logprobs=True)
        yield "beside-its-base", [*completion.token_ids, *completion.logprobs]


def initial(name: str, work: CaseFolder) -> Entries:
    """Draw initial weights."""
    import torch

    from transformer_xl import RunConfig, build_model

    settings = MODELS[name][1]
    train = {**LENGTHS, "memory_length": 0 if name in WITHOUT_MEMORY else LENGTHS["memory_length"]}
    config = RunConfig.model_validate({"model": {**sizes(settings), **settings}, "train": train})
    torch.manual_seed(1)
    yield "weights", digest(build_model(config.model, memory_length=train["memory_length"]).state_dict())


def evaluation(name: str, method: str, work: CaseFolder) -> Entries:
    """Score the test text."""
    import numpy as np

    from transformer_xl import evaluate

    corpus, file = MODELS[name][0], work.new("losses.npy")
    splits = {"split": work.split(corpus, "test"), "train_split": work.split(corpus, "train")}
    result = evaluate(work.run(name), **splits, token_losses=file, **EVALUATION[method])
    yield "nats", [result.nats]
    yield "losses", sums(np.load(file))


def scoring(name: str, work: CaseFolder) -> Entries:
    """Score texts, words and a stream that is read in parts, saved and continued."""
    from transformer_xl import SurprisalStream, score, surprisal

    texts, run = [text_of(9, 1), text_of(150, 2)], work.run(name)
    for index, scored in enumerate(score(run, texts)):
        yield f"text-{index}", sums(scored.nats_K)
    table = surprisal(run, texts, **({} if name in WITHOUT_MEMORY else {"memory_lengths": [8, 200]}))
    for column in table.surprisal_columns:
        yield f"words/{column}", sums(row[column] for row in table)
    stream, file = SurprisalStream(run), work.new("stream")
    parts = [stream.read(texts[1][:100]), stream.flush(), stream.read(texts[1][100:300])]
    stream.save(file)
    stream, _ = SurprisalStream.load(run, file)
    parts += [stream.read(texts[1][300:]), stream.finish()]
    yield "stream", sums(nats for part in parts for nats in part.nats_K)


def generation(name: str, prompt: str, work: CaseFolder) -> Entries:
    """Continue a prompt in many ways."""
    from transformer_xl import beam_search, generate, stream

    run, length = work.run(name), PROMPTS[prompt]
    ids = run.tokenizer.encode(text_of(300, 3)).tolist()
    start, options = None if length is None else ids[:length], {"max_new_tokens": 30, "logprobs": True}
    for method, settings in GENERATION.items():
        if name in ("transformer-xl", "wide") or method in FEW_GENERATIONS:
            if "memory_length" in settings and name in WITHOUT_MEMORY:
                continue
            options["logprobs"] = method != "beam-search"
            function = partial(beam_search, run, start) if method == "beam-search" else partial(generate, run, [start])
            yield from completions(method, function(**{key: v for key, v in options.items() if v}, **settings))
    if length:
        ragged = [ids[:3], ids[: length // 2], ids[50 : 50 + length]]
        yield from completions("ragged", generate(run, ragged, num_samples=2, max_new_tokens=30, logprobs=True))
        first = stream(run, start, max_new_tokens=20, seed=3, logprobs=True)
        "".join(first)
        memory = {"memory": first.memory(), "add_bos_token": False}
        yield from completions("continued", [first, generate(run, ids[:7], greedy=True, max_new_tokens=20, **memory)])


def completions(method: str, found: Any) -> Entries:
    """Yield tokens and log-probabilities of completions."""
    yield f"{method}/tokens", [list(one.token_ids) for one in found]
    yield f"{method}/logprobs", sums(value for one in found for value in one.logprobs)


def serving(dtype: str, work: CaseFolder) -> Entries:
    """Ask a server over HTTP."""
    words = [
        "-m",
        "transformer_xl",
        "serve",
        str(work.fixed("wide")),
        "--port=0",
        f"--threads={work.threads}",
        f"--dtype={dtype}",
    ]
    words += ["--chat-template=plain", "--max-memory-length=64"]
    process = subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True)
    try:
        url = next(match[1] for line in process.stderr if (match := re.search(r"on (http://\S+)", line)))
        session = ""
        for name, (path, body) in REQUESTS.items():
            body = {"model": "wide", "seed": 4, **body}
            body |= {"session": session} if body.get("session") == "same" else {}
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/{path}", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=100) as response:
                answer = json.load(response)
            session = answer.get("session", session)
            yield name, [json.dumps(choice, sort_keys=True) for choice in answer["choices"]]
    finally:
        process.kill()
        process.communicate()


def transformers(name: str, work: CaseFolder) -> Entries:
    """Use a model in transformers: directly, and from a folder."""
    import torch

    from transformer_xl import convert
    from transformer_xl.integrations.huggingface import TransformerXLForCausalLM, from_run

    run = work.run(name)
    ids = run.tokenizer.encode(text_of(200, 4)).tolist()
    model, _ = from_run(run)
    folder = work.new("folder")
    convert(work.fixed(name), folder, to="huggingface")
    opened = TransformerXLForCausalLM.from_pretrained(folder)
    for prompt, length in {"short-prompt": 9, "long-prompt": 150}.items():
        tokens = torch.tensor([ids[:length], ids[7 : 7 + length]])
        for source, each in {"run": model, "folder": opened}.items():
            with torch.no_grad():
                yield f"{prompt}/{source}/logits", sums(each(tokens).logits.logsumexp(-1).flatten())
            options = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
            options["attention_mask"] = torch.ones_like(tokens)
            yield f"{prompt}/{source}/greedy", each.generate(tokens, **options)[:, length:].tolist()


def lm_eval(name: str, work: CaseFolder) -> Entries:
    """Answer requests of lm_eval."""
    from lm_eval.api.instance import Instance

    from transformer_xl.integrations.lm_eval.model import TxlLM

    text = text_of(120, 5)
    pairs = [(text[: 10 * size], text[10 * size : 10 * size + 40]) for size in (0, 1, 5, 20)]
    pairs += [(text[:50], end) for end in (" a", " ba,", "\nbaba da")]
    for windows in ("memory", "harness"):
        model = TxlLM(work.run(name), windows=windows, max_length=50)
        answers = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)], True)
        yield f"{windows}/loglikelihood", [float(value) for answer in answers for value in answer]
        rolling = [Instance("loglikelihood_rolling", {}, (text[:size],), size) for size in (20, 500)]
        yield f"{windows}/rolling", model.loglikelihood_rolling(rolling, True)


def forward(name: str, work: CaseFolder) -> Entries:
    """Call a model itself, on segments with memory, and in 8-bit integers."""
    import torch

    from transformer_xl import Backbone, BackboneConfig, generate, load
    from transformer_xl.integrations.int8 import to_int8

    loaded = load(work.fixed(name), device="cpu")
    ids = torch.from_numpy(loaded.tokenizer.encode(text_of(200, 6))[:140].astype("int64")).view(2, 70)
    for dtype in (torch.float32, torch.float64):
        model = loaded.model.to(dtype)
        memory, logits = model.initial_memory(batch_size=2), []
        for segment in ids.split((24, 24, 5, 1, 1, 15), dim=1):
            hidden, memory = model(segment, memory)
            logits.append(model.logits(hidden).logsumexp(-1))
        total = torch.cat(logits, 1)
        total.sum().backward()
        yield f"{dtype}/logits".removeprefix("torch."), sums(total.detach().flatten())
        gradients = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
        yield f"{dtype}/gradients".removeprefix("torch."), digest(gradients)
        model.zero_grad()
    completion = generate(to_int8(work.run(name)), "Once upon", greedy=True, max_new_tokens=20, logprobs=True)
    yield "int8", [*completion.token_ids, *completion.logprobs]
    torch.manual_seed(2)
    backbone = Backbone(BackboneConfig(d_input=10, d_model=32, n_heads=2, d_ff=64), memory_length=12).eval()
    memory, found = None, []
    for part in torch.randn(2, 40, 10).split((20, 1, 19), dim=1):
        hidden, memory = backbone(part, memory)
        found.append(hidden.detach().sum(-1))
    yield "backbone", sums(torch.cat(found, 1).flatten())


def commands(name: str, work: CaseFolder) -> Entries:
    """Run a command, and yield the numbers and texts of its JSON, but for times and paths."""
    paths = {"RUN": work.fixed("transformer-xl"), "CORPUS": work.corpora / "bytes", "OUT": work.new("out")}
    paths["TEXT"] = work.new("text")
    paths["TEXT"].write_text(TEXT)
    words = [re.sub("RUN|CORPUS|OUT|TEXT", lambda match: str(paths[match[0]]), word) for word in COMMANDS[name]]
    printed = subprocess.run(
        [sys.executable, "-m", "transformer_xl", *words, "--json"], check=True, capture_output=True
    )

    def leaves(value: Any, key: str = "") -> Iterator[Any]:
        if isinstance(value, dict | list):
            for part, inner in value.items() if isinstance(value, dict) else ((key, inner) for inner in value):
                yield from leaves(inner, part)
        elif key in ("text", "token") or not (isinstance(value, str) or "second" in key):
            yield value

    lines = printed.stdout.decode().splitlines()
    # score prints an object in each line
    objects = [json.loads(line) for line in lines] if name == "score" else json.loads(printed.stdout)
    yield "values", list(leaves(objects))


def old_checkpoints(work: CaseFolder) -> Iterator[tuple[str, Path, dict[str, Any], str]]:
    """Yield name, path, arguments of `convert` and a text of each small checkpoint of another program."""
    sys.path.insert(0, str(TESTS))
    import torch
    from integrations.checkpoints.checkpoints import FIXTURES, WORDS, golden, hugging_face_folder
    from integrations.checkpoints.old_modules import (
        OldConfig,
        nvidia_checkpoint,
        old_corpus,
        old_model,
        old_modules,
    )

    draw = random.Random(7).random
    text = "\n".join(" ".join(WORDS[1 + int(22 * draw())] for _ in range(10)) for _ in range(5)) + "\n"
    for file in sorted(FIXTURES.glob("*.safetensors")):
        config, weights, _ = golden(file.stem)
        if not any(name.startswith("crit.") for name in weights):  # a model without a softmax is no run
            continue
        yield f"huggingface/{file.stem}", hugging_face_folder(work.new("hub"), config, weights), {}, text
    for name, nvidia in {"official": False, "nvidia": True}.items():
        old, path = OldConfig(same_length=True, clamp_len=4, div_val=2, nvidia=nvidia), work.new("model.pt")
        model = old_model(old)
        with old_modules():
            if nvidia:
                path = path.with_name("checkpoint_best.pt")
                torch.save(nvidia_checkpoint(old, model, WORDS), path)
            else:
                torch.save(model, path)
                torch.save(old_corpus(WORDS), path.with_name("cache.pt"))
        yield name, path if nvidia else path.parent, {}, text
    numbers = " ".join(str(int(61 * draw())) for _ in range(50))
    for folder in sorted((FIXTURES.parent / "golden" / "tensorflow").iterdir()):
        yield f"tensorflow/{folder.name}", folder, {"tokenizer": "integer"}, numbers


def converted(work: CaseFolder) -> Entries:
    """Convert checkpoints of other programs, score with them and generate."""
    from transformer_xl import convert, generate, load, score

    for name, path, arguments, text in old_checkpoints(work):
        out = work.new("run")
        convert(path, out, **arguments)
        run = load(out, device="cpu")
        yield f"{name}/losses", sums(score(run, text)[0].nats_K)
        prompt = run.tokenizer.encode(text).tolist()[:20]
        yield f"{name}/greedy", list(generate(run, prompt, greedy=True, max_new_tokens=20).token_ids)


def corpora(work: CaseFolder) -> Entries:
    """Check the token ids of the corpora."""
    import numpy as np

    for name in ("bytes", "words", "bpe"):
        ids = [np.asarray(work.split(name, split).tokens[:], np.int64).tobytes() for split in ("train", "test")]
        yield name, hashlib.sha256(b"".join(ids)).hexdigest()


def all_cases() -> dict[str, Callable[[CaseFolder], Entries]]:
    """Return the cases by the beginning of the names of their entries, the slowest first."""
    found: dict[str, Callable[[CaseFolder], Entries]] = {f"train/{name}": partial(training, name) for name in TRAINING}
    found |= {f"train/2-processes-{name}": partial(two_processes, name) for name in ("ddp", "fsdp")}
    found |= {f"train/resumed-{name}": partial(resumed, name) for name in ("muon-ema", "shuffled", "n-grams")}
    found |= {f"serve/{dtype}": partial(serving, dtype) for dtype in ("float32", "bfloat16")}
    found |= {f"transformers/{name}": partial(transformers, name) for name in ("transformer-xl", "adaptive", "shaw")}
    found |= {f"lm-eval/{name}": partial(lm_eval, name) for name in ("wide", "adaptive", "lstm")}
    found |= {f"command/{name}": partial(commands, name) for name in COMMANDS}
    found |= {f"forward/{name}": partial(forward, name) for name in ("transformer-xl", "wide", "n-grams", "shaw")}
    found |= {f"finetune/{name}": partial(finetuning, name) for name in FINETUNING}
    for name in MODELS:
        for method in EVALUATION if name in ("transformer-xl", "wide") else FEW_EVALUATIONS:
            if method != "sliding-window" or name not in ("lstm", "qrnn"):
                found[f"evaluate/{name}/{method}"] = partial(evaluation, name, method)
        found[f"score/{name}"] = partial(scoring, name)
        found |= {f"generate/{name}/{prompt}": partial(generation, name, prompt) for prompt in PROMPTS}
        found[f"initial/{name}"] = partial(initial, name)
    return found | {"convert": converted, "corpora": corpora}
