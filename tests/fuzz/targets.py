"""What reads bytes from elsewhere, each as a function of bytes that may raise a UserError, and nothing else.

A target gets past checksums, magic numbers and lengths: its bytes are what is inside of them, and it writes a file with
the right ones around them. Its seeds are made by the writers of this package and of the tests.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import math
import pickle
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from fuzz import mutations
from fuzz.mutations import Mutation
from integrations.checkpoints.checkpoints import FIXTURES, golden, hub_folder, hugging_face_folder
from integrations.checkpoints.old_modules import OldConfig, nvidia_checkpoint, old_corpus, old_model, old_modules
from library_tokenizers import byte_level, prefix_space, unigram, word_piece
from small_runs import make_run

from transformer_xl import evaluate, prepare, tensor_file
from transformer_xl.config import UserError, load_recipe
from transformer_xl.files import json_digest
from transformer_xl.integrations.checkpoints import huggingface, nvidia, official, tensorflow
from transformer_xl.integrations.checkpoints.tensor_bundle import _MAGIC, _block_entries, _masked, _varint, crc32c
from transformer_xl.integrations.checkpoints.tokenizers import read_tokenizer
from transformer_xl.run_folder import RunFolder
from transformer_xl.tensor_file import load_tensors, read_shapes, save_tensors
from transformer_xl.text.token_store import Corpus
from transformer_xl.text.tokenizers import load_tokenizer, save_tokenizer

TESTS, CORPUS = Path(__file__).parents[1], Path(__file__).parent / "corpus"
Check = Callable[[bytes], object]
Prepared = tuple[list[bytes], Check]
WORDS = ["<eos>", "the", ",", ".", "of", "and", "in", "<unk>", *(f"word{number}" for number in range(15))]
TEXT = b"the cat, and\nword1 word2.\n" * 9


@dataclass(frozen=True)
class Target:
    """A reader of foreign bytes."""

    name: str
    prepare: Callable[[Path], Prepared]
    """Makes what it needs in an empty folder; returns its seeds, and the function that reads bytes."""
    mutate: Mutation


TARGETS: dict[str, Target] = {}
OPENED = contextlib.ExitStack()
"""What the prepared targets hold, to be closed after them."""


def target(mutate: Mutation) -> Callable[[Callable[[Path], Prepared]], None]:
    """Add a target, of the name of the function."""

    def add(function: Callable[[Path], Prepared]) -> None:
        TARGETS[function.__name__] = Target(function.__name__, function, mutate)

    return add


def survive(check: Check, content: bytes) -> object:
    """Read bytes, and return the error that a user can correct, or what the reader returns."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return check(content)
    except UserError as error:
        return error


def reader_of(path: Path, read: Callable[[], object]) -> Check:
    """Return the function that writes bytes to a file and then reads it."""

    def check(content: bytes) -> None:
        path.write_bytes(content)
        read()

    return check


def kept_inputs(name: str) -> list[bytes]:
    """Return the inputs of a target that `run.py --keep` chose, or that once failed: a line in base64 for each."""
    file = CORPUS / f"{name}.txt"
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [zlib.decompress(base64.b64decode(line)) for line in lines]


# ---- checkpoints of other programs


def archive(pickled: bytes, storages: dict[str, bytes]) -> bytes:
    """Return an archive of torch.save with this pickle."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("a/data.pkl", pickled)
        file.writestr("a/byteorder", "little")
        for key, elements in storages.items():
            file.writestr(f"a/data/{key}", elements)
    return content.getvalue()


def members(saved: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return the pickle and the storages of an archive of torch.save."""
    with zipfile.ZipFile(io.BytesIO(saved)) as file:
        contents = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    storages = {name.removeprefix("data/"): part for name, part in contents.items() if name.startswith("data/")}
    return contents["data.pkl"], storages


def saved(make: Callable[[], object], **options: Any) -> bytes:
    """Return what torch.save writes of a value."""
    content = io.BytesIO()
    with old_modules():
        torch.save(make(), content, **options)
    return content.getvalue()


@target(mutations.of_pickle)
def official_pickle(folder: Path) -> Prepared:
    """The pickle in model.pt of the authors' code."""
    pickled, storages = members(saved(lambda: old_model(OldConfig(n_layer=1))))
    read = reader_of(folder / "model.pt", lambda: official.read(folder))
    return [pickled], lambda content: read(archive(content, storages))


@target(mutations.of_pickle)
def nvidia_pickle(folder: Path) -> Prepared:
    """The pickle in checkpoint_best.pt of NVIDIA's code."""

    def checkpoint() -> dict[str, Any]:
        values = nvidia_checkpoint(OldConfig(n_layer=1), old_model(OldConfig(nvidia=True, n_layer=1)), WORDS)
        return {name: value for name, value in values.items() if name not in ("optimizer_state", "scheduler_state")}

    pickled, storages = members(saved(checkpoint))
    read = reader_of(folder / "checkpoint_best.pt", lambda: nvidia.read(folder))
    return [pickled], lambda content: read(archive(content, storages))


@target(mutations.of_bytes)
def torch_file(folder: Path) -> Prepared:
    """A whole file of torch.save in both forms, without checksums."""
    hub = hub_folder(folder / "hub", "vocab.bin")
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16), "c": torch.zeros(0)}
    archived = bytearray(saved(lambda: weights))
    with zipfile.ZipFile(io.BytesIO(archived)) as file:
        infos = file.infolist()
    for info in infos:  # the checksum is 0 in both headers, as where torch leaves it out
        crc = info.CRC.to_bytes(4, "little")
        archived = bytearray(bytes(archived).replace(crc, bytes(4))) if info.CRC else archived
    seeds = [bytes(archived), saved(lambda: weights, _use_new_zipfile_serialization=False)]
    return seeds, reader_of(hub / "pytorch_model.bin", lambda: huggingface._read_weights(hub / "pytorch_model.bin"))


@target(mutations.of_pickle)
def pickled_vocabulary(folder: Path) -> Prepared:
    """A vocabulary or corpus as a plain pickle."""
    hub_folder(folder / "hub", "vocab.pkl")
    with old_modules():
        corpus = pickle.dumps(old_corpus(WORDS), 2)
    seeds = [(folder / "hub" / "vocab.pkl").read_bytes(), corpus.replace(b"cutils.vocabulary\n", b"cvocabulary\n")]
    seeds += [pickle.dumps({"idx2sym": WORDS[:3], "sym2idx": {"a": 1}}, protocol) for protocol in (0, 4)]
    file = folder / "vocab.pkl"
    return seeds, reader_of(file, lambda: read_tokenizer(file))


@target(mutations.of_json)
def vocabulary_json(folder: Path) -> Prepared:
    """vocab.json of a checkpoint."""
    file = folder / "vocab.json"
    seeds = [json.dumps(WORDS).encode(), json.dumps({word: i for i, word in enumerate(WORDS)}).encode()]
    seeds += [b'{"idx2sym": ["a", "_", "b"], "lower_case": true}', b'{"sym2idx": {"a": 0, "b": 1}}']
    return seeds, reader_of(file, lambda: read_tokenizer(file))


@target(mutations.of_json)
def huggingface_config(folder: Path) -> Prepared:
    """config.json of a TransfoXL folder."""
    config, weights, _ = golden("tied-biases")
    hub = hugging_face_folder(folder / "hub", config, weights)
    return [json.dumps(config).encode()], reader_of(hub / "config.json", lambda: huggingface.read(hub))


@target(mutations.of_json)
def pretrained_config(folder: Path) -> Prepared:
    """config.json of a folder for transformers 5."""
    from transformer_xl.integrations.checkpoints import pretrained

    run = make_run(folder / "run")
    pretrained.write(folder / "hub", run.config, run.model.state_dict(), run.tokenizer)
    file = folder / "hub" / "config.json"
    return [file.read_bytes()], reader_of(file, lambda: huggingface.read(file.parent))


@target(mutations.of_json)
def weight_index(folder: Path) -> Prepared:
    """model.safetensors.index.json, which lists the files of the weights."""
    config, weights, _ = golden("tied-biases")
    hub = hugging_face_folder(folder / "hub", config, weights)
    (hub / "model.safetensors").rename(hub / "part.safetensors")
    file = hub / "model.safetensors.index.json"
    seed = {"metadata": {}, "weight_map": dict.fromkeys(list(weights)[:4], "part.safetensors")}
    return [json.dumps(seed).encode()], reader_of(file, lambda: huggingface._read_weights(file))


@target(mutations.of_bytes)
def tensor_bundle(folder: Path) -> Prepared:
    """A block of the index of a TensorFlow checkpoint, with the right checksum."""
    source = FIXTURES.parent / "golden" / "tensorflow" / "words"
    shutil.copytree(source, folder / "checkpoint")
    index = folder / "checkpoint" / "model.ckpt-17.index"
    content = index.read_bytes()
    position = len(content) - 48
    for _ in range(2):
        position, offset = _varint(content, position)
        position, size = _varint(content, position)
    seeds = []
    for _, handle in _block_entries(content, offset, size):
        middle, start = _varint(handle, 0)
        seeds.append(content[start : start + _varint(handle, middle)[1]])
    read = reader_of(index, lambda: tensorflow.read(index.parent))
    return seeds, lambda block: read(table(block))


def table(block: bytes) -> bytes:
    """Return an index of one block."""
    empty = struct.pack("<II", 0, 1)
    handle = bytes([0]) + _as_varint(len(block))
    blocks = [block, empty, bytes([0, 1, len(handle), 0]) + handle + empty]
    content, handles = b"", list[bytes]()
    for one in blocks:
        handles.append(_as_varint(len(content)) + _as_varint(len(one)))
        checksum = _masked(crc32c(np.frombuffer(one + b"\0", np.uint8)))
        content += one + b"\0" + struct.pack("<I", checksum)
    return content + b"".join(handles[1:]).ljust(40, b"\0") + struct.pack("<Q", _MAGIC)


def _as_varint(value: int) -> bytes:
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _as_varint(rest) if rest else bytes([low])


# ---- safetensors


def framed(header: bytes, data: bytes) -> bytes:
    """Return a safetensors file of a header and the values of the tensors."""
    return struct.pack("<Q", len(header)) + header + data


def parts(content: bytes) -> tuple[bytes, bytes]:
    """Return the header and the values of a safetensors file."""
    length = struct.unpack_from("<Q", content)[0]
    return content[8 : 8 + length].rstrip(), content[8 + length :]


def sealed(header: bytes, data: bytes) -> bytes:
    """Return a safetensors file with the checksum of `tensor_file.py`, if the header can have one."""
    with contextlib.suppress(Exception):
        values = json.loads(header)
        entry = json.loads(values["__metadata__"]["transformer_xl"])
        entry.pop("sha256", None)
        tensors = safetensors.torch.load(framed(header, data))
        digest = tensor_file._digest(tensors, {name: str(value) for name, value in entry.items()})
        values["__metadata__"]["transformer_xl"] = json.dumps({**entry, "sha256": digest})
        header = json.dumps(values).encode()
    return framed(header, data)


def unsealed(content: bytes, nested: str = "") -> tuple[bytes, bytes]:
    """Return the header of a file of `save_tensors` in a form that is easily changed, and the values."""
    header, data = parts(content)
    values = json.loads(header)
    entry = json.loads(values["__metadata__"]["transformer_xl"])
    entry.pop("sha256")
    if nested:
        entry[nested] = json.loads(entry[nested])
    values["__metadata__"]["transformer_xl"] = entry
    return json.dumps(values).encode(), data


def sealer(data: bytes, nested: str = "") -> Callable[[bytes], bytes]:
    """Return the function that makes a file of a header of `unsealed`."""

    def seal(header: bytes) -> bytes:
        with contextlib.suppress(Exception):
            values = json.loads(header)
            entry = values["__metadata__"]["transformer_xl"]
            if nested:
                entry[nested] = json.dumps(entry[nested])
            values["__metadata__"]["transformer_xl"] = json.dumps(entry)
            header = json.dumps(values).encode()
        return sealed(header, data)

    return seal


@target(mutations.of_json)
def safetensors_header(folder: Path) -> Prepared:
    """The header of a file of weights."""
    file = folder / "a.safetensors"
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.zeros(0)}
    save_tensors(file, tensors, {"step": "3"})
    header, data = unsealed(file.read_bytes())
    seal = sealer(data)

    def read() -> None:
        read_shapes(file)
        load_tensors(file)

    check = reader_of(file, read)
    wide = header.replace(b'"F32"', b'"F8_E4M3"').replace(b'"BF16"', b'"C64"')
    return [header, wide, parts(file.read_bytes())[0]], lambda content: check(seal(content))


@target(mutations.of_json)
def foreign_safetensors(folder: Path) -> Prepared:
    """The header of a safetensors file of another program."""
    config, weights, _ = golden("tied-biases")
    hub = hugging_face_folder(folder / "hub", config, dict(list(weights.items())[:3]))
    header, data = parts((hub / "model.safetensors").read_bytes())
    check = reader_of(hub / "model.safetensors", lambda: huggingface._read_weights(hub / "model.safetensors"))
    return [header], lambda content: check(framed(content, data))


@target(mutations.of_json)
def best_weights(folder: Path) -> Prepared:
    """The header of model.safetensors of a run: step, loss, and losses at memory lengths."""
    path = folder / "run"
    make_run(path)
    lengths = {"chosen": 3, "nats_per_token": {"3": 1.5, "5": 2.0}, "num_tokens": 9, "segment_length": 7,
               "attention_window": None, "clamp_length": None}  # fmt: skip
    tensors, metadata = load_tensors(path / "model.safetensors")
    metadata |= {"memory_lengths": json.dumps(lengths), "nats_per_token": "1.25", "step": "12"}
    save_tensors(path / "model.safetensors", tensors, metadata)
    header, data = unsealed((path / "model.safetensors").read_bytes(), "memory_lengths")
    run, seal = RunFolder.open(path), sealer(data, "memory_lengths")

    def read() -> None:
        chosen = run.choose_weights()
        assert chosen.as_dict()
        chosen.lines()
        run.best_known()

    check = reader_of(path / "model.safetensors", read)
    return [header], lambda content: check(seal(content))


# ---- runs and corpora


def show(path: Path) -> None:
    """Do what `txl info` does."""
    from transformer_xl.cli.info import _folder_facts, _rows
    from transformer_xl.cli.output import print_json

    facts = _folder_facts(path, False, torch.device("cpu"))
    print_json(facts)
    assert _rows(facts)


def use_run(path: Path) -> None:
    """Do what `txl info` does, and load the weights."""
    from transformer_xl import load

    show(path)
    run = load(path, device="cpu")
    assert run.weights is None or run.weights.lines() is not None


@target(mutations.of_yaml)
def config_yaml(folder: Path) -> Prepared:
    """config.yaml of a run."""
    path = folder / "run"
    make_run(path, evaluation={"memory_length": 5})
    file = path / "config.yaml"
    adapter = TESTS / "earlier" / "0.1.0" / "adapter" / "config.yaml"
    return [file.read_bytes(), adapter.read_bytes()], reader_of(file, lambda: use_run(path))


@target(mutations.of_yaml)
def recipe_yaml(folder: Path) -> Prepared:
    """A recipe."""
    file = folder / "a.yaml"
    seeds = [b"title: a\nmodel: {n_layers: 1, d_model: 8, n_heads: 2, cutoffs: [5, 9]}\ntrain:\n  max_steps: 1e3\n"]
    return seeds, reader_of(file, lambda: load_recipe(str(file)))


@target(mutations.of_json)
def training_json(folder: Path) -> Prepared:
    """The record of a checkpoint, with the right checksum."""
    path = folder / "run"
    shutil.copytree(TESTS / "earlier" / "0.1.0" / "resumable", path)
    file, settings = min((path / "checkpoints").iterdir()) / "training.json", path / "config.yaml"
    settings.write_text(settings.read_text().replace("weight_average: ema", "weight_average: none"))
    values = json.loads(file.read_bytes())
    values["config"]["train"]["weight_average"] = "none"  # with an average, the loss of the checkpoint is not used
    del values["sha256"]
    write = reader_of(file, lambda: None)

    def check(content: bytes) -> None:
        with contextlib.suppress(Exception):
            values = json.loads(content)
            content = json.dumps({**values, "sha256": json_digest(values)}).encode()
        write(content)
        chosen = RunFolder.open(path).choose_weights("last")
        chosen.lines()
        json.dumps(chosen.as_dict())
        use_run(path)
        RunFolder.open(path).verify()

    return [json.dumps(values).encode()], check


@target(mutations.of_json)
def training_header(folder: Path) -> Prepared:
    """The header of what torch's distributed checkpoint wrote of a training, in a checkpoint."""
    from transformer_xl.training.checkpoint import _read, _read_shapes, _write
    from transformer_xl.training.distributed import DistributedContext

    names = ["a/momentum", "memory/valid", "random"]
    tensors = dict(zip(names, (torch.ones(2, 3), torch.tensor([3, 3]), torch.zeros(5, dtype=torch.uint8)), strict=True))
    _write(tensors, folder / "training", DistributedContext())
    (file,) = (folder / "training").iterdir()
    header, data = parts(file.read_bytes())

    def read() -> None:
        saved = _read_shapes(folder / "training")
        if all(name in saved and saved[name].size == tensor.shape for name, tensor in tensors.items()):
            _read({name: tensor.clone() for name, tensor in tensors.items()}, folder / "training", DistributedContext())

    check = reader_of(file, read)
    return [header], lambda content: check(framed(content, data))


@target(mutations.of_json)
def metrics_jsonl(folder: Path) -> Prepared:
    """metrics.jsonl and starts.jsonl of a run."""
    path = folder / "run"
    make_run(path)
    line = {"split": "train", "step": 3, "nats_per_token": 1.5, "tokens_per_second": 9.0}
    start = {"date": "2026-01-01T00:00:00+00:00", "step": 0, "command": "txl train", "processes": 1, "cores": [1, {}]}
    seeds = [json.dumps(line).encode() + b"\n" + json.dumps({**line, "split": "valid"}).encode() + b"\n"]
    seeds.append(json.dumps(start).encode() + b"\n")

    def check(content: bytes) -> None:
        for name, other in (("metrics.jsonl", "starts.jsonl"), ("starts.jsonl", "metrics.jsonl")):
            (path / name).write_bytes(content)
            (path / other).unlink(missing_ok=True)
            with contextlib.suppress(UserError):
                show(path)

    return seeds, check


def small_corpus(folder: Path, tokenizer: str = "byte") -> Path:
    """Make a corpus of several documents."""
    prepare(
        out=folder, documents={"train": [TEXT.decode()] * 2, "test": ["the cat", "word1 the\n"]}, tokenizer=tokenizer
    )
    return folder


@target(mutations.of_json)
def corpus_json(folder: Path) -> Prepared:
    """corpus.json, with the right checksum."""
    path = small_corpus(folder / "corpus")
    file = path / "corpus.json"
    values = json.loads(file.read_bytes())
    values.pop("sha256", None)
    write = reader_of(file, lambda: None)

    def check(content: bytes) -> None:
        with contextlib.suppress(Exception):
            values = json.loads(content)
            content = json.dumps({**values, "sha256": json_digest(values)}).encode()
        write(content)
        show(path)
        corpus = Corpus.open(path)
        for split in corpus.splits:
            corpus.split(split, verify=True)

    return [json.dumps(values).encode()], check


@target(mutations.of_bytes)
def corpus_splits(folder: Path) -> Prepared:
    """The starts of documents and the tokens of a split, with the right checksums; a byte says which."""
    path = small_corpus(folder / "corpus", "word")
    run = make_run(folder / "run", tokenizer=load_tokenizer(path))
    record = json.loads((path / "corpus.json").read_bytes())
    record.pop("sha256", None)
    files = [path / "test.documents", path / "test-00000.tokens"]
    seeds = [bytes([index]) + file.read_bytes() for index, file in enumerate(files)]

    def check(content: bytes) -> None:
        index = content[0] % 2 if content else 0
        contents = [seed[1:] for seed in seeds]
        contents[index] = content[1:]
        for file, part in zip(files, contents, strict=True):
            file.write_bytes(part)
        starts, tokens = contents
        split = {**record["splits"]["test"], "documents_sha256": sha256(starts).hexdigest(),
                 "sha256": sha256(tokens).hexdigest(), "num_documents": len(starts) // 8,
                 "num_tokens": len(tokens), "shard_lengths": [len(tokens)]}  # fmt: skip
        values = {**record, "splits": {**record["splits"], "test": split}}
        (path / "corpus.json").write_text(json.dumps({**values, "sha256": json_digest(values)}))
        result = evaluate(run, Corpus.open(path).split("test"), reset_memory=True, batch_size=2)
        assert math.isfinite(result.nats_per_token)

    return seeds, check


# ---- tokenizers and texts


@target(mutations.of_json)
def tokenizer_json(folder: Path) -> Prepared:
    """txl_tokenizer.json of every kind, and tokenizer.json of the library tokenizers."""
    texts, seeds = [TEXT.decode()], list[bytes]()
    for kind in ("byte", "char", "word", "bpe", "integer"):
        options = {"vocab_size": 257} if kind == "bpe" else {}
        documents = {"train": ["1 2 3\n"] if kind == "integer" else texts}
        prepare(out=folder / kind, documents=documents, tokenizer=kind, **options)
        seeds.append((folder / kind / "txl_tokenizer.json").read_bytes())
        if kind == "bpe":
            seeds.append(json.dumps(json.loads(seeds[-1])["tokenizer"]).encode())
    seeds += [json.dumps(values()).encode() for values in (byte_level, prefix_space, unigram, word_piece)]
    seeds.append(b'{"kind": "integer", "num_values": 2, "midi": {"settings": {"a": 1}, "tokens": ["x", "y"]}}')
    file = folder / "a.json"

    def read() -> None:
        tokenizer = load_tokenizer(file)
        save_tokenizer(tokenizer, folder / "b.json")
        with contextlib.suppress(UserError):
            ids = tokenizer.encode(TEXT)
            tokenizer.decode(ids)
            tokenizer.word_indices(TEXT)
            tokenizer.unknown_words(TEXT)
        assert 0 <= tokenizer.bos_token_id < tokenizer.vocab_size
        assert len(tokenizer.is_newline_V) == tokenizer.vocab_size

    return seeds, reader_of(file, read)


@target(mutations.of_json)
def experiment_items(folder: Path) -> Prepared:
    """CSV, TSV, JSON, JSON lines and text of `txl score --per word`; a byte says which."""
    from transformer_xl.apps.surprisal.surprisal import surprisal
    from transformer_xl.text.sources.items import ItemColumns, read_items

    run, kinds = make_run(folder / "run"), ("text", "csv", "tsv", "jsonl", "json")
    columns = ItemColumns("text", ("item", "condition"), "story")
    rows = [b"item,condition,story,text", b'1,a,x,"The dog, ran."', b'2,b,y,"It\n""barked"""']
    objects = [{"item": 1, "condition": "a", "story": "x", "text": "The dog."}, {"item": 2, "condition": "a",
                "story": 5, "text": "It \ud83d barked"}]  # fmt: skip
    seeds = [b"2The dog ran.\nIt barked.\n", b"3" + b"\r\n".join(rows), b"4" + b"\n".join(rows).replace(b",", b"\t")]
    seeds += [b"5" + b"\n".join(json.dumps(row).encode() for row in objects), b"6" + json.dumps(objects).encode()]

    def check(content: bytes) -> None:
        kind = kinds[content[0] % 5 if content else 0]
        items = read_items("items", content[1:], kind, columns)
        if sum(len(item.text) for item in items) < 2000:
            surprisal(run, items, whitespace="trailing").to_csv()

    return seeds, check


@target(mutations.of_json)
def classifier_json(folder: Path) -> Prepared:
    """classifier.json of a classifier's folder."""
    from transformer_xl.apps.classify.classifier import ClassifierRecord, read_record

    validations = [{"step": step, "train_loss": 1.5, "loss": 0.25 * step, "accuracy": 1.0} for step in (2, 4)]
    record = ClassifierRecord(labels=("a", "b"), num_train=3, num_valid=2, validations=validations)
    file = folder / "classifier.json"
    return [record.model_dump_json().encode()], reader_of(file, lambda: read_record(folder).best)


@target(mutations.of_bytes)
def reading_time_tables(folder: Path) -> Prepared:
    """Tables of reading times and of word frequencies; a byte says which, and how numbers and words are read."""
    from transformer_xl import ReadingTimeSweep, TableLayout, fit_reading_times, read_reading_times, read_word_counts
    from transformer_xl.text.sources.items import TextItem

    run, texts = make_run(folder / "run"), [TextItem({"item": 1}, "The dog, ran away."), TextItem({"item": "b"}, "No.")]
    words = list(enumerate(texts[0].text.split(), start=1))
    rows = [f'r{reader},1,{number},"{word}",{300 + 7 * number}' for reader in range(40) for number, word in words]
    table = "\n".join(["reader,item,word_number,word,time", *rows, "r1,b,1,No.,NA", "r2,b,1.0,No.,0"]).encode()
    seeds = [b"0" + table, b"1" + table.replace(b",", b";").replace(b'"dog;"', b"dog,"), b"2word,count\nThe,3\ndog,4\n"]
    layouts = [TableLayout(), TableLayout(decimal="comma", match="letters", quotes=False, first_word_number=1)]

    def check(content: bytes) -> None:
        kind = content[0] % 3 if content else 0
        if kind == 2:
            read_word_counts("counts", content[1:])
            return
        for given in (None, texts):
            times = read_reading_times("table", content[1:], layouts[kind], given)
        if sum(map(len, times.texts.values())) < 50:
            fit_reading_times(run, times, {"the": 3}, ReadingTimeSweep(memory_lengths=(2,))).to_csv()

    return seeds, check


@target(mutations.of_json)
def minimal_pair_files(folder: Path) -> Prepared:
    """JSON lines of `txl minimal-pairs`."""
    from transformer_xl import minimal_pairs, read_minimal_pairs

    run = make_run(folder / "run")
    pairs = [{"sentence_good": "The dog ran.", "sentence_bad": "The dog run.", "UID": "a", "field": 5, "before": "So"},
             {"sentence_good": "\ud83d", "sentence_bad": "No", "before": ""}]  # fmt: skip
    seeds = ["\n".join(map(json.dumps, part)).encode() for part in (pairs[:1], pairs)]

    def check(content: bytes) -> None:
        pairs = read_minimal_pairs("pairs", content, context_field="before")
        if sum(len(pair.good + pair.bad + pair.context) for pair in pairs) < 500:
            scores = minimal_pairs(run, pairs, context="It.")
            scores.accuracies()
            scores.to_csv()

    return seeds, check


@target(mutations.of_bytes)
def text_sources(folder: Path) -> Prepared:
    """Texts and arrays that `txl prepare` reads, by the suffix: a byte says which."""
    import bz2
    import gzip
    import lzma

    array, rows = io.BytesIO(), io.BytesIO()
    np.save(array, np.arange(9))
    np.save(rows, np.arange(6, dtype=np.uint8).reshape(2, 3))
    contents = {".txt": TEXT[:60], ".gz": gzip.compress(TEXT), ".bz2": bz2.compress(TEXT), ".xz": lzma.compress(TEXT),
                ".npy": array.getvalue(), ".numbers": b"1 2 3\n4 5\n"}  # fmt: skip
    suffixes = list(contents)
    seeds = [bytes([index]) + content for index, content in enumerate(contents.values())]
    seeds.append(bytes([4]) + rows.getvalue())

    def check(content: bytes) -> None:
        suffix = suffixes[content[0] % len(suffixes) if content else 0]
        file = folder / f"a{suffix}"
        file.write_bytes(content[1:])
        for kind in ("integer",) if suffix in (".npy", ".numbers") else ("word", "char"):
            shutil.rmtree(folder / "out", ignore_errors=True)
            prepare(train=file, out=folder / "out", tokenizer=kind)

    return seeds, check


@target(mutations.of_midi)
def midi(folder: Path) -> Prepared:
    """A MIDI file."""
    from melodies import melody

    from transformer_xl.apps.music.midi import MidiCodec, MidiLimits

    codec, file = MidiCodec(limits=MidiLimits(max_seconds=10)), folder / "a.mid"
    OPENED.callback(codec.close)
    return [melody()[:900], melody("frere-jacques")], reader_of(file, lambda: codec.decode(codec.encode_file(file)))


# ---- the server, and streams


class Server:
    """The application of the server in this process, without a socket."""

    def __init__(self, runs: dict[str, Any]) -> None:
        """Serve these runs."""
        from transformer_xl.apps.serve.config import ServerConfig
        from transformer_xl.apps.serve.guard import GuardSettings
        from transformer_xl.apps.serve.requests import RequestRunner
        from transformer_xl.apps.serve.served_model import ServedModel
        from transformer_xl.apps.serve.server import guarded_app

        config = ServerConfig(max_tokens=20, max_prompt_tokens=400, max_batch=4, chat_template="plain", timeout=20.0,
                              session_bytes=2**20)  # fmt: skip
        self.runner = RequestRunner([ServedModel(name, run, config) for name, run in runs.items()], config)
        self._app, self._loop = guarded_app(self.runner, GuardSettings()), asyncio.new_event_loop()
        self.runner.engine.start()
        OPENED.callback(self._loop.close)
        OPENED.callback(lambda: self._loop.run_until_complete(self._loop.shutdown_default_executor()))
        OPENED.callback(self.runner.engine.stop)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        return self._loop.run_until_complete(asyncio.wait_for(self._answer(method, path, body), 20))

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        incoming, done = [{"type": "http.request", "body": body, "more_body": False}], asyncio.Event()
        status, content = 0, b""
        kind = b"application/octet-stream" if path.endswith("import") else b"application/json"
        headers = [(b"host", b"localhost"), (b"content-type", kind), (b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
                 "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers,
                 "client": ("127.0.0.1", 9), "server": ("127.0.0.1", 80), "root_path": ""}  # fmt: skip

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await done.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status, content
            status, content = message.get("status", status), content + message.get("body", b"")
            if message["type"] == "http.response.body" and not message.get("more_body"):
                done.set()

        await self._app(scope, receive, send)
        return status, content


@target(mutations.of_json)
def session_file(folder: Path) -> Prepared:
    """The header of a session's file."""
    from transformer_xl.apps.serve.session_file import read_session

    server, file = Server({"tiny": make_run(folder / "run")}), folder / "a.safetensors"
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 3, "session": "new"}
    session = json.loads(server.answer("POST", "/v1/completions", json.dumps(body).encode())[1])["session"]
    header, data = unsealed(server.answer("GET", f"/v1/sessions/{session}/export", b"")[1], "session")
    models = server.runner.engine.models
    seal, check = sealer(data, "session"), reader_of(file, lambda: read_session(file, models))
    empty = json.loads(header)
    empty["__metadata__"]["transformer_xl"]["session"]["state"] = None
    return [header, json.dumps(empty).encode()], lambda content: check(seal(content))


@target(mutations.of_json)
def stream_state(folder: Path) -> Prepared:
    """The header of the file of `txl watch --state`."""
    from transformer_xl.apps.watch.line_surprisal import LineStream
    from transformer_xl.apps.watch.live import FollowedFile
    from transformer_xl.evaluation.stream import SurprisalStream

    run, log = make_run(folder / "run"), folder / "log"
    log.write_bytes(TEXT)
    source, stream = FollowedFile(log), SurprisalStream(run)
    lines = LineStream(stream)
    next(lines.report(lines.read(source.read(0) or b"") + lines.flush()))
    extra = {"lines": lines.state(), "position": source.position(), "score": "mean", "threshold": 3.5}
    file = folder / "state"
    stream.save(file, extra)
    header, data = unsealed(file.read_bytes(), "stream")
    seal = sealer(data, "stream")

    def read() -> None:
        stream, values = SurprisalStream.load(run, file)
        lines = LineStream(stream, values.get("lines", {}) if values else None)
        source = FollowedFile(log)
        try:
            if isinstance(position := values.get("position"), dict):
                source.begin_at(position)
            for line in [*lines.report(lines.read((source.read(0) or b"")[:300])), *lines.finish()]:
                assert math.isfinite(line.bits_per_token)
            json.dumps({"lines": lines.state(), "position": source.position()})
        finally:
            source.close()

    check = reader_of(file, read)
    return [header], lambda content: check(seal(content))


@target(mutations.of_request)
def http_request(folder: Path) -> Prepared:
    """A line with method and path, and the body: the answer has a status that is no failure of the server."""
    tokenizer = load_tokenizer(small_corpus(folder / "corpus", "word"))
    server = Server({"tiny": make_run(folder / "run"), "words": make_run(folder / "words", tokenizer=tokenizer)})

    def check(content: bytes) -> str:
        head, _, body = content.partition(b"\n")
        method, _, path = head.decode("utf-8", "replace").partition(" ")
        status, reply = server.answer(method, path, body)
        assert status < 500 or status == 507, reply
        assert server.runner.engine.error is None
        return f"{path[:30]} {status} {json.loads(reply)['error']['message'] if status >= 400 else ''}"

    completion = {"model": "tiny", "prompt": "abc", "max_tokens": 3, "seed": 1, "logprobs": 2, "echo": True, "n": 2,
                  "best_of": 2, "stop": ["x", "\n"], "top_p": 0.9, "top_k": 5, "min_p": 0.1, "temperature": 0.7,
                  "memory_length": 3, "stream": False, "user": "u"}  # fmt: skip
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None},
            {"role": "user", "content": [{"type": "text", "text": "b"}]}], "max_tokens": 2, "logprobs": True,
            "top_logprobs": 1, "session": "new", "stop": "q", "metadata": {"a": 1}}  # fmt: skip
    bodies: list[tuple[str, Any]] = [
        ("/v1/completions", completion), ("/v1/chat/completions", chat), ("/tokenize", {"prompt": "the cat"}),
        ("/v1/completions", {"model": "words", "prompt": [[1, 2], [3]], "max_tokens": 2, "stream": True,
                             "stream_options": {"include_usage": True}, "add_special_tokens": False}),
        ("/v1/completions", {"model": "words", "prompt": ["the", "cat"], "max_tokens": 0, "echo": True, "logprobs": 0,
                             "return_tokens_as_token_ids": True, "session": None}),
        ("/detokenize", {"tokens": [1, 2], "model": "words"}),
        ("/attention", {"prompt": [1, 2, 3], "position": 1, "memory_length": 2}),
        ("/v1/sessions", {"model": "tiny", "memory_length": 4}), ("/v1/sessions/import", {}),
    ]  # fmt: skip
    return [f"POST {path}\n{json.dumps(body)}".encode() for path, body in bodies], check
