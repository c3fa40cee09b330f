"""Tests of integer arrays in .npy files, which are read as lines of text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformer_xl.config import UserError
from transformer_xl.text.sources import arrays
from transformer_xl.text.sources.arrays import ArrayRange


@given(
    shape=st.one_of(st.tuples(st.integers(1, 41)), st.tuples(st.integers(1, 7), st.integers(1, 11))),
    dtype=st.sampled_from(["int8", "uint16", "<i8", ">i4", "uint64"]),
    order=st.sampled_from(["C", "F"]),
    chunk_values=st.sampled_from([1, 3, 1000]),
    data=st.data(),
)
@settings(deadline=None)
def test_range_of_an_array_is_text_with_a_line_for_each_row(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, ...],
    dtype: str,
    order: str,
    chunk_values: int,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.mktemp("arrays") / "a.npy"
    # values below 127, which fit into every dtype
    array = (np.arange(np.prod(shape)) * 13 % 127).astype(dtype).reshape(shape)
    np.save(path, np.asarray(array, order=order))
    assert ArrayRange.whole(path).size() == array.size
    start = data.draw(st.integers(0, array.size))
    stop = data.draw(st.integers(start, array.size))
    expected = ""
    for index in range(start, stop):
        is_line_end = (index + 1) % shape[-1] == 0 or index + 1 == stop
        expected += f"{array.reshape(-1)[index]}" + ("\n" if is_line_end else " ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrays, "_CHUNK_VALUES", chunk_values)
        chunks = list(ArrayRange(path, start=start, stop=stop))
    assert b"".join(chunks).decode() == expected
    assert all(len(chunk.split()) <= chunk_values for chunk in chunks)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(3), "has float64, expected integers; convert it with array.astype"),
        (np.zeros(3, bool), "has bool, expected integers"),
        (np.zeros((2, 3, 5), int), r"3 dimensions, expected 1 \(one sequence\) or 2 \(a sequence in each row\)"),
        (np.array(7), "0 dimensions"),
        (np.zeros((0, 5), int), "an empty array; leave it out"),
        # An array of Python objects is stored as a pickle, which is never loaded.
        (np.array([None, 1]), "damaged, or not a .npy file of integers; write it again with numpy.save"),
    ],
)
def test_arrays_that_are_not_rows_of_integers_are_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(UserError, match=f"a.npy: .*{message}") as caught:
        ArrayRange.whole(tmp_path / "a.npy")
    assert "\n" not in str(caught.value)


def test_damaged_and_truncated_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(1009))
    content = path.read_bytes()
    whole = ArrayRange.whole(path)
    # .npy files whose header has a malformed shape
    headers = [content.replace(b"(1009,)", shape) for shape in (b"(1009, ", b"((0009)", b"(-109,)", b"0o10.7,")]
    for damaged in (content[:-1], content[:50], content[:3], b"1 2 3\n", b"PK\3\4", *headers):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a.npy: damaged, or not a .npy file of integers") as caught:
            ArrayRange.whole(path)
        assert "pickle" not in str(caught.value)
    np.save(path, np.arange(997))
    with pytest.raises(UserError, match=r"a.npy became shorter while it was read"):
        list(whole)
