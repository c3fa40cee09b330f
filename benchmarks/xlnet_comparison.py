"""Compare XLNet with a causal model of the same size, trained for the same time, where both sides of a gap help.

    python benchmarks/xlnet_comparison.py [--steps 2000] [--seeds 1,2,3] [--work DIR] [--quick]

Both are trained on the source of Python's standard library in bytes: XLNet by its recipe xlnet-tiny, and a causal model
with the same layers and settings for as many steps as take the same processor time. Then:

gaps        words of the test text, each among 15 others of the same length in bytes, with 96 + 32 bytes before and 24
            after it. XLNet gives the probability of a word given both sides; the causal model that of word and what
            follows, given what precedes. Divided by the sum over the 16, both are probabilities of the true one.
topics      which part of the library a passage of 256 bytes of other files is from: a linear classifier on the mean
            hidden states of each model, fitted on passages of files that it was not trained on.

Runs that are in --work are not trained again, so a comparison that was stopped goes on.

Shape suffixes: C candidates, T tokens, N passages, D width of the features, K topics.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from arguments import listed, natural, positive
from environment import results_file, say, surroundings, warn_if_busy, write
from torch import Tensor

from transformer_xl import load, prepare, train
from transformer_xl.apps.classify.embedding import embed
from transformer_xl.config import load_recipe
from transformer_xl.model.memory import ContextLimits
from transformer_xl.run import Run
from transformer_xl.text.token_store import Corpus
from transformer_xl.xlnet.two_streams import XLNet, visible_in_order

BEFORE, LEFT, RIGHT, CANDIDATES = 96, 32, 24, 16
TOPICS = ("asyncio", "email", "encodings", "idlelib", "multiprocessing", "test", "tkinter", "unittest")
SETTINGS = ("n_layers", "d_model", "n_heads", "d_head", "d_ff", "dropout", "attention_dropout")
OF_TRAINING = (
    "batch_size",
    "learning_rate",
    "warmup_steps",
    "lr_schedule",
    "optimizer",
    "weight_decay",
    "max_grad_norm",
)


def trained(name: str, corpus: Corpus, path: Path, seed: int, steps: int) -> tuple[Run, float]:
    """Return the run of a kind of model, trained if it is not there, and the processor time of its training."""
    recipe, timing = load_recipe("xlnet-tiny"), path / "seconds.txt"
    if not timing.exists():
        model, settings = None, {"seed": seed, "max_steps": steps, "warmup_steps": min(200, steps // 4)}
        if name == "causal":
            model = {key: recipe.model[key] for key in SETTINGS}
            settings = {key: recipe.train[key] for key in OF_TRAINING} | settings
            settings |= {"segment_length": 64, "memory_length": recipe.train["memory_length"]}
        start = time.process_time()
        base = "xlnet-tiny" if name == "xlnet" else None
        train(base, corpus, path, model=model, train=settings, threads=1, progress=False)
        timing.write_text(f"{time.process_time() - start:.1f}")
    return load(path), float(timing.read_text())


def seconds_per_step(name: str, corpus: Corpus, work: Path, steps: int) -> float:
    """Return the processor time of a step, without that of starting: the difference of two short trainings."""
    times = [trained(name, corpus, work / f"timing-{name}-{number}", 0, number)[1] for number in (steps, 3 * steps)]
    return (times[1] - times[0]) / (2 * steps)


def gaps(text: bytes, number: int) -> list[tuple[bytes, list[bytes], bytes]]:
    """Return what is before, the words (the true one first) and what is after, of words drawn from the text."""
    places = range(BEFORE + LEFT, len(text) - RIGHT - 10)
    words = [match for match in re.finditer(rb"[A-Za-z_]{4,10}", text) if match.start() in places]
    generator = np.random.default_rng(1)
    by_length: dict[int, list[bytes]] = {}
    for match in words:
        by_length.setdefault(len(match[0]), []).append(match[0])
    found = []
    for index in generator.permutation(len(words))[:number]:
        match = words[index]
        others = sorted({*by_length[len(match[0])]} - {match[0]})
        if len(others) >= CANDIDATES - 1:
            drawn = [others[place] for place in generator.choice(len(others), CANDIDATES - 1, replace=False)]
            before = text[match.start() - BEFORE - LEFT : match.start()]
            found.append((before, [match[0], *drawn], text[match.end() : match.end() + RIGHT]))
    return found


@torch.no_grad()
def gap_nats(run: Run, before: bytes, words: list[bytes], after: bytes) -> tuple[Tensor, float]:
    """Return the losses of the candidates (C,), up to a constant, and that of the true word alone in nats."""
    model, length = run.model, len(words[0])
    ids_CT = torch.tensor([list(before[BEFORE:] + word + after) for word in words])
    memory = model.initial_memory(1, ContextLimits(BEFORE))
    span = slice(LEFT, LEFT + length)
    if isinstance(model, XLNet):
        for start in range(0, BEFORE, 32):
            memory = model.two_streams([list(before[start : start + 32])], memory).memory
        rank_T = torch.full((ids_CT.shape[1],), -1)
        rank_T[span] = torch.arange(length)
        visible_CTT = visible_in_order(rank_T[None]).expand(len(words), -1, -1)
        targets_CQ = torch.arange(LEFT, LEFT + length).expand(len(words), -1)
        streams = model.two_streams(ids_CT, memory.select([0] * len(words)), visible=visible_CTT, targets=targets_CQ)
        nats_C = model.nats(streams.query_BQD, ids_CT[:, span]).sum(1)
        return nats_C, float(nats_C[0])
    memory = model([list(before[:BEFORE])], memory)[1].select([0] * len(words))
    nats_CT = model.nats(model(ids_CT[:, :-1], memory)[0], ids_CT[:, 1:])
    return nats_CT[:, LEFT - 1 :].sum(1), float(nats_CT[0, LEFT - 1 : LEFT - 1 + length].sum())


def gap_results(run: Run, found: list[tuple[bytes, list[bytes], bytes]]) -> dict[str, float]:
    """Return the mean loss of the true word among the candidates, how often it is the first, and its own loss."""
    nats, first, own, num_bytes = 0.0, 0, 0.0, 0
    for before, words, after in found:
        nats_C, alone = gap_nats(run, before, words, after)
        nats -= float((-nats_C).log_softmax(0)[0])
        first += int(nats_C.argmin() == 0)
        own, num_bytes = own + alone, num_bytes + len(words[0])
    return {
        "nats_among_16": nats / len(found),
        "accuracy_among_16": first / len(found),
        "nats_per_byte_of_the_word": own / num_bytes,
    }


def passages(number: int) -> tuple[list[bytes], Tensor]:
    """Return passages of files of each topic, and their topics (N,): first those to fit on, then those to test on."""
    folder, generator = Path(sysconfig.get_paths()["stdlib"]), np.random.default_rng(2)
    sets: list[list[tuple[bytes, int]]] = [[], []]
    for topic, name in enumerate(TOPICS):
        files = sorted(folder.joinpath(name).rglob("*.py"))
        files = [file for file in files if file.stat().st_size > 2000]
        order = generator.permutation(len(files))
        for part, chosen in enumerate((order[: len(order) // 2], order[len(order) // 2 :])):
            for _ in range(number):
                content = files[chosen[generator.integers(len(chosen))]].read_bytes()
                start = int(generator.integers(len(content) - 256))
                sets[part].append((content[start : start + 256], topic))
    return [text for part in sets for text, _ in part], torch.tensor([topic for part in sets for _, topic in part])


def topic_accuracy(run: Run, texts: list[bytes], topics_N: Tensor) -> float:
    """Return the accuracy of a linear classifier on the second half of the passages, fitted on the first."""
    vectors_ND = torch.from_numpy(embed(run, texts, pooling="mean")).double()
    half = len(texts) // 2
    vectors_ND = (vectors_ND - vectors_ND[:half].mean(0)) / vectors_ND[:half].std(0)
    weight_KD = torch.zeros(len(TOPICS), vectors_ND.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight_KD], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(vectors_ND[:half] @ weight_KD.T, topics_N[:half]) + 1e-2 * weight_KD.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return float(((vectors_ND[half:] @ weight_KD.T).argmax(1) == topics_N[half:]).double().mean())


def main() -> None:
    """Train and compare as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=2000, help="of XLNet (default 2000)")
    parser.add_argument("--seeds", type=listed(natural), default="1,2,3")
    parser.add_argument("--gaps", type=positive, default=1000, help="number of words (default 1000)")
    parser.add_argument(
        "--passages", type=positive, default=60, help="of a topic, to fit and to test each (default 60)"
    )
    parser.add_argument("--work", type=Path, default=Path("runs/xlnet-comparison"))
    parser.add_argument("--out", type=Path, default=results_file("xlnet"))
    parser.add_argument("--quick", action="store_true", help="little of all, for a test of this file")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.seeds, args.gaps, args.passages = 20, [1], 10, 4
    load_before = warn_if_busy()
    args.work.mkdir(parents=True, exist_ok=True)
    folder = args.work / "corpus"
    corpus = Corpus.open(folder) if folder.exists() else prepare("python-stdlib", folder)
    text = corpus.tokenizer.decode_bytes(corpus.split("test").tokens[:2_000_000])
    found, (texts, topics_N) = gaps(text, args.gaps), passages(args.passages)
    timing = 10 if args.quick else 40
    ratio = seconds_per_step("xlnet", corpus, args.work, timing) / seconds_per_step("causal", corpus, args.work, timing)
    results: dict[str, list[dict[str, Any]]] = {"xlnet": [], "causal": []}
    for seed in args.seeds:
        for name, steps in (("xlnet", args.steps), ("causal", round(args.steps * ratio))):
            run, seconds = trained(name, corpus, args.work / f"{name}-{seed}", seed, steps)
            one = {"seed": seed, "steps": steps, "processor_seconds": seconds, "parameters": run.model.num_parameters()}
            one |= gap_results(run, found) | {"topic_accuracy": topic_accuracy(run, texts, topics_N)}
            results[name].append(one)
            say(f"{name:7} " + ", ".join(f"{key} {value:,.4g}" for key, value in one.items()))
    names = ("nats_among_16", "accuracy_among_16", "nats_per_byte_of_the_word", "topic_accuracy")
    print("| | XLNet | causal |\n|---|---:|---:|")
    for key in names:
        cells = []
        for name in results:
            values = [one[key] for one in results[name]]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.3f}{spread}")
        print(f"| {key.replace('_', ' ')} | {' | '.join(cells)} |")
    chance = {"nats_among_16": math.log(CANDIDATES), "topic_accuracy": 1 / len(TOPICS)}
    if not args.quick or args.out != results_file("xlnet"):
        write({**surroundings("cpu", load_before), "chance": chance, "results": results}, args.out)


if __name__ == "__main__":
    main()
