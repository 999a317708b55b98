"""Weights within one process: the offer carries the way to the tensors, and nothing is copied but
into the replica's model.

Left out: checksums, since the replica reads the learner's own memory; names, shapes and values are
checked by `LLMEngine.update_weights`, as ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoengine.engine import Engine
from nanorl.weights.offer import Named, Offer, WeightsRefused


@dataclass(frozen=True, kw_only=True)
class InprocOffer(Offer):
    """Good until the engine's next optimizer step; it cannot be pickled."""

    engine: Engine
    engine_version: int


class InprocSender:
    """Offers an engine of the same process."""

    def __init__(self, key: str) -> None:
        self.key = key

    def send(self, engine: Engine, version: int) -> InprocOffer:
        if engine.mesh.size() > 1:
            raise ValueError(
                f"inproc: the engine is spread over {engine.mesh.size()} processes; use shm, dist "
                "or disk"
            )
        return InprocOffer(version=version, engine=engine, engine_version=engine.version)


class InprocReceiver:
    """Reads the offered engine's weights in place."""

    refuses_nan = False

    def __init__(self, key: str) -> None:
        self.key = key

    def receive(self, offer: Offer) -> Named:
        assert isinstance(offer, InprocOffer), "senders and receivers come from one transport"
        if offer.engine.version != offer.engine_version:
            raise WeightsRefused(
                f"version {offer.version} is gone: the learner has trained on since; take the next "
                "one"
            )
        yield from offer.engine.export_state()
