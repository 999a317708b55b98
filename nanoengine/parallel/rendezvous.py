"""How the ranks of a mesh that nobody introduced find each other: a store that rank 0 opens.

    store, meeting = open_store()                               # rank 0
    mesh = join_mesh(meeting, layout, 0, store=store)
    mesh = join_mesh(meeting, layout, rank)                     # every other one, told `meeting`

The port is whatever was free when rank 0 asked, so no number has to be agreed on and two runs on a
machine never meet. The store lives in rank 0's process and ends with it, as the mesh does. Store
and groups listen only at the address of the meeting: on one machine the loopback's, which no other
machine can reach.

Left out: carrying the meeting from rank 0 to the others (whoever starts the processes does), and
NCCL's own sockets, which NCCL_SOCKET_IFNAME chooses.
"""

from __future__ import annotations

import socket
from typing import NamedTuple

import torch
import torch.distributed as dist

from nanoengine.parallel.layout import Layout
from nanoengine.parallel.mesh import Mesh

LOOPBACK = "127.0.0.1"
_BACKLOG = 1024


class MeetingPoint(NamedTuple):
    """Where the store of a mesh listens: small and picklable, to be handed to the other ranks."""

    host: str
    port: int


def open_store(host: str = LOOPBACK) -> tuple[dist.Store, MeetingPoint]:
    """Open a store at `host`, an address of this machine that the other ranks can reach; keep it
    as long as the mesh. `ValueError` where `host` is not this machine's."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.bind((host, 0))
    except OSError as error:
        listener.close()
        raise ValueError(
            f"host={host!r}: not an IPv4 address of this machine ({error.strerror}); give the one "
            f"that the other ranks reach it by, or leave it out where all are on this machine"
        ) from error
    listener.listen(_BACKLOG)
    port = listener.getsockname()[1]
    # Bound here because a TCPStore that binds by itself listens on every address of the machine.
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, MeetingPoint(host, port)


def join_mesh(
    meeting: MeetingPoint,
    layout: Layout,
    rank: int,
    *,
    store: dist.Store | None = None,
    device: torch.device | str = "cpu",
    name: str = "mesh",
    timeout_s: float = 600.0,
) -> Mesh:
    """This process's place in the mesh that meets there. Rank 0 passes the `store` it opened;
    meshes that share a store need different names. Raises torch's DistNetworkError where nobody
    listens."""
    if store is None:
        store = dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False)
    return Mesh(
        layout,
        rank,
        store,
        device=device,
        name=name,
        timeout_s=timeout_s,
        host=address_towards(meeting),
    )


def address_towards(meeting: MeetingPoint) -> str:
    """This machine's address on the network where the meeting is; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((meeting.host, meeting.port))
        address: str = probe.getsockname()[0]
        return address
