"""Who holds which cpu and gpu of a machine: whole devices, shares, bundles, all or none."""

from __future__ import annotations

import pytest

from nanosched.ledger import Machine
from nanosched.resources import ActorOptions, PlacementGroup, Resources


def gpus_of(machine: Machine, **options: float) -> list[str] | None:
    lease = machine.lease(ActorOptions(**options))  # type: ignore[arg-type]
    return None if lease is None else list(lease.gpus)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Machine(Resources(num_cpus=2, num_gpus=2))


def test_whole_gpus_are_held_by_one_and_shares_are_packed(machine: Machine) -> None:
    assert gpus_of(machine, num_gpus=0.3) == ["0"]
    assert gpus_of(machine, num_gpus=1) == ["1"]
    assert gpus_of(machine, num_gpus=1) is None
    assert gpus_of(machine, num_gpus=0.7) == ["0"]
    assert machine.free() == Resources(num_cpus=2, num_gpus=0)


def test_ten_tenths_make_one(machine: Machine) -> None:
    leases = [machine.lease(ActorOptions(num_gpus=0.1)) for _ in range(10)]
    assert gpus_of(machine, num_gpus=2) is None
    for lease in leases:
        assert lease is not None
        lease.release()
        lease.release()  # twice gives back once
    assert gpus_of(machine, num_gpus=2) == ["0", "1"]


def test_ids_are_those_that_the_process_may_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,7")
    assert gpus_of(Machine(Resources(num_gpus=2)), num_gpus=2) == ["5", "3"]


def test_a_group_takes_all_bundles_or_none(machine: Machine) -> None:
    first = PlacementGroup((Resources(num_gpus=1), Resources(num_cpus=2)))
    second = PlacementGroup((Resources(num_gpus=1), Resources(num_cpus=1)))
    assert machine.lease_group(first)
    assert not machine.lease_group(second)
    assert machine.free() == Resources(num_cpus=0, num_gpus=1)
    machine.release_group(first)
    assert machine.lease_group(second)
    assert machine.free() == Resources(num_cpus=1, num_gpus=1)


def test_large_bundles_find_room_beside_small_ones(machine: Machine) -> None:
    shares = [Resources(num_gpus=share) for share in (0.4, 0.4, 0.6, 0.6)]
    assert machine.lease_group(PlacementGroup(tuple(shares)))


def test_what_can_never_be_had_is_refused_with_what_there_is(machine: Machine) -> None:
    with pytest.raises(ValueError, match=r"num_gpus=3 can never .* has num_cpus=2, num_gpus=2"):
        machine.check(ActorOptions(num_gpus=3))
    with pytest.raises(ValueError, match="can never be had"):
        machine.check_group(PlacementGroup((Resources(num_cpus=2), Resources(num_cpus=1))))
    group = PlacementGroup((Resources(num_cpus=1), Resources(num_gpus=0.5)))
    with pytest.raises(ValueError, match="removed, or is another"):
        machine.check(ActorOptions(placement=group))
    assert machine.lease_group(group)
    with pytest.raises(ValueError, match=r"the placement group has .num_cpus=0, num_gpus"):
        machine.check(ActorOptions(num_cpus=1, placement=group, bundle=1))
    machine.check(ActorOptions(num_cpus=1, placement=group))
    with pytest.raises(ValueError, match="counted from 0"):
        ActorOptions(placement=group, bundle=2)
    with pytest.raises(ValueError, match="give a whole number"):
        ActorOptions(num_gpus=1.5)
    with pytest.raises(ValueError, match="unknown strategy 'PLACE'"):
        PlacementGroup((Resources(),), "PLACE")


def test_actors_of_a_bundle_share_its_devices(machine: Machine) -> None:
    group = PlacementGroup((Resources(num_gpus=1), Resources(num_gpus=1)))
    assert machine.lease_group(group)
    one, two = (
        machine.lease(ActorOptions(num_gpus=0.5, placement=group, bundle=1)) for _ in range(2)
    )
    assert one is not None and two is not None
    assert list(one.gpus) == list(two.gpus) == ["1"]
    assert machine.lease(ActorOptions(num_gpus=0.5, placement=group, bundle=1)) is None
    assert machine.lease(ActorOptions(num_gpus=0.5, placement=group)) is not None
