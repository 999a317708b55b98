"""Where other processes of a scheduler find this machine. Ray is a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from nanosched import meeting_address, node_address

OURS, OTHER, LOOPBACK = "10.1.2.3", "10.1.2.4", "127.0.0.1"


def stand_in(monkeypatch: pytest.MonkeyPatch, is_connected: bool, **machines: bool) -> None:
    """A Ray that calls this machine OURS; `machines` are addresses and whether they live."""
    nodes = [{"NodeManagerAddress": one, "Alive": lives} for one, lives in machines.items()]
    util = SimpleNamespace(get_node_ip_address=lambda: OURS)
    ray = SimpleNamespace(is_initialized=lambda: is_connected, util=util, nodes=lambda: nodes)
    monkeypatch.setitem(sys.modules, "ray", ray)


@pytest.mark.parametrize(
    ("is_connected", "address"), [(True, OURS), (False, LOOPBACK), (None, LOOPBACK)]
)
def test_only_who_is_connected_to_ray_is_reached_from_elsewhere(
    is_connected: bool | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: Ray was never imported, and is not now."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    if is_connected is not None:
        stand_in(monkeypatch, is_connected, **{OURS: True, OTHER: True})
    assert node_address() == meeting_address() == address
    assert ("ray" in sys.modules) == (is_connected is not None)


@pytest.mark.parametrize(
    ("machines", "address"),
    [
        ({OURS: True}, LOOPBACK),
        ({OURS: True, OTHER: False}, LOOPBACK),  # it was there, and has gone
        ({OURS: True, OTHER: True}, OURS),
        ({OTHER: True}, OURS),  # Ray does not list this one yet
    ],
)
def test_ranks_of_a_cluster_of_one_machine_meet_where_no_other_machine_can_connect(
    machines: dict[str, bool], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, True, **machines)
    assert meeting_address() == address
    assert node_address() == OURS
