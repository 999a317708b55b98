"""Processes on a grid of five axes, and every collective the project uses, counted.

    axis   splits                                   neighbours exchange
    pp     layers (pipeline)                        activations, point to point
    dp     samples                                  gradients; parameters under ZeRO
    ep     experts, and samples for all the rest    tokens; gradients
    cp     the tokens of a sequence                 keys and values
    tp     the matrices of a layer                  activations, several times a layer

Ranks count through the axes in that order, tp fastest, so the axis that talks most has the
nearest neighbours. Methods take an axis or a tuple of axes, whose ranks then form one group.

A mesh owns its process groups, built straight from torch's back ends: there is no default group
and no registry, so any number of meshes and engines live in one process. A group of one rank does
not exist; its collectives do nothing and count nothing, nor do those of empty tensors. Reductions
of half-precision tensors run in fp32: rounding at every hop would make the result depend on the
number of ranks. Counters say what each kind of collective moved; times are estimate.py's.

Left out: starting processes (torchrun, nanosched, the tests' pool), how they find each other
(rendezvous.py) and topology discovery.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from nanoengine.parallel.layout import AXES, WORLD, Layout
from nanoengine.parallel.peer_proof import prove_peers

Axis = str | tuple[str, ...]
ReduceOp = Literal["sum", "max", "min"]
_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


@dataclass
class Traffic:
    """The tensors that a rank handed to one kind of collective. `bytes` are those of the whole
    tensor: the reduced one, the gathered one, the one before scattering, the one sent."""

    calls: int = 0
    bytes: int = 0


def wire_bytes(op: str, num_bytes: float, num_ranks: int) -> float:
    """Bytes each rank sends for a tensor of `num_bytes` by the ring algorithm."""
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share}.get(
        op, 1.0
    ) * num_bytes


class Handle:
    """A collective on its way; `wait` before touching its tensors. Waiting twice is no harm."""

    def __init__(self, work: Any = None, finish: Callable[[], None] | None = None) -> None:
        self._work, self._finish = work, finish

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._finish is not None:
            self._finish()
        self._work = self._finish = None


class Mesh:
    """This process's place in the grid. Groups are made on first use, by all their members."""

    def __init__(
        self,
        layout: Layout,
        rank: int = 0,
        store: dist.Store | None = None,
        *,
        device: torch.device | str = "cpu",
        name: str = "mesh",
        timeout_s: float = 600.0,
        host: str | None = None,
    ) -> None:
        """`store` introduces the processes to each other (any torch store; a single process needs
        none); who can read it can join. Meshes that share a store need different names. On a CPU
        the groups listen at `host`, an address of this machine; None: where its name points to."""
        if not 0 <= rank < layout.world:
            raise ValueError(f"rank={rank}: must be in 0..{layout.world - 1} for {layout}")
        if store is None and layout.world > 1:
            raise ValueError(f"store=None: {layout.world} ranks need a store to find each other")
        self.layout = layout
        self.world_rank = rank
        self.device = torch.device(device)
        self.traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)  # (op, "dp-cp"): ..
        self._store, self._name = store, name
        self._timeout = timedelta(seconds=timeout_s)
        self._host = host
        self._coordinates = layout.coordinates(rank)
        self._groups: dict[tuple[str, ...], Any] = {}

    @classmethod
    def alone(cls) -> Mesh:
        """The mesh of a process that trains by itself on a CPU: one rank, no groups."""
        return cls(Layout())

    @classmethod
    def from_torchrun(cls, layout: Layout, *, device: torch.device | str = "cpu") -> Mesh:
        """The mesh of a process started by `torchrun`, which hands its place in variables of the
        environment. The store is torchrun's and asks nobody for a secret: whoever can connect to it
        can join, so only processes that you trust should be able to."""
        try:
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is not set: start this with torchrun") from error
        if world != layout.world:
            raise ValueError(
                f"torchrun started {world} processes, but {layout} needs {layout.world}; "
                f"pass --nproc-per-node {layout.world} or change the layout"
            )
        agent_has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = dist.TCPStore(host, port, world, rank == 0 and not agent_has_store)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(layout, rank, store, device=device, name=f"nanoengine/{attempt}")

    def twin(self, name: str) -> Mesh:
        """The same grid with groups of its own, for messages that must not queue behind others."""
        return Mesh(
            self.layout,
            self.world_rank,
            self._store,
            device=self.device,
            name=f"{self._name}/{name}",
            timeout_s=self._timeout.total_seconds(),
            host=self._host,
        )

    # -- where am I --------------------------------------------------------------------------

    def size(self, axis: Axis = WORLD) -> int:
        size = 1
        for name in _names(axis):
            size *= getattr(self.layout, name)
        return size

    def rank(self, axis: Axis = WORLD) -> int:
        """This process's index in its group along `axis`."""
        rank = 0
        for name in _names(axis):
            rank = rank * getattr(self.layout, name) + self._coordinates[name]
        return rank

    def group(self, axis: Axis = WORLD) -> Any:
        """The back end's process group; ValueError where it would have one rank."""
        names = self._long(axis)
        if not names:
            raise ValueError(f"group({axis!r}): has one rank, so there is no group")
        if names not in self._groups:
            members = self.layout.members(self.world_rank, names)
            prefix = f"{self._name}/{'-'.join(names)}/{members[0]}"
            assert self._store is not None, "the constructor asked for one"
            store = dist.PrefixStore(prefix, self._store)
            self._groups[names] = self._connect(store, members.index(self.world_rank), len(members))
        return self._groups[names]

    def _long(self, axis: Axis) -> tuple[str, ...]:
        """The axes that have more than one rank: ("dp", "cp") is the group "dp" where cp is 1."""
        return tuple(name for name in _names(axis) if self.size(name) > 1)

    def _connect(self, store: dist.Store, rank: int, size: int) -> Any:
        if self.device.type == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = self._timeout
            return dist.ProcessGroupNCCL(store, rank, size, nccl)
        backend: Any = dist.ProcessGroupGloo  # its type stub lacks the options
        gloo = backend._Options()
        gloo._timeout = self._timeout
        if self._host is None:
            gloo._devices = [backend.create_default_device()]
        else:
            gloo._devices = [backend.create_device(hostname=self._host)]
        group = backend(store, rank, size, gloo)
        prove_peers(group, store, rank, size, self._timeout)  # nobody leaves before all are there
        return group

    def close(self) -> None:
        """Release the groups; all ranks call it. Idempotent."""
        for names in sorted(self._groups):
            group = self._groups[names]
            group.barrier().wait()  # a peer may still be reading our last message
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()

    def abandon(self) -> None:
        """Let go of the groups without a farewell, after a failure. Their connections close once
        nobody refers to them, and peers that wait for this process learn that it has gone."""
        self._groups.clear()

    # -- collectives -------------------------------------------------------------------------

    def all_reduce(
        self, axis: Axis, tensor: Tensor, op: ReduceOp = "sum", *, is_async: bool = False
    ) -> Handle:
        """In place. Half precision is reduced in fp32 and rounded once."""
        if self.size(axis) == 1 or not tensor.numel():
            return Handle()
        wide = _widen(tensor.contiguous())
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        work = self._count("all_reduce", axis, wide).allreduce([wide], options)
        finish = None if wide is tensor else lambda: _copy(tensor, wide)
        return _maybe_wait(Handle(work, finish), is_async)

    def all_gather(
        self, axis: Axis, out: Tensor, tensor: Tensor, *, is_async: bool = False
    ) -> Handle:
        """`out` becomes the ranks' tensors one after the other; `tensor` may be a slice of it."""
        if self._copied(axis, out, tensor) or not tensor.numel():
            return Handle()
        group = self._count("all_gather", axis, out)
        work = group._allgather_base(out.view(-1), tensor.contiguous().view(-1))
        return _maybe_wait(Handle(work), is_async)

    def reduce_scatter(
        self, axis: Axis, out: Tensor, tensor: Tensor, *, is_async: bool = False
    ) -> Handle:
        """`out` becomes this rank's part of the sum of the ranks' tensors, part r for rank r."""
        if self._copied(axis, out, tensor) or not tensor.numel():
            return Handle()
        wide = _widen(tensor.contiguous()).view(-1)
        target = out if out.dtype == wide.dtype else out.new_empty(out.shape, dtype=wide.dtype)
        group = self._count("reduce_scatter", axis, wide)
        work = group._reduce_scatter_base(target.view(-1), wide)
        finish = None if target is out else lambda: _copy(out, target)
        return _maybe_wait(Handle(work, finish), is_async)

    def broadcast(
        self, axis: Axis, tensor: Tensor, source: int = 0, *, is_async: bool = False
    ) -> Handle:
        """In place; `source` is an index in the group."""
        if self.size(axis) == 1:
            return Handle()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        work = self._count("broadcast", axis, tensor).broadcast([tensor], options)
        return _maybe_wait(Handle(work), is_async)

    def all_to_all(
        self,
        axis: Axis,
        out: Tensor,
        tensor: Tensor,
        out_rows: Sequence[int],
        in_rows: Sequence[int],
    ) -> Handle:
        """Rows to and from each rank: `in_rows[r]` of `tensor` go to rank r."""
        if self.size(axis) == 1:
            _copy(out, tensor)
            return Handle()
        group = self._count("all_to_all", axis, tensor)
        work = group.alltoall_base(out, tensor.contiguous(), list(out_rows), list(in_rows))
        return _maybe_wait(Handle(work), False)

    def send(
        self, axis: Axis, tensor: Tensor, to: int, *, tag: int = 0, is_async: bool = False
    ) -> Handle:
        """To index `to` of the group. `tensor` must stay unchanged until the handle is waited for;
        messages between two ranks with one tag arrive in order."""
        group = self._count("send", axis, tensor)
        return _maybe_wait(Handle(group.send([tensor.contiguous()], to, tag)), is_async)

    def recv(
        self, axis: Axis, tensor: Tensor, source: int, *, tag: int = 0, is_async: bool = False
    ) -> Handle:
        """Into a contiguous tensor, from index `source` of the group."""
        group = self._count("recv", axis, tensor)
        return _maybe_wait(Handle(group.recv([tensor], source, tag)), is_async)

    def exchange(
        self, axis: Axis, out: Tensor, to: int, into: Tensor, source: int, *, tag: int = 0
    ) -> Handle:
        """Send and receive at once, without a deadlock on any back end; returns both on their
        way. Empty tensors do not travel."""
        if not out.numel() and not into.numel():
            return Handle()
        group = self.group(axis)
        if self.device.type == "cuda":
            group._start_coalescing(self.device)
        received = sent = Handle()
        if into.numel():
            received = self.recv(axis, into, source, tag=tag, is_async=True)
        if out.numel():
            sent = self.send(axis, out, to, tag=tag, is_async=True)
        if self.device.type == "cuda":
            return Handle(group._end_coalescing(self.device))
        return Handle(sent, received.wait)

    def barrier(self, axis: Axis = WORLD) -> None:
        if self.size(axis) > 1:
            self.group(axis).barrier().wait()

    # -- small things ------------------------------------------------------------------------

    def sum_float(self, axis: Axis, *values: float) -> list[float]:
        """Each value summed in fp64 over the group."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.all_reduce(axis, total)
        return total.tolist()

    def max_int(self, axis: Axis, value: int) -> int:
        largest = torch.tensor([value], dtype=torch.int64, device=self.device)
        self.all_reduce(axis, largest, "max")
        return int(largest)

    def gather_json(self, axis: Axis, value: Any) -> list[Any]:
        """Every rank's small JSON value, in order."""
        if self.size(axis) == 1:
            return [value]
        text = json.dumps(value).encode()
        width = self.max_int(axis, len(text))
        mine = torch.tensor(list(text.ljust(width)), dtype=torch.uint8, device=self.device)
        out = mine.new_empty(width * self.size(axis))
        self.all_gather(axis, out, mine)
        return [json.loads(bytes(part.tolist())) for part in out.split(width)]

    def _copied(self, axis: Axis, out: Tensor, source: Tensor) -> bool:
        """Copy, which is what gathering and scattering do in a group of one rank."""
        if self.size(axis) > 1:
            return False
        if out.data_ptr() != source.data_ptr():
            _copy(out.view(-1), source.reshape(-1))
        return True

    def _count(self, op: str, axis: Axis, tensor: Tensor) -> Any:
        entry = self.traffic[op, "-".join(self._long(axis))]
        entry.calls += 1
        entry.bytes += tensor.numel() * tensor.element_size()
        return self.group(axis)


def _names(axis: Axis) -> tuple[str, ...]:
    """In the order of AXES, so that every spelling of a group is the same group."""
    given = (axis,) if isinstance(axis, str) else axis
    for name in given:
        if name not in AXES:
            raise ValueError(f"axis {name!r}: must be one of {', '.join(AXES)}")
    return tuple(name for name in AXES if name in given)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _copy(out: Tensor, source: Tensor) -> None:
    with torch.no_grad():
        out.copy_(source)


def _maybe_wait(handle: Handle, is_async: bool) -> Handle:
    if not is_async:
        handle.wait()
    return handle
