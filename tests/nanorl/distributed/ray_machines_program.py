"""The program of test_ray_machines.py: a Ray cluster of two machines, as far as one can play them.

    python ray_machines_program.py FOLDER [options of train_agent.py]

The machines have addresses of their own in the loopback network. The run's trainer has a rank on
each. Prints on how many machines each placement group lay and how the run ended as one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from ray._private import ray_constants
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from nanorl.distributed.roles import policy_role as policy
from nanorl.distributed.roles.policy_role import PolicyRank
from nanosched import WorkerGroup

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))


def start(folder: str) -> Cluster:
    """Two machines; the first has the head, and the driver."""
    ray_constants.ENABLE_RAY_CLUSTER = False  # the loopback network is enough
    common = {"num_cpus": 2, "object_store_memory": 100 << 20}
    head = {"include_dashboard": False, "temp_dir": folder, "node_ip_address": "127.0.0.1"}
    # Cluster writes its address below Ray's own folder, which a new machine does not have.
    os.environ["RAY_TMPDIR"] = folder
    os.makedirs(f"{folder}/ray", exist_ok=True)
    cluster = Cluster(initialize_head=True, head_node_args={**common, **head})
    cluster.add_node(**common, node_ip_address="127.0.0.2")
    return cluster


def main() -> None:
    folder, *options = sys.argv[1:]
    cluster = start(folder)
    os.chdir(folder)  # whoever trains may be elsewhere than who started the cluster
    import train_agent

    machines: list[int] = []
    start_ranks = policy.start_ranks

    async def look(group: WorkerGroup[PolicyRank]) -> None:
        await start_ranks(group)
        for reserved in placement_group_table().values():
            machines.append(len(set(reserved["bundles_to_node_id"].values())))

    policy.start_ranks = look
    try:
        sys.argv = ["train_agent.py", *options, "--cluster.address", cluster.address]
        status = train_agent.main()
    finally:
        cluster.shutdown()
    print(json.dumps({"status": status, "machines": sorted(machines)}))


if __name__ == "__main__":
    main()
