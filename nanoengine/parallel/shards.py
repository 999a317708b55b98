"""Buckets of which every process owns a share, and what each process owns of a parameter.

Rank r owns the r-th share of each flat bucket, whatever parameters begin or end in it. What it owns
of the masters is a buffer of its own, or the weights themselves where they are as wide, or the
weights and their remainders (kernels/torch/split_master.py).

Next: data_parallel.py (sums of their gradients), zero.py (when they are whole).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kernels.torch.split_master import join_master, split_master_
from nanoengine.flat import ALIGNMENT, Bucket, BucketState, Named, Slot, empty_remainder
from nanoengine.parallel.mesh import Handle, Mesh
from nanoengine.parallel.parameter_record import record_of


@dataclass(frozen=True)
class ShardEntry:
    """The elements `lo:hi` of a flattened parameter, and where they lie in the rank's shard."""

    slot: Slot
    lo: int
    hi: int
    begin: int

    def of(self, shard: Tensor) -> Tensor:
        return shard[self.begin : self.begin + self.hi - self.lo]


def entries_of(bucket: Bucket) -> Iterator[ShardEntry]:
    """Yield what this rank's share of a bucket holds of each parameter."""
    for slot in bucket.slots:
        lo = max(slot.offset, bucket.begin)
        hi = min(slot.offset + slot.param.numel(), bucket.begin + bucket.share)
        if lo < hi:
            yield ShardEntry(slot, lo - slot.offset, hi - slot.offset, lo - bucket.begin)


def entries(
    states: Sequence[BucketState], kind: Literal["master", "exp_avg", "exp_avg_sq", "grad"]
) -> Iterator[tuple[ShardEntry, Tensor]]:
    """Yield as `AdamW.entries` does."""
    for state in states:
        if kind == "master":
            yield from _masters(state)
            continue
        shard = state.bucket.grad_shard if kind == "grad" else getattr(state, kind)
        for entry in entries_of(state.bucket):
            yield entry, entry.of(shard)


def _masters(state: BucketState) -> Iterator[tuple[ShardEntry, Tensor]]:
    """Yield the part that this rank owns of each parameter, in full width. Values written to it
    before the next one is asked for stay."""
    for entry in entries_of(state.bucket):
        if state.remainder is None:
            yield entry, entry.of(state.master)
            continue
        halves = entry.of(state.shard), entry.of(state.remainder)
        whole = join_master(*halves)
        yield entry, whole
        split_master_(*halves, whole)


class ShardedBucket(Bucket):
    """Parameters with one flat gradient, of which this rank owns one of `num_shards` shares."""

    def __init__(
        self,
        named: Named,
        layers: Sequence[nn.Module],
        mesh: Mesh,
        axes: tuple[str, ...],
        *,
        is_sharded: bool,
        wide: torch.dtype,
    ) -> None:
        self.layers, self.axes = list(layers), axes
        self.num_shards = mesh.size(axes) if is_sharded else 1
        super().__init__(named, wide, multiple=self.num_shards * ALIGNMENT)
        self.share //= self.num_shards
        self.begin = mesh.rank(axes) * self.share if is_sharded else 0
        self.num_decayed = min(max(self.num_decayed - self.begin, 0), self.share)
        if self.num_shards > 1:
            self.grad_shard = self.grad.new_zeros(self.share)
        self.partials = [slot for slot in self.slots if record_of(slot.param).is_partial]
        self.is_deferred = any(record_of(slot.param).is_deferred for slot in self.slots)

    def mine(self, flat: Tensor) -> Tensor:
        """This rank's share of a flat buffer laid out as the bucket."""
        return flat[self.begin : self.begin + self.share]

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


class ShardedState(BucketState):
    """The whole weights of a bucket, and this rank's share of their masters and moments."""

    bucket: ShardedBucket

    def __init__(self, bucket: ShardedBucket, dtype: torch.dtype, *, is_resident: bool) -> None:
        """With `is_resident` the whole weights are always here."""
        self.is_resident = is_resident or bucket.num_shards == 1
        if bucket.num_shards == 1:
            super().__init__(bucket, dtype)
        else:
            self._deal(bucket, dtype)

    def _deal(self, bucket: ShardedBucket, dtype: torch.dtype) -> None:
        """Keep this rank's share of what the parameters hold."""
        self.bucket, self.remainder = bucket, empty_remainder(bucket, dtype)
        is_split = self.remainder is not None
        whole = torch.zeros_like(bucket.grad, dtype=dtype if is_split else None)
        owned = {id(entry.slot): entry for entry in entries_of(bucket)}
        for slot in bucket.slots:
            given = slot.param.data
            slot.view(whole).copy_(given)
            if self.remainder is not None and id(slot) in owned:
                entry = owned[id(slot)]
                part = given.flatten()[entry.lo : entry.hi].float()
                split_master_(entry.of(bucket.mine(whole)), entry.of(self.remainder), part)
            # Its memory is free for the next buffers; the shape stays until the weights are there.
            slot.param.data = given.new_empty(()).expand(given.shape)
            del given
        self.weights = whole.to(dtype)  # the same memory where no rounding is needed
        self.shard = bucket.mine(self.weights)  # what the other ranks gather
        if is_split:
            self.master = self.shard = self.shard if self.is_resident else self.shard.clone()
        elif self.is_resident and dtype == whole.dtype:
            self.master = self.shard
        else:
            self.master = bucket.mine(whole).clone()
            if not self.is_resident:
                self.shard = self.master if dtype == whole.dtype else self.shard.clone()
        for slot in bucket.slots:
            slot.param.data = slot.view(self.weights)

    @torch.no_grad()
    def read(self) -> None:
        mine = self.bucket.mine(self.weights)
        for target in (self.master, self.shard):
            if target.data_ptr() != mine.data_ptr():
                target.copy_(mine)
        if self.remainder is not None:
            self.remainder.zero_()

    def gather(self, mesh: Mesh) -> Handle:
        """Start giving every rank the whole weights."""
        if self.bucket.num_shards == 1:
            return Handle()
        return mesh.all_gather(self.bucket.axes, self.weights, self.shard, is_async=True)
