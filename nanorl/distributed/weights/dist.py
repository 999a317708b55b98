"""Weights between processes that meet in a group of their own, on one machine or several.

    ranks 0 .. P-1      the learner's, each with the pieces it holds
    ranks P ..          one for each replica, which wants every tensor whole

A group is an *epoch*: it is made for one set of replicas, and another one when a replica comes or
goes, or after a failure. Each piece goes from a rank that owns it straight to each replica, by
nanoengine's resharding plan, made once an epoch. Replicas receive into memory of their own, kept
from version to version, compare checksums piece by piece, and then load.

Both sides run at once, so a publication differs from the other transports': the driver announces
the epoch in a store, the senders read it there, and the replicas find it in the offer. The store is
a meeting's (nanoengine.parallel.rendezvous): only who has its secret, which travels with senders
and receivers, reads it, writes to it or takes a place in a group. A peer that dies is an error for
all who still wait for it, within the time limit; the transport then opens another epoch.

Left out: forwarding between replicas (each is served by the owners), and changes alone.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.transport.checksum import checksum
from nanoengine.engine import Engine
from nanoengine.parallel.layout import WORLD, Layout
from nanoengine.parallel.meeting_store import MeetingPoint, MeetingStore
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.rendezvous import address_towards
from nanoengine.state.reshard import Resharder, model_pieces
from nanoengine.state.slices import Box, Held, Piece
from nanorl.distributed.weights.offer import Named, Offer, WeightsRefused

_ANNOUNCEMENT = "announcement"


@dataclass(frozen=True)
class Meeting:
    """The meeting of processes at the driver's store: the number of learner ranks, the longest wait
    in seconds, and "cpu" (gloo) or "cuda" (NCCL, each process's current device)."""

    point: MeetingPoint
    num_senders: int
    timeout_s: float
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class DistOffer(Offer):
    """An invitation: the tensors come while it is accepted."""

    epoch: int
    receivers: tuple[str, ...]  # their keys, in the order of their ranks


def announce(store: MeetingStore, offer: DistOffer) -> None:
    """Tell the senders which epoch is next."""
    fields = [offer.version, offer.epoch, offer.receivers]
    store.set(_ANNOUNCEMENT, json.dumps(fields))


class DistSender:
    """One learner rank's end."""

    def __init__(self, key: str, meeting: Meeting, rank: int) -> None:
        self.key = key
        self._link = _Link(meeting, rank)
        self._sent: tuple[int, int] | None = None  # (policy version, updates taken until then)

    def send(self, engine: Engine, version: int) -> DistOffer:
        """See `WeightSender`; returns when all replicas have received. WeightsRefused when one did
        not in time, or where the engine was trained since it first sent this version."""
        updates = engine.optimizer.step_count  # `engine.version` starts over with each phase
        if self._sent is not None and self._sent[0] == version and self._sent[1] != updates:
            raise WeightsRefused(
                f"version {version} is gone: the learner has trained on since; take the next one"
            )
        with engine.optimizer.gathered():
            held = model_pieces(engine.models)
            with self._link.failures_refuse(version):
                offer = self._link.announced()
                if offer.version != version:
                    raise WeightsRefused(
                        f"version {version} was to be sent, {offer.version} is announced"
                    )
                self._link.exchange(offer, held)
        self._sent = (version, updates)
        return offer


class DistReceiver:
    """One replica's end."""

    refuses_nan = False

    def __init__(self, key: str, meeting: Meeting) -> None:
        self.key = key
        self._meeting = meeting
        self._link: _Link | None = None

    def receive(self, offer: Offer) -> Named:
        assert isinstance(offer, DistOffer), "senders and receivers come from one transport"
        rank = self._meeting.num_senders + offer.receivers.index(self.key)
        if self._link is None or self._link.rank != rank:
            self._link = _Link(self._meeting, rank)
        with self._link.failures_refuse(offer.version):
            staged = self._link.exchange(offer, [])
        yield from staged


class _Link:
    """This process's place among those that meet."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self._meeting = meeting
        self._store: MeetingStore | None = None
        self._epoch = -1
        self._mesh: Mesh | None = None
        self._resharder = Resharder()
        self._held: list[Piece] | None = None
        self._wanted: Held = []

    def announced(self) -> DistOffer:
        version, epoch, receivers = json.loads(self._open_store().get(_ANNOUNCEMENT))
        return DistOffer(version=version, epoch=epoch, receivers=tuple(receivers))

    def exchange(self, offer: DistOffer, held: Held) -> list[tuple[str, Tensor]]:
        """All processes of the epoch call it together. What a replica has received, verified."""
        mesh = self._connect(offer)
        self._agree(mesh, [piece for piece, _ in held])
        self._resharder.run(held, self._wanted)
        self._compare(mesh, held, offer.version)
        return [(piece.name, tensor) for piece, tensor in self._wanted]

    @contextmanager
    def failures_refuse(self, version: int) -> Iterator[None]:
        """A lost peer, or one that is late, ends this process's part in the epoch."""
        try:
            yield
        except WeightsRefused:
            raise
        except RuntimeError as error:  # what torch.distributed raises
            if self._mesh is not None:
                self._mesh.abandon()
            # A frame that the error remembers would hold a group, and with it the connections: the
            # others would wait for us until their time is up.
            traceback.clear_frames(error.__traceback__)
            self._mesh = None
            raise WeightsRefused(
                f"version {version} did not arrive whole, a process was lost or too slow "
                f"({error}); the version before stays"
            ) from error

    def _open_store(self) -> MeetingStore:
        if self._store is None:
            where = self._meeting
            self._store = MeetingStore(where.point, timeout_s=where.timeout_s)
        return self._store

    def _connect(self, offer: DistOffer) -> Mesh:
        if self._mesh is None or self._epoch != offer.epoch:
            size = self._meeting.num_senders + len(offer.receivers)
            device: torch.device | str = self._meeting.device
            if device == "cuda":
                device = torch.device("cuda", torch.cuda.current_device())
            self._mesh = Mesh(
                Layout(dp=size),
                self.rank,
                self._open_store(),
                device=device,
                name=f"weights/{offer.epoch}",
                timeout_s=self._meeting.timeout_s,
                host=address_towards(self._meeting.point),
            )
            self._epoch, self._held = offer.epoch, None
            self._resharder = Resharder(self._mesh)
        return self._mesh

    def _agree(self, mesh: Mesh, held: list[Piece]) -> None:
        """Replicas learn which tensors there are, and make room for them."""
        if not mesh.max_int(WORLD, int(held != self._held)):
            return
        everyone = mesh.gather_json(WORLD, [piece.to_json() for piece in held])
        if self.rank >= self._meeting.num_senders:
            whole: dict[str, Piece] = {}
            for fields in (fields for pieces in everyone for fields in pieces):
                piece = Piece.from_json(fields)
                box = Box((0,) * len(piece.whole), piece.whole)
                whole.setdefault(piece.name, Piece(piece.name, piece.whole, box, piece.dtype))
            self._make_room(mesh, list(whole.values()))
        self._held = held

    def _make_room(self, mesh: Mesh, pieces: list[Piece]) -> None:
        if pieces != [piece for piece, _ in self._wanted]:
            self._wanted = [
                (p, torch.empty(p.whole, dtype=getattr(torch, p.dtype), device=mesh.device))
                for p in pieces
            ]

    def _compare(self, mesh: Mesh, held: Held, version: int) -> None:
        """The checksum of each copy, at its source and where it arrived."""
        copies = self._resharder.copies
        sums: dict[tuple[int, Box], int] = {}
        for copy in copies:
            where = (copy.source_piece, copy.box)
            if copy.source == self.rank and where not in sums:
                piece, tensor = held[copy.source_piece]
                sums[where] = checksum(copy.box.of(tensor, piece.box))
        mine = [sums[c.source_piece, c.box] for c in copies if c.source == self.rank]
        theirs = [iter(values) for values in mesh.gather_json(WORLD, mine)]
        for copy in copies:
            expected = next(theirs[copy.source])
            if copy.to == self.rank:
                piece, tensor = self._wanted[copy.to_piece]
                if checksum(copy.box.of(tensor, piece.box)) != expected:
                    raise WeightsRefused(
                        f"{piece.name} of version {version} was damaged on the way; the version "
                        "before stays"
                    )
