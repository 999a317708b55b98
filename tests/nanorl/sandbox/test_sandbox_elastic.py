"""The pool's size follows the work; an idle worker that died or hangs meets no program."""

from __future__ import annotations

import os
import signal
import time

import pytest
from sandbox_driver import children
from waiting import eventually

from nanorl.sandbox import ExecStatus, SandboxPool, SandboxSpec
from nanorl.sandbox.dispatch import Dispatcher, State

pytestmark = pytest.mark.sandbox
SPEC = SandboxSpec(timeout_s=60.0)


def num_alive(pool: SandboxPool) -> int:
    return sum(slot.state is not State.DEAD for slot in pool._dispatcher._slots)


def worker_pid(pool: SandboxPool) -> int:
    worker = pool._dispatcher._slots[0].worker
    return worker.pid if worker is not None else 0


def test_a_pool_grows_while_programs_wait_and_shrinks_when_idle() -> None:
    """Until it has grown no program ends, so the others wait."""
    code = "import time; time.sleep(600)"
    before = set(children(os.getpid()))
    with SandboxPool(SPEC, num_workers=1, max_workers=3, idle_s=0.5) as pool:
        assert num_alive(pool) == 1
        running = [pool._submit(code, None, b"", 600) for _ in range(3)]
        waiting = [pool._submit("print(1)", None, b"", None) for _ in range(5)]
        assert eventually(lambda: num_alive(pool) == 3)
        assert all(future.cancel() for future in running)
        assert all(future.result().status is ExecStatus.OK for future in waiting)
        assert eventually(lambda: num_alive(pool) == 1)
        # One worker's; those of the others may take a moment to end.
        assert eventually(lambda: len(set(children(os.getpid())) - before) <= 5)
        assert pool.run_sync("print(1)").stdout == b"1\n"
        assert num_alive(pool) == 1, "nothing waited, nothing was started"


def test_a_pool_starts_no_more_workers_than_programs_wait() -> None:
    with SandboxPool(SPEC, num_workers=1, max_workers=8, idle_s=60) as pool:
        running = [pool._submit("import time; time.sleep(600)", None, b"", 600) for _ in range(2)]
        busy = [State.BUSY] * 2
        assert eventually(lambda: [slot.state for slot in pool._dispatcher._slots[:2]] == busy)
        assert num_alive(pool) == 2
        assert all(future.cancel() for future in running)


def test_impossible_sizes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_workers=1 must be at least num_workers=2"):
        SandboxPool(SPEC, num_workers=2, max_workers=1)
    with pytest.raises(ValueError, match="idle_s=0"):
        SandboxPool(SPEC, max_workers=2, idle_s=0)


def test_an_idle_worker_that_hangs_is_replaced_before_a_program_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Dispatcher, "check_s", 0.2)
    monkeypatch.setattr(Dispatcher, "answer_s", 1.0)
    with SandboxPool(SPEC) as pool:
        first = worker_pid(pool)
        for pid in children(first):
            os.kill(pid, signal.SIGSTOP)
        assert eventually(lambda: worker_pid(pool) not in (0, first))
        assert pool.run_sync("print(1)").stdout == b"1\n"


def test_an_idle_worker_that_answers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dispatcher, "check_s", 0.05)
    with SandboxPool(SPEC) as pool:
        first = worker_pid(pool)
        time.sleep(1.0)
        assert worker_pid(pool) == first
        assert pool.run_sync("print(1)").stdout == b"1\n"
        assert pool._dispatcher._slots[0].num_runs == 2, "the canary and one"


def test_a_waiting_program_process_that_died_is_replaced_by_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by the kernel, when memory runs out. The worker itself stays."""
    monkeypatch.setattr(Dispatcher, "check_s", 0.2)
    with SandboxPool(SPEC) as pool:
        first = worker_pid(pool)
        assert eventually(lambda: len(children(first)) == 4)  # the next one has been forked
        waiting = children(first)[-1]
        os.kill(waiting, signal.SIGKILL)
        assert eventually(lambda: waiting not in children(first) and len(children(first)) == 4)
        assert worker_pid(pool) == first
        assert pool.run_sync("print(1)").stdout == b"1\n"
