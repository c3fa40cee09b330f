"""Compressed files and archives: read in chunks, only wanted files extracted, damage reported in one line."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import re
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.sources.archives import (
    FileRange,
    checksum,
    extract_from_tar,
    file_checksum,
    is_archive,
    with_progress,
    zip_members,
)

TEXT = b"".join(b"line %d\n" % index for index in range(7919))
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda text: text,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def tar_of(files: Mapping[str, bytes], mode: str = "w:gz", extra: tuple[tarfile.TarInfo, ...] = ()) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode=mode) as archive:
        for entry in extra:
            archive.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return held.getvalue()


def zip_of(files: Mapping[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("folder")
        for name, content in files.items():
            archive.writestr(name, content)
    return held.getvalue()


@pytest.mark.parametrize("ending", PACKERS)
@given(start=st.integers(0, 97), length=st.integers(0, 97))
@settings(max_examples=11, deadline=None)
def test_a_range_of_a_compressed_file(
    tmp_path_factory: pytest.TempPathFactory, ending: str, start: int, length: int
) -> None:
    text = bytes(range(60, 254))
    path = tmp_path_factory.mktemp("packed") / f"a{ending}"
    path.write_bytes(PACKERS[ending](text))
    text_range = FileRange(path, start, start + length)
    assert b"".join(text_range) == b"".join(text_range) == text[start : start + length]
    assert text_range.size() == length
    assert b"".join(FileRange(path)) == text
    assert FileRange(path).size() == len(text)
    assert FileRange(path).is_compressed == bool(ending)
    assert b"".join(FileRange(path, start)) == text[start:]


def test_a_range_of_a_zip_member(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(zip_of({"x/a": b"-", "x/b": TEXT}))
    assert zip_members(path) == ["x/a", "x/b"]
    assert b"".join(FileRange(path, 17, 1013, "x/b")) == TEXT[17:1013]
    assert FileRange(path, member="x/b").size() == len(TEXT)
    assert FileRange(path, 17, member="x/b").name == f"{path} (x/b), from byte 17 on"


@pytest.mark.parametrize("ending", [".gz", ".zip"])
def test_compressed_text_is_read_in_chunks(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a{ending}"
    text = bytes(3 * 2**20 + 7)
    path.write_bytes(zip_of({"a": text}) if ending == ".zip" else gzip.compress(text, 1))
    text_range = FileRange(path, member="a" if ending == ".zip" else "")
    assert [len(chunk) for chunk in text_range] == [2**20, 2**20, 2**20, 7]


def damaged(content: bytes) -> dict[str, bytes]:
    middle = len(content) // 2
    return {
        "cut short": content[:middle],
        "altered": content[:middle]
        + bytes(byte ^ 255 for byte in content[middle : middle + 20])
        + content[middle + 20 :],
        "something else": b"no archive at all\n" * 97,
    }


@pytest.mark.parametrize("damage", ["cut short", "altered", "something else"])
@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
def test_damaged_compressed_files_are_refused(tmp_path: Path, ending: str, damage: str) -> None:
    path = tmp_path / f"a{ending}"
    path.write_bytes(damaged(PACKERS[ending](TEXT))[damage])
    with pytest.raises(UserError, match=rf"a{ending}: damaged or truncated \(.+\); get it again") as caught:
        list(FileRange(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut short", "altered", "something else"])
def test_damaged_zips_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.zip"
    path.write_bytes(damaged(zip_of({"b": TEXT}))[damage])
    with pytest.raises(UserError, match=r"a.zip: damaged or truncated \(.+\); get it again"):
        print([b"".join(FileRange(path, member=member)) for member in zip_members(path)])


# A plain tar has no checksum of its contents: altered ones are seen only by the checksum of the archive or the text.
TAR_DAMAGES = [("w", "cut short"), ("w", "something else")]
TAR_DAMAGES += [(f"w:{pack}", damage) for pack in ("gz", "bz2", "xz") for damage in ("cut short", "altered")]


@pytest.mark.parametrize(("mode", "damage"), [*TAR_DAMAGES, ("w:gz", "something else")])
def test_damaged_tars_leave_nothing(tmp_path: Path, mode: str, damage: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(damaged(tar_of({"x/b": TEXT * 3, "x/c": TEXT}, mode))[damage])
    with pytest.raises(UserError, match=r"a.tar: damaged or truncated \(.+\); get it again"):
        extract_from_tar(path, ["x/b", "x/c"], tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_locked_zips_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    content = bytearray(zip_of({"b": TEXT}))
    for sign, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the bit that says so, in both tables
        for found in re.finditer(re.escape(sign), bytes(content)):
            content[found.start() + flags] |= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a.zip: b cannot be extracted \(.*encrypted.*\)"):
        list(FileRange(path, member="b"))


def test_only_what_is_wanted_leaves_a_tar(tmp_path: Path) -> None:
    link = tarfile.TarInfo("x/c")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    path = tmp_path / "a.tgz"
    files = {"../../evil": b"1", "/b": b"2", "./x/a": b"3", "x/other": b"4", "y/a": b"5", "z/d": b"6"}
    path.write_bytes(tar_of(files, extra=(link,)))
    told: list[tuple[str, int, int]] = []
    extract_from_tar(path, ["x/a", "x/b", "x/c", "w/d"], tmp_path / "out", lambda *said: told.append(said))
    found = {item.relative_to(tmp_path).as_posix(): item.read_bytes() for item in (tmp_path / "out").iterdir()}
    assert found == {"out/a": b"3", "out/b": b"2", "out/d": b"6"}
    assert not (tmp_path.parent / "evil").exists()
    assert told[0][0] == "extract a.tgz"
    assert 0 < told[-1][1] <= told[-1][2] == path.stat().st_size


def test_the_right_path_wins_over_the_right_name(tmp_path: Path) -> None:
    for files in ({"y/a": b"wrong", "x/a": b"right"}, {"x/a": b"right", "y/a": b"wrong"}):
        path = tmp_path / "a.tar"
        path.write_bytes(tar_of(files, "w"))
        extract_from_tar(path, ["x/a"], tmp_path / next(iter(files))[0])
        assert (tmp_path / next(iter(files))[0] / "a").read_bytes() == b"right"


def test_checksums_are_of_all_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(TEXT))
    for algorithm in ("sha256", "sha1", "md5"):
        assert (
            checksum([TEXT[:99], TEXT[99:]], f"{algorithm}:0")
            == f"{algorithm}:{hashlib.new(algorithm, TEXT).hexdigest()}"
        )
    assert file_checksum(path, "sha256:") == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_progress_counts_bytes() -> None:
    told: list[tuple[str, int, int]] = []
    assert list(with_progress([b"abc", b"de"], lambda *said: told.append(said), "read a", 5)) == [b"abc", b"de"]
    assert told == [("read a", 3, 5), ("read a", 5, 5)]


def test_archives_are_known_by_their_names() -> None:
    names = ["a.zip", "A.ZIP", "a.tgz", "a.tar.xz", "a.tar", "a.gz", "a.txt", "zip", "a.npy"]
    assert [name for name in names if is_archive(Path(name))] == names[:5]
