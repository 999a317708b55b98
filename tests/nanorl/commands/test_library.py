"""`nanorl.train` and `nanorl.evaluate` in this process: in a notebook, from a debugger, stopped."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from waiting import LIMIT_S, wait_until

import nanorl
from nanoengine.stop_signals import Interrupted
from nanorl.commands import api

OPTIONS = {
    **{"dtype": "fp32", "threads": 1, "warm_start.steps": 0, "rl.tasks_per_step": 1},
    **{"rl.group_size": 2, "rl.algorithm.advantage": "reinforce_pp", "agent.max_turn_tokens": 4},
    "evaluation": {"num_tasks": 2, "num_tasks_untrained": 0, "num_tasks_no_tool": 0},
}
pytestmark = pytest.mark.xdist_group("heavy")


def local_environment(seen: list[Any]) -> type[nanorl.Env]:
    """A class that no other process could find."""

    class Local(nanorl.Env):
        def tasks(self, rng: Any) -> nanorl.Task:
            return nanorl.Task(f"say {rng.randint(0, 99)}", answer="x")

        def reset(self) -> None:
            seen.append(threading.current_thread())

    return Local


def test_a_class_in_a_function_is_trained_and_evaluated_in_the_callers_thread(
    tmp_path: Path,
) -> None:
    """Where `breakpoint()` in one of its methods has the caller's terminal."""
    seen: list[Any] = []
    env = local_environment(seen)
    run = nanorl.train("tiny", env=env, steps=1, out=tmp_path / "run", options=OPTIONS)
    assert run.folder == tmp_path / "run" and run.model.is_dir()
    assert {*seen} == {threading.main_thread()}
    result = nanorl.evaluate(run.folder, env=env, num_tasks=3, k=2, out=tmp_path / "eval")
    assert result.num_samples == 2 and len(result.scores) == 3
    written = json.loads((tmp_path / "eval" / "eval.json").read_text())
    assert written["num_tasks"] == 3
    with pytest.raises(ValueError, match=r"no option is called rl\.lr; there are model, num_tasks"):
        nanorl.evaluate(run.folder, env=env, options={"rl.lr": 1})
    with pytest.raises(ValueError, match="Local"):  # never in another environment than its own
        nanorl.evaluate(run.folder, num_tasks=1, out=tmp_path / "other")


def test_in_a_notebook_whose_loop_is_running(tmp_path: Path) -> None:
    seen: list[Any] = []

    async def cell() -> nanorl.TrainedRun:
        return nanorl.train(
            "tiny", env=local_environment(seen), steps=1, out=tmp_path / "run", options=OPTIONS
        )

    assert asyncio.run(cell()).folder == tmp_path / "run" and seen


def pressing(
    monkeypatch: pytest.MonkeyPatch, *moments: Callable[[], object], last: threading.Event
) -> None:
    """Ctrl-C while a run in a thread is waited for, when each of `moments` has returned; `last` is
    set afterwards."""
    left, join = list(moments), threading.Thread.join

    def pressed(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread.name == "nanorl run":
            if left:
                left.pop(0)()
                raise KeyboardInterrupt
            last.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", pressed)


async def in_a_cell(work: Coroutine[Any, Any, None]) -> None:
    """As a notebook runs it: a loop is running here already."""
    api.run_to_end(work)


@pytest.mark.parametrize("stands_still", ["before", "after"])
def test_ctrl_c_in_a_notebook_may_come_before_the_run_has_begun_or_when_it_has_ended(
    monkeypatch: pytest.MonkeyPatch, stands_still: str
) -> None:
    loops: list[asyncio.AbstractEventLoop] = []
    may_go_on, run = threading.Event(), api._Apart._run

    def stalled(apart: api._Apart) -> None:
        if stands_still == "before":
            assert may_go_on.wait(LIMIT_S)
        run(apart)
        loops.append(apart._loop)
        assert may_go_on.wait(LIMIT_S)

    async def work() -> None:
        try:
            await asyncio.sleep(LIMIT_S if stands_still == "before" else 0)
        except asyncio.CancelledError:
            raise Interrupted from None

    monkeypatch.setattr(api._Apart, "_run", stalled)
    is_ended = stands_still == "after"
    pressing(monkeypatch, lambda: wait_until(lambda: loops or not is_ended), last=may_go_on)
    with nullcontext() if is_ended else pytest.raises(Interrupted):
        asyncio.run(in_a_cell(work()))


def test_a_second_ctrl_c_in_a_notebook_does_not_cut_the_saving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_begun, is_saving, may_end = (threading.Event() for _ in range(3))

    async def work() -> None:
        has_begun.set()
        try:
            await asyncio.sleep(LIMIT_S)
        except asyncio.CancelledError:
            is_saving.set()
            await asyncio.to_thread(may_end.wait, LIMIT_S)
            raise Interrupted from None

    pressing(
        monkeypatch,
        lambda: has_begun.wait(LIMIT_S),
        lambda: is_saving.wait(LIMIT_S),
        last=may_end,
    )
    with pytest.raises(Interrupted):
        asyncio.run(in_a_cell(work()))


PROGRAM = """
import sys
import nanorl

class Slow(nanorl.Env):
    def tasks(self, rng):
        return nanorl.Task(f"say {rng.randint(0, 99)}", answer="x")
    def reset(self):
        print("an episode", flush=True)

if __name__ == "__main__":
    nanorl.train("tiny", env=Slow, steps=100000, out=sys.argv[1], options=OPTIONS)
"""


def test_ctrl_c_in_a_script_saves_the_run_of_its_own_class(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "run"
    script.write_text(PROGRAM.replace("OPTIONS", repr(OPTIONS)))
    with subprocess.Popen(
        [sys.executable, str(script), str(out)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        lines = (line for line in process.stdout if line.startswith("an episode"))
        for _ in range(6):  # two of the evaluation, two a step of RL
            assert next(lines, None), process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert process.returncode != 0 and Interrupted.__name__ in errors
    assert any((out / "checkpoints").iterdir())
    assert json.loads((out / "config.json").read_text())["env"] == "__main__:Slow"


def test_no_module_of_the_package_hides_what_the_front_door_gives() -> None:
    """Importing nanorl.x sets nanorl.x: a function of that name would be gone."""
    folder = Path(nanorl.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not modules & set(nanorl.__all__)
