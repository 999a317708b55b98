"""Runs a pipeline schedule: the lists of schedules.py, over real stages and real messages.

The runner knows nothing of models. It walks its rank's list; for each action it takes the input
from the neighbour, lets the chunk compute, and hands the output on. Both sides of a message know
its shape from the micro-batch, so nothing but the tensor travels, and shapes may differ from one
micro-batch to the next.

No deadlock: sends never block, so a rank waits only for an input, and a schedule that the simulator
can finish is one in which every input is produced. The receive of the next action is posted before
the current one computes, so messages travel meanwhile. A sent tensor is released as soon as a
message from the same rank proves that it was taken: what is alive is what the schedule says.

On NCCL messages have no tags and a pair of ranks has one queue, so each kind and direction has a
communicator of its own (`Channels`); within one, the schedules take messages in the order sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.torch.linear import finish_weight_grads
from nanoengine.parallel.mesh import Handle, Mesh
from nanoengine.parallel.schedules import Action, Schedule
from nanoengine.parallel.stage import Stage


class PipelineChunk(Protocol):
    """One stage, as the runner sees it. `x` is None on the first stage; the last one gives None
    forward and gets None backward."""

    @property
    def num_live(self) -> int:
        """Micro-batches whose activations are held."""
        ...

    def forward(self, micro: int, x: Tensor | None) -> Tensor | None: ...

    def backward(self, micro: int, dy: Tensor | None) -> Tensor | None: ...

    def backward_input(self, micro: int, dy: Tensor | None) -> Tensor | None: ...

    def backward_weight(self, micro: int) -> None: ...

    def boundary(self, micro: int, *, is_output: bool) -> Tensor:
        """An empty tensor for an input, or with `is_output` for the gradient of an output."""
        ...


@dataclass(frozen=True)
class _Message:
    """A tensor that an action needs from another rank, or gives to it."""

    direction: str  # "F" or "B"
    stage: int  # that computes the action it feeds
    micro: int


class Channels:
    """The meshes messages travel on: one on a CPU, one for each kind and direction on a GPU."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._twins = {}
        if mesh.device.type == "cuda":
            for direction in ("F", "B"):
                for way in ("up", "down"):
                    self._twins[direction, way] = mesh.twin(f"pipeline-{direction}-{way}")

    def of(self, direction: str, source: int, to: int) -> Mesh:
        return self._twins.get((direction, "up" if to > source else "down"), self.mesh)


class PipelineRunner:
    """Executes schedules over this rank's chunks."""

    def __init__(self, mesh: Mesh, chunks: Sequence[PipelineChunk]) -> None:
        self._rank = mesh.rank("pp")
        self._chunks = chunks
        self._channels = Channels(mesh)
        self.peak_live = 0

    def run(self, schedule: Schedule) -> None:
        """All actions of this rank; every pipeline rank calls it with the same schedule."""
        mailbox = _Mailbox(schedule, self._rank, self._channels, self._chunks)
        row = schedule.actions[self._rank]
        self.peak_live = 0
        keeps = any(action.kind != "F" for action in row)
        for i, action in enumerate(row):
            mailbox.expect(action)
            received = mailbox.take(action)
            if i + 1 < len(row):
                mailbox.expect(row[i + 1])
            chunk = self._chunks[action.chunk]
            if action.kind == "W":
                chunk.backward_weight(action.micro)
                continue
            if action.kind == "F":
                result = chunk.forward(action.micro, received)
                if keeps:
                    live = sum(each.num_live for each in self._chunks)
                    self.peak_live = max(self.peak_live, live)
            elif action.kind == "I":
                result = chunk.backward_input(action.micro, received)
            else:
                result = chunk.backward(action.micro, received)
            mailbox.give(action, result)
        mailbox.close()


class _Mailbox:
    """The messages of one run."""

    def __init__(
        self, schedule: Schedule, rank: int, channels: Channels, chunks: Sequence[PipelineChunk]
    ) -> None:
        self._schedule, self._rank = schedule, rank
        self._channels, self._chunks = channels, chunks
        self._local: dict[_Message, Tensor] = {}
        self._posted: dict[_Message, tuple[Tensor, Handle]] = {}
        self._sent: dict[int, list[tuple[int, Handle]]] = {}  # to: (place where it is taken, ..)
        self._places = [
            {_key(schedule, r, action): i for i, action in enumerate(row) if action.kind != "W"}
            for r, row in enumerate(schedule.actions)
        ]

    def expect(self, action: Action) -> None:
        """Post the receive of an action's input."""
        message = self._input(action)
        if message is None or message in self._posted:
            return
        source = self._schedule.owner(_neighbour(message, -1))[0]
        if source == self._rank:
            return
        is_output = message.direction == "B"
        tensor = self._chunks[action.chunk].boundary(action.micro, is_output=is_output)
        mesh = self._channels.of(message.direction, source, self._rank)
        handle = mesh.recv("pp", tensor, source, tag=self._tag(message), is_async=True)
        self._posted[message] = (tensor, handle)

    def take(self, action: Action) -> Tensor | None:
        message = self._input(action)
        if message is None:
            return None
        if message in self._local:
            return self._local.pop(message)
        tensor, handle = self._posted.pop(message)
        handle.wait()
        origin = _Message(message.direction, _neighbour(message, -1), message.micro)
        source = self._schedule.owner(origin.stage)[0]
        self._release(source, self._places[source][origin])
        return tensor

    def give(self, action: Action, tensor: Tensor | None) -> None:
        """Hand an action's output to the stage that needs it."""
        here = _key(self._schedule, self._rank, action)
        stage = _neighbour(here, 1)
        if tensor is None or not 0 <= stage < self._schedule.num_stages:
            return
        message = _Message(here.direction, stage, action.micro)
        to = self._schedule.owner(stage)[0]
        if to == self._rank:
            self._local[message] = tensor
            return
        mesh = self._channels.of(message.direction, self._rank, to)
        handle = mesh.send("pp", tensor, to, tag=self._tag(message), is_async=True)
        self._sent.setdefault(to, []).append((self._places[to][message], handle))

    def close(self) -> None:
        for to in list(self._sent):
            self._release(to, None)

    def _release(self, to: int, place: int | None) -> None:
        """Rank `to` has come to `place` of its list, so it has taken what it needed before."""
        kept = []
        for taken_at, handle in self._sent.get(to, []):
            if place is None or taken_at <= place:
                handle.wait()
            else:
                kept.append((taken_at, handle))
        self._sent[to] = kept

    def _input(self, action: Action) -> _Message | None:
        """The message an action waits for; None where it starts from ids, a loss, or a W."""
        if action.kind == "W":
            return None
        here = _key(self._schedule, self._rank, action)
        return here if 0 <= _neighbour(here, -1) < self._schedule.num_stages else None

    def _tag(self, message: _Message) -> int:
        number = message.stage * self._schedule.num_micro + message.micro
        return 2 * number + (message.direction == "B")


def _key(schedule: Schedule, rank: int, action: Action) -> _Message:
    direction = "F" if action.kind == "F" else "B"
    return _Message(direction, schedule.stage(rank, action.chunk), action.micro)


def _neighbour(message: _Message, step: int) -> int:
    """The stage after (1) or before (-1) in the direction of travel."""
    return message.stage + (step if message.direction == "F" else -step)


class StageChunk:
    """A Stage as the runner sees it.

    `compute(stage, micro, x)` runs the stage on micro-batch number `micro` and gives what the next
    stage takes, or on the last stage the loss (a scalar, already divided by the global weight).
    `boundary(stage, micro, is_output)` is an empty tensor as of `PipelineChunk`.
    """

    def __init__(
        self,
        stage: Stage,
        compute: Callable[[Stage, int, Tensor | None], Tensor],
        boundary: Callable[[Stage, int, bool], Tensor],
        *,
        keeps: bool = True,
    ) -> None:
        self._stage, self._compute, self._boundary = stage, compute, boundary
        self._keeps = keeps
        self._live: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._late: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}

    @property
    def num_live(self) -> int:
        return len(self._live) + len(self._late)

    def boundary(self, micro: int, *, is_output: bool) -> Tensor:
        return self._boundary(self._stage, micro, is_output)

    def forward(self, micro: int, x: Tensor | None) -> Tensor | None:
        if x is not None and self._keeps:
            x.requires_grad_()
        y = self._compute(self._stage, micro, x)
        if self._keeps:
            self._live[micro] = (x, y)
        return None if self._stage.is_last else y.detach()

    def backward(self, micro: int, dy: Tensor | None) -> Tensor | None:
        x, y = self._live.pop(micro)
        if y.requires_grad:  # a loss without any counted token may not
            torch.autograd.backward(y, dy)
        if x is None:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def backward_input(self, micro: int, dy: Tensor | None) -> Tensor | None:
        """Backward, but the linear layers' weight gradients wait for `backward_weight`."""
        late: list[tuple[Tensor, Tensor, Tensor]] = []
        weights = self._stage.linear_weights()
        for weight in weights:
            weight.late_grads = late  # type: ignore[attr-defined]
        try:
            dx = self.backward(micro, dy)
        finally:
            for weight in weights:
                del weight.late_grads  # type: ignore[attr-defined]
        self._late[micro] = late
        return dx

    def backward_weight(self, micro: int) -> None:
        finish_weight_grads(self._late.pop(micro))
