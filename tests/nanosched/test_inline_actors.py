"""What holds for inline actors only, because everything happens in one process and one thread.

What they share with actors in processes of their own stands in test_contract.py.
"""

import asyncio
import gc
import pickle
import weakref

import pytest
from contract_actors import Counter
from waiting import until

from nanosched import ActorHandle, Future, Scheduler, SchedulerError, TaskError, WorkerDied


@pytest.fixture
def sched():
    with Scheduler(backend="inline") as scheduler:
        yield scheduler


def test_a_synchronous_method_runs_inside_its_call(sched):
    counter = sched.actor(Counter).remote()
    assert counter.add.remote(2).is_done()
    late = counter.add.remote(counter.slow_add.remote(40))
    after = counter.add.remote(2)
    assert not after.is_done()
    assert sched.get([after, late]) == [86, 84]


def test_arguments_and_results_are_passed_by_reference(sched):
    class Keeper:
        def keep(self, obj: object) -> object:
            return obj

    obj = [1]
    keeper = sched.actor(Keeper).remote()
    assert sched.get(keeper.keep.remote(obj)) is obj
    assert sched.get(keeper.keep.remote(sched.put(obj))) is obj


def test_nested_futures_stay_what_they_are(sched):
    counter = sched.actor(Counter).remote()
    assert sched.get(counter.kind_of.remote([sched.put(5)])) == "list"


def test_a_handle_cannot_leave_the_process(sched):
    with pytest.raises(TypeError, match="inline actor Counter cannot leave"):
        pickle.dumps(sched.actor(Counter).remote())


def test_a_loop_that_ends_fails_the_calls_it_was_running(sched):
    async def main() -> list[Future]:
        counter = sched.actor(Counter).remote()
        futures = [counter.wait_for_gate.remote()]
        await asyncio.sleep(0)
        return [*futures, counter.wait_for_gate.remote()]  # the second never takes a step

    for future in asyncio.run(main()):
        with pytest.raises(TaskError, match="CancelledError"):
            sched.get(future)


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


def test_a_reservation_that_nothing_can_serve_is_refused(sched):
    there = sched.available()
    sched.placement_group([there])
    with pytest.raises(SchedulerError, match="nothing runs that could free more"):
        sched.placement_group([there])


def test_kill_stops_a_method_that_runs_on_the_loop(sched):
    async def main() -> None:
        counter = sched.actor(Counter).remote()
        waiting = counter.wait_for_gate.remote()
        await asyncio.sleep(0)
        sched.kill(counter)
        with pytest.raises(WorkerDied):
            await waiting
        await until(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(main())


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
