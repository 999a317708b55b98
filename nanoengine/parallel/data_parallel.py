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
Next: shards.py (what a rank owns of a bucket), zero.py (when buckets are whole).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from nanoengine.flat import collect_grad
from nanoengine.parallel.layout import REPLICA_AXES
from nanoengine.parallel.mesh import Handle, Mesh
from nanoengine.parallel.parameter_record import record_of
from nanoengine.parallel.shards import ShardedBucket


def replica_axes(parameter: Tensor) -> tuple[str, ...]:
    """The ranks that hold the same parameter: an expert's live on one ep rank only."""
    is_expert = record_of(parameter).is_expert
    return tuple(axis for axis in REPLICA_AXES if not (is_expert and axis == "ep"))


class GradientReducer:
    """Sends buckets on their way. `every_pass`: after each backward pass, not only the last."""

    def __init__(
        self,
        mesh: Mesh,
        buckets: Sequence[ShardedBucket],
        *,
        every_pass: bool,
        when_reduced: Callable[[ShardedBucket], None] | None = None,
    ) -> None:
        self._mesh, self._buckets, self._every_pass = mesh, list(buckets), every_pass
        self._when_reduced = when_reduced
        self._is_open = False
        self._next = 0
        self._missing = [0] * len(self._buckets)
        self._in_flight: list[tuple[ShardedBucket, Tensor | None, Handle]] = []
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

    def _note_reduced(self, bucket: ShardedBucket) -> None:
        if self._when_reduced is not None:
            self._when_reduced(bucket)

    def _sum_partials(self, bucket: ShardedBucket) -> None:
        """Tensor-parallel ranks hold terms of these gradients, not copies: add them up."""
        if not bucket.partials or self._mesh.size("tp") == 1:
            return
        views = [slot.view(bucket.grad) for slot in bucket.partials]
        flat = torch.cat([view.flatten() for view in views])
        self._mesh.all_reduce("tp", flat)
        for view, total in zip(views, flat.split([view.numel() for view in views]), strict=True):
            view.copy_(total.view_as(view))
