"""Who holds which cpus and gpus of one machine: every gpu by its id, shares of one included.

`Machine` is what back ends of one machine ask (inline, local); Ray has its own. A `Ledger` is one
budget: the machine's, or that of one bundle of a placement group, which is itself a lease of the
machine's. Amounts are kept to four decimals, as Ray does, so that ten tenths make one.
Left out: fairness among those who wait (who asks first is served first where it fits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from nanosched.resources import ActorOptions, PlacementGroup, Resources, visible_gpus

B = TypeVar("B")


@dataclass(eq=False)
class Lease:
    """The resources that one actor or bundle holds: some cpus, and a share of each gpu in `gpus`,
    by id."""

    num_cpus: float
    gpus: dict[str, float]
    ledger: Ledger

    def release(self) -> None:
        """Give it back. Releasing twice gives it back once."""
        self.ledger.take_back(self)
        self.num_cpus, self.gpus = 0, {}


@dataclass(eq=False)
class Ledger:
    """A budget: `gpus` maps each id to the share of that device that is free."""

    num_cpus: float
    gpus: dict[str, float]

    def lease(self, wanted: Resources) -> Lease | None:
        """Reserve all of it, or nothing; None if there is not enough at the moment."""
        gpus = self._choose(wanted.num_gpus)
        if gpus is None or wanted.num_cpus > self.num_cpus:
            return None
        lease = Lease(wanted.num_cpus, gpus, self)
        self.num_cpus = _rounded(self.num_cpus - wanted.num_cpus)
        for gpu, share in gpus.items():
            self.gpus[gpu] = _rounded(self.gpus[gpu] - share)
        return lease

    def _choose(self, num_gpus: float) -> dict[str, float] | None:
        """Whole devices in their order; a fraction goes where it leaves the least over."""
        if num_gpus == 0:
            return {}
        share = min(num_gpus, 1.0)
        fitting = [gpu for gpu, free in self.gpus.items() if free >= share]
        count = max(1, int(num_gpus))
        if len(fitting) < count:
            return None
        fitting.sort(key=lambda gpu: self.gpus[gpu])  # stable: equal ones keep their order
        return dict.fromkeys(fitting[:count], share)

    def take_back(self, lease: Lease) -> None:
        self.num_cpus = _rounded(self.num_cpus + lease.num_cpus)
        for gpu, share in lease.gpus.items():
            self.gpus[gpu] = _rounded(self.gpus[gpu] + share)

    def free(self) -> Resources:
        num_gpus = _rounded(sum(self.gpus.values()))
        return Resources(num_cpus=self.num_cpus, num_gpus=num_gpus)


class Machine:
    """One machine's budget, and the placement groups that hold a part of it."""

    def __init__(self, declared: Resources | None) -> None:
        self.declared = declared or Resources.of_machine()
        count = self.declared.num_gpus
        if count != int(count):
            raise ValueError(f"num_gpus={count:g}: a machine has whole gpus")
        self._ids = (visible_gpus() or [])[: int(count)]
        if len(self._ids) < count:  # declared without being there, as tests do
            self._ids = [str(index) for index in range(int(count))]
        self._ledger = self._full()
        self._groups: dict[PlacementGroup, list[tuple[Lease, Ledger]]] = {}

    def _full(self) -> Ledger:
        return Ledger(self.declared.num_cpus, dict.fromkeys(self._ids, 1.0))

    def check(self, options: ActorOptions) -> None:
        """ValueError if an actor with these options could not start even if all were free."""
        wanted, group = options.resources, options.placement
        if group is None:
            if self._full().lease(wanted) is None:
                raise ValueError(f"{wanted} can never be had: this machine has {self.declared}")
            return
        if group not in self._groups:
            raise ValueError("the placement group was removed, or is another scheduler's")
        bundles = _asked(options, list(group.bundles))
        if not any(_holds(bundle, wanted) for bundle in bundles):
            shown = " or ".join(f"({bundle})" for bundle in bundles)
            raise ValueError(f"{wanted} can never be had: the placement group has {shown}")

    def lease(self, options: ActorOptions) -> Lease | None:
        """Lease the resources that an actor needs, from the machine or from its bundle; None while
        it is taken."""
        if options.placement is None:
            return self._ledger.lease(options.resources)
        for _, ledger in _asked(options, self._groups.get(options.placement, [])):
            lease = ledger.lease(options.resources)
            if lease is not None:
                return lease
        return None

    def check_group(self, group: PlacementGroup) -> None:
        """ValueError if the bundles could not be had together even if all were free."""
        if _lease_all(self._full(), group.bundles) is None:
            shown = ", ".join(f"({bundle})" for bundle in group.bundles)
            raise ValueError(f"bundles {shown} can never be had: this machine has {self.declared}")

    def lease_group(self, group: PlacementGroup) -> bool:
        """Reserve all bundles, or none and return False."""
        leases = _lease_all(self._ledger, group.bundles)
        if leases is None:
            return False
        self._groups[group] = [(one, Ledger(one.num_cpus, dict(one.gpus))) for one in leases]
        return True

    def release_group(self, group: PlacementGroup) -> None:
        for lease, _ in self._groups.pop(group, []):
            lease.release()

    def free(self) -> Resources:
        """The resources that neither an actor nor a bundle holds."""
        return self._ledger.free()


def _lease_all(ledger: Ledger, bundles: Sequence[Resources]) -> list[Lease] | None:
    """The leases in the bundles' order. The largest are placed first: a gpu that two small shares
    have been put on has no room for a large one."""
    leases: dict[int, Lease] = {}
    for index in sorted(range(len(bundles)), key=lambda index: -bundles[index].num_gpus):
        lease = ledger.lease(bundles[index])
        if lease is None:
            for one in leases.values():
                one.release()
            return None
        leases[index] = lease
    return [leases[index] for index in range(len(bundles))]


def _asked(options: ActorOptions, bundles: list[B]) -> list[B]:
    """The bundle that the options name, or all."""
    return bundles if options.bundle is None else bundles[options.bundle : options.bundle + 1]


def _holds(bundle: Resources, wanted: Resources) -> bool:
    return bundle.num_cpus >= wanted.num_cpus and bundle.num_gpus >= wanted.num_gpus


def _rounded(amount: float) -> float:
    return round(amount, 4)
