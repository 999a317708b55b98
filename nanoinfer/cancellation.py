"""Work that a cancellation must not cut in two: a step of the engine, of the optimizer, a save."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(work: Awaitable[T]) -> T:
    """Await `work`, which runs as its own task or thread. A cancellation, however often it is
    repeated, is obeyed after it is complete. What `work` raises comes first."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})  # never cancels what it waits for
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
