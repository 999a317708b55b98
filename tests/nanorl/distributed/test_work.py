"""What actors say of their heavy calls while these run."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from waiting import until

from nanorl.distributed.roles import work as work_module
from nanorl.distributed.roles.actor_role import status_of
from nanorl.distributed.roles.work import WorkThread
from nanorl.observability.monitor.board import IdleShares


def test_calls_that_run_and_wait_are_counted_and_timed_while_they_do() -> None:
    async def main() -> None:
        work = WorkThread("test", torch.device("cpu"), 1)
        is_free, has_begun = threading.Event(), threading.Event()

        def hold(result: int) -> int:
            has_begun.set()
            assert is_free.wait(60)
            return result

        assert work.counters() == {"num_running": 0, "num_waiting": 0, "busy_s": 0}
        calls = [asyncio.create_task(work.run(hold, index)) for index in range(3)]
        await until(has_begun.is_set)
        first, later = work.counters(), work.counters()
        assert (first["num_running"], first["num_waiting"]) == (1, 2)
        assert 0 < first["busy_s"] < later["busy_s"]  # of a call that has not ended
        is_free.set()
        assert await asyncio.gather(*calls) == [0, 1, 2]
        with pytest.raises(ZeroDivisionError):
            await work.run(lambda: 1 // 0)
        ended = work.counters()
        assert (ended["num_running"], ended["num_waiting"]) == (0, 0)
        assert ended["busy_s"] > later["busy_s"]
        assert work.counters() == ended

    asyncio.run(main())


def test_a_call_that_ends_while_it_is_counted_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between what the counters have read and the time that they look up."""

    async def main() -> None:
        work = WorkThread("test", torch.device("cpu"), 1)
        is_free, has_begun = threading.Event(), threading.Event()

        def hold() -> None:
            has_begun.set()
            assert is_free.wait(60)

        def clock() -> float:
            if has_begun.is_set() and threading.current_thread() is threading.main_thread():
                is_free.set()
                work._thread.submit(lambda: None).result(60)  # one after another
            return time.perf_counter()

        monkeypatch.setattr(work_module, "time", SimpleNamespace(perf_counter=clock))
        call = asyncio.create_task(work.run(hold))
        await until(has_begun.is_set)
        counted_s = work.counters()["busy_s"]
        await call
        assert work.counters()["busy_s"] == counted_s > 0

    asyncio.run(main())


def test_a_role_on_another_machine_is_shown_there() -> None:
    """Its memory is then not looked for among this machine's processes."""
    answer = {"pid": float(os.getpid()), "host": "gpu7", "busy_s": 2.0}
    status = status_of("trainer-1", "policy", "ready", 0, answer)
    assert (status.host, status.pid, dict(status.metrics)) == ("gpu7", os.getpid(), {"busy_s": 2.0})
    now_s = [10.0]
    idle = IdleShares(lambda: now_s[0])
    assert idle.since_last([status]) == {}
    now_s[0] = 14.0
    later = status_of("trainer-1", "policy", "ready", 0, {**answer, "busy_s": 5.0})
    assert idle.since_last([later]) == {"trainer-1": 0.25}
