"""Tests of compressed files and archives: read in chunks, only named files extracted, damage reported in one line."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import itertools
import lzma
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_sources import tar_of, zip_of

from transformer_xl.config import UserError
from transformer_xl.text.sources.archives import (
    FileDigest,
    FileRange,
    compute_digest,
    extract,
    raw_chunks,
)

TEXT = b"".join(b"line %d\n" % index for index in range(7919))
# How the content of a file with this suffix is made from its text.
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda text: text,  # not compressed
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


@pytest.mark.parametrize("suffix", COMPRESS)
@given(start=st.integers(0, 97), length=st.integers(0, 97))
@settings(max_examples=11, deadline=None)
def test_range_of_a_compressed_file_is_that_of_its_text(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, start: int, length: int
) -> None:
    text = bytes(range(60, 254))  # 194 bytes, the largest value of start + length
    path = tmp_path_factory.mktemp("compressed") / f"a{suffix}"
    path.write_bytes(COMPRESS[suffix](text))
    text_range = FileRange(path, start=start, stop=start + length)
    assert b"".join(text_range) == b"".join(text_range) == text[start : start + length]
    assert text_range.size() == length
    assert b"".join(FileRange(path, start=start)) == text[start:]
    assert FileRange(path).size() == len(text)
    assert FileRange(path).is_compressed == bool(suffix)


def test_compressed_text_is_read_in_chunks(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(3 * 2**20 + 7), 1))
    assert [len(chunk) for chunk in FileRange(path)] == [2**20, 2**20, 2**20, 7]  # CHUNK_BYTES is 2**20


def damage(content: bytes, how: str) -> bytes:
    """The first half ("truncated"), the content with 20 inverted bytes ("changed"), or plain text ("other")."""
    middle = len(content) // 2
    if how == "truncated":
        return content[:middle]
    if how == "changed":
        return content[:middle] + bytes(byte ^ 255 for byte in content[middle : middle + 20]) + content[middle + 20 :]
    return b"no archive at all\n" * 97


@pytest.mark.parametrize("how", ["truncated", "changed", "other"])
@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_damaged_file_is_refused(tmp_path: Path, suffix: str, how: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(damage(COMPRESS[suffix](TEXT), how))
    with pytest.raises(UserError, match=rf"a{suffix}: .*damaged or truncated \(.+\); get it again") as caught:
        list(FileRange(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "how"),
    # An uncompressed tar has no checksum of its contents, so a change is detected only in the compressed ones.
    [
        *itertools.product([".tar"], ["truncated", "other"]),
        *itertools.product([".tar.gz", ".tar.bz2", ".tar.xz", ".zip"], ["truncated", "changed", "other"]),
    ],
)
def test_damaged_archive_leaves_no_folder(tmp_path: Path, suffix: str, how: str) -> None:
    path, files = tmp_path / f"a{suffix}", {"x/b": TEXT * 3, "x/c": TEXT}
    path.write_bytes(damage(zip_of(files) if suffix == ".zip" else tar_of(files, f"w:{suffix[5:]}"), how))
    with pytest.raises(UserError, match=r"a\.\S*: .*damaged or truncated \(.+\); get it again"):
        extract(path, ["x/b", "x/c"], tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == [path]


# Offset and value of a field of the file header: the flag of encryption, and a compression method.
@pytest.mark.parametrize(("offset", "value", "message"), [(6, 1, "encrypted"), (8, 99, "compression method")])
def test_unsupported_zip_is_refused(tmp_path: Path, offset: int, value: int, message: str) -> None:
    path = tmp_path / "a.zip"
    content = bytearray(zip_of({"b": TEXT}))
    # Set the field in the local file header and in the central directory.
    for signature, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        for header in re.finditer(re.escape(signature), bytes(content)):
            content[header.start() + offset + shift] = value
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"a.zip: not readable.*{message}"):
        extract(path, ["b"], tmp_path / "out")


def test_only_named_regular_files_are_extracted_from_a_tar(tmp_path: Path) -> None:
    link = tarfile.TarInfo("x/c")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    path = tmp_path / "a.tgz"
    # Only the base names a, b, c and d are requested. c is a link, and a exists at the requested path (./x/a) and at
    # another (y/a); b and d exist only at other paths than the requested ones.
    files = {"../../evil": b"1", "/b": b"2", "./x/a": b"3", "x/other": b"4", "y/a": b"5", "z/d": b"6"}
    path.write_bytes(tar_of(files, links=[link]))
    progress: list[tuple[str, int, int]] = []
    extract(path, ["x/a", "x/b", "x/c", "w/d"], tmp_path / "out", lambda *call: progress.append(call))
    extracted = {item.name: item.read_bytes() for item in (tmp_path / "out").iterdir()}
    assert extracted == {"a": b"3", "b": b"2", "d": b"6"}
    assert not (tmp_path.parent / "evil").exists()
    assert progress[0][0] == "extract a.tgz"
    assert 0 < progress[-1][1] <= progress[-1][2] == path.stat().st_size


def test_file_at_the_exact_path_is_preferred_to_one_of_the_same_name(tmp_path: Path) -> None:
    for folder, files in (("1", {"y/a": b"wrong", "x/a": b"right"}), ("2", {"x/a": b"right", "y/a": b"wrong"})):
        path = tmp_path / "a.tar"
        path.write_bytes(tar_of(files, "w"))
        extract(path, ["x/a"], tmp_path / folder)
        assert (tmp_path / folder / "a").read_bytes() == b"right"


def test_digest_covers_all_bytes_and_reports_progress(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(TEXT)
    progress: list[tuple[str, int, int]] = []
    for algorithm in ("sha256", "sha1", "md5"):
        expected = FileDigest(len(TEXT), f"{algorithm}:{hashlib.new(algorithm, TEXT).hexdigest()}")
        assert compute_digest([TEXT[:99], TEXT[99:]], expected, "a", lambda *call: progress.append(call)) == expected
        assert compute_digest(raw_chunks(path), expected, name="a") == expected
    assert progress[:2] == [("check a", 99, len(TEXT)), ("check a", len(TEXT), len(TEXT))]
