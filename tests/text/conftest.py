from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_flush() -> Iterator[None]:
    """Skip fsync, which waits for the disk; tests/test_files.py tests that files are flushed to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_xl.files._flush", lambda path: None)
        yield
