"""Files of torch.save are read without unpickling: the tensors equal the saved ones, are mapped into memory, and never
reach beyond the file.

torch.save writes a zip archive; before version 1.6 it wrote a stream of five pickles (a magic number, the version, the
system, the value, the keys of the storages), followed by the storages, the elements of the tensors.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.serialization import set_crc32_options

from transformer_xl.config import UserError
from transformer_xl.integrations.checkpoints.torch_file import TorchFile
from transformer_xl.integrations.checkpoints.unpickler import PickledObject

both_forms = pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "stream"])


def saved(path: Path, value: Any, *, is_archive: bool = True) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=is_archive)
    return path


def opened(path: Path) -> TorchFile:
    """Open a file whose pickle may name no classes besides those of tensors."""
    return TorchFile(path)


@both_forms
def test_tensors_equal_the_saved_ones(is_archive: bool, tmp_path: Path) -> None:
    whole = torch.arange(60.0).view(3, 4, 5)
    dtypes = (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
              torch.uint8, torch.bool)  # fmt: skip
    tensors = {
        "whole": whole, "transposed": whole.transpose(0, 2), "part": whole[1, 1:, ::2], "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 3), "parameter": nn.Parameter(torch.randn(2, 3)),
        **{str(dtype): torch.arange(5).to(dtype) for dtype in dtypes},
    }  # fmt: skip
    file = opened(saved(tmp_path / "a.pt", OrderedDict(tensors), is_archive=is_archive))
    assert list(file.value) == list(tensors)
    for name, tensor in tensors.items():
        read_tensor = file.tensor(file.value[name])
        assert read_tensor.dtype == tensor.dtype
        assert torch.equal(read_tensor, tensor.detach()), name
    whole, part = (file.tensor(file.value[name]) for name in ("whole", "part"))
    assert part.data_ptr() == whole[1, 1].data_ptr()  # elements shared in the file are shared in memory


def test_writing_to_a_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", torch.zeros(1000))
    before = path.read_bytes()
    file = opened(path)
    file.tensor(file.value).fill_(7)
    assert path.read_bytes() == before


# changes to a tensor of 6 elements with offset 0, size (2, 3) and stride (3, 1)
@pytest.mark.parametrize(
    "changes",
    [
        {"offset": 1}, {"offset": -1}, {"size": (3, 3)}, {"size": (2, -3)}, {"stride": (3, 2)}, {"stride": (-3, 1)},
        {"size": (10**12,), "stride": (0,)}, {"size": (2,)}, {"offset": "0"}, {"size": 6}, {"offset": 2**62},
        {"size": (2, True)}, {"size": (2**62, 2**62, 0), "stride": (0, 0, 0)}, {"size": (2**70, 0)},
        {"size": (1,), "stride": (2**70,)}, {"size": {2: 1, 3: 1}}, {"size": b"ab"}, {"size": None},
        {"size": (1,) * 9, "stride": (1,) * 9}, {"size": (2**30,), "stride": (0,)},
        {"size": (2**31 - 1,) * 3 + (0,), "stride": (0,) * 4}, {"stride": None},
    ],
    ids=str,
)  # fmt: skip
def test_tensor_that_extends_beyond_its_storage_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    file = opened(saved(tmp_path / "a.pt", torch.zeros(6).view(2, 3)))
    arguments = dict(zip(("storage", "offset", "size", "stride"), file.value.arguments, strict=False)) | changes
    with pytest.raises(UserError, match=r"a.pt is damaged \(a tensor in it"):
        file.tensor(PickledObject(file.value.name, tuple(arguments.values())))


def test_storage_keys_that_are_not_strings_are_refused(tmp_path: Path) -> None:
    """A key is not looked up if it could be hashed only with an error, or not safely: a deeply nested one crashes."""
    path = saved(tmp_path / "a.pt", torch.zeros(3), is_archive=False)
    content = path.read_bytes()
    stream = io.BytesIO(content)
    for _ in range(3):  # the pickles before that of the value
        pickle.load(stream)
    (key,) = re.findall(rb"\d{6,}", content[stream.tell() :])[:1]  # key of the only storage, a number
    keys = pickle.dumps([key.decode()], 2)  # the last pickle
    assert keys in content
    path.write_bytes(content.replace(keys, pickle.dumps([[]], 2)))
    with pytest.raises(UserError, match=r"is damaged \(its list of storages is wrong\)"):
        opened(path)


@pytest.mark.parametrize(
    # change: returns the new content of a member, or None to remove it; compression: that of the new archive
    ("change", "compression", "message"),
    [
        (lambda name, content: content, zipfile.ZIP_DEFLATED, "is not stored as torch.save does"),
        (lambda name, content: None if "data/" in name else content, 0, r"elements of a tensor \('0'\) are incomplete"),
        (lambda name, content: content[:-1] if "data/" in name else content, 0, "elements of a tensor"),
        (lambda name, content: None if "pkl" in name else content, 0, "not a complete archive of torch.save"),
        (lambda name, content: b"big" if "byteorder" in name else content, 0, "big-endian"),
    ],
)
def test_changed_archive_is_refused(
    change: Callable[[str, bytes], bytes | None], compression: int, message: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "a.pt", torch.zeros(60))
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        members = {name: change(name, archive.read(name)) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            if content is not None:
                archive.writestr(name, content)
    with pytest.raises(UserError, match=message):
        (file := opened(path)).tensor(file.value)


def test_changed_bit_is_found_by_the_checksum(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"a": torch.zeros(60), "b": torch.ones(60)})
    content = bytearray(path.read_bytes())
    content[content.index(struct.pack("<f", 1.0) * 60) + 7] ^= 1
    path.write_bytes(content)
    file = opened(path)
    assert torch.equal(file.tensor(file.value["a"]), torch.zeros(60))
    with pytest.raises(
        UserError, match=r"a.pt is damaged \(the checksum of 'data/1' in it does not match\); get it again"
    ):
        file.tensor(file.value["b"])
    content[content.index(b"data.pkl") + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a.pt is damaged \(the checksum of 'data.pkl' in it does not match\)"):
        opened(path)


def test_archive_without_checksums_is_read(tmp_path: Path) -> None:
    set_crc32_options(compute_crc32=False)
    try:
        file = opened(saved(tmp_path / "a.pt", torch.ones(60)))
    finally:
        set_crc32_options(compute_crc32=True)
    assert torch.equal(file.tensor(file.value), torch.ones(60))


def test_archive_whose_members_overlap_is_refused(tmp_path: Path) -> None:
    """Members that share their bytes would make a small file a large one, and checking all of them slow."""
    path = saved(tmp_path / "a.pt", torch.zeros(6000))
    with zipfile.ZipFile(path, "a") as archive:
        member = copy(archive.getinfo("a/data/0"))
        member.filename = "a/data/1"
        archive.filelist.append(member)
        archive.comment = b"changed"  # so that the list of members is written again
    with pytest.raises(UserError, match=r"a.pt is damaged \(its members overlap"):
        opened(path)


@both_forms
def test_truncated_file_gives_an_error_of_one_line(is_archive: bool, tmp_path: Path) -> None:
    content = saved(tmp_path / "a.pt", {"a": torch.zeros(9), "b": [1, "x"]}, is_archive=is_archive).read_bytes()
    for length in range(0, len(content), 13):
        (tmp_path / "b.pt").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"b.pt (is damaged|is empty)[^\n]*\Z"):
            opened(tmp_path / "b.pt")
