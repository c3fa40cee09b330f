"""Files of a named corpus among the user's files: every form they may have, and what is wrong with them in one line."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from transformer_xl.config import UserError
from transformer_xl.text.sources import dataset_files
from transformer_xl.text.sources.archives import FileRange
from transformer_xl.text.sources.dataset_files import TextFile, find_files, plain_file
from transformer_xl.text.sources.download import RemoteFile

TEXTS = {f"x-v1/data/x.{split}": b"%s text\n" % split.encode() * 1009 for split in ("train", "valid", "test")}


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def zip_of(files: Mapping[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return held.getvalue()


def tar_of(files: Mapping[str, bytes]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return held.getvalue()


ZIP, TAR = zip_of({"x-v1/readme": b"-", **TEXTS}), tar_of({"x-v1/readme": b"-", **TEXTS})
ARCHIVES = {
    "zip": RemoteFile("x-v1.zip", ("http://127.0.0.1:1/x",), len(ZIP), sha256(ZIP)),
    "tar": RemoteFile("x-v1.tgz", ("http://127.0.0.1:1/x",), len(TAR), sha256(TAR)),
}
TRAIN, VALID, TEST = (
    TextFile(path, len(text), sha256(text), other_names=(f"{path.rpartition('.')[2]}.txt",))
    for path, text in TEXTS.items()
)
UNKNOWN = TextFile(TRAIN.path)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TXL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def find(source: Path | None, kind: str = "zip", texts: tuple[TextFile, ...] = (TRAIN, VALID, TEST)) -> list[bytes]:
    found = find_files("x", ARCHIVES[kind], texts, source)
    assert list(found) == list(texts) or set(found) == set(texts)
    return [b"".join(found[text]) for text in texts]


def named(change: Callable[[str], str], pack: Callable[[bytes], bytes] = bytes) -> dict[str, bytes]:
    return {change(path): pack(text) for path, text in TEXTS.items()}


def last(path: str) -> str:
    return path.rpartition("/")[2]


FORMS: dict[str, dict[str, bytes]] = {
    "as in the archive": TEXTS,
    "by their last names": named(last),
    "from the second folder on": named(lambda path: path.partition("/")[2]),
    "by another name": named(lambda path: f"{path.rpartition('.')[2]}.txt"),
    "gzip": named(lambda path: f"{last(path)}.gz", gzip.compress),
    "bzip2": named(lambda path: f"{path}.bz2", bz2.compress),
    "xz": named(lambda path: f"{path.rpartition('.')[2]}.txt.xz", lzma.compress),
    "the zip": {"x-v1.zip": ZIP},
    "the tar": {"x-v1.tgz": TAR},
    "another zip": {"mine.zip": zip_of(named(lambda path: f"a/{last(path)}"))},
    "another tar": {"mine.tar.gz": tar_of(named(lambda path: f"./{path}"))},
    "some here, some there": {
        "x.train": TEXTS[TRAIN.path],
        "a.zip": zip_of({"x.valid": TEXTS[VALID.path]}),
        "b.tgz": tar_of({"x.test": TEXTS[TEST.path]}),
        "c.tgz": b"not read, as nothing is missing any more",
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_texts(tmp_path: Path, form: str) -> None:
    folder = make(tmp_path / "mine", FORMS[form])
    before = sorted(folder.rglob("*"))
    kind = "tar" if "tar" in form else "zip"
    for _ in range(2):  # again, with what is unpacked already
        assert find(folder, kind) == list(TEXTS.values())
    assert sorted(folder.rglob("*")) == before
    if len(FORMS[form]) == 1:
        assert find(next(folder.iterdir()), kind) == list(TEXTS.values())


def test_a_source_may_be_one_file(tmp_path: Path) -> None:
    for name, content in {"x.train": TEXTS[TRAIN.path], "x.train.gz": gzip.compress(TEXTS[TRAIN.path])}.items():
        file = make(tmp_path / "mine", {name: content}) / name
        assert find(file, texts=(TRAIN,)) == [TEXTS[TRAIN.path]]


def test_what_was_downloaded_before_needs_no_network(cache: Path) -> None:
    make(cache, {"x-v1.zip": ZIP, "x-v1.tgz": TAR, "x.train": TEXTS[TRAIN.path]})
    for kind in ("zip", "tar"):
        assert find(None, kind) == list(TEXTS.values())
    alone = TextFile(TRAIN.path, TRAIN.num_bytes, TRAIN.checksum, urls=("http://127.0.0.1:1/",))
    found = find_files(
        "x",
        ARCHIVES["zip"],
        [alone, TEST],
    )
    assert found[alone] == FileRange(cache / "x.train")
    assert found[TEST] == FileRange(cache / "x-v1.zip", member=TEST.path)


def test_a_tar_is_unpacked_once_for_its_contents(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "mine", {"mine.tgz": TAR})
    find(folder)
    with monkeypatch.context() as patch:
        patch.setattr(dataset_files, "extract_from_tar", None)
        find(folder)
    other = {path: text[::-1] for path, text in TEXTS.items()}
    make(folder, {"mine.tgz": tar_of(other)})
    unknown = tuple(TextFile(path) for path in TEXTS)
    assert find(folder, texts=unknown) == list(other.values())
    assert len(list((cache / "unpacked").iterdir())) == 2


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    folder = make(tmp_path / "mine", {"x-v1.tgz": TAR, "x.test": TEXTS[TEST.path]})
    find_files("x", ARCHIVES["tar"], [TRAIN, TEST], folder, lambda *said: told.append(said))
    assert list(dict.fromkeys(what for what, *_ in told)) == ["check x-v1.tgz", "extract x-v1.tgz", "check x.test"]
    assert ("check x.test", TEST.num_bytes, TEST.num_bytes) in told


WRONG = TEXTS[TRAIN.path][::-1]
OWN = r"get it again, or use it as your own text: txl prepare --train .*mine/x.train"
REFUSED: dict[str, tuple[dict[str, bytes], str]] = {
    "nothing": (
        {"other": b"-"},
        r"--data-dir .*mine: no x-v1.zip or x.train, x.valid, x.test there for x \(nor with .gz, .bz2 or .xz, nor in a "
        r"zip or tar archive\); name the folder that contains them, or leave --data-dir out to download",
    ),
    "one missing": ({**FORMS["by their last names"], "x.valid": b""}, r"x.valid: 0 bytes long, expected 11,099 for x"),
    "two missing": ({"x.train": TEXTS[TRAIN.path]}, r"--data-dir .*mine: no x.valid, x.test there for x"),
    "other contents": (
        {**FORMS["by their last names"], "x.train": WRONG},
        rf"x.train: sha256 {sha256(WRONG)[7:]}, expected sha256 {(TRAIN.checksum or '')[7:]} for x; {OWN}",
    ),
    "other contents, packed": (
        {**FORMS["gzip"], "x.train.gz": gzip.compress(WRONG[1:])},
        rf"x.train.gz: decompressed 11,098 bytes long, expected 11,099 for x; {OWN}.gz",
    ),
    "packed, cut short": (
        {**FORMS["gzip"], "x.train.gz": gzip.compress(WRONG)[:-20]},
        r"x.train.gz: damaged or truncated \(.*\); get it again",
    ),
    "the zip cut short": ({"x-v1.zip": ZIP[:-7]}, rf"x-v1.zip: {len(ZIP) - 7:,} bytes long, expected {len(ZIP):,};"),
    "the zip altered": (
        {"x-v1.zip": ZIP[:99] + b"!" + ZIP[100:]},
        r"x-v1.zip: sha256 \w{64}, expected sha256 \w{64}; get it again, or use .* extract it",
    ),
    "another zip cut short": ({"a.zip": ZIP[:-7]}, r"a.zip: damaged or truncated \(.*\); get it again"),
    "another tar cut short": ({"a.tgz": TAR[:-99]}, r"a.tgz: damaged or truncated \(.*\); get it again"),
    "another zip, other contents": (
        {"a.zip": zip_of({**TEXTS, TRAIN.path: WRONG})},
        r"a.zip \(x-v1/data/x.train\): decompressed sha256 \w{64}, expected sha256 \w{64} for x; .*extract it, and txl",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_sources_are_refused(tmp_path: Path, cache: Path, case: str) -> None:
    files, message = REFUSED[case]
    folder = make(tmp_path / "mine", files)
    with pytest.raises(UserError, match=message) as caught:
        find(folder)
    assert "\n" not in str(caught.value)
    assert not list(cache.rglob("*.partial*"))


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data-dir .*gone: no such file or folder; name the one that contains x"):
        find(tmp_path / "gone")


def test_a_text_without_known_contents_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = make(tmp_path / "mine", {"x.train": WRONG})
    assert find(folder, texts=(UNKNOWN,)) == [WRONG]


def test_a_plain_file_of_any_text(tmp_path: Path, cache: Path) -> None:
    folder = make(tmp_path / "mine", {"x.train": b"words", "x.train.gz": gzip.compress(b"words")})
    assert plain_file(FileRange(folder / "x.train"), "x.train") == folder / "x.train"
    for _ in range(2):
        path = plain_file(FileRange(folder / "x.train.gz"), "x.train")
        assert path == cache / "unpacked" / "x.train"
        assert path.read_bytes() == b"words"
