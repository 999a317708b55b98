"""AdamW over a mesh: masters, moments, gradients and parameters cut over the ranks that hold the
same parameters.

    ZeRO   parameters   gradients   masters + moments     a step moves, per parameter
    0      whole        whole       whole                 all-reduce of the gradient
    1      whole        whole       1/n                   reduce-scatter it, all-gather the weights
    2      whole        1/n         1/n                   the same; the scatter for each micro-batch
    3      1/n          1/n         1/n                   and all-gather twice for each micro-batch

Next: data_parallel.py (buckets and their reduction), zero.py (what is in memory).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nanoengine.config import AdamWConfig
from nanoengine.flat import BucketState
from nanoengine.optim import sum_of_squares
from nanoengine.parallel.data_parallel import GradientReducer
from nanoengine.parallel.layout import REPLICA_AXES, WORLD
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.parameter_record import record_of
from nanoengine.parallel.shards import ShardedBucket, ShardedState, entries_of
from nanoengine.parallel.zero import Residency, check_zero, cut_into_buckets
from nanoengine.state.kept_adamw import AdamW


class ShardedAdamW(AdamW):
    """Owns this rank's share of the masters, moments and gradients of `models`, its parts of the
    model: one, or its pipeline stages. All ranks of the mesh call the same methods."""

    states: list[ShardedState]  # type: ignore[assignment]
    buckets: list[ShardedBucket]  # type: ignore[assignment]

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
        check_zero(zero, mesh.layout)
        self.mesh = mesh
        self.zero = zero if mesh.size(REPLICA_AXES) > 1 else 0  # one replica shares with nobody
        self._bucket_bytes = bucket_bytes
        super().__init__(models, config, dtype=dtype)

    def _make_states(
        self, models: Sequence[nn.Module], dtype: torch.dtype, wide: torch.dtype
    ) -> list[BucketState]:
        is_sharded = self.zero > 0
        cut = cut_into_buckets(models, self.mesh, self.zero, self._bucket_bytes, wide)
        buckets = [
            ShardedBucket(named, layers, self.mesh, axes, is_sharded=is_sharded, wide=wide)
            for layers, named, axes in cut
        ]
        return [ShardedState(bucket, dtype, is_resident=self.zero < 3) for bucket in buckets]

    def _watch_gradients(self, models: Sequence[nn.Module]) -> None:
        self.residency = Residency(self.mesh, self.states, models) if self.zero >= 2 else None
        self.reducer = GradientReducer(
            self.mesh,
            self.buckets,
            every_pass=self.zero >= 2,
            when_reduced=self.residency.after_backward if self.residency is not None else None,
        )

    @property
    def needs_equal_passes(self) -> bool:
        """Say whether all data-parallel ranks must run the same number of forward passes."""
        meets_in_passes = self.zero >= 2 or self.mesh.size("ep") > 1
        return meets_in_passes and self.mesh.size(("dp", "ep")) > 1

    # -- one step ----------------------------------------------------------------------------

    def start_pass(self, *, is_last: bool, is_pipeline: bool = False) -> None:
        self.reducer.start_pass(is_last=is_last, is_pipeline=is_pipeline)

    def end_pass(self) -> None:
        self.reducer.end_pass()

    def finish_gradients(self) -> None:
        self.reducer.finish()

    def _sum_of_squares(self) -> float:
        """Every element counts once, however many ranks hold it. One collective of all ranks,
        whatever a rank holds: a pipeline stage without experts meets those with them."""
        return self.mesh.sum_float(WORLD, math.fsum(self._own_squares()))[0]

    def _own_squares(self) -> Iterator[float]:
        for bucket in self.buckets:
            if bucket.num_shards > 1 or self.mesh.rank(bucket.axes) == 0:  # of copies the first
                for entry in entries_of(bucket):
                    if self._counts(entry.slot.param):
                        yield sum_of_squares(entry.of(bucket.grad_shard))

    def _counts(self, parameter: Tensor) -> bool:
        """Tensor-parallel ranks share small parameters, pipeline stages a tied embedding."""
        record = record_of(parameter)
        return not record.is_copy and (record.slice is not None or self.mesh.rank("tp") == 0)

    def write_back(self) -> None:
        """Round the masters into the weights and give every rank the whole ones (ZeRO-1, 2); with
        ZeRO-3 whatever is gathered is out of date and goes."""
        self.release()
        handles = []
        for state in self.states:
            state.round()
            if self.zero < 3:
                handles.append(state.gather(self.mesh))
        for handle in handles:
            handle.wait()

    def read_weights(self) -> None:
        """Take this rank's share of the parameters as its new masters."""
        self._require_loaded()
        for state in self.states:
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
        """Free the parameters of other ranks (ZeRO-3), after each forward or training step."""
        if self.residency is not None:
            self.residency.release_all()
