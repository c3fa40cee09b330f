"""Pickles are read and nothing in them is run: values as Python's own unpickler gives them, calls written down."""

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
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from transformer_xl.config import UserError
from transformer_xl.interop.unpickler import OPCODES, GlobalName, PickledObject, read_pickle

PLAIN: dict[str, Any] = {
    "texts": ["", "caf\u00e9", "\U0001f600 \\ \n ' \"", "x" * 300, "\udc80"],
    "numbers": [0, -1, 255, 256, 65535, 65536, -(2**31), 2**31, 2**70, -(2**70), 1.5, -0.0, 1e300, True, False, None],
    "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ([],))],
    "inside": {"a": {"b": [{}, [[]]]}, 3: "three", b"t": 2},
    "bytes": [b"", b"abc", bytes(range(256)), b"x" * 300],
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "counted": Counter("abracadabra"),
    "missing": defaultdict(list, {"a": [1]}),
}
PLAIN["again"] = PLAIN["tuples"]


def nothing(_: str) -> bool:
    return False


def anything(_: str) -> bool:
    return True


def read(content: bytes, admits: Any = nothing) -> Any:
    return read_pickle(io.BytesIO(content), admits, "some.pkl")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_are_what_they_are(protocol: int) -> None:
    values = {name: value for name, value in PLAIN.items() if protocol > 0 or name != "missing"}
    content = pickle.dumps(values, protocol)
    found = read(content)
    assert found == values
    assert found["again"] is found["tuples"]
    assert list(found["ordered"]) == ["b", "a"]
    assert [type(number) for number in found["numbers"]] == [type(number) for number in values["numbers"]]
    without_framing = pickle._Pickler(buffer := io.BytesIO(), protocol)  # what Python's slow pickler writes
    without_framing.dump(values)
    assert read(buffer.getvalue()) == values


def test_every_opcode_is_there_but_those_that_reach_outside() -> None:
    known = {opcode.name for opcode in pickletools.opcodes}
    assert known - OPCODES.keys() == {"EXT1", "EXT2", "EXT4", "NEXT_BUFFER", "READONLY_BUFFER"}
    assert OPCODES.keys() <= known


def test_pickles_of_python_2() -> None:
    assert read(b"(dp0\nS'word'\np1\nI7\nsS'cafe'\nL12L\ns.") == {"word": 7, "cafe": 12}
    assert read(b"\x80\x02}q\x00(U\x05caf\xc3\xa9q\x01K\x07T\x02\x00\x00\x00\xff\xfeK\x08u.") == {
        "caf\u00e9": 7, b"\xff\xfe": 8,
    }  # fmt: skip
    made = read(b"(idata_utils\nCorpus\np0\n(dS'name'\nS'wt103'\nsb.", anything)
    assert (made.name, made.attributes) == ("data_utils.Corpus", {"name": "wt103"})
    made = read(b"ccopy_reg\n_reconstructor\n(cvocabulary\nVocab\nc__builtin__\nobject\nNtR(dS'a'\nI1\nsb.", anything)
    assert (made.name, made.attributes) == ("vocabulary.Vocab", {"a": 1})


class Harm:
    """Unpickled, it calls what it was given."""

    def __init__(self, called: Any, *arguments: Any) -> None:
        self.call = called, arguments

    def __reduce__(self) -> Any:
        return self.call


def test_what_is_called_is_written_down_even_where_every_name_is_admitted(tmp_path: Path) -> None:
    mark = tmp_path / "harm"
    content = pickle.dumps([Harm(os.mkdir, str(mark)), Harm(eval, f"open({str(mark) + '/a'!r}, 'w')")])
    first, second = read(content, anything)
    assert (first.name, first.arguments) == (f"{os.name}.mkdir", (str(mark),))
    assert (second.name, len(second.arguments)) == ("builtins.eval", 1)
    assert not mark.exists()
    pickle.loads(content)[1].close()  # it would have done harm
    assert mark.exists()


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("made", "name"),
    [
        (Harm(os.system, "true"), f"{os.name}.system"),
        (Harm(eval, "1"), "__builtin__.eval|builtins.eval"),
        (Harm(getattr, "a", "b"), "__builtin__.getattr|builtins.getattr"),
        (Harm(copyreg._reconstructor, Path, object, None), "pathlib.Path"),
        ([{"a": (Path("a"),)}], "pathlib"),
    ],
    ids=["system", "eval", "getattr", "reconstructor", "path"],
)
def test_a_name_that_is_not_expected_is_refused(made: Any, name: str, protocol: int) -> None:
    """Test 11: a malicious pickle is refused, and the message says what it named."""
    with pytest.raises(UserError, match=rf"some.pkl names ({name})[\w.]*, which has no place in a checkpoint"):
        read(pickle.dumps(made, protocol))


@pytest.mark.parametrize(
    "name",
    [
        "transformers.AutoTokenizer", "transformers.models.auto.auto_factory.getattribute_from_module",
        "transformers.utils.import_utils._LazyModule", "transformers.tokenization_utils.Trie.__init__.__globals__",
        "collections.OrderedDict.__init__", "numpy.testing._private.utils.runstring", "torch.serialization.load",
        "torch._utils._rebuild_tensor_v2.__globals__", "sacremoses.os.system", "collections", "os",
    ],
)  # fmt: skip
def test_a_name_that_hides_behind_a_known_one_is_refused(name: str) -> None:
    """Test 11: a `transformers.*` global is refused; none of ours is a name of another's machinery."""
    from transformer_xl.interop import nvidia, official, torch_file
    from transformer_xl.interop.tokenizers import CORPUS_CLASSES, HUGGING_FACE_CLASSES

    module, _, last = name.rpartition(".")
    for admits in (
        HUGGING_FACE_CLASSES.__contains__, CORPUS_CLASSES.__contains__, torch_file._NAMES.__contains__,
        official._admits,
        nvidia._admits,
    ):  # fmt: skip
        assert not admits(name)
        with pytest.raises(UserError, match="which has no place in a checkpoint"):
            read(b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(last)]) + last.encode()
                 + b"\x93)R.", admits)  # fmt: skip


def test_nothing_is_imported_and_no_class_is_touched() -> None:
    before = set(sys.modules)
    made = read(b"cantigravity\nfly\n)R(dS'x'\nI1\nsb.", anything)
    assert made == made
    assert isinstance(made, PickledObject)
    assert set(sys.modules) == before
    for content in (
        b"ccollections\nOrderedDict\n(N}S'get'\nI1\nstb.",  # BUILD of a class
        b"ccollections\nCounter\n}S'update'\nI1\nsb.",
        b"ccollections\nOrderedDict\nI1\na.",
        b"S'text'\n}S'a'\nI1\nsb.",
        b"I5\n)R.",  # a call of a number
        b"}(I1\nI2\nu)\x81.",  # a new object of a dictionary
    ):
        with pytest.raises(UserError, match=r"some.pkl is damaged, or not a pickle"):
            read(content, anything)
    assert OrderedDict.get is dict.get
    assert Counter.update is not None


def test_what_is_stored_outside_is_asked_for_by_its_id() -> None:
    for content, label in ((b"P12\n.", "12"), (b"\x80\x02(X\x01\x00\x00\x00a\x4b\x01tQ.", ("a", 1))):
        assert read_pickle(io.BytesIO(content), nothing, "some.pkl", lambda label: [label]) == [label]
        with pytest.raises(UserError, match=r"some.pkl is damaged"):
            read(content)
    assert read(b"ctorch\nFloatStorage\n.", anything) == GlobalName("torch.FloatStorage")


def test_half_a_pickle_and_a_changed_one_give_one_clear_line() -> None:
    draw = random.Random(4)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        content = pickle.dumps({**PLAIN, "bytes": b"a", "texts": "a"}, protocol)
        for length in range(0, len(content), 3):
            with pytest.raises(UserError, match=r"^some.pkl is damaged, or not a pickle \(at byte"):
                read(content[:length], anything)
        for _ in range(300):
            changed = bytearray(content)
            changed[draw.randrange(len(changed))] = draw.randrange(256)
            with suppress(UserError):
                read(bytes(changed), anything)


BOMBS = {
    "memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b".",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "number": b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"\x01.",
    "negative": b"\x80\x02\x8b" + struct.pack("<i", -5) + b"\x01.",
    "digits": b"I" + b"9" * 100_000 + b"\n.",
    "copies": b"\x80\x02}q\x00(" + b"".join(b"M" + struct.pack("<H", place) + b"N" for place in range(5000))
    + b"uccollections\nCounter\nq\x010" + b"h\x01h\x00\x85R" * 5000 + b".",
    "encodings": b"\x80\x02X" + struct.pack("<I", 20_000) + b"a" * 20_000 + b"q\x00c_codecs\nencode\nq\x010"
    + b"h\x01h\x00X\x06\x00\x00\x00latin1\x86R" * 5000 + b".",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_cannot_fill_the_memory(name: str) -> None:
    tracemalloc.start()
    try:
        if name in ("memo", "frame"):
            assert read(BOMBS[name]) is None
        else:
            with pytest.raises(UserError, match=r"some.pkl is damaged"):
                read(BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


HARMFUL_KEYS = {
    "tuples one in the other": b"})" + b"\x85" * 200_000 + b"Ns.",
    "a tuple that doubles": b"})" + b"2\x86" * 60 + b"Ns.",
    "references one to the other": b"}N" + b"Q" * 3000 + b"Ns.",
    "in a call": b"ccollections\nOrderedDict\n]N" + b"Q" * 3000 + b"N\x86a\x85R.",
    "tuples in a call": b"ccollections\nOrderedDict\n])" + b"\x85" * 200_000 + b"N\x86a\x85R.",
    "an object's": b"ca\nb\n)R)" + b"\x85" * 200_000 + b"Ns.",
    "of a dictionary made at once": b"()" + b"\x85" * 200_000 + b"Nd.",
    "numbers of one hash": b"}\x8a\x08" + (2**61 - 1).to_bytes(8, "little") + b"Ns.",
}


@pytest.mark.parametrize("name", HARMFUL_KEYS)
def test_what_cannot_be_hashed_safely_is_no_key(name: str) -> None:
    """Read by a process of its own: a fault ends or stops the interpreter."""
    program = (
        "import io, sys; from transformer_xl.interop.unpickler import read_pickle\n"
        "try: read_pickle(io.BytesIO(sys.stdin.buffer.read()), lambda _: True, 'some.pkl', lambda label: [label])\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=HARMFUL_KEYS[name], capture_output=True, timeout=300)
    assert done.stdout.startswith(b"UserError some.pkl is damaged, or not a pickle"), (done.returncode, done.stdout)


def test_so_many_objects_are_no_checkpoint() -> None:
    assert len(read(b"(" + b"ca\nb\n)R" * 1000 + b"l.", anything)) == 1000
    with pytest.raises(UserError, match=r"some.pkl is damaged"):
        read(b"(" + b"ca\nb\n)R" * 250_001 + b"l.", anything)


def test_depth_and_cycles_are_no_danger() -> None:
    depth = 200_000
    deep = read(b"]" * depth + b"a" * (depth - 1) + b".")
    for _ in range(depth - 1):
        (deep,) = deep
    assert deep == []
    cycle = read(b"\x80\x02]q\x00h\x00a.")
    assert cycle[0] is cycle
