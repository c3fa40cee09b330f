"""speed.py measures two versions in turn, and finds what is slower."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import speed


def test_versions_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both are the working tree, since there may be no git."""
    works, tree = "train-small,generate-small", speed.checked_out
    flags = ["--quick", "--rounds=1", "--threads=1", f"--works={works}", f"--out={tmp_path / 'out'}"]
    monkeypatch.setattr("sys.argv", ["speed.py", *flags])
    monkeypatch.setattr(speed, "default_base", lambda: "base")
    monkeypatch.setattr(speed, "checked_out", lambda name, folder: tree(None, folder))
    monkeypatch.setattr(speed, "LOWEST_RATIO", 1e9)
    with pytest.raises(SystemExit, match=r"worse than .* of base: train-small, generate-small"):
        speed.main()
    results = json.loads((tmp_path / "out").read_text())
    assert list(results["works"]) == works.split(",")
    assert all(
        value > 0 for lines in results["works"].values() for line in lines for side in line["rounds"] for value in side
    )
    output = capsys.readouterr()
    assert "| train-small | MiB peak |" in output.out
    for work in works.split(","):
        assert re.search(rf"{work}, by operator:\n.*\n.*\n\| \S.* \| [0-9.]+ \| [0-9.]+ \|", output.out + output.err)


@pytest.mark.parametrize(
    ("flag", "wanted"), [("--works=sleep", "'sleep' is none of"), ("no-such-commit", "no worktree of no-such-commit")]
)
def test_bad_input_is_refused(flag: str, wanted: str, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """With another status than slower code."""
    monkeypatch.setattr("sys.argv", ["speed.py", flag])
    with pytest.raises(SystemExit, match="2"):
        speed.main()
    assert wanted in capsys.readouterr().err


def test_operators_that_take_longer_come_first() -> None:
    table = speed.operator_table({"mm": 1.0, "add": 1.0, "gone": 2.0}, {"mm": 1.1, "add": 1.5, "new": 0.2})
    assert [line.split()[1] for line in table[2:]] == ["add", "new", "mm", "gone"]


def test_slower_works_are_found() -> None:
    """A higher number is better for tokens/s alone; an interval that reaches 0.95 is no difference."""
    slow, fast = {"tokens/s": 90.0, "s": 1.2}, {"tokens/s": 100.0, "s": 1.0}
    worse = speed.compare([(fast, slow), (fast, slow)])
    assert [line["ratio"] for line in worse] == pytest.approx([0.9, 1 / 1.2])
    unclear = speed.compare([(fast, slow), (fast, fast)])
    found = {"worse": worse, "unclear": unclear, "better": speed.compare([(slow, fast)])}
    assert speed.slower(found) == ["worse"]
