"""A replica that comes while the trainer's weights have moved on since the last publication."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from nanoengine.packing import Sample
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanorl.distributed.roles.cluster import Cluster
from nanorl.options.cluster_config import ClusterConfig
from nanorl.options.parts import Parts
from nanorl.options.presets import get_preset

pytestmark = [pytest.mark.sandbox, pytest.mark.xdist_group("sandbox")]
LIMIT_S = 100.0
SAMPLES = [Sample(tokens=[5, 6, 7, 8], loss_mask=[0, 1, 1, 1])]


def test_over_dist_it_waits_for_the_next_publication_and_then_serves_that(tmp_path: Path) -> None:
    """`dist` sends from the trainer's own weights, so the last version cannot be had any more."""
    config = replace(
        get_preset("tiny").config(),
        out=tmp_path,
        dtype="fp32",
        threads=1,
        cluster=ClusterConfig(backend="local", transport="dist", hang_s=2 * LIMIT_S),
    )
    cluster = Cluster(Parts(config))

    async def scenario() -> None:
        await cluster.start()
        try:
            await cluster.publisher.publish(0)
            step = (SAMPLES, sft_loss, num_loss_tokens)
            await asyncio.to_thread(cluster.engine.train_step, *step)
            await cluster.scale(2)
            assert await versions() == {"replica-0": 0.0}
            await cluster.publisher.publish(1)
            assert await versions() == {"replica-0": 1.0, "replica-1": 1.0}
            await cluster.scale(3)  # nothing has moved since: this one catches up at once
            assert await versions() == {f"replica-{n}": 1.0 for n in range(3)}
        finally:
            await cluster.close_loop()

    async def versions() -> dict[str, float]:
        """Of the replicas that take requests."""
        beats = {
            name: handle.heartbeat.remote() for name, handle in cluster.publisher.serving.items()
        }
        return {name: (await beat)["version"] for name, beat in beats.items()}

    try:
        asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))
    finally:
        cluster.close()
