"""Spreads requests over replicas. It is a `Generator`, so an agent does not know that there are
many.

    router = Router(wait_s=60)
    router.set_replicas({"r0": ActorClient(handle), "r1": HttpReplica("http://127.0.0.1:8000")})
    output = await router.generate(ids, params)

A request goes to the replica that has answered the longest prefix of it, since that one probably
has it in its cache: so the members of a group meet, and a rollout's turns return. When the load of
that replica exceeds the least by more than `gate` requests, the least loaded is taken instead, and
the prefix has moved. The load of a replica is the number of requests that this router has there.

A replica that is lost, or that drains, gets no request until `set_replicas` names it again. Its
requests go to others: from what the drained one had sampled, and otherwise from the beginning.
Since a token depends on weights, seed and position alone, both say what the first would have said.

Left out: a request that kills whoever serves it goes round as long as there are replicas (whoever
restarts them counts), and several event loops at a time.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from nanoengine.spans import content_ids
from nanoinfer.params import Output, SamplingParams
from nanorl.distributed.roles.replica_clients import ReplicaClient, ReplicaLost


class NoReplica(TimeoutError):  # noqa: N818 - named as what happened
    """There was no replica to send a request to, for longer than the router may wait."""


@dataclass(eq=False)
class _Place:
    """A replica as the router sees it."""

    name: str
    client: ReplicaClient
    is_open: bool = True
    load: int = 0  # requests that are there now
    num_requests: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Least loaded first; of equals the one that was asked less often."""
        return (self.load, self.num_requests)


@dataclass
class _Totals:
    """The counts of what happened since the router was made."""

    num_requests: int = 0
    num_finished: int = 0
    num_failed: int = 0  # raised, or the caller was cancelled
    num_kept: int = 0  # went to the replica that had their prefix
    num_let_go: int = 0  # did not, for the load of that replica
    num_lost: int = 0  # answers lost with their replica; the request went elsewhere
    num_drained: int = 0  # answers cut short by a drain; the request went on elsewhere


class Router:
    """Routes the requests of one process. It never repeats a request that was answered."""

    def __init__(
        self,
        *,
        gate: int = 8,
        wait_s: float = 300.0,
        block_size: int = 16,
        max_prefixes: int = 1 << 16,
    ) -> None:
        """`wait_s` is how long a request waits for a replica where there is none. Prefixes are
        known in blocks of `block_size` tokens, the latest `max_prefixes` of them."""
        if gate < 0 or block_size < 1 or max_prefixes < 0:
            raise ValueError(
                f"gate={gate}, block_size={block_size}, max_prefixes={max_prefixes}: gate and "
                "max_prefixes must be at least 0, block_size at least 1"
            )
        self._gate, self._wait_s, self._block_size = gate, wait_s, block_size
        self._max_prefixes = max_prefixes
        self._places: dict[str, _Place] = {}
        self._homes: OrderedDict[bytes, _Place] = OrderedDict()  # by prefix, the latest last
        self._waiters: set[asyncio.Future[None]] = set()
        self._totals = _Totals()
        self._prefix = uuid.uuid4().hex  # several routers may use one replica

    def set_replicas(self, replicas: Mapping[str, ReplicaClient]) -> None:
        """From now on there are these. Requests under way at one that is left out stay there until
        it answers (a drain makes it) or dies; one that was lost or drained is used again."""
        for name in self._places.keys() - replicas.keys():
            self._places.pop(name).is_open = False
        for name, client in replicas.items():
            place = self._places.setdefault(name, _Place(name, client))
            # A handle that was sent here twice is two objects, so a client says nothing about who
            # is behind it: the name does.
            place.client, place.is_open = client, True
        if replicas:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        """Complete `ids`, wherever it may be. Raises what the replica raised, `NoReplica` if none
        came in time; cancelling the caller aborts the request."""
        self._totals.num_requests += 1
        name = f"{self._prefix}-{self._totals.num_requests}"
        try:
            output = await self._generate(list(ids), params, name)
        except BaseException:  # a request that was cancelled counts as failed too
            self._totals.num_failed += 1
            raise
        self._totals.num_finished += 1
        return output

    async def _generate(self, ids: list[int], params: SamplingParams, name: str) -> Output:
        sampled: Output | None = None
        while True:
            so_far = ids if sampled is None else ids + sampled.ids
            place = await self._place_for(content_ids(so_far, params.images))
            client = place.client
            place.load += 1
            place.num_requests += 1
            try:
                output = await client.generate(ids, params, name, sampled)
            except ReplicaLost:
                self._totals.num_lost += 1
                self._close(place, client)
                continue
            finally:
                place.load -= 1
            if output.finish_reason != "abort" or output.stop_reason is not None:
                said = content_ids(ids + output.ids, params.images)
                self._remember(self._keys(said), place)
                return output
            self._totals.num_drained += 1
            self._close(place, client)
            sampled = output if output.ids else sampled

    def _close(self, place: _Place, client: ReplicaClient) -> None:
        """Give the place no more requests, unless somebody else has taken it meanwhile."""
        if place.client is client:
            place.is_open = False

    async def _place_for(self, ids: list[int]) -> _Place:
        keys = self._keys(ids)
        await self._until_open()
        open_places = [place for place in self._places.values() if place.is_open]
        place = min(open_places, key=lambda place: place.order)
        home = self._home(keys)
        if home is not None and home.load - place.load <= self._gate:
            place = home
            self._totals.num_kept += 1
        elif home is not None:
            self._totals.num_let_go += 1
        self._remember(keys, place)
        return place

    async def _until_open(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._wait_s
        while not any(place.is_open for place in self._places.values()):
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await waiter
            except TimeoutError:
                known = ", ".join(sorted(self._places)) or "none"
                raise NoReplica(
                    f"no replica came within {self._wait_s:g} s; known, but lost or drained: "
                    f"{known}. Start one, or look why they ended"
                ) from None
            finally:
                self._waiters.discard(waiter)

    def counters(self) -> dict[str, float]:
        """The totals, the requests that wait for a replica, and the load of each by its name."""
        totals = {name: float(value) for name, value in asdict(self._totals).items()}
        loads = {f"load/{place.name}": float(place.load) for place in self._places.values()}
        num_open = sum(place.is_open for place in self._places.values())
        return totals | loads | {"num_waiting": len(self._waiters), "num_open": num_open}

    # Prefixes

    def _keys(self, ids: list[int]) -> list[bytes]:
        """A digest of each leading run of whole blocks of content ids, the shortest first."""
        raw, size = np.asarray(ids, dtype=np.int64).tobytes(), 8 * self._block_size
        chain = hashlib.blake2b(digest_size=16)
        keys = []
        for end in range(size, len(raw) + 1, size):
            chain.update(raw[end - size : end])
            keys.append(chain.digest())
        return keys

    def _home(self, keys: list[bytes]) -> _Place | None:
        """The open replica of the longest known prefix."""
        for key in reversed(keys):
            place = self._homes.get(key)
            if place is not None and place.is_open:
                return place
        return None

    def _remember(self, keys: list[bytes], place: _Place) -> None:
        for key in keys:
            self._homes[key] = place
            self._homes.move_to_end(key)
        while len(self._homes) > self._max_prefixes:
            self._homes.popitem(last=False)
