"""One engine of a model that is split over tensor-parallel ranks: rank 0 leads, the others follow.

Every rank has an engine of its own, and they stay in step because all are called alike
(`LLMEngine`). Here the calls are made on rank 0 alone: `LedEngine` announces each over the mesh
before it makes it, and `follow` makes the same on the other ranks. New weights come to rank 0 and
travel on to the others tensor by tensor, so all ranks refuse them or none does.

A call that a request's own mistake refuses (`ValueError`) is refused alike on all ranks. Anything
else that fails on one rank leaves the ranks out of step, for good: then, and when a rank has died
or says nothing for as long as the mesh waits, all raise `RanksLost`, and the group is to be made
anew. Followers that hear nothing for that long raise too, so an idle leader calls `beat` now and
then (a replica's heartbeat does).

Left out: repairing a group that has lost a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from nanoengine.model.transformer import Transformer
from nanoengine.parallel.mesh import Mesh
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams
from nanoinfer.variants.led_messages import (
    AbortCall,
    AddCall,
    LeaderHeartbeat,
    LeaderShutdown,
    LedMessage,
    PlainCall,
    PlainName,
    TensorHeader,
    TensorsEnd,
    WeightsCall,
    decode,
    encode,
)

_PAGE = 2048  # bytes of a message that travel with its length
_MOST_BYTES = 1 << 30  # prompts of a million tokens are a hundredth of it


class RanksLost(ConnectionError):  # noqa: N818 - named as what happened
    """The ranks of a tensor-parallel engine are out of step: one died, hangs, or failed alone."""


class LedEngine(LLMEngine):
    """The leader: an `LLMEngine` whose every call is made on all ranks of the mesh's tp axis. One
    thread at a time calls it, and nobody else uses the mesh's tp group."""

    def __init__(
        self,
        model: Transformer,
        config: InferConfig,
        version: int = 0,
        tokenizer: ChatTokenizer | None = None,
        *,
        mesh: Mesh,
    ) -> None:
        """`mesh` is the one that the model is split over; all ranks make their engine of the same
        config, version and tokenizer."""
        if mesh.rank("tp") != 0:
            raise ValueError(f"rank {mesh.rank('tp')} of the tp axis: rank 0 leads; call follow()")
        self._mesh = mesh
        self._lost: RanksLost | None = None
        super().__init__(model, config, version, tokenizer)

    def add(
        self,
        ids: Ids[int],
        params: SamplingParams,
        priority: int = 0,
        sampled: Output | None = None,
    ) -> int:
        """As of `LLMEngine`, on all ranks."""
        self.validate(ids, params)  # what is refused here, the others are not even told
        raw = encode(AddCall([int(token) for token in ids], params, priority, sampled))
        call = decode(raw)  # so that this rank computes with the very numbers that the others read
        assert isinstance(call, AddCall), "it is what was encoded"
        self._announce(raw)
        return super().add(*call)

    def abort(self, handle: int) -> Output | None:
        """As of `LLMEngine`, on all ranks. Works when ranks are lost, so that callers get what
        there is."""
        if self._lost is None and self.peek(handle) is not None:
            with suppress(RanksLost):  # told by the next call that needs the others
                self._announce(encode(AbortCall(handle)))
        return super().abort(handle)

    def step(self) -> list[tuple[int, Output]]:
        """As of `LLMEngine`, on all ranks."""
        return self._together("step", super().step)

    def pause(self) -> None:
        self._together("pause", super().pause)

    def resume(self) -> None:
        self._together("resume", super().resume)

    def sleep(self) -> None:
        """As of `LLMEngine`, on all ranks."""
        self._together("sleep", super().sleep)

    def wake(self) -> None:
        self._together("wake", super().wake)

    def update_weights(
        self, state: Iterable[tuple[str, Tensor]], version: int, *, is_finite: bool = False
    ) -> None:
        """As of `LLMEngine`, on all ranks: whole tensors in, each rank takes its part."""
        self._announce(encode(WeightsCall(version)))
        super().update_weights(self._handed_on(state), version, is_finite=is_finite)

    def beat(self) -> dict[str, float]:
        """`metrics`, once the other ranks have heard that this one lives."""
        self._announce(encode(LeaderHeartbeat()))
        return self.metrics()

    def dismiss(self) -> None:
        """Let the followers return. Nothing else can be called afterwards."""
        self._announce(encode(LeaderShutdown()))
        self._lost = RanksLost("the other ranks were dismissed")

    def _handed_on(self, state: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        try:
            for name, tensor in state:
                self._announce(encode(TensorHeader(name, tuple(tensor.shape), tensor.dtype)))
                with self._in_step("sending weights"):
                    sent = tensor.detach().to(self._mesh.device).contiguous()
                    self._mesh.broadcast("tp", sent.view(-1).view(torch.uint8))
                yield name, tensor
        except RanksLost:
            raise
        except Exception as error:  # the caller's own iterator: the ranks must hear it
            self._announce(encode(TensorsEnd(f"{type(error).__name__}: {error}")))
            raise
        self._announce(encode(TensorsEnd()))

    def _together(self, method: PlainName, do: Callable[[], Any]) -> Any:
        self._announce(encode(PlainCall(method)))
        with self._in_step(method):
            return do()

    def _announce(self, raw: bytes) -> None:
        if self._lost is not None:
            raise self._lost
        with self._in_step("announcing"):
            _say(self._mesh, raw)

    @contextmanager
    def _in_step(self, what: str) -> Iterator[None]:
        """Inside, whatever fails leaves the ranks out of step."""
        try:
            yield
        except Exception as error:  # wherever it stopped, the ranks are out of step
            self._lost = RanksLost(f"{what} failed: {type(error).__name__}: {error}")
            raise self._lost from error


def follow(engine: LLMEngine, mesh: Mesh) -> None:
    """Do what rank 0's `LedEngine` does, until it says goodbye. `RanksLost` if it is silent for as
    long as the mesh waits, or dies."""
    while True:
        try:
            message = _hear(mesh)
            if isinstance(message, LeaderShutdown):
                return
            _follow_one(engine, mesh, message)
        except Exception as error:  # a rank that skips a call can follow no other
            raise RanksLost(
                f"rank {mesh.rank('tp')} follows no more: {type(error).__name__}: {error}"
            ) from error


def _follow_one(engine: LLMEngine, mesh: Mesh, message: LedMessage) -> None:
    if isinstance(message, WeightsCall):
        with suppress(ValueError):  # the leader refuses them, too
            engine.update_weights(_received(mesh), message.version)
    elif isinstance(message, AddCall):
        with suppress(ValueError):  # the same
            engine.add(*message)
    elif isinstance(message, AbortCall):
        engine.abort(message.handle)
    elif isinstance(message, PlainCall):
        getattr(engine, message.method)()
    else:
        assert isinstance(message, LeaderHeartbeat), f"out of step: {message}"


def _received(mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    while True:
        message = _hear(mesh)
        if isinstance(message, TensorsEnd):
            if message.error:
                raise ValueError(f"rank 0 could not bring the weights: {message.error}")
            return
        assert isinstance(message, TensorHeader), f"out of step: {message}"
        tensor = torch.empty(message.shape, dtype=message.dtype, device=mesh.device)
        mesh.broadcast("tp", tensor.view(-1).view(torch.uint8))
        yield message.name, tensor


def _say(mesh: Mesh, raw: bytes) -> None:
    page = len(raw).to_bytes(8, "little") + raw[: _PAGE - 8]
    mesh.broadcast("tp", _bytes(page.ljust(_PAGE, b"\0"), mesh))
    if len(raw) > _PAGE - 8:
        mesh.broadcast("tp", _bytes(raw[_PAGE - 8 :], mesh))


def _hear(mesh: Mesh) -> LedMessage:
    page = torch.empty(_PAGE, dtype=torch.uint8, device=mesh.device)
    mesh.broadcast("tp", page)
    first = page.cpu().numpy().tobytes()
    length = int.from_bytes(first[:8], "little")
    if length > _MOST_BYTES:
        raise ValueError(f"a message of {length} bytes: at most {_MOST_BYTES}")
    raw = first[8 : 8 + length]
    if length > len(raw):
        rest = torch.empty(length - len(raw), dtype=torch.uint8, device=mesh.device)
        mesh.broadcast("tp", rest)
        raw += rest.cpu().numpy().tobytes()
    return decode(raw)


def _bytes(raw: bytes, mesh: Mesh) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(mesh.device)
