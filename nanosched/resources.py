"""What an actor may ask for: cpus, gpus, and a place in a group of reserved bundles.

Who has what is ledger.py's. Left out: memory and custom resources.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

STRATEGIES = ("PACK", "SPREAD")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Amounts of cpu cores and of gpus; both may be fractions."""

    num_cpus: float = 0
    num_gpus: float = 0

    def __post_init__(self) -> None:
        check_amount("num_cpus", self.num_cpus)
        check_amount("num_gpus", self.num_gpus)

    def __str__(self) -> str:
        return f"num_cpus={self.num_cpus:g}, num_gpus={self.num_gpus:g}"

    @classmethod
    def of_machine(cls) -> Resources:
        """The cores that this process may run on, and the NVIDIA devices that it may see."""
        visible = visible_gpus()
        devices = Path("/proc/driver/nvidia/gpus")
        num_devices = len(list(devices.iterdir())) if devices.is_dir() else 0
        num_gpus = num_devices if visible is None else min(len(visible), num_devices)
        has_affinity = hasattr(os, "sched_getaffinity")  # macOS has not
        num_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        return cls(num_cpus=num_cpus, num_gpus=num_gpus)


def visible_gpus() -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES; None where it is not set."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [name for name in text.split(",") if name]


def check_amount(name: str, amount: float) -> None:
    if not 0 <= amount < math.inf:
        raise ValueError(f"{name}={amount}: cannot be negative, infinite or NaN; give 0 for none")


def check_request(wanted: Resources) -> None:
    """A fraction is a share of one gpu, so that above one only whole numbers make sense."""
    if wanted.num_gpus > 1 and wanted.num_gpus != int(wanted.num_gpus):
        raise ValueError(
            f"num_gpus={wanted.num_gpus:g}: a fraction is a share of one gpu; above 1 give a "
            "whole number"
        )


@dataclass(frozen=True, eq=False)
class PlacementGroup:
    """Bundles of resources that are held together until `Scheduler.remove`.

    `PACK` wants as few machines as possible, `SPREAD` as many; neither is a condition.
    """

    bundles: tuple[Resources, ...]
    strategy: str = "PACK"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"unknown strategy {self.strategy!r}; allowed: {', '.join(STRATEGIES)}"
            )
        if not self.bundles:
            raise ValueError("a placement group without bundles: give at least one")
        for bundle in self.bundles:
            check_request(bundle)


@dataclass(frozen=True, kw_only=True)
class ActorOptions:
    """Says how an actor is placed and supervised.

    An actor reserves nothing unless it says so. With `placement` it takes what it needs from
    `bundle` of that group, or from the first bundle that has it if `bundle` is None.
    """

    num_cpus: float = 0
    num_gpus: float = 0
    name: str | None = None
    max_restarts: int = 0
    placement: PlacementGroup | None = None
    bundle: int | None = None

    def __post_init__(self) -> None:
        check_amount("max_restarts", self.max_restarts)
        check_request(self.resources)
        if self.bundle is None:
            return
        if self.placement is None:
            raise ValueError(f"bundle={self.bundle} without placement: say which group's bundle")
        num_bundles = len(self.placement.bundles)
        if not 0 <= self.bundle < num_bundles:
            raise ValueError(
                f"bundle={self.bundle}: the placement group has {num_bundles}, counted from 0"
            )

    @property
    def resources(self) -> Resources:
        return Resources(num_cpus=self.num_cpus, num_gpus=self.num_gpus)
