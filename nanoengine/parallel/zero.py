"""AdamW whose masters, moments, gradients and parameters are cut over the data-parallel ranks.

    ZeRO   parameters   gradients   masters + moments     a step moves, per parameter
    0      whole        whole       whole                 all-reduce of the gradient
    1      whole        whole       1/n                   reduce-scatter it, all-gather the weights
    2      whole        1/n         1/n                   the same; the scatter for each micro-batch
    3      1/n          1/n         1/n                   and all-gather twice for each micro-batch

The unit is the bucket of data_parallel.py: rank r owns the r-th share of each flat bucket, whatever
parameters begin or end in it. Masters are fp32 (fp64 for fp64 models). Where the model computes in
the masters' dtype, a whole parameter's share *is* the master; else the weights are rounded from it.

ZeRO-3 keeps a bucket a layer. Its weights are gathered when the layer is about to run, forward and
backward, while the layer before it still computes, and freed after. The embedding, the last norm
and the head stay for the whole pass. Between passes a parameter has a shape and no memory: reading
one outside `gathered` is an error that torch does not catch.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
arXiv 1910.02054. Left out: offloading to NVMe, hierarchical shards (HSDP).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from nanoengine.optim import (
    AdamWConfig,
    Offloadable,
    Parked,
    clip,
    lr_at,
    sum_of_squares,
    update,
)
from nanoengine.parallel.data_parallel import (
    Bucket,
    GradientReducer,
    Piece,
    is_deferred,
    replica_axes,
)
from nanoengine.parallel.mesh import REPLICA_AXES, WORLD, Handle, Mesh

Named = list[tuple[str, nn.Parameter]]
Kind = Literal["master", "exp_avg", "exp_avg_sq", "grad"]


class ShardedAdamW(Offloadable):
    """The interface of `optim.AdamW` over a mesh. `models` are this rank's parts of the model:
    one, or its pipeline stages."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        config: AdamWConfig,
        mesh: Mesh,
        *,
        zero: int = 0,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 25_000_000,
    ) -> None:
        if zero not in (0, 1, 2, 3):
            raise ValueError(f"zero={zero}: must be 0, 1, 2 or 3")
        if zero == 3 and mesh.size("pp") > 1:
            raise ValueError(
                "zero=3 with pp > 1: every micro-batch in flight would gather each layer again; "
                "use zero=2, or more dp and no pp"
            )
        self.config, self.mesh = config, mesh
        self.zero = zero if mesh.size(REPLICA_AXES) > 1 else 0  # one replica shares with nobody
        self.step_count = 0
        self.phase_start = 0  # the step count at which the schedule began
        units = _units(models)
        first = units[0][1][0][1]
        dtype = first.dtype if dtype is None else dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.has_working_copy = dtype != wide
        limit = 0 if self.zero == 3 else bucket_bytes
        self.buckets = [
            Bucket(named, layers, mesh, axes, is_sharded=self.zero > 0, wide=wide)
            for layers, named, axes in _merge(units, limit, wide)
        ]
        size = sum(bucket.share for bucket in self.buckets)
        device = first.device
        self.exp_avg, self.exp_avg_sq = (torch.zeros(size, dtype=wide, device=device) for _ in "mv")
        keeps_masters = self.has_working_copy or self.zero == 3
        own = torch.zeros(size, dtype=wide, device=device) if keeps_masters else None
        self._own_masters = own
        self._states: list[BucketState] = []
        begin = 0
        for bucket in self.buckets:
            part = slice(begin, begin + bucket.share)
            begin += bucket.share
            moments = self.exp_avg[part], self.exp_avg_sq[part]
            own_part = None if own is None else own[part]
            self._states.append(
                BucketState(bucket, dtype, own_part, *moments, is_resident=self.zero < 3)
            )
        self.residency = Residency(mesh, self._states, models) if self.zero >= 2 else None
        self.reducer = GradientReducer(
            mesh,
            self.buckets,
            every_pass=self.zero >= 2,
            when_reduced=self.residency.after_backward if self.residency is not None else None,
        )

    @property
    def needs_equal_passes(self) -> bool:
        """Whether all data-parallel ranks must run the same number of forward passes."""
        meets_in_passes = self.zero >= 2 or self.mesh.size("ep") > 1
        return meets_in_passes and self.mesh.size(("dp", "ep")) > 1

    # -- one step ----------------------------------------------------------------------------

    def restart(self, config: AdamWConfig) -> None:
        """Another phase of training, as `AdamW.restart`: second moments stay."""
        self._require_loaded()
        self.config = config
        self.phase_start = self.step_count
        self.exp_avg.zero_()

    def zero_grad(self) -> None:
        self._require_loaded()
        for bucket in self.buckets:
            bucket.grad_shard.zero_()
            if bucket.grad.untyped_storage().nbytes():
                bucket.grad.zero_()

    def start_pass(self, *, is_last: bool, is_pipeline: bool = False) -> None:
        self.reducer.start_pass(is_last=is_last, is_pipeline=is_pipeline)

    def end_pass(self) -> None:
        self.reducer.end_pass()

    def finish_gradients(self) -> None:
        self.reducer.finish()

    def grad_norm(self) -> float:
        """Of the whole model, exactly: every element counts once, however many ranks hold it.

        One collective of all ranks, whatever a rank holds: a pipeline stage without experts meets
        those with them."""
        parts = [
            sum_of_squares(piece.of(bucket.grad_shard))
            for bucket in self.buckets
            if bucket.num_shards > 1 or self.mesh.rank(bucket.axes) == 0  # of copies the first
            for piece in bucket.pieces()
            if self._counts(piece.slot.param)
        ]
        total = self.mesh.sum_float(WORLD, math.fsum(parts))[0]
        return math.sqrt(total) if math.isfinite(total) else total

    def _counts(self, parameter: Tensor) -> bool:
        """Tensor-parallel ranks share small parameters, pipeline stages a tied embedding."""
        if getattr(parameter, "is_copy", False):
            return False
        return hasattr(parameter, "slice") or self.mesh.rank("tp") == 0

    def lr(self) -> float:
        return lr_at(self.config, self.step_count - self.phase_start)

    def step(self, grad_norm: float) -> None:
        """As `AdamW.step`, on this rank's shares; then all ranks get the new weights."""
        lr = self.lr()
        self.step_count += 1
        decayed, spared = [], []
        for state in self._states:
            bucket = state.bucket
            clip(bucket.grad_shard, self.config, grad_norm)
            flats = (state.master, bucket.grad_shard, state.exp_avg, state.exp_avg_sq)
            cut = min(max(bucket.decay_end - bucket.begin, 0), bucket.share)
            decayed.append(tuple(flat[:cut] for flat in flats))
            spared.append(tuple(flat[cut:] for flat in flats))
        for parts, decay in ((decayed, self.config.weight_decay), (spared, 0.0)):
            update(parts, self.config, self.step_count, lr, decay)  # type: ignore[arg-type]
        self.write_back()

    def write_back(self) -> None:
        """Round the masters into the weights and give every rank the whole ones (ZeRO-1, 2); with
        ZeRO-3 whatever is gathered is out of date and goes."""
        self.release()
        handles = []
        for state in self._states:
            state.round()
            if self.zero < 3:
                handles.append(state.gather(self.mesh))
        for handle in handles:
            handle.wait()

    @torch.no_grad()
    def read_weights(self) -> None:
        """Take the parameters as the new masters, after somebody else wrote to them. With ZeRO-3
        call it inside `gathered`."""
        self._require_loaded()
        for state in self._states:
            state.read()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The whole parameters are here (they always are, except with ZeRO-3)."""
        if self.residency is not None:
            self.residency.fetch_all()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """With ZeRO-3, free the parameters of other ranks; after each forward or training step."""
        if self.residency is not None:
            self.residency.release_all()

    # -- memory and state --------------------------------------------------------------------

    def pieces(self, kind: Kind) -> Iterator[tuple[Piece, Tensor]]:
        """What this rank owns: elements lo:hi of each (flattened, tensor-parallel part of a)
        parameter with their values, 1-d views. Writing to them restores; then `write_back`."""
        self._require_loaded()
        for state in self._states:
            shard = state.bucket.grad_shard if kind == "grad" else getattr(state, kind)
            for piece in state.bucket.pieces():
                yield piece, piece.of(shard)

    def offload(self, folder: Path | str | None = None) -> None:
        """Free the gradients and park moments and separate masters until `reload`."""
        if self._parked is None:
            buffers = [self.exp_avg, self.exp_avg_sq]
            if self._own_masters is not None and (self.zero < 3 or self.has_working_copy):
                buffers.append(self._own_masters)
            scratch = {id(t): t for b in self.buckets for t in (b.grad, b.grad_shard)}
            whole = [t for t in scratch.values() if t.untyped_storage().nbytes()]
            self._parked = Parked(buffers, whole, folder)


def _units(models: Sequence[nn.Module]) -> list[tuple[list[nn.Module], Named]]:
    """(layers, parameters) in the order in which backward finishes them: norm and head, layers
    from the last, embedding, and what must wait for the very end."""
    layers: dict[int, tuple[list[nn.Module], Named]] = {}
    head: Named = []
    embedding: Named = []
    deferred: Named = []
    seen: set[int] = set()
    for model in models:
        for name, parameter in model.named_parameters():
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            if is_deferred(parameter):
                deferred.append((name, parameter))
            elif name.startswith("layers."):
                number = int(name.split(".")[1])
                module = model.get_submodule(f"layers.{number}")
                layers.setdefault(number, ([module], []))[1].append((name, parameter))
            else:
                (embedding if name == "embedding" else head).append((name, parameter))
    if not seen:
        raise ValueError("no trainable parameters: every requires_grad is False")
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
        and is_deferred(bucket[1][0][1]) == is_deferred(named[0][1])
    )
    size = sum(parameter.numel() for _, parameter in (*bucket[1], *named))
    return is_alike and size * wide.itemsize <= limit


# What a rank holds of a bucket (zero.py), and when its whole gradients and weights are in memory.
#
# With ZeRO-2 the whole gradient of a layer exists from the moment backward reaches the layer until
# it is reduced; with ZeRO-3 its whole weights exist while the layer runs. Hooks on the layers say
# when. Freed tensors keep their views: only the storage behind them shrinks to nothing and returns.
#
# Left out: prefetching more than one layer ahead.


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
