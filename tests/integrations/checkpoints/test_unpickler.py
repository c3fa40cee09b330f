"""Pickles are read without executing them: plain values equal those of Python's unpickler, calls are only recorded."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import pickletools
import random
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Container
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from transformer_xl.config import UserError
from transformer_xl.integrations.checkpoints import nvidia, official, unpickler
from transformer_xl.integrations.checkpoints.tokenizers import CORPUS_CLASSES, HUGGING_FACE_CLASSES
from transformer_xl.integrations.checkpoints.torch_file import TENSOR_NAMES
from transformer_xl.integrations.checkpoints.unpickler import OPCODES, GlobalName, PickledObject, read_pickle

# Pickles that Python itself would not write are given as opcodes with their arguments (see pickletools). Those that
# occur most: N I S M U X push a value, c and \x93 a class or function by its name, ( a MARK, and ) ] } an empty tuple,
# list and dictionary; t l d make such a container of all values after the MARK, \x85 and \x86 a tuple of one or two
# values; a s u add items; R calls and b sets attributes; q r save to the memo and h reads it; 0 pops and 2 duplicates;
# P Q ask for a value stored outside the pickle; \x80 gives the protocol, and . ends the pickle.

PLAIN: dict[str, Any] = {
    "texts": ["", "caf\u00e9", "\U0001f600 \\ \n ' \"", "x" * 300, "\udc80"],
    "numbers": [0, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**70, -(2**70), 1.5, -0.0, 1e300, True, False, None],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ([],))],
    "nested": {"a": {"b": [{}, [[]]]}, 3: "three", b"t": 2},
    "bytes": [b"", b"abc", bytes(range(256)), b"x" * 300],
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "counter": Counter("abracadabra"),
    "defaultdict": defaultdict(list, {"a": [1]}),
}
PLAIN["same object"] = PLAIN["tuples"]  # pickled as a reference
TOO_MANY = r"^some.pkl has more values than a real checkpoint or vocabulary \(at byte"
DAMAGED = r"^some.pkl is damaged, or not a pickle \(at byte"


class Everything:
    """A container of every name."""

    def __contains__(self, name: object) -> bool:
        return True


def refuse_persistent_id(persistent_id: Any) -> Any:
    """Refuse every value that is stored outside the pickle."""
    raise ValueError(persistent_id)


def read(content: bytes, allowed: Container[str] = ()) -> Any:
    """Read a pickle that may name these classes."""
    return read_pickle(io.BytesIO(content), allowed, "some.pkl", refuse_persistent_id)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_equal_those_of_pickle(protocol: int) -> None:
    result = read(pickle.dumps(PLAIN, protocol))
    assert result == PLAIN
    assert result["same object"] is result["tuples"]
    assert list(result["ordered"]) == ["b", "a"]
    assert [type(number) for number in result["numbers"]] == [type(number) for number in PLAIN["numbers"]]
    python_pickler = pickle._Pickler(buffer := io.BytesIO(), protocol)  # writes no frames, unlike the one in C
    python_pickler.dump(PLAIN)
    assert read(buffer.getvalue()) == PLAIN


def test_all_opcodes_are_supported_except_those_that_reach_outside() -> None:
    known = {opcode.name for opcode in pickletools.opcodes}
    # these refer to copyreg's extension registry, or to buffers outside the pickle
    assert known - OPCODES.keys() == {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
    assert OPCODES.keys() <= known


def test_pickles_of_python_2() -> None:
    """Strings of Python 2 are text if their bytes are UTF-8, else bytes; objects of old-style and new-style classes."""
    assert read(b"(dp0\nS'word'\np1\nI7\nsS'cafe'\nL12L\ns.") == {"word": 7, "cafe": 12}
    strings = read(b"\x80\x02}q\x00(U\x05caf\xc3\xa9q\x01K\x07T\x02\x00\x00\x00\xff\xfeK\x08u.")
    assert strings == {"caf\u00e9": 7, b"\xff\xfe": 8}
    corpus = read(b"(idata_utils\nCorpus\np0\n(dS'name'\nS'wt103'\nsb.", Everything())
    assert (corpus.name, corpus.attributes) == ("data_utils.Corpus", {"name": "wt103"})
    reconstructor = b"ccopy_reg\n_reconstructor\n(cvocabulary\nVocab\nc__builtin__\nobject\nNtR(dS'a'\nI1\nsb."
    vocabulary = read(reconstructor, Everything())
    assert (vocabulary.name, vocabulary.attributes) == ("vocabulary.Vocab", {"a": 1})


class Call:
    """An object whose pickle asks the unpickler to call a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_call_is_recorded_and_not_executed_even_if_every_name_is_allowed(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    recorded = read(pickle.dumps(Call(os.mkdir, str(folder))), Everything())
    assert (recorded.name, recorded.arguments) == (f"{os.name}.mkdir", (str(folder),))
    assert not folder.exists()


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Call(os.system, "true"), f"{os.name}.system"),
        (Call(eval, "1"), "__builtin__.eval|builtins.eval"),
        (Call(getattr, "a", "b"), "__builtin__.getattr|builtins.getattr"),
        (Call(copyreg._reconstructor, Path, object, None), "pathlib.Path"),
        ([{"a": (Path("a"),)}], "pathlib"),
    ],
    ids=["system", "eval", "getattr", "reconstructor", "path"],
)
def test_unexpected_name_is_refused(value: Any, name: str, protocol: int) -> None:
    with pytest.raises(UserError, match=rf"some.pkl names ({name})[\w.]*, which does not belong in a checkpoint"):
        read(pickle.dumps(value, protocol))


@pytest.mark.parametrize(
    "name",
    [
        "transformers.AutoTokenizer", "transformers.models.auto.auto_factory.getattribute_from_module",
        "transformers.utils.import_utils._LazyModule", "transformers.tokenization_utils.Trie.__init__.__globals__",
        "collections.OrderedDict.__init__", "numpy.testing._private.utils.runstring", "torch.serialization.load",
        "torch._utils._rebuild_tensor_v2.__globals__", "sacremoses.os.system", "collections", "os",
        "torch.nn.modules.os.system", "torch.nn.modules.torch.load", "mem_transformer.system",
        "utils.mem_transformer.os", "torch.nn.parameter.torch", "torch.nn.modules:linear.Linear",
        "collections:OrderedDict.get",
    ],
)  # fmt: skip
def test_no_reader_allows_other_names_of_known_modules(name: str) -> None:
    # the pickle pushes module and name as strings, and calls the object of that name; a colon can separate the two
    module, _, last = name.partition(":") if ":" in name else name.rpartition(".")
    stack_global = b"".join(b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, last)) + b"\x93)R."
    for allowed in (
        HUGGING_FACE_CLASSES, CORPUS_CLASSES, TENSOR_NAMES, official.ALLOWED_CLASSES, nvidia.ALLOWED_CLASSES
    ):  # fmt: skip
        with pytest.raises(UserError, match="which does not belong in a checkpoint"):
            read(b"\x80\x04" + stack_global, allowed)


def test_nothing_is_imported_and_no_class_is_changed() -> None:
    modules = set(sys.modules)
    # importing `antigravity` of the standard library would open a web browser
    assert isinstance(read(b"cantigravity\nfly\n)R(dS'x'\nI1\nsb.", Everything()), PickledObject)
    assert set(sys.modules) == modules
    for content in (
        b"ccollections\nOrderedDict\n(N}S'get'\nI1\nstb.",  # sets an attribute of a class
        b"ccollections\nCounter\n}S'update'\nI1\nsb.",
        b"ccollections\nOrderedDict\nI1\na.",  # appends to a class
        b"S'text'\n}S'a'\nI1\nsb.",  # sets an attribute of a string
        b"I5\n)R.",  # calls a number
        b"}(I1\nI2\nu)\x81.",  # creates an object of a dictionary
    ):
        with pytest.raises(UserError, match=DAMAGED):
            read(content, Everything())
    assert OrderedDict.get is dict.get


def test_value_outside_the_pickle_is_requested_by_its_id() -> None:
    """Such an id is passed to `persistent_load`, in this test a function that returns it in a list."""
    for content, persistent_id in ((b"P12\n.", "12"), (b"\x80\x02(X\x01\x00\x00\x00a\x4b\x01tQ.", ("a", 1))):
        assert read_pickle(io.BytesIO(content), (), "some.pkl", lambda value: [value]) == [persistent_id]
        with pytest.raises(UserError, match=DAMAGED):
            read(content)
    assert read(b"ctorch\nFloatStorage\n.", Everything()) == GlobalName("torch.FloatStorage")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_truncated_or_changed_pickle_gives_user_error(protocol: int) -> None:
    generator = random.Random(4)
    content = pickle.dumps({**PLAIN, "bytes": b"a", "texts": "a"}, protocol)
    for length in range(0, len(content), 3):
        with pytest.raises(UserError, match=DAMAGED):
            read(content[:length], Everything())
    for _ in range(300):
        changed = bytearray(content)
        changed[generator.randrange(len(changed))] = generator.randrange(256)
        with suppress(UserError):
            read(bytes(changed), Everything())


# small pickles with a huge memo index, declared length, line or integer, or which copy one value many times
MEMORY_BOMBS = {
    "memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "memo indices of equal hash": b"N" + b"".join(b"p%d\n" % (k * (2**61 - 1)) for k in range(1, 20_000)) + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b".",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "integer of declared length": b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"\x01.",
    "negative length": b"\x80\x02\x8b" + struct.pack("<i", -5) + b"\x01.",
    # 16,000 bits
    "long integer": b"\x80\x02\x8b" + struct.pack("<i", 2000) + b"\x01" * 2000 + b".",
    "digits": b"I" + b"9" * 100_000 + b"\n.",
    "line": b"V" + b"a" * 2**20 + b"\n.",
    # a Counter made 5000 times from one dictionary of 5000 items
    "copies": b"\x80\x02}q\x00(" + b"".join(b"M" + struct.pack("<H", number) + b"N" for number in range(5000))
    + b"uccollections\nCounter\nq\x010" + b"h\x01h\x00\x85R" * 5000 + b".",
    # one text of 20,000 characters, encoded 5000 times
    "encodings": b"\x80\x02X" + struct.pack("<I", 20_000) + b"a" * 20_000 + b"q\x00c_codecs\nencode\nq\x010"
    + b"h\x01h\x00X\x06\x00\x00\x00latin1\x86R" * 5000 + b".",
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORY_BOMBS)
def test_small_file_cannot_fill_the_memory(name: str) -> None:
    tracemalloc.start()
    try:
        if name == "frame":  # harmless: its length is not used
            assert read(MEMORY_BOMBS[name]) is None
        else:
            with pytest.raises(UserError, match=DAMAGED):
                read(MEMORY_BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < 20_000_000  # peak, in bytes
    finally:
        tracemalloc.stop()


# pickles of a dictionary with one key, or of a call that would make such a dictionary
HARMFUL_KEYS = {
    "nested tuples": b"})" + b"\x85" * 200_000 + b"Ns.",
    "tuple of two references to the tuple before, 60 times": b"})" + b"2\x86" * 60 + b"Ns.",
    "nested values from outside the pickle": b"}N" + b"Q" * 3000 + b"Ns.",
    "nested outside values in a call": b"ccollections\nOrderedDict\n]N" + b"Q" * 3000 + b"N\x86a\x85R.",
    "nested tuples in a call": b"ccollections\nOrderedDict\n])" + b"\x85" * 200_000 + b"N\x86a\x85R.",
    "item of an object": b"ca\nb\n)R)" + b"\x85" * 200_000 + b"Ns.",
    "dictionary from a MARK": b"()" + b"\x85" * 200_000 + b"Nd.",
    "large integers": b"}("
    + b"".join(b"\x8a\x0a" + (k * (2**61 - 1)).to_bytes(10, "little") + b"N" for k in range(1, 12_000))
    + b"u.",
}
READ_EACH = """
import io, pickle, sys
from transformer_xl.integrations.checkpoints.unpickler import read_pickle
for content in pickle.load(sys.stdin.buffer):
    try:
        read_pickle(io.BytesIO(content), {"a.b"}, "some.pkl", lambda label: [label])
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


def test_keys_that_cannot_be_hashed_safely_are_refused() -> None:
    """Hashing these keys crashes or hangs the interpreter, so another process reads the pickles."""
    process = subprocess.run(
        [sys.executable, "-c", READ_EACH],
        input=pickle.dumps(list(HARMFUL_KEYS.values())), capture_output=True, timeout=300,
    )  # fmt: skip
    errors = process.stdout.decode().splitlines()
    refused = [line.startswith("UserError some.pkl is damaged, or not a pickle") for line in errors]
    assert refused == [True] * len(HARMFUL_KEYS), (process.returncode, dict(zip(HARMFUL_KEYS, errors, strict=False)))


# each makes one object, in a pickle that begins with the name a.b (saved as 0) and a tuple (saved as 1)
OBJECTS = {
    "call": b"h\x00)R", "dictionary by a call": b"ccollections\nOrderedDict\n)R", "name": b"ca\nb\n",
    "name from the stack": b"h\x02h\x02\x93", "value from outside the pickle": b"h\x01Q", "dictionary": b"}",
    "list": b"]", "list from a MARK": b"(l", "set": b"\x8f", "tuple": b"N\x85", "MARK": b"(0",
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_number_of_objects_is_limited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects take far more memory than the bytes that create them."""
    monkeypatch.setattr(unpickler, "_MAX_OBJECTS", 1000)
    start = b"\x80\x04ca\nb\nq\x00N\x85q\x01X\x01\x00\x00\x00aq\x02"

    def read_objects(count: int) -> Any:
        content = io.BytesIO(start + OBJECTS[name] * count + b".")
        return read_pickle(content, Everything(), "some.pkl", lambda value: value)

    read_objects(400)
    with pytest.raises(UserError, match=TOO_MANY):
        read_objects(1001)


def test_number_of_opcodes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number limits time and memory; MEMOIZE, one byte, makes an entry of a dictionary."""
    monkeypatch.setattr(unpickler, "_MAX_OPCODES", 100)
    assert read(b"\x80\x04N" + b"\x94" * 97 + b".") is None
    with pytest.raises(UserError, match=TOO_MANY):
        read(b"\x80\x04N" + b"\x94" * 98 + b".")


def test_limits_admit_the_largest_published_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """One Billion Word has 793,471 words; Python 2 wrote an OrderedDict as a list of pairs. Here a 1000th."""
    for limit in ("_MAX_OBJECTS", "_MAX_OPCODES"):
        monkeypatch.setattr(unpickler, limit, getattr(unpickler, limit) // 1000)
    size = 793_471 // 1000
    ids = [struct.pack("<I", word_id) for word_id in range(size)]
    words = [b"U\x04%04x" % word_id + b"r" + ids[word_id] for word_id in range(size)]
    pairs = b"".join(b"](" + words[k] + b"J" + ids[k] + b"e" for k in range(size))
    table = b"U\x07sym2idxccollections\nOrderedDict\n](" + pairs + b"e\x85R"
    content = b"\x80\x02}(" + table + b"U\x07idx2sym](" + b"".join(b"j" + word_id for word_id in ids) + b"eu."
    vocabulary = read(content)
    assert vocabulary["sym2idx"] == {word: word_id for word_id, word in enumerate(vocabulary["idx2sym"])}
    assert len(vocabulary["idx2sym"]) == size


def test_deep_and_cyclic_lists_are_read() -> None:
    depth = 200_000
    assert len(read(b"]" * depth + b"a" * (depth - 1) + b".")) == 1
    cycle = read(b"\x80\x02]q\x00h\x00a.")
    assert cycle[0] is cycle
