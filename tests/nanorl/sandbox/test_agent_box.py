"""The guard of an agent's box is out of its program's reach, and so is the limit of its memory."""

from __future__ import annotations

import sys
from pathlib import Path

import box_attacks
import pytest

from nanorl.agents import agent_program as program
from nanorl.sandbox import seccomp
from nanorl.types import InfrastructureError

pytestmark = pytest.mark.sandbox
COUNTED = pytest.mark.parametrize("has_cgroup", [True, False], ids=["cgroup", "watched"])


@pytest.mark.parametrize("name", box_attacks.ATTACKS)
def test_a_program_gets_nothing_of_its_guard(name: str) -> None:
    result = box_attacks.run(box_attacks.ATTACKS[name])
    assert "ESCAPED" not in result.stdout and result.exit_code == 0, result


@COUNTED
@pytest.mark.parametrize("name", box_attacks.GREEDY)
def test_a_program_that_takes_too_much_is_ended_for_it(name: str, has_cgroup: bool) -> None:
    result = box_attacks.run(box_attacks.GREEDY[name], has_cgroup)
    assert "ESCAPED" not in result.stdout and result.reason == "memory", result


def rewritten(monkeypatch: pytest.MonkeyPatch, folder: Path, old: str, new: str) -> None:
    """A guard with one of its lines changed."""
    text = program.GUARD.read_text()
    assert old in text
    path = folder / "guard.py"
    path.write_text(text.replace(old, new))
    monkeypatch.setattr(program, "GUARD", path)


def test_the_limit_is_also_held_from_outside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rewritten(monkeypatch, tmp_path, "            if left < 0:", "            if False:")
    greedy = "held = [bytearray(b'x' * (1 << 20)) for _ in range(300)]\nimport time\ntime.sleep(50)"
    assert box_attacks.run(greedy, has_cgroup=False).reason == "memory"


def test_a_guard_that_cannot_hide_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp, "_PR_SET_DUMPABLE", 22)
    with pytest.raises(InfrastructureError, match="cannot hide from the program"):
        box_attacks.run("print('started')")


def test_a_guard_that_does_not_hide_is_rewritten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The attacks are worth something."""
    line = '    _prctl(_PR_SET_DUMPABLE, 0, "hide from the program")\n'
    rewritten(monkeypatch, tmp_path, line, "")
    found = {
        name
        for name, code in box_attacks.ATTACKS.items()
        if "ESCAPED" in box_attacks.run(code).stdout
    }
    assert found >= {"its memory", "its descriptors"}


def test_a_child_of_the_guard_is_itself_again() -> None:
    """It finds its own descriptors and memory in /proc/self, as any program does."""
    look = "import os; print(sorted(os.listdir('/proc/self/fd'))[:3], open('/proc/self/environ')"
    result = box_attacks.run(
        look + ".read().count('PATH='), open('/proc/self/oom_score_adj').read())"
    )
    assert (result.stdout, result.exit_code) == ("['0', '1', '2'] 1 1000\n\n", 0), result
    assert sys.executable
