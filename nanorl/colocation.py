"""Two engines on one GPU: while the optimizer works, the rollouts' cache is away.

In a synchronous run nobody decodes during an optimizer step, so the memory of the cache, and of
the CUDA graphs that read it by address, is free for activations. Afterwards the cache is empty
anyhow: its keys and values were the old weights'. The price is that graphs are captured again.

On a CPU, on two GPUs, and where rollouts go on beside the optimizer, nothing happens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch

from nanoinfer.async_engine import AsyncEngine


@asynccontextmanager
async def cache_lent(
    generator: AsyncEngine, device: torch.device, *, max_staleness: int = 0
) -> AsyncIterator[None]:
    """Inside, the rollout engine sleeps if its cache lies on `device`, the optimizer's."""
    is_shared = device.type == "cuda" and generator.engine.model.device == device
    if not is_shared or max_staleness > 0:
        yield
        return
    await generator.sleep()
    try:
        yield
    finally:
        await generator.wake()
