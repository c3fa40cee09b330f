"""TensorFlow's checkpoint files: read as TensorFlow wrote them, and refused in one line if they are damaged.

Most tests write them byte by byte (bundles.py, which explains the format).
"""

from __future__ import annotations

import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.checkpoints.bundles import block, entry, slow_crc32c, table

from transformer_xl.config import UserError
from transformer_xl.integrations.checkpoints import tensor_bundle
from transformer_xl.integrations.checkpoints.tensor_bundle import TensorBundle, crc32c

GOLDEN = Path(__file__).parent / "golden" / "tensorflow"


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 3001), st.integers(0, 7))
def test_checksums_of_any_length(length: int, seed: int) -> None:
    content = np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
    assert crc32c(content) == slow_crc32c(content.tobytes())


def test_checksum_with_the_maximum_number_of_lanes() -> None:
    # crc32c splits long contents into lanes of equal length; from 2**20 bytes on it uses the maximum number, 2**14
    content = np.random.default_rng(1).integers(0, 256, 2**20 + 2**18 + 7, dtype=np.uint8)
    assert crc32c(content) == slow_crc32c(content.tobytes())


@pytest.mark.parametrize("folder", sorted(GOLDEN.iterdir()), ids=lambda path: path.name)
def test_tensors_equal_those_that_tensorflow_wrote(folder: Path) -> None:
    bundle = TensorBundle(folder / "model.ckpt-17")
    sums = json.loads((folder / "expected.json").read_text())["sums"]  # the sum of each tensor's elements, by name
    assert bundle.shapes.keys() == sums.keys()
    for name, total in sums.items():
        assert bundle.tensor(name).shape == bundle.shapes[name]
        assert bundle.tensor(name).sum(dtype=np.float64) == pytest.approx(total, abs=1e-12)
    assert int(bundle.tensor("global_step")) == sums["global_step"]


def write_bundle(folder: Path, index: bytes) -> Path:
    """Write an index and a data file of 64 zero bytes; return their prefix."""
    (folder / "a.index").write_bytes(index)
    (folder / "a.data-00000-of-00001").write_bytes(bytes(64))
    return folder / "a"


HEADER = (b"", b"\x08\x01")  # name and value of the first entry: there is 1 data file


def table_with(name: bytes, value: bytes) -> bytes:
    """Return an index with the header and one entry."""
    return table(block([HEADER, (name, value)]))


def test_table_of_several_blocks(tmp_path: Path) -> None:
    first = block([HEADER, (b"layer", entry((2, 3), 24)), (b"layer/x", entry((), 4))])
    prefix = write_bundle(tmp_path, table(first, block([(b"other", entry((0, 5), 0))])))
    bundle = TensorBundle(prefix)
    assert bundle.shapes == {"layer": (2, 3), "layer/x": (), "other": (0, 5)}
    assert bundle.tensor("other").shape == (0, 5)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"", "end is not that of an index"),
        (table(block([HEADER]), compression=1), "compressed block"),
        (table_with(b"x" * 1001, b""), "too long"),  # names have 1000 bytes at most
        (table_with(b"x", b"\x08"), "integer is truncated"),  # a dtype without its value
        (table_with(b"x", b"\x08" + b"\xff" * 10), "integer is too long"),  # more than 64 bits
        (table_with(b"x", b"\x12\x07a"), "longer than its message"),  # a shape of 7 bytes, of which there is one
        (table_with(b"x", b"\x0b"), "field of wire type 3"),  # field 1
        (table_with(b"x", b"\x0a\x01a"), "field has another type"),  # the dtype is text
        (table_with(b"x", b"\x10\x01"), "field has another type"),  # the shape is an integer
        (table_with(b"x", entry((1,) * 9, 4)), "9 dimensions"),
        (table_with(b"\xff", b""), "can't decode byte 0xff"),
        (table(b"\xff" * 8), "block is shorter"),  # 2**32 - 1 positions for binary search
        (table(b""), "outside the file"),  # a block has 4 bytes or more
        # the first name shares 7 bytes with the name before it, which does not exist
        (table(b"\x07\x01\x00x" + struct.pack("<II", 0, 1)), "too long"),
        (table(block([HEADER, (b"x", entry((), 4)), (b"y" * 99, b"")]), repeat=9), "blocks overlap"),
        (table(block([(b"", b"\x0a\x01a")])), "field has another type"),  # the number of data files is text
        (table(block([(b"", b"\x08\x01\x10\x01")])), "big-endian"),  # field 2 of the header is the byte order
    ],
)
def test_wrong_index_is_refused(index: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"a\.index: .*{message}"):
        TensorBundle(write_bundle(tmp_path, index))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (entry((2,), 8, dtype=7), "dtype number 7, which is not supported"),  # strings
        (entry((2,), 8, more_fields=b"\x3a\x00"), "slices, which is not supported"),  # field 7
        (entry((3,), 8), r"has 8 bytes for the shape \(3,\); copy it again"),
        (entry((2**62, 4), 0), "has 0 bytes for the shape"),  # a product that is 0 in 64 bits
        (entry((17,), 68), "ends at byte 68, but the file has 64; copy it again"),
        (entry((16,), 64), "checksum does not match; copy it again"),  # `entry` writes no checksum, which means 0
        (entry((2,), 8, more_fields=b"\x18\x05"), r"a.data-00005-of-00001: no such file"),  # field 3: data file 5
    ],
)
def test_wrong_tensor_is_refused(value: bytes, message: str, tmp_path: Path) -> None:
    bundle = TensorBundle(write_bundle(tmp_path, table_with(b"x", value)))
    with pytest.raises(UserError, match=message):
        bundle.tensor("x")


def test_number_of_entries_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_bundle(tmp_path, table(block([HEADER, *((bytes([name]), b"") for name in range(1, 9))])))
    assert len(TensorBundle(prefix).shapes) == 8
    monkeypatch.setattr(tensor_bundle, "_MAX_ENTRIES", 8)
    with pytest.raises(UserError, match=r"a\.index: .*too many entries"):
        TensorBundle(prefix)


def test_tensors_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    """Each tensor is copied and its checksum computed, so a small file could take any time and memory."""
    values = block([HEADER, (b"x", entry((8,), 32)), (b"y", entry((8,), 32)), (b"z", entry((1,), 4))])
    bundle = TensorBundle(write_bundle(tmp_path, table(values)))
    bundle.check_data(["x", "y"])
    with pytest.raises(UserError, match=r"a: tensors of 68 bytes in data of 64 bytes; copy it again"):
        bundle.check_data(["x", "y", "z"])


def read_all(bundle: TensorBundle) -> None:
    for name in bundle.shapes:
        bundle.tensor(name)


@settings(deadline=None, max_examples=100)
@given(entries=st.binary(max_size=40), value=st.binary(max_size=40))
def test_random_index_gives_user_error_or_tensors(
    entries: bytes, value: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for index in (table(entries + struct.pack("<II", 0, 1)), table_with(b"x", value)):
        with suppress(UserError):
            read_all(TensorBundle(write_bundle(tmp_path_factory.getbasetemp(), index)))


def test_every_changed_byte_is_detected(tmp_path: Path) -> None:
    # the checkpoint that TensorFlow wrote of the model "bytes", one of the CASES of golden/make_tensorflow.py
    for file in (GOLDEN / "bytes").glob("model.ckpt-17.*"):
        shutil.copy(file, tmp_path)
    prefix, path = tmp_path / "model.ckpt-17", tmp_path / "model.ckpt-17.index"
    content, intact = path.read_bytes(), TensorBundle(prefix)
    # The footer has 48 bytes, the last 8 of which are a magic number. The others are not tested, because they contain
    # padding, whose value does not matter.
    footer_without_magic_number = range(len(content) - 48, len(content) - 8)
    for position in sorted(set(range(len(content))) - set(footer_without_magic_number)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x41]) + content[position + 1 :])
        with pytest.raises(UserError, match="damaged"):
            TensorBundle(prefix)
    for length in range(0, len(content), 7):  # truncated
        path.write_bytes(content[:length])
        with pytest.raises(UserError, match="damaged"):
            TensorBundle(prefix)

    path = tmp_path / "model.ckpt-17.data-00000-of-00001"
    content = path.read_bytes()
    for position in range(0, len(content), 311):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(UserError, match="checksum does not match; copy it again"):
            read_all(intact)
    path.write_bytes(content[:-3])
    with pytest.raises(UserError, match=f"ends at byte {len(content):,}, but the file has {len(content) - 3:,}"):
        read_all(intact)
