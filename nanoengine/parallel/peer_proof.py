"""Ranks of a new process group prove to each other, over its own connections, that they belong.

gloo lets in whoever connects first and names a rank's number, which another user of the machine may
do before the rank does: it would then be sent what the rank is sent, and be believed as the rank is
believed. So before anything else goes over a group, its first rank leaves a key in the store, which
only ranks can read, and all prove to each other that they have read it.

Left out: a stranger's power to be in the way. It takes a rank's place by being faster, and then
making the group fails; whoever made it makes another one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanoengine.parallel.meeting_wire import (
    NONCE_BYTES,
    PROOF_BYTES,
    SECRET_BYTES,
    is_proof,
    proof,
)

_KEY = "peer-proof"
_PATIENCE = timedelta(seconds=60)  # all have connected before the first of them proves anything
_TAG = 0


def prove_peers(group: Any, store: dist.Store, rank: int, size: int, limit: timedelta) -> None:
    """Called by all ranks at the same time, right after the group was made. DistNetworkError where
    a connection leads to somebody who does not know the store, or says nothing."""
    if rank == 0:
        store.set(_KEY, secrets.token_bytes(SECRET_BYTES))  # type: ignore[arg-type]
    key = store.get(_KEY)
    peers = [peer for peer in range(size) if peer != rank]
    nonce = secrets.token_bytes(NONCE_BYTES)
    exchange = _Exchange(group, peers, min(limit, _PATIENCE))
    nonces = exchange.run(dict.fromkeys(peers, nonce), NONCE_BYTES)
    mine = {peer: proof(key, b"%d to %d" % (rank, peer), nonce, nonces[peer]) for peer in peers}
    given = exchange.run(mine, PROOF_BYTES)
    for peer in peers:
        if not is_proof(given[peer], key, b"%d to %d" % (peer, rank), nonces[peer], nonce):
            raise _stranger(peer, "does not know")


class _Exchange:
    """Bytes to every other rank of a group, and as many from each."""

    def __init__(self, group: Any, peers: list[int], limit: timedelta) -> None:
        self._group, self._peers, self._limit = group, peers, limit

    def run(self, messages: dict[int, bytes], length: int) -> dict[int, bytes]:
        into = {peer: torch.empty(length, dtype=torch.uint8) for peer in self._peers}
        out = {peer: _tensor(messages[peer]) for peer in self._peers}
        received, sent = dict[int, Any](), dict[int, Any]()
        for peer in self._peers:
            with self._expecting(peer):
                received[peer] = self._group.recv([into[peer]], peer, _TAG)
        for peer in self._peers:
            with self._expecting(peer):
                sent[peer] = self._group.send([out[peer]], peer, _TAG)
        for peer in self._peers:
            with self._expecting(peer):
                sent[peer].wait(self._limit)
                received[peer].wait(self._limit)
        return {peer: tensor.numpy().tobytes() for peer, tensor in into.items()}

    @contextmanager
    def _expecting(self, peer: int) -> Iterator[None]:
        """One that has left by now is refused by `recv` and `send` themselves."""
        try:
            yield
        except RuntimeError as error:
            raise _stranger(peer, f"did not prove in {self._limit}") from error


def _tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _stranger(peer: int, what: str) -> Exception:
    return dist.DistNetworkError(
        f"rank {peer}: whoever is connected in its place {what} the key of this group; it died or "
        f"hangs, or another program took its place before it came: make the group anew"
    )
