"""Weights through GPU memory that processes on one GPU, or on GPUs that see each other, share.

Rank 0 of the learner owns one buffer with room for the whole model, kept for every version. Its
handle comes with each offer, a replica opens it once and reads in place. The ledger, in a page of
shared memory, is shm's. The sender waits for its stream before it offers; a replica answers only
when its own copies are done, so `load` has to wait for the device before it returns.

Actors see different devices under the same number: the buffer is looked for by its GPU's UUID.

Left out: one bucket in turns, which would save memory and cost the all-or-nothing of a replica
without a second copy; PyTorch's expandable segments, whose memory has no handle. It has not yet run
on a GPU: the tests replace the two calls that share memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from kernels.transport.checksum import copy_with_checksums
from nanoengine.plan.footprint import weight_bytes
from nanoengine.state.tensor_file import dtype_name
from nanoengine.state.whole_engine import Engine
from nanorl.distributed.weights.offer import Named, Offer, WeightEntry, WeightsRefused, verified
from nanorl.distributed.weights.shm import PADDING_BYTES, aligned, tensor_at
from nanorl.distributed.weights.version_ledger import ReaderLedger
from nanosched.shared_buffer import SharedBuffer

_DEVICE = 6  # the place of the storage's device among the arguments of `rebuild_cuda_tensor`


@dataclass(frozen=True)
class GpuHandle:
    """The function and arguments with which another process opens a tensor, and the GPU that it
    lies on."""

    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    gpu: str

    @classmethod
    def of(cls, tensor: Tensor) -> GpuHandle:
        rebuild, arguments = reduce_tensor(tensor)
        return cls(rebuild, arguments, _uuid(tensor.device))

    def open(self) -> Tensor:
        """The tensor; WeightsRefused where this process does not see its GPU."""
        for index in range(torch.cuda.device_count()):
            if _uuid(torch.device("cuda", index)) == self.gpu:
                arguments = list(self.arguments)
                arguments[_DEVICE] = index
                return self.rebuild(*arguments)
        raise WeightsRefused(
            f"the weights lie on GPU {self.gpu}, which this process does not see; use shm or dist"
        )


@dataclass(frozen=True, kw_only=True)
class CudaIpcOffer(Offer):
    """Rank 0's buffer; the other ranks' offers have none."""

    handle: GpuHandle | None


class CudaIpcSender:
    """One learner rank's end. All put whole tensors together, rank 0 keeps them."""

    def __init__(self, key: str, page: SharedBuffer) -> None:
        self.key = key
        self._page = page
        self._memory: Tensor | None = None
        self._handle: GpuHandle | None = None

    def send(self, engine: Engine, version: int) -> CudaIpcOffer:
        """See `WeightSender`; ReadersBusy."""
        is_owner = engine.mesh.rank() == 0
        ledger = ReaderLedger(self._page.view())
        ledger.begin_writing()
        entries: list[WeightEntry] = []
        at = 0
        for name, tensor in engine.export_state():  # collective: every rank runs through it
            if not is_owner:
                continue
            entry = WeightEntry(name, tuple(tensor.shape), dtype_name(tensor.dtype), begin=at)
            target = tensor_at(self._room(engine), entry)
            entries.append(entry.sealed(copy_with_checksums([target], [tensor])[0]))
            at += aligned(entry.num_bytes)
        if engine.model.device.type == "cuda":
            torch.cuda.current_stream(engine.model.device).synchronize()
        if is_owner:
            ledger.finish_writing(version)
        return CudaIpcOffer(version=version, entries=tuple(entries), handle=self._handle)

    def _room(self, engine: Engine) -> Tensor:
        if self._memory is None:
            size = weight_bytes(engine.model.config, engine.model.dtype) + PADDING_BYTES
            self._memory = torch.empty(size, dtype=torch.uint8, device=engine.model.device)
            self._handle = GpuHandle.of(self._memory)
        return self._memory


class CudaIpcReceiver:
    """One replica's end."""

    refuses_nan = True

    def __init__(self, key: str, page: SharedBuffer) -> None:
        self.key = key
        self._page = page
        self._opened: tuple[GpuHandle, Tensor] | None = None

    def receive(self, offer: Offer) -> Named:
        assert isinstance(offer, CudaIpcOffer), "senders and receivers come from one transport"
        if offer.handle is None:
            raise WeightsRefused(f"version {offer.version}: this is not the offer of rank 0")
        if self._opened is None or self._opened[0] != offer.handle:
            self._opened = (offer.handle, offer.handle.open())
        ledger = ReaderLedger(self._page.view())
        ledger.require(offer.version)
        memory = self._opened[1]
        yield from verified([(entry, tensor_at(memory, entry)) for entry in offer.entries])
        ledger.require(offer.version)


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
