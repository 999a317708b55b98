"""One contract for every back end: order, errors, death, lifetimes, resources, what arguments do.

What holds within one process only stands in test_inline_actors.py.
"""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
import torch
from backends import MACHINE, MakeScheduler, local, ray
from contract_actors import Arrays, Counter, Plain, Rank, Reporter, Stubborn
from host_processes import is_running
from waiting import eventually, until

from nanosched import (
    GetTimeout,
    Resources,
    Scheduler,
    SchedulerError,
    TaskError,
    WorkerDied,
)

LIMIT_S = 60.0  # no test waits that long: it is what a loaded machine may take
processes = pytest.mark.parametrize("backend", [local, ray])


# -- calls -----------------------------------------------------------------------------------------


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
    assert sched.get(counter.kind_of.remote(sched.put([1]))) == "list"


def test_a_constructor_takes_futures_too(sched):
    counter = sched.actor(Counter).remote(4)
    plain = sched.actor(Plain).remote(counter.add.remote(1), last=sched.put("end"))
    assert sched.get(plain.note.remote(1)) == [5, "end", 1]
    lame = sched.actor(Plain).remote(counter.fail.remote())
    with pytest.raises(TaskError, match=r"Counter\.fail"):
        sched.get(lame.note.remote(1))


def test_a_call_waits_for_its_input_and_later_calls_stay_behind_it(sched):
    seconds = 0.2
    first, second = sched.actor(Plain).remote(), sched.actor(Counter).remote()
    late = second.add.remote(first.sleep.remote(seconds))
    after = second.add.remote(2)
    assert sched.get([after, late]) == [2 + seconds, seconds]
    plain = sched.actor(Plain).remote()
    late = plain.note.remote(first.sleep.remote(seconds))
    assert sched.get([plain.note.remote("after"), late]) == [[seconds, "after"], [seconds]]


def test_async_calls_start_in_order_whatever_their_arguments_weigh(sched):
    counter = sched.actor(Counter).remote()
    heavy = np.ones(3_000_000)
    calls = [counter.begin.remote(n, heavy if n % 3 == 0 else None) for n in range(24)]
    assert sched.get(calls)[-1] == list(range(24))


def test_an_error_of_an_input_is_the_error_of_the_call_and_changes_nothing(sched):
    counter = sched.actor(Counter).remote(7)
    plain = sched.actor(Plain).remote()
    with pytest.raises(TaskError, match=r"^Counter\.fail"):
        sched.get(counter.add.remote(counter.fail.remote()))
    with pytest.raises(TaskError, match=r"^Plain\.fail") as caught:
        sched.get(plain.note.remote(plain.note.remote(plain.fail.remote())))
    assert isinstance(caught.value.cause, KeyError)
    assert sched.get(counter.read.remote()) == 7
    assert sched.get(plain.note.remote(1)) == [1]


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
    assert sched.get(future) == 3


def test_cancelling_an_awaiter_does_not_cancel_the_call(sched):
    async def main() -> str:
        counter = sched.actor(Counter).remote()
        waiting = counter.wait_for_gate.remote()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting, 0.01)
        await counter.open_gate.remote()
        return await waiting

    assert asyncio.run(main()) == "open"


def test_a_failure_is_raised_by_await(sched):
    async def main() -> None:
        counter = sched.actor(Counter).remote()
        with pytest.raises(TaskError, match="slow_fail"):
            await counter.slow_fail.remote()
        waiting = counter.wait_for_gate.remote()
        sched.kill(counter)
        with pytest.raises(WorkerDied):
            await waiting

    asyncio.run(main())


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
    assert isinstance(futures[1].error(), TaskError)
    with pytest.raises(ValueError, match="num_returns=4 of 3"):
        sched.wait(futures, num_returns=4)


def test_polling_with_no_timeout_makes_progress(sched):
    future = sched.actor(Counter).remote().slow_add.remote(1)
    assert eventually(lambda: bool(sched.wait([future], timeout_s=0)[0]))


def test_blocking_get_inside_a_loop_is_refused(sched):
    async def main() -> None:
        future = sched.actor(Counter).remote().wait_for_gate.remote()
        with pytest.raises(SchedulerError, match="await future"):
            sched.get(future)

    asyncio.run(main())


def test_a_slow_consumer_holds_its_producer_back(sched):
    """At most eight calls under way, whatever the number of calls."""
    plain = sched.actor(Plain).remote()
    under_way, results = [], []
    for n in range(60):
        if len(under_way) == 8:
            done, under_way = sched.wait(under_way, num_returns=1)
            results.extend(sched.get(done))
        under_way.append(plain.sleep.remote(0 * n))
    assert len(results) == 52
    assert sched.get(under_way) == [0] * 8


# -- errors and results that do not travel -----------------------------------------------------


@processes
def test_an_error_that_does_not_pickle_still_says_what_it_was(sched):
    plain = sched.actor(Plain).remote()
    with pytest.raises(TaskError, match=r"Plain\.fail_with_a_lock raised .*holds a lock"):
        sched.get(plain.fail_with_a_lock.remote())
    with pytest.raises(
        TaskError, match=r"Plain\.fail_stubbornly raised .*file of size 3"
    ) as caught:
        sched.get(plain.fail_stubbornly.remote())
    assert not isinstance(caught.value.cause, Stubborn)
    assert sched.get(plain.note.remote(1)) == [1]


@processes
def test_a_result_that_does_not_pickle_is_an_error_of_the_call(sched):
    plain = sched.actor(Plain).remote()
    with pytest.raises(TaskError, match=r"Plain\.give_a_lock raised .*pickle"):
        sched.get(plain.give_a_lock.remote())
    assert sched.get(plain.note.remote(1)) == [1]


@processes
def test_the_traceback_of_the_other_process_comes_with_the_error(sched):
    with pytest.raises(TaskError) as caught:
        sched.get(sched.actor(Plain).remote().fail.remote())
    assert "contract_actors.py" in "\n".join(caught.value.cause.__notes__)


# -- data --------------------------------------------------------------------------------------


@processes
@pytest.mark.parametrize("size", [10, 100_000])
def test_arrays_arrive_read_only_on_either_side(sched, size):
    arrays = sched.actor(Arrays).remote()
    result = sched.get(arrays.zeros.remote(size))
    assert result.shape == (size,) and not result.any() and not result.flags.writeable
    assert not sched.get(arrays.is_writable.remote(np.zeros(size)))
    assert not sched.get(arrays.is_writable.remote(sched.put(np.zeros(size))))


def test_arrays_of_every_kind_come_back_bit_equal(sched):
    arrays = sched.actor(Arrays).remote()
    rng = np.random.default_rng(1)
    large = rng.integers(0, 255, 5_000_000, dtype=np.uint8).view(np.float64)  # NaNs among them
    sent = [large, large[::3], large.reshape(-1, 5).T, np.zeros((0, 4)), np.float32(1.5), b"x" * 9]
    for obj, back in zip(sent, sched.get(arrays.echo.remote(sent)), strict=True):
        assert np.asarray(obj).tobytes() == np.asarray(back).tobytes()
        assert np.shape(obj) == np.shape(back)


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)


def test_tensors_of_every_kind_come_back_bit_equal(sched):
    arrays = sched.actor(Arrays).remote()
    base = torch.randn(400, 500, generator=torch.Generator().manual_seed(1))
    sent = [base.to(dtype) for dtype in DTYPES]
    sent += [base[::2, 1:7], base.T, torch.tensor(2.5), torch.zeros(0, 3)]
    back = sched.get(arrays.echo.remote(sent))
    for one, two in zip(sent, back, strict=True):
        assert one.dtype == two.dtype and torch.equal(one, two)
    trained = sched.get(arrays.echo.remote(torch.ones(3, requires_grad=True)))
    assert trained.requires_grad


@processes
def test_tensors_arrive_as_the_receivers_own(sched):
    arrays = sched.actor(Arrays).remote()
    sent = torch.zeros(200_000)
    back = sched.get(arrays.fill.remote(sent))
    assert back.sum() == 200_000 and sent.sum() == 0
    back.add_(1)  # and those that came back are the caller's own


def test_a_result_goes_on_to_another_actor_without_the_driver_reading_it(sched):
    first, second = sched.actor(Arrays).remote(), sched.actor(Arrays).remote()
    result = first.zeros.remote(1_000_000)
    assert sched.get(second.total.remote(result)) == 0.0
    array = np.arange(1_000_000.0)
    shared = sched.put(array)  # once, for two readers
    assert sched.get([one.total.remote(shared) for one in (first, second)]) == [array.sum()] * 2


# -- death -------------------------------------------------------------------------------------


def test_kill_fails_pending_and_later_calls_with_worker_died(sched):
    counter = sched.actor(Counter).remote()
    waiting = counter.wait_for_gate.remote()
    sched.kill(counter)
    for future in (waiting, counter.read.remote()):
        with pytest.raises(WorkerDied, match="Counter was killed"):
            sched.get(future, timeout_s=LIMIT_S)


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


def test_sys_exit_in_an_async_or_a_plain_actor_ends_it_too(sched):
    counter, plain = sched.actor(Counter).remote(), sched.actor(Plain).remote()
    with pytest.raises(WorkerDied, match=r"sys\.exit\(4\)"):
        sched.get(counter.slow_leave.remote(), timeout_s=LIMIT_S)
    with pytest.raises(WorkerDied, match=r"sys\.exit\(3\)"):
        sched.get(plain.leave.remote(), timeout_s=LIMIT_S)


@processes
@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_process_that_ends_fails_its_calls_and_those_behind_them(sched, how):
    plain = sched.actor(Plain).remote()
    fatal, behind = plain.die.remote(how), plain.note.remote(1)
    for future in (fatal, behind, plain.note.remote(2)):
        with pytest.raises(WorkerDied, match="Plain"):
            sched.get(future, timeout_s=LIMIT_S)


@processes
def test_a_killed_process_is_restarted_as_often_as_allowed(sched):
    plain = sched.actor(Plain, max_restarts=1).remote("first")
    death = sched.death(plain)
    assert sched.get(plain.note.remote("state")) == ["first", "state"]
    before = sched.get(plain.pid.remote())
    os.kill(before, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        sched.get(plain.sleep.remote(LIMIT_S), timeout_s=LIMIT_S)  # in flight, or lost on its way
    assert sched.get(plain.note.remote("again"), timeout_s=LIMIT_S) == ["first", "again"]
    after = sched.get(plain.pid.remote())
    assert after != before and not death.is_done()
    os.kill(after, signal.SIGKILL)
    assert "Plain" in sched.get(death, timeout_s=LIMIT_S)
    with pytest.raises(WorkerDied):
        sched.get(plain.pid.remote(), timeout_s=LIMIT_S)


@processes
def test_a_call_that_ends_its_process_is_not_repeated(sched, tmp_path):
    plain = sched.actor(Plain, max_restarts=3).remote()
    with pytest.raises(WorkerDied):
        sched.get(plain.write_and_die.remote(str(tmp_path / "file")), timeout_s=LIMIT_S)
    assert sched.get(plain.note.remote(1), timeout_s=LIMIT_S) == [1]
    assert (tmp_path / "file").read_text() == "here\n"


def test_death_says_why(sched):
    killed, left = sched.actor(Counter).remote(), sched.actor(Plain).remote()
    deaths = [sched.death(killed), sched.death(left)]
    assert sched.death(killed) is deaths[0]
    assert sched.get(left.note.remote(1)) == [1]
    assert not any(death.is_done() for death in deaths)
    sched.kill(killed)
    assert sched.get(deaths[0], timeout_s=LIMIT_S) == "Counter was killed"
    with pytest.raises(WorkerDied):
        sched.get(left.leave.remote())

    async def main() -> str:
        return await asyncio.wait_for(deaths[1], LIMIT_S)

    assert "sys.exit(3)" in asyncio.run(main())


@processes
def test_a_death_is_noticed_while_something_else_is_awaited(sched):
    async def main() -> str:
        plain, counter = sched.actor(Plain).remote(), sched.actor(Counter).remote()
        noticed: list[str] = []
        sched.death(plain).add_done_callback(lambda death: noticed.append(death.result()))
        pid = await plain.pid.remote()
        waiting = asyncio.ensure_future(_await(counter.wait_for_gate.remote()))
        os.kill(pid, signal.SIGKILL)
        await until(lambda: noticed, LIMIT_S)
        await counter.open_gate.remote()
        assert await waiting == "open"
        return noticed[0]

    assert "Plain" in asyncio.run(main())


async def _await(future):
    return await future


@processes
def test_a_process_ends_with_its_last_handle_after_its_calls(sched):
    plain = sched.actor(Plain, name="plain").remote()
    death = sched.death(plain)
    pid = sched.get(sched.get_actor("plain").pid.remote())
    slow = plain.sleep.remote(0.1)
    del plain
    with pytest.raises(ValueError, match="no actor is named 'plain'"):
        sched.get_actor("plain")
    assert sched.get(slow, timeout_s=LIMIT_S) == 0.1
    assert "last handle" in sched.get(death, timeout_s=LIMIT_S)
    assert eventually(lambda: not is_running(pid))


# -- names, mistakes, several schedulers -------------------------------------------------------


def test_names_are_unique_among_living_actors(sched):
    first = sched.actor(Counter).options(name="one").remote()
    with pytest.raises(ValueError, match="an actor named 'one' is alive"):
        sched.actor(Counter, name="one").remote()
    assert sched.get(sched.get_actor("one").read.remote()) == 0
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


def test_two_schedulers_share_nothing_and_close_ends_actors(make_scheduler: MakeScheduler):
    first, second = make_scheduler(), make_scheduler()
    ours, theirs = (s.actor(Counter, name="c").remote() for s in (first, second))
    pending = ours.wait_for_gate.remote()
    first.close()
    first.close()
    for future in (pending, ours.read.remote()):
        with pytest.raises(WorkerDied):
            first.get(future)
    with pytest.raises(SchedulerError, match="closed"):
        first.actor(Counter).remote()
    assert second.get(theirs.read.remote()) == 0
    second.close()


# -- handles travel ----------------------------------------------------------------------------


@processes
def test_a_handle_travels_into_an_async_actor(sched):
    counter, reporter = sched.actor(Counter).remote(1), sched.actor(Reporter).remote()
    sched.get(reporter.keep.remote(counter))
    assert sched.get(reporter.add.remote(2)) == 3
    assert sched.get(counter.add.remote(1)) == 4
    assert sched.get(reporter.add_all.remote(list(range(5)))) == [4, 5, 7, 10, 14]
    with pytest.raises(TaskError, match=r"Reporter\.fail raised TaskError: Counter\.fail raised"):
        sched.get(reporter.fail.remote())
    sched.kill(counter)
    with pytest.raises(TaskError, match=r"Reporter\.add raised WorkerDied") as caught:
        sched.get(reporter.add.remote(1), timeout_s=LIMIT_S)
    assert isinstance(caught.value.cause, WorkerDied)


@processes
def test_a_handle_travels_as_an_argument_of_a_constructor(sched):
    counter = sched.actor(Counter).remote(1)
    reporter = sched.actor(Reporter).remote(counter)
    assert sched.get(reporter.add.remote(2)) == 3


# -- resources ---------------------------------------------------------------------------------


def test_what_can_never_be_had_is_refused_at_once_with_what_there_is(sched):
    with pytest.raises(ValueError, match=r"num_gpus=5.* can never be had.*num_cpus=3, num_gpus=4"):
        sched.actor(Plain, num_gpus=5).remote()
    with pytest.raises(ValueError, match=r"can never be had.*num_cpus=3, num_gpus=4"):
        sched.placement_group([Resources(num_cpus=2), Resources(num_cpus=2)])
    group = sched.placement_group([Resources(num_gpus=1)])
    with pytest.raises(ValueError, match=r"can never be had: the placement group has"):
        sched.actor(Plain, num_gpus=2, placement=group).remote()
    sched.remove(group)
    sched.remove(group)
    with pytest.raises(ValueError, match="the placement group was removed"):
        sched.actor(Plain, placement=group).remote()


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD"])
def test_bundles_are_held_together_until_they_are_removed(sched, strategy):
    assert eventually(lambda: sched.available() == MACHINE)
    group = sched.placement_group([Resources(num_cpus=1, num_gpus=1)] * 3, strategy)
    assert eventually(lambda: sched.available() == Resources(num_cpus=0, num_gpus=1))
    with pytest.raises(GetTimeout):  # two gpus are not free: none is taken
        sched.placement_group([Resources(num_gpus=1)] * 2, timeout_s=0.2)
    single = sched.placement_group([Resources(num_gpus=1)], timeout_s=LIMIT_S)
    plain = sched.actor(Plain, num_gpus=1, placement=group, bundle=1).remote("placed")
    assert sched.get(plain.note.remote(1), timeout_s=LIMIT_S) == ["placed", 1]
    for reserved in (group, single):
        sched.remove(reserved)
    with pytest.raises(WorkerDied, match="ended with its placement group"):
        sched.get(plain.note.remote(2), timeout_s=LIMIT_S)
    assert eventually(lambda: sched.available() == MACHINE)


def test_an_actor_whose_share_is_taken_starts_when_it_is_free(sched):
    first = sched.actor(Plain, num_gpus=3).remote()
    sched.get(first.note.remote(1))
    second = sched.actor(Plain, num_gpus=2).remote()
    waiting = second.note.remote("at last")
    assert sched.get(first.sleep.remote(0.2)) == 0.2
    assert not waiting.is_done()
    sched.kill(first)
    assert sched.get(waiting, timeout_s=LIMIT_S) == ["at last"]


@processes
def test_four_actors_with_a_gpu_each_see_four_devices(sched):
    actors = [sched.actor(Plain, num_gpus=1).remote() for _ in range(4)]
    seen = sched.get([actor.devices.remote() for actor in actors], timeout_s=LIMIT_S)
    assert sorted(seen) == ["0", "1", "2", "3"]
    assert sched.get(sched.actor(Plain).remote().devices.remote()) == ""


# -- groups ------------------------------------------------------------------------------------


def test_a_group_is_called_as_one(sched):
    group = sched.group(Rank, [((rank,), {"size": 2}) for rank in range(2)], name="rank")
    assert len(group) == 2
    assert sched.get(group.call(Rank.where)) == [(0, 2), (1, 2)]
    assert sched.get(group.call(Rank.where, offset=5)) == [(5, 2), (6, 2)]
    assert sched.get(group.call_each(Rank.where, [(10,), (20,)])) == [(10, 2), (21, 2)]
    assert sched.get(sched.get_actor("rank.1").where.remote()) == (1, 2)
    with pytest.raises(ValueError, match="arguments for 1 of 2 ranks"):
        group.call_each(Rank.where, [(10,)])
    group.kill()
    for future in group.call(Rank.where):
        with pytest.raises(WorkerDied, match="Rank was killed"):
            sched.get(future, timeout_s=LIMIT_S)
    assert sched.get(group.death, timeout_s=LIMIT_S).startswith("rank ")


def test_the_death_of_one_rank_ends_its_group(sched):
    group = sched.group(Rank, [((rank,), {}) for rank in range(3)])
    waiting = group.handles[0].wait.remote()
    assert not group.death.is_done()
    with pytest.raises(WorkerDied):
        sched.get(group.handles[2].leave.remote(), timeout_s=LIMIT_S)
    assert sched.get(group.death, timeout_s=LIMIT_S).startswith("rank 2: ")
    with pytest.raises(WorkerDied):
        sched.get(waiting, timeout_s=LIMIT_S)


def test_ranks_take_the_bundles_of_their_placement(sched):
    placement = sched.placement_group([Resources(num_gpus=1), Resources(num_gpus=2)])
    with pytest.raises(ValueError, match="can never be had"):
        sched.group(Rank, [((0,), {}), ((1,), {})], num_gpus=2, placement=placement)
    group = sched.group(Rank, [((0,), {}), ((1,), {})], num_gpus=1, placement=placement)
    assert sched.get(group.call(Rank.where), timeout_s=LIMIT_S) == [(0, 1), (1, 1)]
    sched.remove(placement)
