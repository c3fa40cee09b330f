"""How far does a classifier of long documents see? Evidence is planted in filler text, and the memory length is varied.

    python examples/planted_evidence.py train FOLDER --task name --seed 1      # some minutes on a CPU core
    python examples/planted_evidence.py sweep FOLDER --task name --seed 1      # accuracy by memory length, as CSV
    python examples/planted_evidence.py plot FOLDER/*.csv --out planted.svg    # picture and table of all seeds

Filler is words of the source of Python's standard library, which every computer with Python has. The label of a
document depends on a few words in it:

name     one of four names is planted once: "courier ada"
source   "reported by ada" is planted, and six other names stand alone elsewhere, so the name itself says nothing
order    "harbour closed" and "bridge opened" are planted, and the label is which comes first

A document has 64, 256 or 512 words in training, with the evidence anywhere; then it has up to 32,768, with the
evidence at the beginning, in the middle or anywhere.
"""

from __future__ import annotations

import argparse
import csv
import random
import re
import sysconfig
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import transformer_xl as txl

NAMES = ("ada", "bruno", "carla", "dmitri")
EVENTS = ("harbour closed", "bridge opened")
MARKERS = ("courier", "reported", "by", *" ".join(EVENTS).split())
PLACES = ("beginning", "middle", "anywhere")


@dataclass(frozen=True)
class Settings:
    """What is trained and measured."""

    task: str = "name"
    seed: int = 1
    num_documents: int = 2000
    """Documents to train with, in words as long as `train_lengths`."""
    train_lengths: tuple[int, ...] = (64, 256, 512)
    segment_length: int = 64
    memory_length: int = 512
    """Memory length in training: the longest document fits."""
    base_steps: int = 400
    """Steps of the language model."""
    max_steps: int = 300
    """Steps of the classifier."""
    batch_size: int = 16
    loss_segments: int = 1
    pooling: str = "last"
    name: str = ""
    """Ending of the classifier's name, for other settings of a task and seed."""
    part: str = ""
    """Ending of the name of the results, for a sweep in parts."""
    lengths: tuple[int, ...] = (256, 1024, 4096, 16384, 32768)
    """Lengths of the documents that are classified, in words."""
    memory_lengths: tuple[int, ...] = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    """Memory lengths with which they are read, as far as they are not longer than the documents."""
    places: tuple[str, ...] = PLACES
    num_words: int = 200_000
    """Words that are read for each length and place, as documents of that length; at least `min_documents`."""
    min_documents: int = 16
    max_documents: int = 200

    @property
    def folder(self) -> str:
        """Name of the classifier's folder, and beginning of that of its results."""
        return f"{self.task}-{self.seed}{self.name}"


def filler_words(num_words: int = 500) -> list[str]:
    """Return the words of the standard library's source that are among the most frequent, in order."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    words = re.findall(r"[a-z]{2,}", " ".join(path.read_text("utf-8", "replace").lower() for path in files))
    common = {word for word, _ in Counter(words).most_common(num_words)} - {*NAMES, *MARKERS}
    return [word for word in words if word in common]


def plant(filler: list[str], length: int, task: str, place: str, rng: random.Random) -> tuple[str, str]:
    """Return a document of `length` tokens, the end of the text included, and its label."""
    start = rng.randrange(len(filler))
    words = [filler[(start + index) % len(filler)] for index in range(length - 1)]

    def put(position: int, text: str) -> None:
        new = text.split()
        words[position : position + len(new)] = new

    last = length - 8  # of the positions of evidence
    at = {"beginning": rng.randrange(16), "middle": length // 2 + rng.randrange(16), "anywhere": rng.randrange(last)}
    if task == "order":
        first, second = rng.sample(EVENTS, 2)
        put(at[place] // 2, first)
        put(at[place] // 2 + 2 + rng.randrange(max(1, min(length // 4, last - at[place] // 2 - 4))), second)
        return " ".join(words), first.split()[0]
    label = rng.choice(NAMES)
    if task == "source":
        for position in rng.sample(range(16, last), 6):
            put(position, rng.choice(NAMES))
    put(at[place], f"{'courier' if task == 'name' else 'reported by'} {label}")
    return " ".join(words), label


def documents(
    filler: list[str], settings: Settings, number: int, lengths: tuple[int, ...], place: str, seed: int
) -> tuple[list[str], list[str]]:
    """Return documents and their labels."""
    rng = random.Random(f"{settings.task} {place} {lengths} {seed}")
    planted = [plant(filler, rng.choice(lengths), settings.task, place, rng) for _ in range(number)]
    return [text for text, _ in planted], [label for _, label in planted]


def train(settings: Settings, folder: Path) -> Path:
    """Train the language model (once for all tasks of a seed) and the classifier; return the latter's folder."""
    filler, start = filler_words(), time.perf_counter()
    base = folder / f"base-{settings.seed}"
    if not base.exists():
        texts = [
            text
            for task in ("name", "source", "order")
            for text in documents(filler, Settings(task=task), 150, settings.train_lengths, "anywhere", settings.seed)[
                0
            ]
        ]
        corpus = txl.prepare(out=folder / f"corpus-{settings.seed}", documents=texts, tokenizer="word")
        model = txl.TransformerXLConfig(
            n_layers=2, d_model=64, n_heads=4, d_head=16, d_ff=128, dropout=0.0, clamp_length=256
        )
        lengths = {"segment_length": settings.segment_length, "memory_length": settings.segment_length}
        steps = {"max_steps": settings.base_steps, "warmup_steps": 50, "learning_rate": 2e-3, "optimizer": "adam"}
        options = txl.TrainConfig(**lengths, **steps, batch_size=16, seed=settings.seed, eval_interval=100)
        txl.train(txl.RunConfig(model=model, train=options), corpus, base, progress=False)
    path = folder / settings.folder
    train_texts = documents(filler, settings, settings.num_documents, settings.train_lengths, "anywhere", settings.seed)
    valid_texts = documents(filler, settings, 96, settings.train_lengths, "anywhere", settings.seed + 1000)
    txl.finetune_classifier(
        base,
        *train_texts,
        path,
        valid=valid_texts,
        loss_segments=settings.loss_segments,
        pooling=settings.pooling,
        train={
            "memory_length": settings.memory_length,
            "batch_size": settings.batch_size,
            "max_steps": settings.max_steps,
            "warmup_steps": min(50, settings.max_steps),
            "learning_rate": 2e-3,
            "eval_interval": 50,
            "checkpoint_interval": 100,
            "seed": settings.seed,
        },
        progress=False,
    )
    for one in txl.load_classifier(path).record.validations:
        print(f"{path.name}: step {one.step}, valid loss {one.loss:.3f}, accuracy {one.accuracy:.3f}", flush=True)
    print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)
    return path


def sweep(settings: Settings, folder: Path) -> Path:
    """Measure the accuracy by document length, place of the evidence and memory length; return the CSV file."""
    classifier, filler = txl.load_classifier(folder / settings.folder), filler_words()
    out = folder / f"{settings.folder}{settings.part}.csv"
    with out.open("w", newline="") as stream:
        columns = ["task", "seed", "place", "length", "read", "memory_length", "documents", "accuracy", "seconds"]
        writer = csv.writer(stream)
        writer.writerow(columns)
        for length in settings.lengths:
            number = min(settings.max_documents, max(settings.min_documents, settings.num_words // length))
            for place in settings.places:
                texts, labels = documents(filler, settings, number, (length,), place, seed=10_000)
                cells = [(length, memory) for memory in settings.memory_lengths if memory <= length]
                if place == "anywhere":  # only the end of the document is read, with all of it in memory
                    cells += [(read, read) for read in settings.lengths if read < length]
                for read, memory in cells:
                    start = time.perf_counter()
                    ends = [" ".join(text.split()[-read:]) for text in texts]
                    result = txl.classify(classifier, ends, labels, memory_length=memory)
                    seconds = time.perf_counter() - start
                    row = [settings.task, settings.seed, place, length, read, memory, number, result.accuracy]
                    writer.writerow([*row, round(seconds, 2)])
                    stream.flush()
    return out


def plot(paths: list[Path], out: Path) -> None:
    """Draw the mean accuracy over seeds by memory length, a panel for each place, and print it as a table."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for path in sorted(paths) for row in csv.DictReader(path.read_text().splitlines())]
    whole = [row for row in rows if row["read"] == row["length"]]
    cut = [row | {"place": "only the end is read", "memory_length": row["read"]} for row in rows if row not in whole]
    places = list(dict.fromkeys(row["place"] for row in whole + cut))
    figure = Figure(figsize=(0.8 + 2.7 * len(places), 3.7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(places), sharey=True, squeeze=False)[0]
    lengths = sorted({int(row["length"]) for row in rows})
    colours, styles = ("#56b4e9", "#0072b2", "#009e73", "#e69f00", "#d55e00"), ("-o", "--s", "-.^", ":D", "-v")
    print("| evidence | words | memory length or words read | accuracy by seed | mean |\n|---|---|---|---|---|")
    for axes, place in zip(panels, places, strict=True):
        here = [row for row in whole + cut if row["place"] == place]
        for length, colour, style in zip(lengths, colours, styles, strict=False):
            of_length = [row for row in here if int(row["length"]) == length]
            xs, ys = sorted({int(row["memory_length"]) for row in of_length}), []
            for x in xs:
                accuracies = [float(row["accuracy"]) for row in of_length if int(row["memory_length"]) == x]
                ys.append(sum(accuracies) / len(accuracies))
                by_seed = ", ".join(f"{one:.2f}" for one in accuracies)
                print(f"| {place} | {length:,} | {x:,} | {by_seed} | {ys[-1]:.3f} |")
                axes.vlines(max(x, 32), min(accuracies), max(accuracies), color=colour, alpha=0.4, linewidth=3)
            axes.plot([max(x, 32) for x in xs], ys, style, color=colour, markersize=4, label=f"{length:,} words")
        x_label = "words read" if place.startswith("only") else "memory length (words)"
        axes.set(title=place, xlabel=x_label, ylim=(0, 1.03))
        axes.set_xscale("log", base=2)
        ticks = [32, 128, 512, 2048, 8192, 32768]
        axes.set_xticks(ticks, ["0", "128", "512", "2k", "8k", "32k"])
        axes.grid(visible=True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accuracy")
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, ncols=5, loc="outside lower center")
    figure.savefig(out, dpi=130, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    for name, text in (("train", "train a classifier"), ("sweep", "classify documents with many memory lengths")):
        one = commands.add_parser(name, help=text)
        one.add_argument("folder", type=Path)
        one.add_argument("--task", choices=("name", "source", "order"), default="name")
        for setting, value in asdict(Settings()).items():
            if isinstance(value, int | str) and setting != "task":
                one.add_argument(f"--{setting.replace('_', '-')}", type=type(value), default=value)
            elif isinstance(value, tuple):
                kind = type(value[0])
                one.add_argument(f"--{setting.replace('_', '-')}", type=kind, nargs="+", default=value)
    drawing = commands.add_parser("plot", help="draw the results of sweeps")
    drawing.add_argument("results", type=Path, nargs="+")
    drawing.add_argument("--out", type=Path, default=Path("planted-evidence.svg"))
    arguments = vars(parser.parse_args())
    command = arguments.pop("command")
    if command == "plot":
        plot(arguments["results"], arguments["out"])
        return
    folder = arguments.pop("folder")
    settings = Settings(**{key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()})
    (train if command == "train" else sweep)(settings, folder)


if __name__ == "__main__":
    main()
