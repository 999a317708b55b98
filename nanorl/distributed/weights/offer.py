"""What a publisher hands to a replica: an offer, and the checks that stand before its acceptance.

An offer names a policy version and lists its tensors by their Hugging Face names, with shapes,
dtypes and checksums (transport/checksum.py). How the bytes are reached is the transport's own; the
offers of shm.py, cuda_ipc.py, dist.py and disk.py add what it takes.

`receive` hands out tensors that are verified. Whoever loads takes all of them before it writes the
first, as nanoengine's `load_state` does: so a bad last tensor leaves the old version as it was.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kernels.transport.checksum import checksums_and_finite
from nanoengine.engine import Engine
from nanoengine.tensor_file import dtype_name

Named = Iterator[tuple[str, Tensor]]
"""Whole tensors under their Hugging Face names, to be read and not to be written to."""


class WeightsRefused(RuntimeError):  # noqa: N818 (the name of the event)
    """A version was not taken over; the replica goes on serving the one it has."""


class BaseVersionMissing(WeightsRefused):
    """The changes since a version came to somebody who does not have that version; the transport
    answers with all tensors."""


class ReadersBusy(WeightsRefused):
    """Somebody may still be reading the last version from the memory that the next one needs."""


@dataclass(frozen=True)
class WeightEntry:
    """One tensor of an offer; `begin` is its first byte where the tensors lie in one memory. `seal`
    is made of the tensor's checksum, name, shape and dtype, so that its bytes cannot be taken for
    those of another kind."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    seal: int = 0
    begin: int = 0

    def sealed(self, checksum: int) -> WeightEntry:
        """The entry of a tensor with this checksum."""
        label = zlib.crc32(repr((self.name, self.shape, self.dtype)).encode())
        return replace(self, seal=checksum ^ label)

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise WeightsRefused(f"{self.name}: {self.dtype!r} is no dtype; nothing was loaded")
        return found

    def verify(self, tensor: Tensor) -> Tensor:
        """The tensor, if it is what the offer says and finite; else WeightsRefused."""
        return next(verified([(self, tensor)]))[1]

    def require_kind(self, tensor: Tensor) -> None:
        """WeightsRefused unless shape and dtype are as offered."""
        found, kind = tuple(tensor.shape), dtype_name(tensor.dtype)
        if (found, kind) != (self.shape, self.dtype):
            raise WeightsRefused(
                f"{self.name} is {kind} {found}, was offered as {self.dtype} {self.shape}; "
                "nothing was loaded"
            )

    def require_values(self, checksum: int, is_finite: bool) -> None:
        """WeightsRefused unless these are the sender's bytes, and finite numbers."""
        if self.sealed(checksum).seal != self.seal:
            raise WeightsRefused(
                f"{self.name}: its checksum is not the sender's: the bytes were damaged or "
                "overwritten on the way; nothing was loaded"
            )
        if not is_finite:
            raise WeightsRefused(f"{self.name} holds NaN or infinity; nothing was loaded")


def verified(pairs: Sequence[tuple[WeightEntry, Tensor]]) -> Named:
    """The tensors under their names, if all of them are what the offer says and finite; else
    WeightsRefused. All are read before the first is handed out: in one pass, not one each."""
    for entry, tensor in pairs:
        entry.require_kind(tensor)
    found = checksums_and_finite([tensor for _, tensor in pairs])
    for (entry, tensor), (checksum, is_finite) in zip(pairs, found, strict=True):
        entry.require_values(checksum, is_finite)
        yield entry.name, tensor


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Policy `version`, ready to be loaded. With `base_version` only what has changed since that
    version travels."""

    version: int
    entries: tuple[WeightEntry, ...] = ()
    base_version: int | None = None


class WeightSender(Protocol):
    """One policy rank's end. It keeps plans and buffers from call to call, so a role that is sent
    one in each call holds on to the first of each `key`."""

    key: str

    def send(self, engine: Engine, version: int) -> Offer:
        """All ranks of the engine's mesh call it together, between two optimizer steps; all get
        the same offer. Raises WeightsRefused or SchedulerError, and then nothing new is offered."""
        ...


class WeightReceiver(Protocol):
    """One replica's end. It keeps what it has opened, see WeightSender; a role that is sent one in
    each call holds on to the first of each `key`."""

    key: str
    refuses_nan: bool
    """True if `receive` looks for NaN and infinity itself, so that nobody has to do it again."""

    def receive(self, offer: Offer) -> Named:
        """The tensors of the offer, verified. The iterator raises WeightsRefused for the first that
        is not right. They must not be written to, and are good until the load has been answered."""
        ...
