"""The numbers behind the pictures are written whole, or the error is told."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import no_file_larger_than

from transformer_xl.analysis.attention import _save_array


def test_numbers_are_written_in_float32(tmp_path):
    wanted = np.random.default_rng(1).random((2, 3, 5))
    _save_array(tmp_path / "means.npy", wanted)
    found = np.load(tmp_path / "means.npy", allow_pickle=False)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted.astype(np.float32))


@pytest.mark.parametrize("size", [100, 600])
def test_numbers_that_do_not_fit_on_the_disk_are_an_error(tmp_path, size):
    """However little is lost: 128 bytes of header and 600 of numbers."""
    with no_file_larger_than(size), pytest.raises(OSError, match="File too large"):
        _save_array(tmp_path / "means.npy", np.ones((2, 3, 25)))
