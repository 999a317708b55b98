"""Where other processes of a scheduler find this machine. Ray is a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from nanosched import node_address


@pytest.mark.parametrize(
    ("is_connected", "address"), [(True, "10.1.2.3"), (False, "127.0.0.1"), (None, "127.0.0.1")]
)
def test_only_who_is_connected_to_ray_is_reached_from_elsewhere(
    is_connected: bool | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: Ray was never imported, and is not now."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    if is_connected is not None:
        util = SimpleNamespace(get_node_ip_address=lambda: "10.1.2.3")
        ray = SimpleNamespace(is_initialized=lambda: is_connected, util=util)
        monkeypatch.setitem(sys.modules, "ray", ray)
    assert node_address() == address
    assert ("ray" in sys.modules) == (is_connected is not None)
