"""Decoding from static buffers, so that a GPU can replay a step as one CUDA graph.

A decode step of a small model is a few hundred launches of a few microseconds each, and a host
that takes longer to launch a kernel than the GPU to run it. A graph is launched at once. It repeats
the same kernels on the same addresses, so everything that varies lies in buffers: `StaticDecode`
has a set for each of a ladder of batch sizes, writes a step into the smallest that fits, fills the
other rows with a sequence of one token in the cache's padding block, and runs that size's work.

Addresses also stand for the weights and the cache. Weight updates write in place; a model whose
owner moved its tensors, and a cache that slept, have their graphs dropped. A size is captured when
the first step comes that needs it, on rows of padding: a capture runs the work, and what stood in
the buffers before would be written to blocks that belong to others by now. Nothing in the work may
wait for the GPU or choose by value: the grid of the attention kernel comes from the largest length
a sequence can have, and each sequence cuts its own keys. A layer's window is a constant of its
launches.

How work becomes a graph is the `Capture` it is given: `CudaCapture`, or `run_plainly` for tests on
a CPU, which calls it each time. Steps that are not one new token a sequence are never static; the
output head and sampling run outside.
Left out: graphs of prefill, and of models split over ranks (their collectives).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from nanoengine.model.transformer import Transformer
from nanoinfer.batch import StepInput
from nanoinfer.kv_cache import KVCache, PagedContext

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Takes work on fixed addresses, returns what repeats it."""

_STEP = 16  # between sizes above it; rows of padding cost little, a graph costs memory and a start
_WARM_UPS = 2  # the first call compiles kernels and makes cuBLAS's workspace


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes with a graph: powers of two, then multiples of 16, and the largest."""
    sizes = [1, 2, 4, 8, *range(_STEP, max_num_seqs, _STEP)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def run_plainly(work: Work) -> Work:
    """No graph: the work itself, called each time."""
    return work


class CudaCapture:
    """Records work as CUDA graphs that share one memory pool, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # those that are not dropped
        self._stream: torch.cuda.Stream | None = None  # kept: cuBLAS has a workspace for each

    def __call__(self, work: Work) -> Work:
        with torch.cuda.device(self._device):
            if not self._graphs:  # a pool goes with the last graph that uses it
                self._pool = torch.cuda.graph_pool_handle()
            stream = self._stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    work()
                # Not `torch.cuda.graph`, which gives the allocator's free memory back to the driver
                # before each: a colocated step captures again what slept. In the default mode an
                # allocation of any other thread, such as the optimizer's, would break the capture.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
        self._graphs.add(graph)
        return graph.replay


def can_capture(model: Transformer) -> bool:
    """True if decode steps of this model can be CUDA graphs."""
    return model.device.type == "cuda" and model.split.size == 1 and model.experts is None


@dataclass(frozen=True)
class StaticRows:
    """A decode step, padded with sequences of one token to a size that has a graph."""

    rows: Tensor  # [4, size]: ids, positions, slots, lengths
    tables: Tensor  # [size, blocks]


class _Inputs:
    """A decode step of `size` rows at fixed addresses; rows that are not used are padding."""

    def __init__(self, size: int, cache: KVCache, device: torch.device) -> None:
        assert cache.padding_block is not None, "make the cache with has_padding_block"
        self._padding_block = cache.padding_block
        self._padding_slot = cache.padding_block * cache.block_size
        self._size = size
        self._rows = torch.zeros(4, size, dtype=torch.int64, device=device)
        self.ids, self.positions, self.slots, self.lens = self._rows
        shape = (size, cache.blocks_per_seq)
        self.tables = torch.full(shape, self._padding_block, device=device)
        self.starts = torch.arange(size + 1, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """All rows are padding."""
        self._rows.zero_()
        self.slots.fill_(self._padding_slot)
        self.lens.fill_(1)
        self.tables.fill_(self._padding_block)

    def padded(self, step: StepInput) -> StaticRows:
        """The step as it comes from the host, with its rows of padding."""
        num_seqs, width = step.block_tables.shape
        rows = torch.zeros(4, self._size, dtype=torch.int64)
        rows[2, num_seqs:], rows[3, num_seqs:] = self._padding_slot, 1
        columns = (step.ids_T, step.positions_T, step.slots_T, torch.tensor(step.seq_lens))
        for row, column in zip(rows, columns, strict=True):
            row[:num_seqs] = column
        tables = torch.full((self._size, width), self._padding_block)
        tables[:num_seqs] = step.block_tables
        return StaticRows(rows, tables)

    def write(self, static: StaticRows) -> None:
        """Copy a step in that is on the device."""
        self._rows.copy_(static.rows)
        self.tables[:, : static.tables.shape[1]].copy_(static.tables)


class StaticDecode:
    """The decode steps of one model and cache, of up to `max_num_seqs` sequences."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        max_num_seqs: int,
        capture: Capture = run_plainly,
    ) -> None:
        self.sizes = ladder(max_num_seqs)
        self._model = model
        self._cache = cache
        self._capture = capture
        self._replays: dict[int, Work] = {}  # of the sizes that were needed since `drop`
        self._addresses: tuple[int, ...] = ()
        device = model.device
        self._inputs = {size: _Inputs(size, cache, device) for size in self.sizes}
        shape = (max_num_seqs, model.config.hidden_size)
        self._hidden = torch.zeros(shape, dtype=model.dtype, device=device)

    def padded(self, step: StepInput) -> StaticRows | None:
        """The part of a step that `run` takes, to be sent to the device; None unless each sequence
        has one new token, and there are not too many of them."""
        num_seqs = len(step.seq_lens)
        if len(step.ids_T) != num_seqs or num_seqs > self.sizes[-1]:
            return None
        return self._inputs[self._size_for(num_seqs)].padded(step)

    def run(self, static: StaticRows, num_seqs: int) -> Tensor:
        """Hidden states [S, E] of a padded step on the device; valid until the next. Keys and
        values of its tokens are in the cache afterwards."""
        size = self._size_for(num_seqs)
        if size not in self._replays:
            self._record(size)
        self._inputs[size].write(static)
        self._replays[size]()
        return self._hidden[:num_seqs]

    def prepare(self) -> None:
        """Capture every size now, the largest first: the smaller ones find all they need in its
        pool. Whoever measures steps does not want to measure captures."""
        for size in reversed(self.sizes):
            if size not in self._replays:
                self._record(size)

    def _size_for(self, num_seqs: int) -> int:
        return next(size for size in self.sizes if size >= num_seqs)

    def drop(self) -> None:
        """Forget the graphs, and the memory they hold."""
        self._replays = {}

    def refresh(self) -> None:
        """The weights changed: in place, or the graphs go."""
        if self._replays and self._addresses != _addresses(self._model):
            self.drop()

    def _record(self, size: int) -> None:
        if not self._replays:
            self._addresses = _addresses(self._model)
        self._inputs[size].clear()
        self._replays[size] = self._capture(self._work(size))

    def _work(self, size: int) -> Work:
        inputs = self._inputs[size]
        limit = self._cache.blocks_per_seq * self._cache.block_size

        def work() -> None:
            context = PagedContext(
                self._cache,
                inputs.slots,
                inputs.starts,
                inputs.lens,
                inputs.tables,
                1,
                limit,
                batch_invariant=self._model.batch_invariant,
            )
            self._hidden[:size].copy_(self._model(inputs.ids, inputs.positions, context))

        return work


def _addresses(model: Transformer) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in chain(model.parameters(), model.buffers()))
