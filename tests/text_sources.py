"""Files and archives for the tests of text sources."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from transformer_xl.text.documents import Document
from transformer_xl.text.sources.archives import FileDigest
from transformer_xl.text.sources.download import TextFile
from transformer_xl.text.sources.named_datasets import NamedDataset


def make_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Write files by their path in the folder, and return the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def zip_of(files: Mapping[str, bytes]) -> bytes:
    """A zip archive of these files, which also has an empty folder."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("folder")
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tar_of(files: Mapping[str, bytes], mode: str = "w:gz", links: Iterable[tarfile.TarInfo] = ()) -> bytes:
    """A tar archive of these links and files; `mode` is that of tarfile.open (w:gz is gzip, w is uncompressed)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for link in links:
            archive.addfile(link)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def digest(content: bytes) -> FileDigest:
    """The length and sha256 of a content."""
    return FileDigest(num_bytes=len(content), checksum=f"sha256:{hashlib.sha256(content).hexdigest()}")


def without_digests(dataset: NamedDataset) -> NamedDataset:
    """The same data set, except that any contents of its files are accepted and only its archive can be downloaded."""

    def unverified(text: TextFile) -> TextFile:
        return replace(text, digest=None, urls=())

    files = {
        split: tuple(replace(file, text=unverified(file.text)) for file in files)
        for split, files in dataset.files.items()
    }
    return replace(dataset, files=files, vocab_file=dataset.vocab_file and unverified(dataset.vocab_file))


def text_of(documents: Iterable[Document]) -> bytes:
    """The concatenated text of the documents."""
    return b"".join(chunk for document in documents for chunk in document.chunks)


def names_of(documents: Iterable[Document]) -> list[str]:
    """The file names of the documents."""
    return [Path(document.name).name for document in documents]
