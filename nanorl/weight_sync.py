"""Moves the trainer's weights into the inference engine of the same process.

Between two steps of the engine: check every name, shape and value -> write in place -> repack ->
bump the version -> drop the KV cache. A bad update leaves the old version serving.
Left out: transports to other processes and machines.
"""

from __future__ import annotations

import time

from nanoengine.engine import Engine
from nanoinfer.async_engine import AsyncEngine


async def sync_weights(trainer: Engine, generator: AsyncEngine, version: int) -> float:
    """Copy `trainer`'s weights into `generator`'s engine as policy `version`; returns seconds."""
    start = time.perf_counter()
    await generator.update_weights(trainer.export_state(), version)
    return time.perf_counter() - start
