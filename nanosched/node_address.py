"""The address by which other processes of a scheduler reach the machine that this one runs on.

Left out: sockets (whoever asks opens them), and machines that each other machine knows by another
address.
"""

from __future__ import annotations

import sys

LOOPBACK = "127.0.0.1"


def node_address() -> str:
    """In a process connected to Ray, the driver's or an actor's, what Ray calls this machine; else
    the loopback's, which no other machine can reach."""
    ray = sys.modules.get("ray")  # never imported for this: whoever is connected has it
    if ray is None or not ray.is_initialized():
        return LOOPBACK
    address: str = ray.util.get_node_ip_address()
    return address
