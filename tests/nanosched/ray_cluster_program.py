"""The program of test_ray_cluster.py: two machines, one of which is lost. Prints one JSON line.

python ray_cluster_program.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from ray._private import ray_constants
from ray.cluster_utils import Cluster

from nanosched import Future, PlacementGroup, Resources, Scheduler, WorkerDied

LIMIT_S = 60.0
# A dead machine refuses connections at once. One that is slow to answer has ten seconds, as always.
NOTICE_SOON = {"health_check_period_ms": 300, "health_check_failure_threshold": 3}


class Resident:
    """Knows on which machine it is."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def large(self) -> np.ndarray:
        return np.ones(1_000_000)

    def total(self, array: np.ndarray) -> float:
        return float(array.sum())


def start(folder: str) -> Cluster:
    """Two machines with two cores each; the first has the head, and the driver."""
    ray_constants.ENABLE_RAY_CLUSTER = False  # the loopback device is enough
    common = {"num_cpus": 2, "node_ip_address": "127.0.0.1", "object_store_memory": 100 << 20}
    head = {"include_dashboard": False, "temp_dir": folder, "_system_config": NOTICE_SOON}
    # Cluster writes its address below Ray's own folder, which a new machine does not have.
    os.environ["RAY_TMPDIR"] = folder
    os.makedirs(f"{folder}/ray", exist_ok=True)
    cluster = Cluster(initialize_head=True, head_node_args={**common, **head})
    cluster.add_node(**common)
    return cluster


def outcome(sched: Scheduler, future: Future[Any]) -> str:
    """ "died", or what else came of it, within the limit."""
    try:
        return str(sched.get(future, timeout_s=LIMIT_S))
    except WorkerDied:
        return "died"


def refusal(request: Callable[[], Any]) -> str:
    try:
        request()
    except ValueError as error:
        return str(error)
    return "accepted"


def spread(sched: Scheduler) -> tuple[PlacementGroup, dict[str, list[Any]]]:
    """Two actors on each machine, by the machine's name."""
    group = sched.placement_group([Resources(num_cpus=1)] * 4, "SPREAD", timeout_s=LIMIT_S)
    actors = [
        sched.actor(Resident, num_cpus=1, placement=group, bundle=bundle).remote()
        for bundle in range(4)
    ]
    nodes = sched.get([actor.node.remote() for actor in actors], timeout_s=LIMIT_S)
    return group, {
        name: [actor for actor, where in zip(actors, nodes, strict=True) if where == name]
        for name in nodes
    }


def lose_one(cluster: Cluster, sched: Scheduler) -> dict[str, Any]:
    group, by_node = spread(sched)
    doomed = next(iter(cluster.worker_nodes))
    lost, lame = by_node.pop(doomed.node_id)
    [(safe, friend)] = by_node.values()
    sleeping, large, deaths = lost.sleep.remote(LIMIT_S), lame.large.remote(), sched.death(lost)
    mine = safe.large.remote()
    sched.wait([large], timeout_s=LIMIT_S)  # it is there, on that machine only
    cluster.remove_node(doomed, allow_graceful=False)
    found = {
        "sleeping": outcome(sched, sleeping),
        "later": outcome(sched, lame.node.remote()),
        "result": outcome(sched, safe.total.remote(large)),
        "death": "Resident" in outcome(sched, deaths),
        "others": [outcome(sched, friend.total.remote(mine)), outcome(sched, mine) != "died"],
    }
    sched.remove(group)
    return found


def main() -> None:
    cluster = start(sys.argv[1])
    try:
        with Scheduler(backend="ray", address=cluster.address) as sched:
            there = sched.available()
            found = {
                "available": [there.num_cpus, there.num_gpus],
                "never": refusal(sched.actor(Resident, num_cpus=3).remote),
                "never together": refusal(lambda: sched.placement_group([there, there])),
                **lose_one(cluster, sched),
            }
            found["connected"] = ray.is_initialized()
        found["disconnected"] = not ray.is_initialized()
    finally:
        cluster.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
