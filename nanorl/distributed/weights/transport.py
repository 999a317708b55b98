"""The driver's end of weight transport: it makes senders and receivers, and orders a publication.

    transport = open_transport("shm", num_bytes=weight_bytes(config, dtype))
    sender = transport.sender(rank)               # to each policy rank
    report = await transport.publish(send, {"replica-0": load, ...}, version)
    await transport.catch_up("replica-3", load)   # a late replica, before its first request

`send` has all policy ranks call `sender.send(engine, version)` together and returns their offer.
`load(receiver, offer)` has a replica take the tensors over and returns its seconds; it settles when
the replica has answered or is dead, and raises what the replica raised.

    kind      bytes go through                       a publication
    shm       one shared buffer                      send, then all loads at once
    cuda_ipc  a buffer on the learner's GPU          the same
    disk      a folder per version                   the same
    dist      gloo or NCCL between the processes     send and all loads at once: both sides meet

A replica that refuses or dies changes nothing for the others, and goes on serving what it has.

Left out: choosing a kind, and restarting anybody.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from nanoengine.parallel.rendezvous import open_store
from nanorl.distributed.weights.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from nanorl.distributed.weights.disk import DiskReceiver, DiskSender
from nanorl.distributed.weights.dist import DistOffer, DistReceiver, DistSender, Meeting, announce
from nanorl.distributed.weights.offer import (
    BaseVersionMissing,
    Offer,
    ReadersBusy,
    WeightReceiver,
    WeightSender,
    WeightsRefused,
)
from nanorl.distributed.weights.shm import ShmReceiver, ShmSender, shared_buffer_for
from nanorl.distributed.weights.version_ledger import MOST_READERS, ReaderLedger
from nanosched.errors import TaskError, WorkerDied

Kind = Literal["shm", "cuda_ipc", "dist", "disk"]
Send = Callable[[], Awaitable[Offer]]
Load = Callable[[WeightReceiver, Offer], Awaitable[float]]


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """The fate of a version: every replica is in one of `loaded`, `refused`, `dead` and `late`."""

    version: int
    seconds: float
    loaded: dict[str, float] = field(default_factory=dict)  # its own seconds
    refused: dict[str, str] = field(default_factory=dict)  # why; it serves its old version
    dead: dict[str, str] = field(default_factory=dict)
    late: tuple[str, ...] = ()  # no answer in time; `remove` it once its process has ended


class Transport(ABC):
    """Common to all kinds; see the module. One publication or catching up at a time: another
    call waits for its turn."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._id = uuid.uuid4().hex[:12]
        self._receivers: dict[str, WeightReceiver] = {}
        self._late: dict[str, asyncio.Task[float]] = {}
        self._offer: Offer | None = None
        self._send: Send | None = None
        self._turn, self._resending = asyncio.Lock(), asyncio.Lock()

    # -- the two ends ------------------------------------------------------------------------

    def sender(self, rank: int) -> WeightSender:
        """The end of a policy rank, to be pickled before its first use."""
        return self._make_sender(f"{self._id}/sender-{rank}", rank)

    def receiver(self, name: str) -> WeightReceiver:
        """The end of a replica, to be pickled before its first use; the same one until `remove`."""
        if name not in self._receivers:
            key = f"{self._id}/{name}/{uuid.uuid4().hex[:6]}"
            self._receivers[name] = self._make_receiver(name, key)
        return self._receivers[name]

    def remove(self, name: str) -> None:
        """The replica has left, or its process has ended: nobody waits for its answer any more.
        Call it for a process that hangs only after that was killed, since what it was reading may
        be overwritten now."""
        late = self._late.pop(name, None)
        if late is not None:
            late.cancel()
        self._receivers.pop(name, None)
        self._answered(name)

    def renew_senders(self) -> None:  # noqa: B027 - a hook
        """The policy ranks are new processes: nobody who met the old ones meets them."""

    def close(self) -> None:  # noqa: B027 - a hook
        """Let go of memory, files and sockets. Idempotent."""

    # -- publishing --------------------------------------------------------------------------

    async def publish(self, send: Send, load: Mapping[str, Load], version: int) -> PublishReport:
        """Bring policy `version` to the replicas named in `load`. Raises what `send` raised, and
        ReadersBusy where a replica has not yet answered for the version before; then no replica
        has changed. What replicas raise stands in the report."""
        async with self._turn:
            start = time.perf_counter()
            await self._wait_for_late()
            self._offer, self._send = None, send
            tasks = await self._deliver(send, load, version)
            return self._report(version, tasks, time.perf_counter() - start)

    async def catch_up(self, name: str, load: Load) -> float:
        """Bring the current version to one more replica; returns its seconds. Raises what the
        replica raised, and WeightsRefused where there is no current version: none was published
        yet, or the last publication failed."""
        async with self._turn:
            await self._wait_for_late()
            if self._offer is None or self._send is None:
                raise WeightsRefused(f"{name}: no version has been published; publish one")
            tasks = await self._redeliver(self._send, self._offer, name, load)
            if name in self._late:
                raise ReadersBusy(f"{name} has not answered in {self.timeout_s} s")
            return tasks[name].result()

    async def _deliver(
        self, send: Send, load: Mapping[str, Load], version: int
    ) -> dict[str, asyncio.Task[float]]:
        offer = await send()
        if offer.version != version:
            raise WeightsRefused(f"version {version} was asked for, {offer.version} was sent")
        self._offer = offer
        return await self._load_all(offer, load)

    async def _redeliver(
        self, send: Send, offer: Offer, name: str, load: Load
    ) -> dict[str, asyncio.Task[float]]:
        return await self._load_all(offer, {name: load})

    async def _load_all(
        self, offer: Offer, load: Mapping[str, Load]
    ) -> dict[str, asyncio.Task[float]]:
        tasks = {
            name: asyncio.create_task(self._load_one(name, offer, one), name=f"load {name}")
            for name, one in load.items()
        }
        if tasks:
            await asyncio.wait(tasks.values(), timeout=self.timeout_s)
        self._late |= {name: task for name, task in tasks.items() if not task.done()}
        return tasks

    async def _load_one(self, name: str, offer: Offer, load: Load) -> float:
        receiver = self.receiver(name)
        self._enter(name, offer.version)
        try:
            seconds = await self._load_or_resend(receiver, offer, load)
        except asyncio.CancelledError:  # the driver gave up, the replica may still be reading
            raise
        except BaseException:  # whatever it was, the replica reads no more
            self._answered(name)
            raise
        self._answered(name)
        return seconds

    async def _load_or_resend(self, receiver: WeightReceiver, offer: Offer, load: Load) -> float:
        try:
            return await load(receiver, offer)
        except (BaseVersionMissing, TaskError) as error:
            cause = error.cause if isinstance(error, TaskError) else error
            if not isinstance(cause, BaseVersionMissing):
                raise
        async with self._resending:
            if self._offer is None or self._offer.base_version is not None:
                assert self._send is not None, "something was offered"
                self._offer = await self._send()  # again, so it is whole
            offer = self._offer
        return await load(receiver, offer)

    async def _wait_for_late(self) -> None:
        if self._late:
            await asyncio.wait(self._late.values(), timeout=self.timeout_s)
        self._late = {name: task for name, task in self._late.items() if not task.done()}
        if self._late:
            raise ReadersBusy(
                f"{', '.join(self._late)}: no answer since the last version; end the process, then "
                "Transport.remove(name)"
            )

    def _report(
        self, version: int, tasks: dict[str, asyncio.Task[float]], seconds: float
    ) -> PublishReport:
        report = PublishReport(
            version=version,
            seconds=seconds,
            late=tuple(name for name, task in tasks.items() if not task.done()),
        )
        for name, task in tasks.items():
            if not task.done():
                continue
            error = task.exception()
            if error is None:
                report.loaded[name] = task.result()
            else:
                into = report.dead if isinstance(error, WorkerDied) else report.refused
                into[name] = f"{type(error).__name__}: {error}"
        return report

    # -- what the kinds do differently ---------------------------------------------------------

    @abstractmethod
    def _make_sender(self, key: str, rank: int) -> WeightSender: ...

    @abstractmethod
    def _make_receiver(self, name: str, key: str) -> WeightReceiver: ...

    def _enter(self, name: str, version: int) -> None:  # noqa: B027 - a hook
        """The replica is about to read."""

    def _answered(self, name: str) -> None:  # noqa: B027 - a hook
        """It reads no more."""


class ShmTransport(Transport):
    """Owns the shared buffer, and writes the readers' half of its ledger."""

    def __init__(self, timeout_s: float, num_bytes: int) -> None:
        super().__init__(timeout_s)
        self._buffer = shared_buffer_for(num_bytes)
        self._ledger = ReaderLedger(self._buffer.view())
        self._slots: dict[str, int] = {}

    def _make_sender(self, key: str, rank: int) -> WeightSender:
        return ShmSender(key, self._buffer)

    def _make_receiver(self, name: str, key: str) -> WeightReceiver:
        free = set(range(MOST_READERS)) - set(self._slots.values())
        if not free:
            raise ValueError(f"{name}: a shared buffer has at most {MOST_READERS} readers")
        self._slots[name] = min(free)
        return self._make_end(key)

    def _make_end(self, key: str) -> WeightReceiver:
        return ShmReceiver(key, self._buffer)

    def _enter(self, name: str, version: int) -> None:
        self._ledger.enter(self._slots[name], version)

    def _answered(self, name: str) -> None:
        if name in self._slots:
            self._ledger.strike_out(self._slots[name])

    def remove(self, name: str) -> None:
        super().remove(name)
        self._slots.pop(name, None)

    def close(self) -> None:
        self._buffer.close()


class CudaIpcTransport(ShmTransport):
    """Owns the ledger's page; the learner's rank 0 owns the memory."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s, num_bytes=0)

    def _make_sender(self, key: str, rank: int) -> WeightSender:
        return CudaIpcSender(key, self._buffer)

    def _make_end(self, key: str) -> WeightReceiver:
        return CudaIpcReceiver(key, self._buffer)


class DiskTransport(Transport):
    """Owns the folder of versions, if nobody gave it one."""

    def __init__(self, timeout_s: float, folder: Path | str | None, is_delta: bool) -> None:
        super().__init__(timeout_s)
        self._own = None if folder is not None else tempfile.mkdtemp(prefix="weights-")
        self._folder = str(folder or self._own)
        self._is_delta = is_delta

    def _make_sender(self, key: str, rank: int) -> WeightSender:
        return DiskSender(key, self._folder, has_changes=self._is_delta)

    def _make_receiver(self, name: str, key: str) -> WeightReceiver:
        return DiskReceiver(key, has_changes=self._is_delta)

    def close(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)


class DistTransport(Transport):
    """Owns the store in which processes find each other, and numbers the epochs."""

    def __init__(self, timeout_s: float, num_senders: int, host: str, device: str) -> None:
        super().__init__(timeout_s)
        self._store, point = open_store(host, timeout_s)
        # Peers give up before we do: by then all who met know that it failed.
        self._meeting = Meeting(point, num_senders, timeout_s / 2, device)
        self._epoch, self._members = 0, tuple[str, ...]()

    def _make_sender(self, key: str, rank: int) -> WeightSender:
        return DistSender(key, self._meeting, rank)

    def _make_receiver(self, name: str, key: str) -> WeightReceiver:
        return DistReceiver(key, self._meeting)

    async def _deliver(
        self, send: Send, load: Mapping[str, Load], version: int
    ) -> dict[str, asyncio.Task[float]]:
        keys = tuple(self.receiver(name).key for name in load)
        if keys != self._members:
            self._epoch, self._members = self._epoch + 1, keys
        offer = DistOffer(version=version, epoch=self._epoch, receivers=keys)
        announce(self._store, offer)
        sending = asyncio.ensure_future(send())
        tasks = await self._load_all(offer, load)
        await asyncio.wait([sending], timeout=self.timeout_s)
        is_good = [task.done() and task.exception() is None for task in (sending, *tasks.values())]
        if not all(is_good):
            self._members = ()  # whoever is left meets in another epoch
        if not is_good[0] and not any(is_good[1:]):
            if not sending.done():
                sending.cancel()
                raise WeightsRefused(f"version {version}: the learner was not heard from")
            sending.result()  # raises
        self._offer = offer
        return tasks

    async def _redeliver(
        self, send: Send, offer: Offer, name: str, load: Load
    ) -> dict[str, asyncio.Task[float]]:
        """The learner's ranks meet this replica alone."""
        return await self._deliver(send, {name: load}, offer.version)

    def remove(self, name: str) -> None:
        super().remove(name)
        self._members = ()

    def close(self) -> None:
        self._store.close()

    def renew_senders(self) -> None:
        self._members = ()


def open_transport(
    kind: Kind,
    *,
    num_bytes: int = 0,
    folder: Path | str | None = None,
    num_senders: int = 1,
    is_delta: bool = False,
    timeout_s: float = 60.0,
    meeting_place: tuple[str, str] = ("127.0.0.1", "cpu"),
) -> Transport:
    """`num_bytes` is for shm; `folder` for disk (a temporary one without it), as is `is_delta`:
    only what changed is written. dist needs the number of policy ranks, and as `meeting_place` an
    address of this host that all can reach and the device whose memory the tensors travel between.
    `timeout_s` bounds each wait for a replica or a peer."""
    if is_delta and kind != "disk":
        raise ValueError(f"is_delta=True: {kind} sends whole tensors; use disk, or set it to False")
    if kind == "shm":
        if num_bytes <= 0:
            raise ValueError(f"num_bytes={num_bytes}: shm needs the model's size, `weight_bytes`")
        return ShmTransport(timeout_s, num_bytes)
    if kind == "cuda_ipc":
        return CudaIpcTransport(timeout_s)
    if kind == "disk":
        return DiskTransport(timeout_s, folder, is_delta)
    if kind == "dist":
        return DistTransport(timeout_s, num_senders, *meeting_place)
    raise ValueError(f"kind={kind!r}: must be one of {', '.join(get_args(Kind))}")
