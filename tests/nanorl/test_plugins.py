"""Files of the user are read as they stand: an edit counts, also within the second of a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from nanorl.plugins import import_place


@pytest.mark.parametrize("edited", ["mine.py", "part_of_mine.py"])
def test_an_edit_of_equal_size_within_the_second_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str
) -> None:
    """By size and second, Python's cache of bytecode takes the new text for the old one."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "mine.py").write_text("from part_of_mine import PART\nOWN = 2\n")
    (tmp_path / "part_of_mine.py").write_text("PART = 2\n")

    def load() -> int:
        """As a new process does."""
        ours = ("part_of_mine", "nanorl_plugin_mine_")
        for name in [one for one in sys.modules if one.startswith(ours)]:
            monkeypatch.delitem(sys.modules, name)
        sys.path_importer_cache.pop(str(tmp_path), None)
        module = import_place(str(tmp_path / "mine.py"))
        return int(module.OWN + module.PART)

    for file in tmp_path.glob("*.py"):
        os.utime(file, (1e9, 1e9))
    assert load() == 4
    (tmp_path / edited).write_text((tmp_path / edited).read_text().replace("2", "1"))
    os.utime(tmp_path / edited, (1e9, 1e9))
    assert load() == 3
    assert not (tmp_path / "__pycache__").exists()
    assert not sys.dont_write_bytecode
