"""Moves the trainer's weights into the inference engine of the same process.

pause -> write in place -> verify -> bump the version -> flush the KV cache -> resume. The engine
checks names and shapes before the first write, so a bad update leaves the old version serving.
Left out: transports to other processes and machines.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoengine.engine import Engine
    from nanoinfer.engine import LLMEngine


def sync_weights(trainer: Engine, engine: LLMEngine, version: int) -> float:
    """Copy `trainer`'s weights into `engine` as policy `version`; returns seconds."""
    start = time.perf_counter()
    engine.pause()
    try:
        engine.update_weights(trainer.export_state(), version)
    finally:
        engine.resume()
    return time.perf_counter() - start
