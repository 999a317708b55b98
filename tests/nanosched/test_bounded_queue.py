"""The bounded queue: back-pressure, order, closing, and no lost wake-ups."""

import asyncio
import random

import pytest
from waiting import turns

from nanosched import BoundedQueue, QueueClosed


def test_put_waits_while_the_queue_is_full():
    async def main() -> None:
        queue: BoundedQueue[int] = BoundedQueue(2)
        most = 0

        async def produce() -> None:
            nonlocal most
            for n in range(50):
                await queue.put(n)
                most = max(most, len(queue))
            queue.close()

        producer = asyncio.create_task(produce())
        await turns(100)
        assert len(queue) == 2  # stuck at the bound
        assert [n async for n in queue] == list(range(50))
        await producer
        assert most == 2

    asyncio.run(main())


def test_get_after_close_drains_then_raises():
    async def main() -> None:
        queue: BoundedQueue[int] = BoundedQueue(3)
        await queue.put(1)
        await queue.put(2)
        queue.close()
        with pytest.raises(QueueClosed):
            await queue.put(3)
        assert [await queue.get(), await queue.get()] == [1, 2]
        with pytest.raises(QueueClosed):
            await queue.get()

    asyncio.run(main())


def test_close_wakes_everybody_who_waits():
    async def main() -> None:
        empty: BoundedQueue[int] = BoundedQueue(1)
        full: BoundedQueue[int] = BoundedQueue(1)
        await full.put(0)
        waiters = [asyncio.create_task(empty.get()) for _ in range(3)]
        waiters += [asyncio.create_task(full.put(n)) for n in range(3)]
        await asyncio.sleep(0)
        empty.close()
        full.close()
        results = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 5)
        assert all(isinstance(result, QueueClosed) for result in results)
        assert await full.get() == 0

    asyncio.run(main())


def test_waiting_producers_are_served_in_order():
    async def main() -> None:
        queue: BoundedQueue[int] = BoundedQueue(2)
        producers = [asyncio.create_task(queue.put(n)) for n in range(12)]
        await asyncio.sleep(0)
        received = []
        for burst in (1, 3, 2, 6):
            for _ in range(burst):
                received.append(await queue.get())
            await asyncio.sleep(0)
        await asyncio.gather(*producers)
        assert received == list(range(12))

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(8))
def test_no_item_is_lost_or_doubled_when_waiters_are_cancelled(seed):
    async def main() -> None:
        rng = random.Random(seed)
        queue: BoundedQueue[int] = BoundedQueue(3)
        accepted: set[int] = set()
        received: list[int] = []

        async def produce(n: int) -> None:
            await queue.put(n)
            accepted.add(n)

        async def consume() -> None:
            received.append(await queue.get())

        tasks: list[asyncio.Task[None]] = []
        for n in range(300):
            tasks.append(asyncio.create_task(produce(n) if rng.random() < 0.5 else consume()))
            if rng.random() < 0.4:
                rng.choice(tasks).cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        await turns(20)
        waiting = [t for t in tasks if not t.done()]
        # Not both kinds may wait: that would be a lost wake-up.
        kinds = {t.get_coro().__name__ for t in waiting}  # type: ignore[union-attr]
        assert len(kinds) <= 1
        queue.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        received.extend([n async for n in queue])
        assert sorted(received) == sorted(accepted)

    asyncio.run(main())


def test_a_queue_without_room_is_refused():
    with pytest.raises(ValueError, match="maxsize=0"):
        BoundedQueue(0)
