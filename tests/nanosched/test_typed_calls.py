"""A type checker sees through a call of an actor: its arguments, its result, its constructor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nanosched import Scheduler

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from nanosched import Scheduler

class Counter:
    def __init__(self, start: int = 0) -> None: ...
    def add(self, amount: int) -> int: return amount
    async def slow(self, *, text: str) -> list[str]: return [text]

async def main(sched: Scheduler) -> None:
    counter = sched.actor(Counter).options(name="c").remote(start=3)
    reveal_type(counter)
    reveal_type(counter.call(Counter.add, 2))
    reveal_type(await counter.call(Counter.slow, text="a"))
    reveal_type(sched.get([counter.call(Counter.add, amount=2)]))
    counter.call(Counter.add, "two")
    counter.call(Counter.slow, word="a")
    counter.call(str.upper)
    sched.actor(Counter).remote(begin=3)
"""


def test_a_type_checker_knows_arguments_and_results_of_a_call(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # In a process of its own: what it leaves behind in this one is no object to look at, and a
    # later test that looked at all objects ended the process.
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")),
            *("--cache-dir", str(tmp_path), str(program)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = done.stdout
    assert not done.stderr
    shown = found.replace("builtins.", "").splitlines()
    revealed = [line.split("Revealed type is ")[1] for line in shown if "Revealed" in line]
    assert revealed == [
        '"nanosched.handle.ActorHandle[program.Counter]"',
        '"nanosched.future.Future[int]"',
        '"list[str]"',
        '"list[int]"',
    ]
    first_wrong = PROGRAM.splitlines().index('    counter.call(Counter.add, "two")') + 1
    wrong = {int(line.split(":")[1]) for line in found.splitlines() if ": error:" in line}
    assert wrong == set(range(first_wrong, first_wrong + 4)), found


class Base:
    def name(self) -> str:
        return "base"


class Derived(Base):
    def name(self) -> str:
        return "derived"


def test_a_call_runs_the_version_of_the_actors_own_class() -> None:
    with Scheduler() as sched:
        actor = sched.actor(Derived).remote()
        assert sched.get(actor.call(Base.name)) == "derived"
        with pytest.raises(AttributeError, match="actor Derived has no public method 'upper'"):
            actor.call(str.upper)  # type: ignore[arg-type]
