"""The address by which other processes of a scheduler reach the machine that this one runs on.

`node_address` is what every machine of the cluster knows this one by. `meeting_address` is for
sockets between actors: the loopback's as long as the cluster is one machine, so that no other
machine, of the cluster's network or not, can even connect. A machine that joins later is not of
such a meeting. That is for meetings that are made anew when one of their members cannot come, as
those of ranks are; what has to serve later machines, too, uses `node_address`.

Left out: sockets (whoever asks opens them), and machines that each other machine knows by another
address.
"""

from __future__ import annotations

import sys
from typing import Any

LOOPBACK = "127.0.0.1"


def node_address() -> str:
    """In a process connected to Ray, the driver's or an actor's, what Ray calls this machine; else
    the loopback's, which no other machine can reach."""
    ray = _connected()
    if ray is None:
        return LOOPBACK
    address: str = ray.util.get_node_ip_address()
    return address


def meeting_address() -> str:
    """The loopback's where all machines that now live are this one, else `node_address()`."""
    ray, ours = _connected(), node_address()
    if ray is None:
        return LOOPBACK
    living = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return LOOPBACK if living == {ours} else ours


def _connected() -> Any:
    ray = sys.modules.get("ray")  # never imported for this: whoever is connected has it
    return ray if ray is not None and ray.is_initialized() else None
