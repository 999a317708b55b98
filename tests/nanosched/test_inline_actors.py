"""Inline actors keep the promises of process actors: order, errors, death, lifetimes."""

import asyncio
import gc
import weakref

import pytest

from nanosched import (
    ActorHandle,
    Future,
    GetTimeout,
    Scheduler,
    SchedulerError,
    TaskError,
    WorkerDied,
)


class Counter:
    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError(f"start={start}")
        self.value = start
        self.gate = asyncio.Event()

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def read(self) -> int:
        return self.value

    def nothing(self) -> None:
        return None

    def fail(self) -> None:
        raise KeyError("missing")

    def kind_of(self, obj: object) -> str:
        return type(obj).__name__

    def leave(self) -> None:
        raise SystemExit(3)

    async def slow_add(self, amount: int) -> int:
        await asyncio.sleep(0)
        return self.add(amount)

    async def wait_for_gate(self) -> str:
        await self.gate.wait()
        return "open"

    async def open_gate(self) -> None:
        self.gate.set()

    async def slow_fail(self) -> None:
        await asyncio.sleep(0)
        raise KeyError("missing")

    def _hidden(self) -> None: ...


@pytest.fixture
def sched():
    with Scheduler(backend="inline") as scheduler:
        yield scheduler


def test_calls_of_one_actor_run_in_order_and_keep_state(sched):
    counter = sched.actor(Counter).remote(10)
    futures = [counter.add.remote(n) for n in (1, 2, 3)]
    assert sched.get(futures) == [11, 13, 16]
    assert sched.get(counter.nothing.remote()) is None


def test_a_method_error_surfaces_at_get_with_its_cause(sched):
    future = sched.actor(Counter).remote().fail.remote()
    with pytest.raises(TaskError, match=r"Counter\.fail raised KeyError") as caught:
        sched.get(future)
    assert isinstance(caught.value.cause, KeyError)
    assert caught.value.__cause__ is caught.value.cause


def test_a_constructor_error_surfaces_at_every_call_and_not_before(sched):
    counter = sched.actor(Counter).remote(-1)
    for _ in range(2):
        with pytest.raises(TaskError, match=r"Counter\.__init__ raised ValueError: start=-1"):
            sched.get(counter.read.remote())


def test_top_level_futures_are_dereferenced_and_nested_ones_are_not(sched):
    counter = sched.actor(Counter).remote()
    assert sched.get(counter.add.remote(sched.put(5))) == 5
    assert sched.get(counter.add.remote(amount=counter.add.remote(1))) == 12
    assert sched.get(counter.kind_of.remote([sched.put(5)])) == "list"
    assert sched.get(counter.kind_of.remote(sched.put([1]))) == "list"


def test_a_call_waits_for_its_input_and_later_calls_stay_behind_it(sched):
    first, second = sched.actor(Counter).remote(), sched.actor(Counter).remote()
    late = second.add.remote(first.slow_add.remote(40))
    after = second.add.remote(2)
    assert not after.is_done()
    assert sched.get([after, late]) == [42, 40]


def test_an_error_of_an_input_is_the_error_of_the_call_and_changes_nothing(sched):
    counter = sched.actor(Counter).remote(7)
    with pytest.raises(TaskError, match=r"Counter\.fail"):
        sched.get(counter.add.remote(counter.fail.remote()))
    assert sched.get(counter.read.remote()) == 7


def test_async_methods_run_concurrently_on_the_running_loop(sched):
    async def main() -> tuple[str, int]:
        counter = sched.actor(Counter).remote()
        waiting = counter.wait_for_gate.remote()
        await asyncio.sleep(0)
        assert not waiting.is_done()
        await counter.open_gate.remote()
        return await waiting, await counter.slow_add.remote(4)

    assert asyncio.run(main()) == ("open", 4)


def test_async_methods_work_without_a_loop_through_get(sched):
    counter = sched.actor(Counter).remote()
    waiting, opening = counter.wait_for_gate.remote(), counter.open_gate.remote()
    assert sched.get(waiting) == "open"
    assert sched.get(opening) is None
    with pytest.raises(TaskError, match="KeyError"):
        sched.get(counter.slow_fail.remote())


def test_a_future_made_without_a_loop_can_be_awaited_in_one(sched):
    future = sched.actor(Counter).remote().slow_add.remote(3)

    async def main() -> int:
        return await future + await future

    assert asyncio.run(main()) == 6


def test_cancelling_an_awaiter_does_not_cancel_the_call(sched):
    async def main() -> str:
        counter = sched.actor(Counter).remote()
        waiting = counter.wait_for_gate.remote()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting, 0.01)
        await counter.open_gate.remote()
        return await waiting

    assert asyncio.run(main()) == "open"


def test_a_loop_that_ends_fails_the_calls_it_was_running(sched):
    async def main() -> list[Future]:
        counter = sched.actor(Counter).remote()
        futures = [counter.wait_for_gate.remote()]
        await asyncio.sleep(0)
        return [*futures, counter.wait_for_gate.remote()]  # the second never takes a step

    for future in asyncio.run(main()):
        with pytest.raises(TaskError, match="CancelledError"):
            sched.get(future)


def test_get_times_out_and_the_call_can_still_be_got(sched):
    counter = sched.actor(Counter).remote()
    waiting = counter.wait_for_gate.remote()
    with pytest.raises(GetTimeout, match="wait_for_gate"):
        sched.get(waiting, timeout_s=0.01)
    sched.get(counter.open_gate.remote())
    assert sched.get(waiting) == "open"


def test_get_of_many_raises_a_failure_without_waiting_for_the_rest(sched):
    counter = sched.actor(Counter).remote()
    with pytest.raises(TaskError, match="slow_fail"):
        sched.get([counter.wait_for_gate.remote(), counter.slow_fail.remote()])


def test_wait_returns_what_is_done_in_the_order_given(sched):
    counter = sched.actor(Counter).remote()
    futures = [counter.wait_for_gate.remote(), counter.slow_fail.remote(), counter.read.remote()]
    done, pending = sched.wait(futures, num_returns=2)
    assert (done, pending) == (futures[1:], futures[:1])
    assert sched.wait(futures, num_returns=3, timeout_s=0.01)[1] == futures[:1]
    assert sched.wait([futures[2]] * 1)[0] == [futures[2]]
    with pytest.raises(ValueError, match="num_returns=4 of 3"):
        sched.wait(futures, num_returns=4)


def test_polling_with_no_timeout_makes_progress(sched):
    future = sched.actor(Counter).remote().slow_add.remote(1)
    for _ in range(20):
        if sched.wait([future], timeout_s=0)[0]:
            break
    assert future.is_done()


def test_blocking_get_inside_a_loop_is_refused(sched):
    async def main() -> None:
        future = sched.actor(Counter).remote().wait_for_gate.remote()
        with pytest.raises(SchedulerError, match="await future"):
            sched.get(future)

    asyncio.run(main())


def test_a_call_that_waits_for_its_own_caller_is_refused(sched):
    class Selfish:
        def __init__(self, handles: list[ActorHandle]) -> None:
            self.handles = handles

        def ask_itself(self) -> int:
            return sched.get(self.handles[0].answer.remote())

        def answer(self) -> int:
            return 42

    handles: list[ActorHandle] = []
    handles.append(sched.actor(Selfish).remote(handles))
    with pytest.raises(TaskError, match="can never finish"):
        sched.get(handles[0].ask_itself.remote())


def test_kill_fails_pending_and_later_calls_with_worker_died(sched):
    counter = sched.actor(Counter).remote()
    waiting = counter.wait_for_gate.remote()
    sched.kill(counter)
    for future in (waiting, counter.read.remote()):
        with pytest.raises(WorkerDied, match="Counter was killed"):
            sched.get(future)


def test_kill_stops_a_method_that_runs_on_the_loop(sched):
    async def main() -> None:
        counter = sched.actor(Counter).remote()
        waiting = counter.wait_for_gate.remote()
        await asyncio.sleep(0)
        sched.kill(counter)
        with pytest.raises(WorkerDied):
            await waiting
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_sys_exit_ends_the_actor_and_a_restart_loses_its_state(sched):
    mortal = sched.actor(Counter).remote(5)
    with pytest.raises(WorkerDied, match=r"sys\.exit\(3\)"):
        sched.get(mortal.leave.remote())
    with pytest.raises(WorkerDied):
        sched.get(mortal.read.remote())
    phoenix = sched.actor(Counter, max_restarts=1).remote(5)
    sched.get(phoenix.add.remote(1))
    with pytest.raises(WorkerDied):
        sched.get(phoenix.leave.remote())
    assert sched.get(phoenix.read.remote()) == 5
    with pytest.raises(WorkerDied):
        sched.get(phoenix.leave.remote())
    with pytest.raises(WorkerDied):
        sched.get(phoenix.read.remote())


def test_an_actor_ends_with_its_last_handle(sched):
    instances = []

    class Tracked:
        def __init__(self) -> None:
            instances.append(weakref.ref(self))

        def ping(self) -> str:
            return "pong"

    handle = sched.actor(Tracked, name="tracked").remote()
    assert sched.get(sched.get_actor("tracked").ping.remote()) == "pong"
    del handle
    gc.collect()
    assert instances[0]() is None
    with pytest.raises(ValueError, match="no actor is named 'tracked'"):
        sched.get_actor("tracked")


def test_names_are_unique_among_living_actors(sched):
    first = sched.actor(Counter).options(name="one").remote()
    with pytest.raises(ValueError, match="an actor named 'one' is alive"):
        sched.actor(Counter, name="one").remote()
    sched.kill(first)
    assert sched.get(sched.actor(Counter, name="one").remote(2).read.remote()) == 2


def test_user_mistakes_name_the_value_and_the_rule(sched):
    with pytest.raises(ValueError, match=r"unknown scheduler back end 'slurm'; allowed: inline"):
        Scheduler(backend="slurm")
    with pytest.raises(ValueError, match="unknown actor option 'gpus'; allowed: num_cpus"):
        sched.actor(Counter, gpus=1)
    with pytest.raises(ValueError, match="num_gpus=-1"):
        sched.actor(Counter).options(num_gpus=-1)
    with pytest.raises(ValueError, match="give the class itself"):
        sched.actor(Counter())
    counter = sched.actor(Counter).remote()
    with pytest.raises(AttributeError, match="no public method 'subtract'; it has: add"):
        counter.subtract.remote(1)
    with pytest.raises(AttributeError):
        _ = counter._hidden
    with pytest.raises(SchedulerError, match=r"handle\.add\.remote"):
        counter.add(1)


def test_two_schedulers_share_nothing_and_close_ends_actors():
    first, second = Scheduler(), Scheduler()
    ours, theirs = (s.actor(Counter, name="c").remote() for s in (first, second))
    first.close()
    first.close()
    with pytest.raises(WorkerDied):
        first.get(ours.read.remote())
    with pytest.raises(SchedulerError, match="closed"):
        first.actor(Counter).remote()
    assert second.get(theirs.read.remote()) == 0
    second.close()
