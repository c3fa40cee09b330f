"""Tests of finding the files of a named data set among the user's files: every accepted form, and every error."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from text_sources import digest, make_files, tar_of, zip_of

from transformer_xl.config import UserError
from transformer_xl.text.sources import download
from transformer_xl.text.sources.archives import FileRange
from transformer_xl.text.sources.download import RemoteFile, TextFile, find_files

# Three texts of a data set "x", by their paths in its archive.
TEXTS = {f"x-v1/data/x.{split}": b"%s text\n" % split.encode() * 1009 for split in ("train", "valid", "test")}
ZIP, TAR = zip_of({"x-v1/readme": b"-", **TEXTS}), tar_of({"x-v1/readme": b"-", **TEXTS})
NO_URL = ("http://127.0.0.1:1/x",)  # refuses connections
ARCHIVES = {
    "zip": RemoteFile("x-v1.zip", NO_URL, digest(ZIP)),
    "tar": RemoteFile("x-v1.tgz", NO_URL, digest(TAR)),
}
TRAIN, VALID, TEST = (
    TextFile(path, digest(text), other_names=(f"{path.rpartition('.')[2]}.txt",)) for path, text in TEXTS.items()
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def find(
    data_dir: Path | None, archive: str = "zip", texts: tuple[TextFile, ...] = (TRAIN, VALID, TEST)
) -> list[bytes]:
    """The contents of the texts that `find_files` finds; None searches the cache instead of a folder."""
    found = find_files("x", ARCHIVES[archive], texts, data_dir)
    assert set(found) == set(texts)
    return [b"".join(found[text]) for text in texts]


def texts_named(rename: Callable[[str], str], compress: Callable[[bytes], bytes] = bytes) -> dict[str, bytes]:
    """TEXTS with renamed paths and compressed contents; `bytes` as `compress` returns them unchanged."""
    return {rename(path): compress(text) for path, text in TEXTS.items()}


def base_name(path: str) -> str:
    return path.rpartition("/")[2]


# For each form in which a user may have the texts: the files in --data-dir.
FORMS: dict[str, dict[str, bytes]] = {
    "paths of the archive": TEXTS,
    "base names": texts_named(base_name),
    "paths from the second folder on": texts_named(lambda path: path.partition("/")[2]),
    "other names": texts_named(lambda path: f"{path.rpartition('.')[2]}.txt"),
    "gzip": texts_named(lambda path: f"{base_name(path)}.gz", gzip.compress),
    "bzip2": texts_named(lambda path: f"{path}.bz2", bz2.compress),
    "xz": texts_named(lambda path: f"{path.rpartition('.')[2]}.txt.xz", lzma.compress),
    "distributed zip": {"x-v1.zip": ZIP},
    "distributed tar": {"x-v1.tgz": TAR},
}


@pytest.mark.parametrize("form", FORMS)
def test_texts_are_found_in_every_form(tmp_path: Path, form: str) -> None:
    folder = make_files(tmp_path / "mine", FORMS[form])
    files = sorted(folder.rglob("*"))
    archive = "tar" if "tar" in form else "zip"
    for _ in range(2):  # the second time, tar archives are extracted already
        assert find(folder, archive) == list(TEXTS.values())
    assert sorted(folder.rglob("*")) == files
    if len(FORMS[form]) == 1:
        assert find(next(folder.iterdir()), archive) == list(TEXTS.values())


def test_data_dir_may_be_a_compressed_file(tmp_path: Path) -> None:
    folder = make_files(tmp_path / "mine", {"x.train.gz": gzip.compress(TEXTS[TRAIN.path])})
    assert find(folder / "x.train.gz", texts=(TRAIN,)) == [TEXTS[TRAIN.path]]


def test_downloaded_files_are_found_without_network(cache: Path) -> None:
    make_files(cache, {"x-v1.zip": ZIP, "x-v1.tgz": TAR, "x.train": TEXTS[TRAIN.path]})
    for archive in ("zip", "tar"):
        assert find(None, archive) == list(TEXTS.values())
    separate = TextFile(TRAIN.path, TRAIN.digest, urls=NO_URL)
    found = find_files("x", ARCHIVES["zip"], [separate, TEST])
    # a FileRange without start and stop is the whole file
    (folder,) = (cache / "unpacked").glob(f"x-{digest(ZIP).checksum.partition(':')[2][:16]}")
    assert found == {separate: FileRange(cache / "x.train"), TEST: FileRange(folder / TEST.name)}


def test_archive_is_extracted_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_files(tmp_path / "mine", {"x-v1.tgz": TAR})
    find(folder, "tar")
    monkeypatch.setattr(download, "extract", None)  # calling it would fail
    find(folder, "tar")
    assert len(list((cache / "unpacked").iterdir())) == 1


@pytest.mark.skipif(os.name != "posix", reason="folders are locked on POSIX only")
def test_archive_is_extracted_once_by_two_at_once(tmp_path: Path) -> None:
    folder, is_begun = make_files(tmp_path / "mine", {"x-v1.tgz": TAR}), threading.Event()

    def progress(stage: str, *_: int) -> None:
        if stage.startswith("extract"):
            is_begun.set()
            time.sleep(0.2)

    with ThreadPoolExecutor() as threads:
        first = threads.submit(find_files, "x", ARCHIVES["tar"], [TRAIN], folder, progress)
        is_begun.wait()
        second = threads.submit(find_files, "x", ARCHIVES["tar"], [TRAIN], folder)
        assert first.result() == second.result()


WRONG = TEXTS[TRAIN.path][::-1]  # of the same length, 11,099 bytes
COMMAND = "txl prepare --train FILE --valid FILE --test FILE$"
ADVICE = f"get it again, or use its texts as your own: {COMMAND}"
# For each fault: the files in --data-dir, and a pattern of the error message.
ERRORS: dict[str, tuple[dict[str, bytes], str]] = {
    "no text": (
        {"other": b"-"},
        r"data_dir=.*mine: no x-v1.zip or x.train, x.valid, x.test there for x \(nor compressed\); .*leave "
        "data_dir out to download",
    ),
    "two missing": ({"x.train": TEXTS[TRAIN.path]}, r"data_dir=.*mine: no x.valid, x.test there for x"),
    "other text": (
        {**FORMS["base names"], "x.train": WRONG},
        rf"x.train: 11,099 bytes, sha256 \w{{64}}, expected {TRAIN.digest} for x; {ADVICE}",
    ),
    "other compressed text": (
        {**FORMS["gzip"], "x.train.gz": gzip.compress(WRONG[1:])},
        rf"x.train.gz: 11,098 bytes, .* expected 11,099 bytes, .* for x; {ADVICE}",
    ),
    "truncated gzip": ({**FORMS["gzip"], "x.train.gz": gzip.compress(WRONG)[:-20]}, "x.train.gz: .*truncated.*again"),
    "truncated zip": ({"x-v1.zip": ZIP[:-7]}, rf"x-v1.zip: {len(ZIP) - 7:,} bytes, .* expected {len(ZIP):,} bytes"),
    "changed zip": (
        {"x-v1.zip": ZIP[:99] + b"!" + ZIP[100:]},
        r"x-v1.zip: [\d,]+ bytes, sha256 \w{64}, expected .*; get it again, or use .*: " + COMMAND,
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_files_are_refused(tmp_path: Path, cache: Path, case: str) -> None:
    files, message = ERRORS[case]
    folder = make_files(tmp_path / "mine", files)
    with pytest.raises(UserError, match=message) as caught:
        find(folder)
    assert "\n" not in str(caught.value)
    assert not list(cache.rglob("*.partial*"))  # unfinished files and folders have such names
