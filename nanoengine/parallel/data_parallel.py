"""Data parallelism: gradients of all replicas added up, in buckets, while backward still runs.

    backward:   head, layer 3 | layer 2, layer 1 | layer 0, embedding        (time →)
    bucket 0:                 |----- reduce -----|
    bucket 1:                                    |----- reduce -----| ...

A bucket is a run of parameters whose gradients are neighbours in one flat fp32 buffer. A hook on
each parameter notes that its gradient is complete; the bucket leaves when all of them are, and
always in the same order, so that ranks whose backward differs (or who have none, because no token
of theirs is trained on) still meet in the same collective. Sums, never means: the loss was divided
by the weight of the whole batch already.

Without ZeRO, and with ZeRO-1, gradients of the micro-batches of a step add up locally and travel
in the last backward pass. ZeRO-2 and 3 scatter them after every pass and free the whole ones.

Left out: compressed gradients; parameters that get no gradient in a pass wait until it ends.
Next: zero.py, which cuts the buckets into shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kernels.torch.split_master import join_master, split_master_
from nanoengine.model.linear import record_of
from nanoengine.parallel.layout import REPLICA_AXES
from nanoengine.parallel.mesh import Handle, Mesh

ALIGNMENT = 64  # elements; every parameter starts on a cache line in fp32 and in bf16


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the flat buffers."""

    name: str
    param: nn.Parameter
    offset: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.param.numel()].view(self.param.shape)


def lay_out(named: list[tuple[str, nn.Parameter]]) -> tuple[list[Slot], int, int]:
    """Decayed parameters first: matrices, not the biases of experts, which are stacked. Returns
    (slots, end of the decayed part, total size)."""
    slots: list[Slot] = []
    offset, decay_end = 0, 0
    for decayed in (True, False):
        for name, param in named:
            if (param.ndim >= 2 and not name.endswith(".bias")) is decayed:
                slots.append(Slot(name, param, offset))
                offset += -(-param.numel() // ALIGNMENT) * ALIGNMENT
        if decayed:
            decay_end = offset
    return slots, decay_end, offset


def collect_grad(param: nn.Parameter) -> None:
    """Move autograd's gradient into `main_grad`, in the order autograd produces them."""
    if param.grad is not None:
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None


@dataclass(frozen=True)
class ShardEntry:
    """The elements `lo:hi` of a flattened parameter, and where they lie in the rank's shard."""

    slot: Slot
    lo: int
    hi: int
    begin: int

    def of(self, shard: Tensor) -> Tensor:
        return shard[self.begin : self.begin + self.hi - self.lo]


class Bucket:
    """Parameters with one flat gradient, of which this rank owns one of `num_shards` shares."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        layers: Sequence[nn.Module],
        mesh: Mesh,
        axes: tuple[str, ...],
        *,
        is_sharded: bool,
        wide: torch.dtype,
    ) -> None:
        self.layers, self.axes = list(layers), axes
        self.slots, self.decay_end, size = lay_out(list(named))
        self.num_shards = mesh.size(axes) if is_sharded else 1
        unit = self.num_shards * ALIGNMENT
        self.share = -(-size // unit) * ALIGNMENT
        self.begin = mesh.rank(axes) * self.share if is_sharded else 0
        device = self.slots[0].param.device
        self.grad = torch.zeros(self.share * self.num_shards, dtype=wide, device=device)
        self.grad_shard = self.grad if self.num_shards == 1 else self.grad.new_zeros(self.share)
        for slot in self.slots:
            slot.param.main_grad = slot.view(self.grad)  # type: ignore[attr-defined]
        self.partials = [slot for slot in self.slots if record_of(slot.param).is_partial]
        self.is_deferred = any(record_of(slot.param).is_deferred for slot in self.slots)

    def mine(self, flat: Tensor) -> Tensor:
        """This rank's share of a flat buffer laid out as the bucket."""
        return flat[self.begin : self.begin + self.share]

    def entries(self) -> Iterator[ShardEntry]:
        """Yield what this rank's share holds of each parameter."""
        for slot in self.slots:
            lo = max(slot.offset, self.begin)
            hi = min(slot.offset + slot.param.numel(), self.begin + self.share)
            if lo < hi:
                yield ShardEntry(slot, lo - slot.offset, hi - slot.offset, lo - self.begin)

    def zero_grad(self) -> None:
        self.grad_shard.zero_()
        if self.num_shards > 1 and self.grad.untyped_storage().nbytes():
            self.grad.zero_()

    def allocate_grad(self) -> None:
        """Bring back a freed gradient, as zeros."""
        storage = self.grad.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.grad.numel() * self.grad.element_size())
            self.grad.zero_()

    def free_grad(self) -> None:
        self.grad.untyped_storage().resize_(0)


class BucketState:
    """A bucket's weights, masters and moments. What this rank owns of the masters is a buffer of
    its own, or the weights themselves where they are as wide, or the weights and their remainders
    (kernels/torch/split_master.py). Whoever makes one gives it its moments."""

    exp_avg: Tensor
    exp_avg_sq: Tensor

    def __init__(
        self,
        bucket: Bucket,
        dtype: torch.dtype,
        own_master: Tensor | None,
        *,
        remainder: Tensor | None = None,
        is_resident: bool,
    ) -> None:
        self.bucket = bucket
        self.is_resident = is_resident or bucket.num_shards == 1  # whole weights are always here
        self.remainder = remainder
        if own_master is not None and bucket.num_shards == 1:
            whole = own_master  # the master is the whole: no second copy is made on the way
        else:
            whole = torch.zeros_like(bucket.grad, dtype=dtype if remainder is not None else None)
        owned = {id(entry.slot): entry for entry in bucket.entries()}
        for slot in bucket.slots:
            given = slot.param.data
            slot.view(whole).copy_(given)
            if remainder is not None and id(slot) in owned:
                entry = owned[id(slot)]
                part = given.flatten()[entry.lo : entry.hi].float()
                split_master_(entry.of(bucket.mine(whole)), entry.of(remainder), part)
            # Its memory is free for the next buffers; the shape stays until the weights are there.
            slot.param.data = given.new_empty(()).expand(given.shape)
            del given
        self.weights = whole.to(dtype)  # the same memory where no rounding is needed
        self.shard = bucket.mine(self.weights)  # what the other ranks gather
        if remainder is not None:
            self.master = self.shard = self.shard if self.is_resident else self.shard.clone()
        else:
            self.master = bucket.mine(whole) if own_master is None else own_master
            if self.master is not whole:
                self.master.copy_(bucket.mine(whole))
            if not self.is_resident:
                self.shard = self.master if dtype == whole.dtype else self.shard.clone()
        for slot in bucket.slots:
            slot.param.data = slot.view(self.weights)

    def masters(self) -> Iterator[tuple[ShardEntry, Tensor]]:
        """Yield what this rank owns of each parameter in full width; what is written to it before
        the next one is asked for stays."""
        for entry in self.bucket.entries():
            if self.remainder is None:
                yield entry, entry.of(self.master)
                continue
            halves = entry.of(self.shard), entry.of(self.remainder)
            whole = join_master(*halves)
            yield entry, whole
            split_master_(*halves, whole)

    @torch.no_grad()
    def round(self) -> None:
        if self.shard.data_ptr() != self.master.data_ptr():
            self.shard.copy_(self.master)

    @torch.no_grad()
    def read(self) -> None:
        mine = self.bucket.mine(self.weights)
        for target in (self.master, self.shard):
            if target.data_ptr() != mine.data_ptr():
                target.copy_(mine)
        if self.remainder is not None:
            self.remainder.zero_()

    def gather(self, mesh: Mesh) -> Handle:
        if self.bucket.num_shards == 1:
            return Handle()
        return mesh.all_gather(self.bucket.axes, self.weights, self.shard, is_async=True)


def replica_axes(parameter: Tensor) -> tuple[str, ...]:
    """The ranks that hold the same parameter: an expert's live on one ep rank only."""
    is_expert = record_of(parameter).is_expert
    return tuple(axis for axis in REPLICA_AXES if not (is_expert and axis == "ep"))


class GradientReducer:
    """Sends buckets on their way. `every_pass`: after each backward pass, not only the last."""

    def __init__(
        self,
        mesh: Mesh,
        buckets: Sequence[Bucket],
        *,
        every_pass: bool,
        when_reduced: Callable[[Bucket], None] | None = None,
    ) -> None:
        self._mesh, self._buckets, self._every_pass = mesh, list(buckets), every_pass
        self._when_reduced = when_reduced
        self._is_open = False
        self._next = 0
        self._missing = [0] * len(self._buckets)
        self._in_flight: list[tuple[Bucket, Tensor | None, Handle]] = []
        self.num_early = 0  # buckets that left before backward had ended, since the last finish
        for index, bucket in enumerate(self._buckets):
            for slot in bucket.slots:
                hook = partial(self._on_gradient, index)
                slot.param.register_post_accumulate_grad_hook(hook)

    def start_pass(self, *, is_last: bool, is_pipeline: bool = False) -> None:
        """Call it before each backward pass. Buckets leave in the last one, or in every one; the
        passes of a pipeline overlap and count as one, whose buckets leave at its end."""
        self._is_open = (is_last or self._every_pass) and not is_pipeline
        self._next = 0
        self._missing = [len(bucket.slots) for bucket in self._buckets]
        if self._every_pass:
            for bucket in self._buckets:
                if not bucket.layers:  # those of layers come when backward reaches the layer
                    bucket.allocate_grad()

    def end_pass(self) -> None:
        """Call it after each backward pass."""
        self._is_open = False
        if self._every_pass:
            self._flush()

    def finish(self) -> None:
        """Call it after the last pass, or without any: all gradients are reduced afterwards."""
        if not self._every_pass:
            self._flush()
        self._next = 0

    def _flush(self) -> None:
        self.num_early = self._next
        while self._next < len(self._buckets):
            self._launch()
        self._settle(keep=0)

    def _on_gradient(self, index: int, parameter: nn.Parameter) -> None:
        collect_grad(parameter)
        self._missing[index] -= 1
        if not self._is_open:
            return
        while self._next < len(self._buckets) and self._missing[self._next] <= 0:
            if self._buckets[self._next].is_deferred:
                return
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        bucket.allocate_grad()
        self._sum_partials(bucket)
        if self._mesh.size(bucket.axes) == 1:
            self._note_reduced(bucket)
            return
        part: Tensor | None = None
        if bucket.num_shards == 1:
            handle = self._mesh.all_reduce(bucket.axes, bucket.grad, is_async=True)
        else:
            part = torch.empty_like(bucket.grad_shard) if self._every_pass else bucket.grad_shard
            handle = self._mesh.reduce_scatter(bucket.axes, part, bucket.grad, is_async=True)
        self._in_flight.append((bucket, part, handle))
        if self._every_pass:
            self._settle(keep=1)  # two whole gradients at a time, no more

    def _settle(self, keep: int) -> None:
        while len(self._in_flight) > keep:
            bucket, part, handle = self._in_flight.pop(0)
            handle.wait()
            if self._every_pass and part is not None:
                bucket.grad_shard.add_(part)
                bucket.free_grad()
            self._note_reduced(bucket)

    def _note_reduced(self, bucket: Bucket) -> None:
        if self._when_reduced is not None:
            self._when_reduced(bucket)

    def _sum_partials(self, bucket: Bucket) -> None:
        """Tensor-parallel ranks hold terms of these gradients, not copies: add them up."""
        if not bucket.partials or self._mesh.size("tp") == 1:
            return
        views = [slot.view(bucket.grad) for slot in bucket.partials]
        flat = torch.cat([view.flatten() for view in views])
        self._mesh.all_reduce("tp", flat)
        for view, total in zip(views, flat.split([view.numel() for view in views]), strict=True):
            view.copy_(total.view_as(view))
