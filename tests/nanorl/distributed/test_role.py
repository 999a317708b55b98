"""A role whose actor does not get ready, dies again and again, or is given up while it starts."""

from __future__ import annotations

import asyncio
import inspect
import time

import pytest
from waiting import turns, until

from nanorl.distributed.roles.actor_role import (
    MOST_COLLAPSES,
    MOST_FAILURES,
    ActorRole,
    Pulse,
    getting_ready,
    until_dead,
)
from nanorl.distributed.roles.role import DirectRole, RoleLost
from nanosched import ActorHandle, Scheduler, WorkerDied

LIMIT_S = 60.0
START_S = 0.2  # of one that hangs
HANG_S = 0.4


class Sleepy:
    """Answers at once, unless it is one of those that hang while they get ready."""

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs

    async def get_ready(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()

    async def answer(self) -> int:
        return 7


class Nursery:
    """Starts actors, the first `num_hanging` of which hang, and remembers them and what was
    said of them."""

    def __init__(self, scheduler: Scheduler, num_hanging: int) -> None:
        self.num_hanging = num_hanging
        self.started: list[ActorHandle[Sleepy]] = []
        self.told: list[str] = []
        self.scheduler = scheduler

    async def start(self) -> ActorHandle[Sleepy]:
        hangs = len(self.started) < self.num_hanging
        actor = self.scheduler.actor(Sleepy).remote(hangs)
        self.started.append(actor)
        limit_s = START_S if hangs else LIMIT_S
        async with getting_ready(self.scheduler, actor, "store", limit_s) as handle:
            await handle.call(Sleepy.get_ready)
        return handle

    def role(self) -> ActorRole[Sleepy]:
        return ActorRole(
            *("store", "store", self.scheduler, self.start),
            on_restart=lambda role, why: self.told.append(why),
        )

    async def num_dead(self) -> int:
        deaths = [asyncio.ensure_future(wait_for(self.scheduler, one)) for one in self.started]
        done, late = await asyncio.wait(deaths, timeout=0.1)
        for one in late:
            one.cancel()
        return len(done)


async def wait_for(scheduler: Scheduler, handle: ActorHandle[Sleepy]) -> str:
    return await scheduler.death(handle)


def test_an_actor_that_hangs_while_it_starts_is_killed_and_has_a_successor() -> None:
    async def play() -> None:
        with Scheduler(backend="inline") as scheduler:
            nursery = Nursery(scheduler, num_hanging=1)
            role = nursery.role()
            assert await asyncio.wait_for(role.call(Sleepy.answer), LIMIT_S) == 7
            assert nursery.told == ["store was not ready after 0.2 s, so it was killed"]
            assert role.num_restarts == 1
            assert (len(nursery.started), await nursery.num_dead()) == (2, 1)

    asyncio.run(play())


def test_a_role_that_never_gets_ready_is_lost_and_leaves_no_process() -> None:
    async def play() -> None:
        with Scheduler(backend="inline") as scheduler:
            nursery = Nursery(scheduler, num_hanging=100)
            with pytest.raises(RoleLost, match=r"store died 2 times .* go on with --resume"):
                await asyncio.wait_for(nursery.role().call(Sleepy.answer), LIMIT_S)
            assert await nursery.num_dead() == len(nursery.started) == MOST_FAILURES

    asyncio.run(play())


def test_a_start_that_is_given_up_leaves_no_process() -> None:
    async def play() -> None:
        with Scheduler(backend="inline") as scheduler:
            nursery = Nursery(scheduler, num_hanging=100)
            call = asyncio.create_task(nursery.role().call(Sleepy.answer))
            await until(lambda: nursery.started)
            call.cancel()
            await asyncio.wait({call})
            assert (await nursery.num_dead(), len(nursery.started)) == (1, 1)

    asyncio.run(play())


def test_the_watch_of_a_role_that_cannot_be_started_again_ends_with_the_reason() -> None:
    async def play() -> None:
        with Scheduler(backend="inline") as scheduler:
            nursery = Nursery(scheduler, num_hanging=0)
            role = nursery.role()
            first = await role.handle()
            watch = role.watch(Sleepy.answer, every_s=0.01, hang_s=5.0)
            nursery.num_hanging = 100
            scheduler.kill(first)
            with pytest.raises(RoleLost, match="store died 2 times"):
                await asyncio.wait_for(watch, LIMIT_S)
            role.close()

    asyncio.run(play())


def test_the_fork_servers_death_is_not_counted_as_a_start_that_failed() -> None:
    """Every start is cut off by it, more often than a role may fail of itself."""

    async def play(num_collapses: int) -> int:
        with Scheduler(backend="inline") as scheduler:
            nursery = Nursery(scheduler, num_hanging=0)

            async def start() -> ActorHandle[Sleepy]:
                if scheduler.num_server_deaths < num_collapses:
                    scheduler._backend.num_server_deaths += 1
                    raise WorkerDied("Sleepy ended with the fork server")
                return await nursery.start()

            role = ActorRole("store", "store", scheduler, start)
            return await asyncio.wait_for(role.call(Sleepy.answer), LIMIT_S)

    assert MOST_COLLAPSES - 1 > MOST_FAILURES
    assert asyncio.run(play(MOST_COLLAPSES - 1)) == 7
    with pytest.raises(RoleLost, match=f"died {MOST_COLLAPSES} times while it started"):
        asyncio.run(play(MOST_COLLAPSES))


class Standing:
    """Its process, which is the driver's too, stands still for longer than an answer may take; then
    the answer is on its way for a while."""

    async def beat(self) -> dict[str, float]:
        time.sleep(1.5 * HANG_S)
        await turns(50)
        return {"load": 1.0}


class Mute:
    async def beat(self) -> dict[str, float]:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


@pytest.mark.parametrize(("kind", "is_heard"), [(Standing, True), (Mute, False)])
def test_a_driver_that_stood_still_takes_no_actor_for_dead(
    kind: type[Standing | Mute], is_heard: bool
) -> None:
    async def play() -> bool:
        with Scheduler(backend="inline") as scheduler:
            heard = asyncio.Event()
            pulse = Pulse(kind.beat, 0.01, HANG_S, lambda _: heard.set())
            actor = scheduler.actor(kind).remote()
            waits = {
                asyncio.create_task(until_dead(scheduler, actor, pulse)),
                asyncio.create_task(heard.wait()),
            }
            _, late = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for one in late:
                one.cancel()
            return heard.is_set()

    assert asyncio.run(asyncio.wait_for(play(), 60)) == is_heard


class Stuck:
    """Answers until it is told to hang."""

    def __init__(self) -> None:
        self.hangs = False

    async def hang(self) -> None:
        self.hangs = True

    async def beat(self) -> dict[str, float]:
        if self.hangs:
            await asyncio.Event().wait()
        return {"beats": 1.0}


def test_an_actor_that_stops_answering_is_killed_replaced_and_the_reason_is_told() -> None:
    async def play() -> None:
        with Scheduler(backend="inline") as scheduler:
            told: list[str] = []
            replaced = asyncio.Event()

            async def start() -> ActorHandle[Stuck]:
                return scheduler.actor(Stuck).remote()

            def tell(role: ActorRole[Stuck], why: str) -> None:
                told.append(why)
                replaced.set()

            role = ActorRole("store", "store", scheduler, start, on_restart=tell)
            first = await role.handle()
            role.watch(Stuck.beat, every_s=0.01, hang_s=0.25)
            await first.call(Stuck.hang)
            await asyncio.wait_for(replaced.wait(), 30)
            assert told == ["no answer for 0.25 s, so it was killed"]
            assert await role.handle() is not first
            assert "killed" in await scheduler.death(first)
            assert await role.call(Stuck.beat) == {"beats": 1.0}
            role.close()

    asyncio.run(play())


# -- a role of this process --------------------------------------------------------------------


class Ledger:
    """An object whose methods say who called them, raise, or never end."""

    def __init__(self) -> None:
        self.was_cancelled = False

    def callers(self) -> list[str]:
        """The functions of ours between a caller and this method, the innermost first."""
        frames = [frame.function for frame in inspect.stack(0)[1:]]
        return frames[: frames.index("ask")]

    def fail(self) -> None:
        raise ValueError("no such entry")

    async def wait(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


def test_in_one_process_a_call_is_a_call() -> None:
    role = DirectRole("store", Ledger)

    async def ask() -> list[str]:
        callers: list[str] = await role.call(Ledger.callers)
        return callers

    assert asyncio.run(ask()) == ["call"]


def test_a_direct_role_raises_what_its_object_raises_and_is_cancelled_with_its_caller() -> None:
    role = DirectRole("store", Ledger)

    async def play() -> None:
        with pytest.raises(ValueError, match="no such entry"):
            await role.call(Ledger.fail)
        waiting = asyncio.create_task(role.call(Ledger.wait))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(play())
    assert role.open().was_cancelled


def test_a_direct_role_makes_its_object_once_and_none_after_its_end() -> None:
    made: list[Ledger] = []

    def make() -> Ledger:
        made.append(Ledger())
        return made[-1]

    role = DirectRole("store", make)
    assert not made and role.open() is role.open() is made[0]
    assert role.close() is made[0]
    with pytest.raises(RoleLost, match="store is closed"):
        asyncio.run(role.call(Ledger.fail))
    assert DirectRole("other", Ledger).close() is None and len(made) == 1
