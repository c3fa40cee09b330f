"""The array of mean attention is written completely, or writing fails with an error."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import no_file_larger_than

from transformer_xl.apps.analyze.attention import _save_array


@pytest.mark.parametrize("size", [100, 600])
def test_array_that_does_not_fit_on_disk_raises_error(tmp_path, size):
    """The file needs 728 bytes: a header of 128 and 150 float32 values. 100 bytes cannot hold the header, 600 not all
    values."""
    with no_file_larger_than(size), pytest.raises(OSError, match="File too large"):
        _save_array(tmp_path / "means.npy", np.ones((2, 3, 25)))
    with no_file_larger_than(728):
        _save_array(tmp_path / "means.npy", np.ones((2, 3, 25)))
