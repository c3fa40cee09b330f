"""Random command lines, drawn from the tree of commands and flags of `txl`, and random damage to files.

Everything is drawn from a `random.Random`, so that a case follows from its seed and its number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from cyclopts import App, Argument

from transformer_xl.cli.main import build_app


@dataclass(frozen=True)
class Command:
    """A command of `txl` with its parameters."""

    words: tuple[str, ...]
    positional: list[Argument]
    flags: list[Argument]


def commands() -> list[Command]:
    """Return every command that has no further commands below it."""

    def walk(app: App, words: tuple[str, ...]) -> Iterator[Command]:
        below = [name for name in app if not name.startswith("-")]
        for name in below:
            yield from walk(app[name], (*words, name))
        if not below:
            leaves = [argument for argument in app.assemble_argument_collection() if not argument.children]
            yield Command(
                words, [leaf for leaf in leaves if leaf.index is not None], [x for x in leaves if x.index is None]
            )

    return list(walk(build_app(), ()))


# what is in the folder of the cases (see test_random_input.py), by what it is
RUNS = ["run", "words run", "lstm"]
CORPORA = ["corpus", "words"]
TEXTS = ["text.txt", "a b.txt", "text.txt.gz", "latin.txt"]
OTHERS = ["empty.txt", "numbers.txt", "ids.npy", "bad.npy", "binary.bin", "archive.zip", "folder", "link", "words.txt",
          "small.yaml", "list.yaml", "hub", "gone", "gone/deep", "run/config.yaml", "corpus/corpus.json", "", ".", "-",
          "run/model.safetensors", "/dev/null", "\udcff", "x" * 300, "n\u0000l", "line\nbreak", "[bold]"]  # fmt: skip
NEW = ["new", "new", "new", "a new one", "deep/new", "n\u00e9w", "text.txt/new"]
EVERYTHING = RUNS + CORPORA + TEXTS + OTHERS + NEW

# right values of the parameters that name files, and of those whose type is any text
RIGHT: dict[str, list[str]] = {
    "RUN": RUNS, "RUNS": [*RUNS, "a=run", "b=words run"], "FILES": TEXTS, "SOURCES": [*TEXTS, "ids.npy", "*.txt"],
    "FROM": ["hub", "hub", "run"], "TO": NEW, "MODEL": ["run"], "RECIPE": ["small.yaml"], "--recipe": ["small.yaml"],
    "--corpus": ["corpus", "corpus", "words"], "--run": NEW, "--resume": ["run"], "--out": NEW,
    "--train": TEXTS, "--valid": TEXTS, "--test": TEXTS, "--data-dir": ["folder", "text.txt", "archive.zip"],
    "--vocab-file": ["words.txt", "none"], "--token-losses": ["losses.npy"], "--plot": ["p.svg", "p.png", "p.pdf"],
    "--text-file": TEXTS, "--prompt-file": TEXTS, "--prompt": ["the", "a b\n", "\u00fc\u4e2d", "", "\udcff"],
    "--stop": ["e", "\n", ""], "--split": ["train", "valid", "test", "Test"], "--device": ["cpu", "cuda", "mps", ""],
    "--tokenizer": ["byte", "char", "word", "bpe", "integer", "corpus", "words", "run", "words/txl_tokenizer.json"],
    "--sweep-memory-length": ["0,3", "5", "0,a", "3,,5", "-1"], "--sweep-attention-window": ["2,5", "0", "5,5"],
    "--heads": ["0:0", "1:1,0:1", "9:9", "a", "0"], "--seeds": ["1", "1,1", "0", "a"],
    "--attention-windows": ["3,5", "0", "none"], "--segment-lengths": ["3", "0", "3,x"],
    "--model.cutoffs": ["5,20", "auto", "none", "20,5", "0", "5,5", "900"],
    "--model.attn-implementation": ["auto", "sdpa", "cpu", "reference", "triton", "x"],
}  # fmt: skip
INTEGERS = ["1", "2", "3", "5", "7", "8", "16", "24"]
WRONG_INTEGERS = ["0", "-1", "1000000", "2147483647", "2147483648", "9223372036854775808", "1" * 40]
FLOATS = ["0", "0.1", "0.5", "1", "2", "1e-3"]
WRONG_FLOATS = ["-1", "nan", "inf", "-inf", "1e308", "1e-320", "1e999", "1000000"]
WORDS = ["", "abc", "1.5", "1e3", "0x10", " 5", "1_000", "\u0663", "none", "auto", "true", "-", "--", "5,7", "x" * 2000]
TAKES_MINUTES = {"layers", "cudagraphs"}  # they start a C++ compiler
# flags that say how much to do: a large number is no mistake, and takes long; none never ends
WORK = ["--train.max-steps", "--max-new-tokens", "--num-samples", "--num-beams", "--repeats", "--num-positions"]
# flags that keep the work small, unless they are drawn
SMALL: dict[str, dict[str, str]] = {
    "train": {
        "--model.n-layers": "2", "--model.d-model": "14", "--model.n-heads": "2", "--model.d-head": "5",
        "--model.d-ff": "19", "--train.segment-length": "7", "--train.memory-length": "11", "--train.batch-size": "3",
        "--train.max-steps": "3", "--train.warmup-steps": "1", "--train.eval-interval": "2",
    },
    "generate": {"--max-new-tokens": "5"},
    "analyze attention": {"--max-tokens": "30"},
    "analyze context": {"--min-context": "4", "--max-context": "12", "--context-step": "4", "--num-positions": "5"},
    "analyze speed": {"--attention-windows": "3", "--segment-lengths": "5", "--repeats": "1"},
}  # fmt: skip
# commands that take minutes if nothing is wrong, and what is wrong in them
ALWAYS_WRONG = [
    ("--out", "text.txt"),
    ("--recipe", "gone"),
    ("--device", "cpuu"),
    ("--max-tokens", "0"),
    ("--out", "run"),
]


# how often a command is drawn: those with many flags more often
WEIGHTS = {
    "train": 16,
    "evaluate": 12,
    "generate": 12,
    "prepare": 12,
    "convert": 8,
    "score": 6,
    "recipes": 1,
    "reproduce": 1,
}


def _value(draw: random.Random, argument: Argument) -> str:
    """Draw a value of a parameter: often right, often of the right type but out of range, sometimes of another type."""
    kinds = _types(argument.hint)
    choices = [str(choice) for kind in kinds for choice in get_args(kind) if get_origin(kind) is Literal]
    mode = draw.random()
    if mode < 0.05:
        return draw.choice(WORDS)
    if argument.name in RIGHT:
        right = 0.9 if argument.index is not None else 0.75  # with a wrong run, no command gets further
        return draw.choice(RIGHT[argument.name] if mode < right else EVERYTHING)
    if argument.name in WORK:
        return draw.choice(INTEGERS if mode < 0.5 else ["0", "-1", "2147483648"])
    if choices and (mode < 0.6 or not {int, float}.intersection(kinds)):
        return draw.choice([choice for choice in choices if choice not in TAKES_MINUTES])
    if int in kinds:
        return draw.choice(INTEGERS if mode < 0.5 else WRONG_INTEGERS)
    if float in kinds:
        return draw.choice(FLOATS if mode < 0.5 else WRONG_FLOATS)
    return draw.choice(EVERYTHING)


def _types(hint: Any) -> list[Any]:
    """Return the alternatives of a type, in order; the order of a set would change with Python's hash seed."""
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _types(part)]
    if get_origin(hint) in (list, tuple):
        return _types(get_args(hint)[0])
    return [hint]


def draw_command(draw: random.Random, tree: list[Command]) -> list[str]:
    """Draw a command line that is probably wrong, and often only in what its values mean."""
    # train and evaluate have most of the flags
    command = draw.choices(tree, [WEIGHTS.get(one.words[0], 4) for one in tree])[0]
    name = " ".join(command.words)
    flags = {
        flag.name: flag
        for flag in draw.sample(command.flags, min(len(command.flags), draw.choice([0, 1, 1, 2, 2, 3, 5])))
    }
    given: dict[str, str | None] = {}
    for flag in flags.values():
        is_switch = bool in _types(flag.hint)
        given[draw.choice(flag.names) if is_switch else flag.name] = None if is_switch else _value(draw, flag)
    if name == "train" and "--resume" not in given:
        given.setdefault("--corpus", draw.choice(["corpus", "corpus", "corpus", "words", "run", "text.txt"]))
        given.setdefault("--run", "new")
    if "--resume" not in given:
        given = {**SMALL.get(name, {}), **given}
    if command.words[0] in ("reproduce", "demo"):
        names = {flag.name for flag in command.flags}
        given.update([draw.choice([wrong for wrong in ALWAYS_WRONG if wrong[0] in names])])
    if name == "watch":  # a file is followed without an end, and so is a socket
        given["--max-delay"] = "-1"
    words = list(command.words)
    for argument in command.positional:
        is_needed = argument.name not in ("RECIPE", "MODEL", "PATH") or draw.random() < 0.5
        number = draw.choice([1, 1, 1, 2]) if argument.name in ("FILES", "SOURCES", "RUNS") else int(is_needed)
        if draw.random() > 0.03:
            words += [_value(draw, argument) for _ in range(number)]
    for flag_name, value in given.items():
        if value is None:
            words += [flag_name]
        elif draw.random() < 0.5 or value.startswith("-"):
            words += [f"{flag_name}={value}"]
        else:
            words += [flag_name, value]
    oddity = draw.random()
    if oddity < 0.02:
        words += ["surplus"]
    elif oddity < 0.04:
        words[-1] += "x"
    elif oddity < 0.05:
        words += ["--help"]
    return words


def damage(draw: random.Random, content: bytes, *, is_json: bool = False) -> bytes:
    """Return a file's content with random damage."""
    ways = [_truncate, _flip, _flip, _zero, _insert, _swap, _repeat, lambda *_: b""]
    if is_json and draw.random() < 0.6:
        return _change_json(draw, content)
    return draw.choices(ways, [3, 4, 4, 2, 2, 2, 2, 1])[0](draw, content)


def _truncate(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content) + 1)]


def _flip(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 9])):
        if changed:
            # the start of a file has its header
            index = draw.randrange(min(len(changed), draw.choice([64, 10**9])))
            changed[index] ^= 1 << draw.randrange(8) if draw.random() < 0.5 else draw.randrange(1, 256)
    return bytes(changed)


def _zero(draw: random.Random, content: bytes) -> bytes:
    start, length = draw.randrange(len(content) + 1), draw.choice([1, 8, 512, 10**6])
    return content[:start] + bytes(len(content[start : start + length])) + content[start + length :]


def _insert(draw: random.Random, content: bytes) -> bytes:
    start = draw.randrange(len(content) + 1)
    return content[:start] + draw.randbytes(draw.choice([1, 3, 100])) + content[start:]


def _swap(draw: random.Random, content: bytes) -> bytes:
    a, b, c = sorted(draw.randrange(len(content) + 1) for _ in range(3))
    return content[:a] + content[b:c] + content[a:b] + content[c:]


def _repeat(draw: random.Random, content: bytes) -> bytes:
    start, stop = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    return content[:stop] + content[start:]


ODD_JSON: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    0.5,
    2**31,
    2**70,
    1e308,
    float("nan"),
    "",
    "x",
    "1",
    [],
    {},
    [[]],
    {"a": 1},
]


def _change_json(draw: random.Random, content: bytes) -> bytes:
    """Return JSON (or lines of JSON) with one value replaced, removed or added at a random depth."""
    lines = content.splitlines()
    try:
        json.loads(content)
        lines = [content]
    except ValueError:
        pass
    index = draw.randrange(len(lines))
    value = json.loads(lines[index])
    holder, key = {"": value}, ""
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.85:
        holder = holder[key]
        key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
    if draw.random() < 0.15 and key != "":
        del holder[key]
    elif draw.random() < 0.1 and isinstance(holder, dict):
        holder["surplus"] = draw.choice(ODD_JSON)
    else:
        holder[key] = draw.choice(ODD_JSON)
    top = value if key != "" or holder.get("") is value else holder[""]
    lines[index] = json.dumps(top).encode()
    return b"\n".join(lines) + b"\n"
