"""Which devices the processes of a run get, as placement groups of the scheduler, and which way
weights can take between them.

    separate    one group: the trainer's ranks, then reference and critic where there are any,
                a GPU each; and one group for each replica, a GPU for each of its processes
    colocated   one group: trainer rank i and replica process i share bundle i, half a GPU each;
                reference and critic share bundle 0 with them. Shares are the scheduler's
                accounting: each in its turn has all the memory

A judge scores while replicas sample, and so has a group of its own either way.

What the layout needs is reserved before any process starts, and stays so: a role that is started
again returns to its devices. On GPUs a group is packed, onto as few machines as can be. Without
GPUs bundles ask for nothing, since a laptop has fewer cores than a run has processes, and they are
spread: packed, nothing would ever fill a machine.

Left out: which GPUs of a machine are near each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanorl.distributed.weights.transport import Kind
from nanorl.options.run_config import RunConfig
from nanosched import GetTimeout, PlacementGroup, Resources, Scheduler

WAIT_S = 10.0
"""So long a Ray cluster may take to say that devices are free; the event loop waits with it."""
_LOOK_S = 0.1


@dataclass(frozen=True)
class RolePlace:
    """A bundle for each process of one role, in order of rank, and the GPUs that each asks for."""

    group: PlacementGroup
    bundles: Sequence[int]
    num_gpus: float

    @property
    def of_all(self) -> dict[str, Any]:
        """Options of `Scheduler.group` for all processes."""
        return {"placement": self.group, "bundles": self.bundles, "num_gpus": self.num_gpus}

    @property
    def of_one(self) -> dict[str, Any]:
        """Options of `Scheduler.actor` for a role of one process."""
        (bundle,) = self.bundles
        return {"placement": self.group, "bundle": bundle, "num_gpus": self.num_gpus}


class Places:
    """The places of a run's roles, from before they start until the scheduler closes."""

    def __init__(
        self,
        scheduler: Scheduler,
        config: RunConfig,
        *,
        has_gpus: bool,
        judges: Mapping[str, bool] | None = None,
    ) -> None:
        """Reserves what the layout needs; `ValueError` where that is more than is free. `judges`
        are their names, and whether each wants a GPU."""
        spec, rollout = config.rl.algorithm, config.rollout
        needed = (("reference", spec.needs_reference), ("critic", spec.needs_critic))
        self._scorers = [name for name, is_needed in needed if is_needed]
        self._scheduler, self._has_gpus, self._tp = scheduler, has_gpus, rollout.tp
        self._wait_s = WAIT_S if config.cluster.backend == "ray" else 0.0
        self._world, self._num_replicas = config.learner.layout.world, rollout.replicas
        self._replicas: dict[str, RolePlace] = {}
        self._free: list[RolePlace] = []  # of replicas, reserved and not in use
        self._shared: PlacementGroup | None = None
        wishes = judges or {}
        self._num_judges = sum(wishes.values())  # those on GPUs
        if config.cluster.placement == "colocated":
            self._put_together()
        else:
            self._set_apart()
        self.judges = {name: self._judge_place(on_gpu) for name, on_gpu in wishes.items()}

    def _set_apart(self) -> None:
        num_first = self._world + len(self._scorers)
        needed = num_first + self._num_replicas * self._tp + self._num_judges
        parts = [f"{self._world} for the trainer", *(f"1 for the {one}" for one in self._scorers)]
        parts += [f"{self._num_judges} for judges"] if self._num_judges else []
        self._require(
            needed,
            f"--cluster.placement separate needs {needed} GPUs ({', '.join(parts)}, {self._tp} for "
            f"each of {self._num_replicas} replicas)",
            "choose fewer --rollout.replicas, a smaller layout (--learner.*), or colocated"
            + self._without_judges,
        )
        group = self._reserve(num_first)
        share = float(self._has_gpus)
        self.trainer = RolePlace(group, range(self._world), share)
        self.scorers = {
            name: RolePlace(group, [self._world + index], share)
            for index, name in enumerate(self._scorers)
        }
        self._free = [self._own_place() for _ in range(self._num_replicas)]

    def _put_together(self) -> None:
        num_processes = self._num_replicas * self._tp
        num_shared = max(self._world, num_processes)
        needed = num_shared + self._num_judges
        judges = f", judges {self._num_judges} of their own" if self._num_judges else ""
        self._require(
            needed,
            f"--cluster.placement colocated needs {needed} GPUs (the trainer has {self._world} "
            f"processes, the replicas {num_processes}{judges})",
            "choose fewer --rollout.replicas, or a smaller layout (--learner.*)"
            + self._without_judges,
        )
        self._shared = group = self._reserve(num_shared)
        # Rounded down as the scheduler counts, or the last of three thirds would not fit.
        share = math.floor(10_000 / (2 + len(self._scorers))) / 10_000 if self._has_gpus else 0.0
        self.trainer = RolePlace(group, range(self._world), share)
        self.scorers = {name: RolePlace(group, [0], share) for name in self._scorers}
        firsts = range(0, num_processes, self._tp)
        self._free = [RolePlace(group, range(at, at + self._tp), share) for at in firsts]

    @property
    def _without_judges(self) -> str:
        """Say what else a user may do where judges want GPUs."""
        if not self._num_judges:
            return ""
        return ", or have judges on the CPU (--reward-args device=cpu) or at an address"

    def _judge_place(self, is_on_gpu: bool) -> RolePlace:
        if is_on_gpu and self._has_gpus:
            return RolePlace(self._reserve(1), [0], 1.0)
        group = self._scheduler.placement_group([Resources()], "SPREAD", self._wait_s)
        return RolePlace(group, [0], 0.0)

    def replica(self, name: str) -> RolePlace:
        """The place of a replica, the same one until `free`; `ValueError` if there is none left."""
        if name not in self._replicas:
            self._replicas[name] = self._free.pop(0) if self._free else self._own_place()
        return self._replicas[name]

    def free(self, name: str) -> None:
        """The replica has left for good."""
        place = self._replicas.pop(name, None)
        if place is None:
            return
        if place.group is self._shared:
            self._free.append(place)
        else:
            self._scheduler.remove(place.group)

    def _own_place(self) -> RolePlace:
        self._require(
            self._tp,
            f"one more replica needs {self._tp} GPUs",
            "remove another replica first, or add machines to the cluster",
        )
        return RolePlace(self._reserve(self._tp), range(self._tp), float(self._has_gpus))

    def _require(self, num_gpus: int, what: str, remedy: str) -> None:
        if not self._has_gpus:
            return
        deadline_s = time.monotonic() + self._wait_s
        while (free := self._scheduler.available().num_gpus) < num_gpus:
            if time.monotonic() >= deadline_s:
                raise ValueError(f"{what}, and {free:g} are free; {remedy}")
            time.sleep(_LOOK_S)

    def _reserve(self, num_bundles: int) -> PlacementGroup:
        bundle = Resources(num_gpus=float(self._has_gpus))
        strategy = "PACK" if self._has_gpus else "SPREAD"
        try:
            return self._scheduler.placement_group([bundle] * num_bundles, strategy, self._wait_s)
        except GetTimeout as error:
            raise ValueError(
                f"{num_bundles} GPUs for one role could not be had together ({error}); wait until "
                "somebody else's work has ended, or choose a smaller layout"
            ) from error


def transport_kind(config: RunConfig, *, has_gpus: bool) -> Kind:
    """Choose how weights reach the replicas: as asked for, or the fastest way that reaches all of
    them. `ValueError` for one that the placement does not allow."""
    cluster, rollout = config.cluster, config.rollout
    is_shared = has_gpus and cluster.placement == "colocated"
    # Each process sees its own devices alone, so only the replica in bundle 0 sees rank 0's memory.
    is_one_gpu = is_shared and cluster.backend == "local" and rollout.replicas == 1
    if cluster.transport == "cuda_ipc" and not is_one_gpu:
        raise ValueError(
            "--cluster.transport cuda_ipc: only a replica that shares the first GPU of the trainer "
            "sees its memory (CUDA, --cluster.backend local, --cluster.placement colocated, "
            "--rollout.replicas 1); choose auto"
        )
    if cluster.transport == "dist" and is_shared:
        raise ValueError(
            "--cluster.transport dist with --cluster.placement colocated: NCCL does not connect "
            "two processes of one GPU; choose auto"
        )
    if cluster.transport != "auto":
        return cluster.transport
    if rollout.addresses or (is_shared and cluster.backend == "ray"):
        return "disk"
    if cluster.backend == "ray":
        return "dist"
    return "cuda_ipc" if is_one_gpu else "shm"
