"""How the ranks of a mesh that nobody introduced find each other: a store that rank 0 opens.

    store, meeting = open_store()                               # rank 0
    mesh = join_mesh(meeting, layout, 0, store=store)
    mesh = join_mesh(meeting, layout, rank)                     # every other one, told `meeting`

The port is whatever was free when rank 0 asked, so no number has to be agreed on and two runs on a
machine never meet. The store lives in rank 0's process and ends with it, as the mesh does. Store
and groups listen only at the address of the meeting: on one machine the loopback's, which no other
machine can reach.

Every user of the machine can reach that, so a meeting has a secret, which proves who belongs to
it: to the store (meeting_store.py) and to every other rank of a gloo group (peer_proof.py). It is
drawn here, and is as safe as the way by which the meeting is told.

Left out: carrying the meeting from rank 0 to the others (whoever starts the processes does), and
NCCL's own sockets, which NCCL_SOCKET_IFNAME chooses and which open to who knows the random number
in the group's id; the ranks have that from the store.
"""

from __future__ import annotations

import secrets
import socket

import torch

from nanoengine.parallel.layout import Layout
from nanoengine.parallel.meeting_server import MeetingServer
from nanoengine.parallel.meeting_store import MeetingPoint, MeetingStore
from nanoengine.parallel.meeting_wire import SECRET_BYTES
from nanoengine.parallel.mesh import Mesh

LOOPBACK = "127.0.0.1"


def open_store(host: str = LOOPBACK, timeout_s: float = 600.0) -> tuple[MeetingStore, MeetingPoint]:
    """Open a store at `host`, an address of this machine that the other ranks can reach; keep it
    as long as the mesh. `ValueError` where `host` is not this machine's."""
    secret = secrets.token_bytes(SECRET_BYTES)
    server = MeetingServer(host, secret)
    meeting = MeetingPoint(host, server.port, secret)
    return MeetingStore(meeting, timeout_s=timeout_s, server=server), meeting


def join_mesh(
    meeting: MeetingPoint,
    layout: Layout,
    rank: int,
    *,
    store: MeetingStore | None = None,
    device: torch.device | str = "cpu",
    name: str = "mesh",
    timeout_s: float = 600.0,
) -> Mesh:
    """This process's place in the mesh that meets there. Rank 0 passes the `store` it opened;
    meshes that share a store need different names. Raises torch's DistNetworkError where nobody
    listens, or somebody who does not know the meeting's secret, once a group is made."""
    if store is None:
        store = MeetingStore(meeting, timeout_s=timeout_s)
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
