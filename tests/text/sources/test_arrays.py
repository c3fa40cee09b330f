"""Numbers in .npy files as lines of text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.documents import Document
from transformer_xl.text.sources import arrays
from transformer_xl.text.sources.arrays import ArrayRange, limit_numbers


@given(
    shape=st.one_of(st.tuples(st.integers(1, 41)), st.tuples(st.integers(1, 7), st.integers(1, 11))),
    dtype=st.sampled_from(["int8", "uint16", "<i8", ">i4", "uint64"]),
    order=st.sampled_from(["C", "F"]),
    at_once=st.sampled_from([1, 3, 1000]),
    data=st.data(),
)
@settings(deadline=None)
def test_numbers_become_lines(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, ...],
    dtype: str,
    order: str,
    at_once: int,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("arrays") / "a.npy"
    array = (np.arange(np.prod(shape)) * 13 % 127).astype(dtype).reshape(shape)
    np.save(path, np.asarray(array, order=order))
    part = ArrayRange.whole(path)
    assert part.size() == array.size
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    # Number by number: a line ends where a row does, and where the part does.
    wanted = ""
    for index in range(start, stop):
        row_ends = (index + 1) % shape[-1] == 0 or index + 1 == stop
        wanted += f"{array.reshape(-1)[index]}" + ("\n" if row_ends else " ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "_CHUNK_VALUES", at_once)
        chunks = list(ArrayRange(path, start, stop))
    assert b"".join(chunks).decode() == wanted
    assert len(chunks) <= (stop - start) / min(at_once, shape[-1]) + 1
    assert all(chunk.count(b" ") + chunk.count(b"\n") < 2 * at_once + 1 for chunk in chunks)


def test_rows_are_whole(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((5, 7), int))
    np.save(tmp_path / "b.npy", np.zeros(35, int))
    assert [ArrayRange.whole(tmp_path / "a.npy").row_end(index) for index in (0, 1, 7, 8, 35)] == [0, 7, 7, 14, 35]
    assert [ArrayRange.whole(tmp_path / "b.npy").row_end(index) for index in (0, 1, 7, 8, 35)] == [0, 1, 7, 8, 35]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3), "has float64, expected integers; convert it with array.astype"),
        (np.zeros(3, bool), "has bool, expected integers"),
        (
            np.zeros((2, 3, 5), int),
            r"an array of 3 dimensions, expected 1 \(one sequence\) or 2 \(a sequence in each row\)",
        ),
        (np.array(7), "an array of 0 dimensions"),
        (np.zeros((0, 5), int), "an empty array; leave it out"),
        (np.array([None, 1]), "damaged, or not a .npy file of integers; write it again with numpy.save"),
        (np.zeros(3, [("a", int)]), "has .*, expected integers"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(UserError, match=f"a.npy: {message}") as caught:
        ArrayRange.whole(tmp_path / "a.npy")
    assert "\n" not in str(caught.value)


def test_damaged_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(1009))
    content = path.read_bytes()
    part = ArrayRange.whole(path)
    headers = [content.replace(b"(1009,)", new) for new in (b"(1009, ", b"((0009)", b"(-109,)", b"0o10.7,")]
    for damaged in (content[:-1], content[:50], content[:3], b"1 2 3\n", b"PK\3\4", *headers):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a.npy: damaged, or not a .npy file of integers") as caught:
            ArrayRange.whole(path)
        assert "pickle" not in str(caught.value)
    np.save(path, np.arange(997))
    with pytest.raises(UserError, match=r"a.npy became shorter while it was read"):
        list(part)
    path.unlink()
    with pytest.raises(UserError, match=r"reading .*a.npy: no such file or folder"):
        list(part)


@pytest.mark.parametrize("at_once", [2, 1000])
def test_numbers_out_of_range_are_named_by_their_index(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "_CHUNK_VALUES", at_once)
    array = np.arange(35)
    array[[25, 31]] = -2, 2**31
    np.save(tmp_path / "one.npy", array)
    np.save(tmp_path / "two.npy", array.reshape(5, 7))
    one, two = ArrayRange.whole(tmp_path / "one.npy"), ArrayRange.whole(tmp_path / "two.npy")
    for part, stop, below, message in (
        (one, 35, 29, r"one.npy: array\[25\] is -2, expected an integer from 0 to 28; remove it, or renumber"),
        (two, 35, 29, r"two.npy: array\[3, 4\] is -2, expected an integer from 0 to 28; remove it, or renumber"),
        (two, 25, 23, r"two.npy: array\[3, 2\] is 23, expected an integer from 0 to 22; .* and a larger --vocab-size$"),
    ):
        (document,) = limit_numbers([Document("a", ArrayRange(part.path, 0, stop))], below)
        with pytest.raises(UserError, match=message):
            list(document.chunks)
    with pytest.raises(UserError, match=r"array\[4, 3\] is 2147483648, expected .* 0 to 214748364\d; .* renumber"):
        list(ArrayRange(two.path, 26, 35))
    assert b"".join(ArrayRange(two.path, 26, 31, 31)) == b"26 27\n28 29 30\n"
