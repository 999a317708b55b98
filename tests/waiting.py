"""Waiting for what shall come to be, in the tests: for the event, and never for a time.

`wait_until` asks again and again and fails after a limit, `until` does so in an event loop, and
`turns` lets the other tasks of a loop go on. The limits are for a loaded machine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LIMIT_S = 60.0
EVERY_S = 0.01


def wait_until(
    is_so: Callable[[], object],
    limit_s: float = LIMIT_S,
    *,
    alive: Callable[[], bool] = lambda: True,
    told: Callable[[], object] = lambda: None,
) -> None:
    """Return once `is_so()`. Fails after `limit_s`, or when what it comes from is not `alive()`
    any more; `told()` is said then."""
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert alive() or is_so(), told()  # it may have come to be, and its maker have ended since
        assert time.monotonic() < end_s, f"not within {limit_s:g} s: {told()}"
        time.sleep(EVERY_S)


def eventually(is_so: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
    """Whether it does within `limit_s`."""
    end_s = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < end_s:
        time.sleep(EVERY_S)
    return bool(is_so())


async def until(is_so: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """`wait_until` of a loop, whose other tasks go on meanwhile."""
    async with asyncio.timeout(limit_s):
        while not is_so():
            await asyncio.sleep(0.001)


async def turns(count: int = 1) -> None:
    """Let the other tasks of the loop go on, so often."""
    for _ in range(count):
        await asyncio.sleep(0)
