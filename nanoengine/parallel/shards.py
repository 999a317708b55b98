"""What a rank holds of a bucket (zero.py), and when its whole gradients and weights are in memory.

With ZeRO-2 the whole gradient of a layer exists from the moment backward reaches the layer until
it is reduced; with ZeRO-3 its whole weights exist while the layer runs. Hooks on the layers say
when. Freed tensors keep their views: only the storage behind them shrinks to nothing and returns.

Left out: prefetching more than one layer ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanoengine.parallel.data_parallel import Bucket
from nanoengine.parallel.mesh import Handle, Mesh


class BucketState:
    """A bucket's weights, masters and moments."""

    def __init__(
        self,
        bucket: Bucket,
        dtype: torch.dtype,
        own_master: Tensor | None,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        is_resident: bool,
    ) -> None:
        self.bucket = bucket
        self.is_resident = is_resident or bucket.num_shards == 1  # whole weights are always here
        self.exp_avg, self.exp_avg_sq = exp_avg, exp_avg_sq
        whole = torch.zeros_like(bucket.grad)
        for slot in bucket.slots:
            slot.view(whole).copy_(slot.param.data)
        self.weights = whole.to(dtype)  # the same memory where no rounding is needed
        self.master = bucket.mine(whole) if own_master is None else own_master
        self.master.copy_(bucket.mine(whole))
        self.shard = bucket.mine(self.weights)  # what the other ranks gather
        if not self.is_resident:
            self.shard = self.master if dtype == whole.dtype else self.shard.clone()
        for slot in bucket.slots:
            slot.param.data = slot.view(self.weights)

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

    def gather(self, mesh: Mesh) -> Handle:
        if self.bucket.num_shards == 1:
            return Handle()
        return mesh.all_gather(self.bucket.axes, self.weights, self.shard, is_async=True)


class Residency:
    """Which layers' whole gradients (ZeRO-2) and parameters (ZeRO-3) are in memory, by hooks on
    the layers: before and after their forward, and before their backward."""

    def __init__(self, mesh: Mesh, states: list[BucketState], models: Sequence[nn.Module]) -> None:
        self._mesh, self._states = mesh, states
        self._index = {id(state.bucket): i for i, state in enumerate(states)}
        self._arriving: dict[int, Handle] = {}
        self._in_backward: set[int] = set()
        for i, state in enumerate(states):
            if state.bucket.num_shards > 1:
                state.bucket.free_grad()
            for layer in state.bucket.layers:
                layer.register_forward_pre_hook(partial(self._before_forward, i))
                layer.register_forward_hook(partial(self._after_forward, i))
        for model in models:
            model.register_forward_pre_hook(self._before_model)
        self.release_all()

    def fetch_all(self) -> None:
        for i in range(len(self._states)):
            self._fetch(i)
        for i in range(len(self._states)):
            self._ensure(i)

    def release_all(self) -> None:
        self._in_backward.clear()
        for i in range(len(self._states)):
            self._ensure_landed(i)
            self._release(i)

    def after_backward(self, bucket: Bucket) -> None:
        i = self._index[id(bucket)]
        self._in_backward.discard(i)
        if bucket.layers:
            self._release(i)

    def _before_model(self, model: nn.Module, args: Any) -> None:
        for i, state in enumerate(self._states):
            if not state.bucket.layers:
                self._ensure(i)

    def _before_forward(self, i: int, layer: nn.Module, args: Any) -> None:
        self._ensure(i)
        if i not in self._in_backward:
            self._prefetch(i - 1)  # buckets are in the order of backward

    def _after_forward(self, i: int, layer: nn.Module, args: Any, output: Any) -> Any:
        if i in self._in_backward:  # this forward is a checkpointed layer's second
            return None
        is_first_of_backward = i == 0 or not self._states[i - 1].bucket.layers
        if not torch.is_grad_enabled():
            self._release(i)
            return None
        if not is_first_of_backward:
            self._release(i)
        return _Boundary.apply(partial(self._before_backward, i), *output)

    def _before_backward(self, i: int) -> None:
        self._in_backward.add(i)
        self._states[i].bucket.allocate_grad()
        self._ensure(i)
        self._prefetch(i + 1)

    def _prefetch(self, i: int) -> None:
        if 0 <= i < len(self._states) and self._states[i].bucket.layers:
            self._fetch(i)

    def _fetch(self, i: int) -> None:
        """Start gathering, unless the weights are here or on their way."""
        state = self._states[i]
        storage = state.weights.untyped_storage()
        if state.is_resident or storage.nbytes():
            return
        storage.resize_(state.weights.numel() * state.weights.element_size())
        self._arriving[i] = state.gather(self._mesh)

    def _ensure(self, i: int) -> None:
        self._fetch(i)
        self._ensure_landed(i)

    def _ensure_landed(self, i: int) -> None:
        handle = self._arriving.pop(i, None)
        if handle is not None:
            handle.wait()

    def _release(self, i: int) -> None:
        if not self._states[i].is_resident and i not in self._arriving:
            self._states[i].weights.untyped_storage().resize_(0)


class _Boundary(torch.autograd.Function):
    """Identity between two layers; its backward is the moment before the layer's."""

    @staticmethod
    def forward(ctx: Any, before: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.before = before
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.before()
        return (None, *grads)
