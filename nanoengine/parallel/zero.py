"""ZeRO: how parameters are dealt into buckets, and when whole gradients and weights are in memory.

Rank r owns the r-th share of each flat bucket of shards.py, whatever parameters begin or end in it
(the table in sharded_adamw.py says of what). Masters are fp32 (fp64 for fp64 models). Where the
model computes in the masters' dtype, a whole parameter's share *is* the master; else the weights
are rounded from it.

With ZeRO-2 the whole gradient of a layer exists from the moment backward reaches the layer until
it is reduced. ZeRO-3 keeps a bucket a layer: its weights are gathered when the layer is about to
run, forward and backward, while the layer before it still computes, and freed after. The
embedding, the last norm, the head and a vision tower stay for the whole pass. Hooks on the layers
say when. Freed tensors keep their views: only the storage behind them shrinks to nothing and
returns, so between passes a parameter has a shape and no memory, and reading one outside `gathered`
is an error that torch does not catch.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054. Left out: offloading to NVMe, hierarchical shards (HSDP), prefetching more than
one layer ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanoengine.flat import Named, trainable
from nanoengine.parallel.data_parallel import replica_axes
from nanoengine.parallel.layout import REPLICA_AXES, Layout
from nanoengine.parallel.mesh import Handle, Mesh
from nanoengine.parallel.parameter_record import record_of
from nanoengine.parallel.shards import ShardedBucket, ShardedState


def check_zero(zero: int, layout: Layout) -> None:
    """`ValueError` for a stage that does not exist, or not over a pipeline."""
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero}: must be 0, 1, 2 or 3")
    if zero == 3 and layout.pp > 1:
        raise ValueError(
            "zero=3 with pp > 1: every micro-batch in flight would gather each layer again; "
            "use zero=2, or more dp and no pp"
        )


def cut_into_buckets(
    models: Sequence[nn.Module], mesh: Mesh, zero: int, bucket_bytes: int, wide: torch.dtype
) -> Iterator[tuple[list[nn.Module], Named, tuple[str, ...]]]:
    """(layers, parameters, axes they are shared over) of each bucket, in the order in which they
    are sent; with ZeRO-3 each layer is one. A process alone sends nothing: one bucket."""
    if mesh.size() == 1:
        yield [], [(name, parameter) for _, name, parameter in trainable(models)], REPLICA_AXES
    else:
        yield from _merge(_units(models), 0 if zero == 3 else bucket_bytes, wide)


def _units(models: Sequence[nn.Module]) -> list[tuple[list[nn.Module], Named]]:
    """(layers, parameters) in the order in which backward finishes them: norm and head, layers
    from the last, embedding, and what must wait for the very end."""
    layers: dict[int, tuple[list[nn.Module], Named]] = {}
    head: Named = []
    embedding: Named = []
    deferred: Named = []
    for model, name, parameter in trainable(models):
        if record_of(parameter).is_deferred:
            deferred.append((name, parameter))
        elif name.startswith("layers."):
            number = int(name.split(".")[1])
            module = model.get_submodule(f"layers.{number}")
            layers.setdefault(number, ([module], []))[1].append((name, parameter))
        else:
            (embedding if name == "embedding" else head).append((name, parameter))
    ordered = [layers[number] for number in sorted(layers, reverse=True)]
    units = [([], head), *ordered, ([], embedding), ([], deferred)]
    return [(modules, named) for modules, named in units if named]


def _merge(
    units: list[tuple[list[nn.Module], Named]], limit: int, wide: torch.dtype
) -> Iterator[tuple[list[nn.Module], Named, tuple[str, ...]]]:
    """Neighbouring units of one kind in buckets of about `limit` bytes."""
    taken: list[tuple[list[nn.Module], Named, tuple[str, ...]]] = []
    for modules, named in units:
        for axes in dict.fromkeys(replica_axes(parameter) for _, parameter in named):
            own = [(name, p) for name, p in named if replica_axes(p) == axes]
            if taken and _fits(taken[-1], own, modules, axes, limit, wide):
                taken[-1][0].extend(modules)
                taken[-1][1].extend(own)
            else:
                taken.append((list(modules), own, axes))
    yield from taken


def _fits(
    bucket: tuple[list[nn.Module], Named, tuple[str, ...]],
    named: Named,
    modules: list[nn.Module],
    axes: tuple[str, ...],
    limit: int,
    wide: torch.dtype,
) -> bool:
    is_alike = (
        bucket[2] == axes
        and bool(bucket[0]) == bool(modules)
        and record_of(bucket[1][0][1]).is_deferred == record_of(named[0][1]).is_deferred
    )
    size = sum(parameter.numel() for _, parameter in (*bucket[1], *named))
    return is_alike and size * wide.itemsize <= limit


class Residency:
    """Keeps whole gradients (ZeRO-2) and parameters (ZeRO-3) in memory while needed, by hooks on
    the layers: before and after their forward, and before their backward."""

    def __init__(self, mesh: Mesh, states: list[ShardedState], models: Sequence[nn.Module]) -> None:
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

    def after_backward(self, bucket: ShardedBucket) -> None:
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
