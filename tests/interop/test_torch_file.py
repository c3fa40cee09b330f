"""Files of torch.save in both forms: the very tensors, mapped, and nothing that reaches beyond the file."""

from __future__ import annotations

import io
import pickle
import re
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from transformer_xl.config import UserError
from transformer_xl.interop.torch_file import TorchFile
from transformer_xl.interop.unpickler import PickledObject


def nothing(_: str) -> bool:
    return False


def saved(path: Path, value: Any, *, newer: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=newer)
    return path


@pytest.mark.parametrize("newer", [True, False])
def test_tensors_are_what_was_saved(newer: bool, tmp_path: Path) -> None:
    whole = torch.arange(60.0).view(3, 4, 5)
    tensors = {
        "whole": whole, "turned": whole.transpose(0, 2), "part": whole[1, 1:, ::2], "single": torch.tensor(1.5),
        "empty": torch.zeros(0, 3), "parameter": nn.Parameter(torch.randn(2, 3)),
        **{str(kind): torch.arange(5).to(kind) for kind in (torch.float64, torch.float16, torch.bfloat16, torch.int64,
                                                            torch.int32, torch.int16, torch.int8, torch.uint8)},
        "bool": torch.tensor([True, False]),
    }  # fmt: skip
    file = TorchFile(saved(tmp_path / "a.pt", OrderedDict(tensors), newer=newer), nothing)
    assert list(file.value) == list(tensors)
    for name, tensor in tensors.items():
        found = file.tensor(file.value[name])
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor.detach()), name
    whole, part = (file.tensor(file.value[name]) for name in ("whole", "part"))
    assert part.data_ptr() == whole[1, 1].data_ptr()  # shared in the file, shared here


def test_writing_to_a_tensor_leaves_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", torch.zeros(1000))
    before = path.read_bytes()
    file = TorchFile(path, nothing)
    file.tensor(file.value).fill_(7)
    assert path.read_bytes() == before


def test_a_pickle_alone_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "vocab.pkl"
    path.write_bytes(pickle.dumps({"a": 1}))
    assert TorchFile(path, nothing).value == {"a": 1}


def with_arguments(path: Path, **changes: Any) -> tuple[TorchFile, PickledObject]:
    file = TorchFile(saved(path, torch.zeros(6).view(2, 3)), nothing)
    names = ["storage", "offset", "size", "stride"]
    arguments = [changes.get(name, value) for name, value in zip(names, file.value.arguments, strict=False)]
    return file, PickledObject(file.value.name, tuple(arguments))


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 1}, {"offset": -1}, {"size": (3, 3)}, {"size": (2, -3)}, {"stride": (3, 2)}, {"stride": (-3, 1)},
        {"size": (10**12,), "stride": (0,)}, {"size": (2,)}, {"offset": "0"}, {"size": 6}, {"offset": 2**62},
        {"size": (2, True)}, {"size": (2**62, 2**62, 0), "stride": (0, 0, 0)}, {"size": (2**70, 0)},
        {"size": (1,), "stride": (2**70,)}, {"size": {2: 1, 3: 1}}, {"size": b"ab"}, {"size": None},
        {"size": (1,) * 9, "stride": (1,) * 9},
        {"size": (2**31 - 1,) * 3 + (0,), "stride": (0,) * 4}, {"stride": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_tensor_that_reaches_beyond_its_numbers_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    file, record = with_arguments(tmp_path / "a.pt", **changes)
    with pytest.raises(UserError, match=r"a.pt is damaged \(a tensor in it"):
        file.tensor(record)


def test_a_list_of_storages_with_odd_keys_is_refused(tmp_path: Path) -> None:
    """A key is compared only if it is a text: hashing a deep one ends the interpreter."""
    path = saved(tmp_path / "a.pt", torch.zeros(3), newer=False)
    content = path.read_bytes()
    keys = pickle.dumps([_storage_key(content)], 2)
    assert keys in content
    path.write_bytes(content.replace(keys, b"\x80\x02])" + b"\x85" * 200_000 + b"a."))
    program = (
        "import sys; from pathlib import Path; from transformer_xl.interop.torch_file import TorchFile\n"
        "try: TorchFile(Path(sys.argv[1]), lambda _: False)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, timeout=300, text=True)
    assert "is damaged (its list of storages is wrong)" in done.stdout, done.returncode


def _storage_key(content: bytes) -> str:
    """The key of the only storage, as the fifth pickle of the older form lists it."""
    stream = io.BytesIO(content)
    for _ in range(3):
        pickle.load(stream)
    keys = re.findall(rb"\d{6,}", content[stream.tell() :])
    return keys[0].decode()


def rewritten(path: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> Path:
    """The archive with its members changed."""
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            if (new := change(name, content)) is not None:
                archive.writestr(name, new)
    return path


@pytest.mark.parametrize(
    ("change", "compression", "message"),
    [
        (lambda name, content: content, zipfile.ZIP_DEFLATED, r"is not as torch.save writes it"),
        (
            lambda name, content: None if "data/" in name else content,
            0,
            r"the elements of a tensor \('0'\) are incomplete",
        ),
        (lambda name, content: content[:-1] if "data/" in name else content, 0, r"the elements of a tensor"),
        (lambda name, content: None if "pkl" in name else content, 0, r"not a complete archive of torch.save"),
        (lambda name, content: b"big" if "byteorder" in name else content, 0, r"big-endian"),
    ],
)
def test_an_archive_that_was_changed_is_refused(change: Any, compression: int, message: str, tmp_path: Path) -> None:
    path = rewritten(saved(tmp_path / "a.pt", torch.zeros(60)), change, compression)
    with pytest.raises(UserError, match=message):
        (file := TorchFile(path, nothing)).tensor(file.value)


@pytest.mark.parametrize("newer", [True, False])
def test_every_cut_gives_one_clear_line(newer: bool, tmp_path: Path) -> None:
    content = saved(tmp_path / "a.pt", {"a": torch.zeros(9), "b": [1, "x"]}, newer=newer).read_bytes()
    for length in range(0, len(content), 13):
        (tmp_path / "b.pt").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"b.pt (is damaged|is empty)") as refused:
            TorchFile(tmp_path / "b.pt", nothing)
        assert not re.search(r"\n", str(refused.value))
