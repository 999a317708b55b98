"""Who takes a rank's place at gloo's own connections is found before anything goes over them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strangers import Stranger, heard, listening_ports, take_places, whoami

from nanoengine.parallel.layout import Layout
from nanoengine.parallel.meeting_store import MeetingPoint, MeetingStore
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.peer_proof import prove_peers
from nanoengine.parallel.rendezvous import LOOPBACK, open_store


class HeldStore(MeetingStore):
    """Tells when a group's listener is there, and lets nobody else know of it before it may: as
    slow as a rank on a busy machine."""

    def __init__(self, point: MeetingPoint, may: threading.Event) -> None:
        super().__init__(point, timeout_s=30)
        self.listens, self._may = threading.Event(), may

    def set(self, key: str, value: str | bytes) -> None:  # type: ignore[override]
        self.listens.set()
        assert self._may.wait(30)
        super().set(key, value)


def two_ranks(
    stranger: Stranger | None,
    said: bytes | None,
    do: Callable[[int, dist.Store], Any],
) -> list[Any]:
    """What `do(rank, store)` returns or raises for two ranks, while the stranger, who sees the
    ports in /proc/net/tcp, is at both of gloo's listeners before they are."""
    store, point = open_store()
    before, may = listening_ports(os.getpid()), threading.Event()
    stores = [HeldStore(point, may) for _ in range(2)]

    def run(rank: int) -> Any:
        try:
            return do(rank, stores[rank])
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(run, rank) for rank in range(2)]
        assert all(one.listens.wait(30) for one in stores)
        ports = listening_ports(os.getpid()) - before
        taken = stranger.call(take_places, list(ports), 2, said) if stranger is not None else None
        may.set()
        assert len(ports) == 2 and taken is None, taken
        found = [one.result(60) for one in ranks]
    store.close()
    return found


def make_mesh(rank: int, store: dist.Store, timeout_s: float = 60) -> Any:
    mesh = Mesh(Layout(tp=2), rank, store, name="m", host=LOOPBACK, timeout_s=timeout_s)
    total = torch.ones(1)
    mesh.all_reduce("tp", total)
    return total.item()


def test_gloo_alone_believes_whoever_connects_in_a_ranks_place() -> None:
    """What makes the proof necessary: one of the two ranks receives what another user sent, and
    its own data go there."""

    def exchange(rank: int, store: dist.Store) -> Any:
        backend: Any = dist.ProcessGroupGloo
        options = backend._Options()
        options._timeout = timedelta(seconds=5)
        options._devices = [backend.create_device(hostname=LOOPBACK)]
        group = backend(dist.PrefixStore("m", store), rank, 2, options)
        received = torch.zeros(8, dtype=torch.uint8)
        received_by = group.recv([received], 1 - rank, 0)
        group.send([torch.full((8,), rank + 1, dtype=torch.uint8)], 1 - rank, 0).wait()
        received_by.wait()
        return bytes(received.tolist())

    with Stranger() as stranger:
        found = two_ranks(stranger, b"stranger", exchange)
        assert stranger.call(whoami) != 0
        assert found.count(b"stranger") == 1  # the other rank is the one that connects
        assert set(stranger.call(heard)) & {bytes([1] * 8), bytes([2] * 8)}


@pytest.mark.parametrize("said", [b"", bytes(32), None], ids=["text", "zeros", "what it heard"])
def test_a_stranger_in_a_ranks_place_is_found_before_anything_goes_over(
    said: bytes | None,
) -> None:
    with Stranger() as stranger:
        found = two_ranks(stranger, said, partial(make_mesh, timeout_s=5))
        assert all(isinstance(error, dist.DistNetworkError) for error in found), found
        assert any("does not know the key of this group" in str(error) for error in found), found
        # A nonce and a proof for nobody else: nothing that the ranks meant to say.
        assert all(len(message) == 32 for message in stranger.call(heard))
    assert two_ranks(None, b"", make_mesh) == [2.0, 2.0]  # and the next group is made


def test_a_group_whose_ranks_do_not_share_the_key_is_none() -> None:
    """A rank that meets elsewhere, as far as two stores are elsewhere."""
    store, point = open_store()
    other, _ = open_store()

    class Elsewhere(MeetingStore):
        def get(self, key: str) -> bytes:
            if "proof" not in key:
                return super().get(key)
            other.set(key, bytes(32))
            return other.get(key)

    stores = [MeetingStore(point, timeout_s=20), Elsewhere(point, timeout_s=20)]
    with ThreadPoolExecutor(2) as threads:
        ranks = [threads.submit(make_mesh, rank, stores[rank]) for rank in range(2)]
        for rank, one in enumerate(ranks):
            with pytest.raises(dist.DistNetworkError, match=rf"rank {1 - rank}: whoever is conn"):
                one.result(60)
    store.close()
    other.close()


class _Board:
    """Groups in memory whose ranks send through it, so that a message can be altered on its way."""

    def __init__(self, size: int, alter: Callable[[int, int, int, bytes], bytes]) -> None:
        self._alter, self._size = alter, size
        self._sent: dict[tuple[int, int, int], bytes] = {}
        self._counts: dict[tuple[int, int, str], int] = {}
        self._there = threading.Condition()

    def group(self, rank: int) -> Any:
        return _Place(self, rank)

    def _number(self, source: int, to: int, end: str) -> int:
        number = self._counts.get((source, to, end), 0)
        self._counts[source, to, end] = number + 1
        return number

    def send(self, source: int, to: int, tensor: torch.Tensor) -> None:
        with self._there:
            number = self._number(source, to, "sent")
            raw = self._alter(source, to, number, bytes(tensor.tolist()))
            self._sent[source, to, number] = raw
            self._there.notify_all()

    def receive(self, source: int, to: int, into: torch.Tensor) -> Callable[[], None]:
        with self._there:
            number = self._number(source, to, "received")

        def wait() -> None:
            with self._there:
                assert self._there.wait_for(lambda: (source, to, number) in self._sent, 30)
                raw = self._sent[source, to, number]
            into.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

        return wait


class _Work:
    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self, limit: timedelta) -> None:
        self._wait()


class _Place:
    def __init__(self, board: _Board, rank: int) -> None:
        self._board, self._rank = board, rank

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _Work:
        self._board.send(self._rank, to, tensors[0])
        return _Work(lambda: None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Work:
        return _Work(self._board.receive(source, self._rank, tensors[0]))


def proved(alter: Callable[[int, int, int, bytes], bytes], size: int = 3) -> list[str]:
    """What becomes of each rank's proof when messages are altered so."""
    board, store = _Board(size, alter), dist.HashStore()

    def run(rank: int) -> str:
        try:
            prove_peers(board.group(rank), store, rank, size, timedelta(seconds=30))
        except dist.DistNetworkError as error:
            return str(error).split(":")[0]
        return "good"

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("refused", ["recv", "send"])
def test_a_rank_that_has_left_before_another_begins_to_prove_is_told_as_one_that_is_lost(
    refused: str,
) -> None:
    """gloo refuses to receive from it or to send to it, and not only to wait for that."""

    class Left:
        def recv(self, *_: Any) -> _Work:
            return self._answer("recv")

        def send(self, *_: Any) -> _Work:
            return self._answer("send")

        def _answer(self, name: str) -> _Work:
            if name == refused:
                raise RuntimeError("Connection closed by peer")
            return _Work(lambda: None)

    with pytest.raises(dist.DistNetworkError, match="rank 1: whoever is connected"):
        prove_peers(Left(), dist.HashStore(), 0, 2, timedelta(seconds=1))


def test_every_pair_of_ranks_proves_itself_and_nobody_elses_proof_will_do() -> None:
    kept: dict[tuple[int, int], bytes] = {}

    def recorded(source: int, to: int, number: int, raw: bytes) -> bytes:
        kept.setdefault((source, number), raw)
        return raw

    assert proved(recorded) == ["good"] * 3
    flip = lambda source, to, n, raw: bytes([raw[0] ^ 1]) + raw[1:]  # noqa: E731
    for number in (0, 1):  # of a nonce, both ends notice; of a proof, the one that it was for
        for pair in ((0, 1), (1, 0), (2, 1), (0, 2)):
            found = proved(
                lambda s, to, n, raw, pair=pair, number=number: (
                    flip(s, to, n, raw) if ((s, to), n) == (pair, number) else raw
                )
            )
            source, to = pair
            expected = ["good"] * 3
            expected[to] = f"rank {source}"
            if number == 0:
                expected[source] = f"rank {to}"
            assert found == expected
    # The proof of an earlier meeting, played back in a rank's place:
    found = proved(lambda s, to, n, raw: kept[s, n] if (s, to) == (1, 0) else raw)
    assert found[0] == "rank 1"
