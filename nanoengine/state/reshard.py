"""Moves tensors between layouts: who holds which slice is compared once, then slices are copied.

Every rank describes what it has and what it wants as pieces (slices.py). All ranks gather the
descriptions, intersect them and get the same list of copies, which is kept for the next time.
Replaying it costs the bytes and nothing else:

    same rank       dst.narrow().copy_(src.narrow()), no buffer and no message
    other rank      slices packed into a bucket, sent, unpacked; at most a few buckets are alive

A replica (the same box on several ranks) is read from the wanting rank itself where it can be, else
from the replicas in turn. Copies convert the dtype.

    resharder = Resharder(mesh)                                     # keep it: it keeps the plan
    resharder.run(model_pieces(train_stages), model_pieces([inference_model]))

Left out: quantising on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoengine.formats.hf import hf_slices, hf_views
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.layout import WORLD
from nanoengine.parallel.mesh import Handle, Mesh
from nanoengine.state.slices import Copy, Held, Piece, make_piece, make_plan

BUCKET_BYTES = 64 << 20
_IN_FLIGHT = 2  # buckets a rank has sent and not yet seen taken


def model_pieces(models: Sequence[Transformer]) -> Held:
    """The weights of a model, or of the stages a rank holds, under their Hugging Face names. The
    tensors are views: what is copied into them is in the model (then `repack` it)."""
    found: dict[str, Held] = {}
    for model in models:
        slices = hf_slices(model)
        for name, view in hf_views(model).items():
            part = slices.get(name)
            runs = [(view, part)] if part is None else part.single_runs(view)
            found.setdefault(name, [(make_piece(name, x, run), x) for x, run in runs])
    return [held for pieces in found.values() for held in pieces]


def copy_local(copies: Iterable[Copy], held: Held, wanted: Held) -> int:
    """Copies within one process. Returns the bytes written."""
    num_bytes = 0
    with torch.no_grad():
        for copy in copies:
            source, into = held[copy.source_piece], wanted[copy.to_piece]
            target = copy.box.of(into[1], into[0].box)
            target.copy_(copy.box.of(source[1], source[0].box))
            num_bytes += target.numel() * target.element_size()
    return num_bytes


@dataclass(frozen=True)
class _Transfer:
    """Copies between one pair of ranks that share a message."""

    source: int
    to: int
    copies: tuple[Copy, ...]


class Resharder:
    """Copies what the ranks of `mesh` hold into what they want; the plan is made on first use and
    whenever the descriptions change. One process needs no mesh."""

    def __init__(self, mesh: Mesh | None = None, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._mesh = mesh
        self._bucket_bytes = bucket_bytes
        self._key: tuple[list[Piece], list[Piece]] | None = None
        self._held: list[list[Piece]] = []
        self._transfers: list[_Transfer] = []
        self.copies: list[Copy] = []  # the plan: everybody's, in one order on all ranks
        self.num_plans = 0

    def run(self, held: Held, wanted: Held) -> int:
        """All ranks call it together. Returns the bytes this rank wrote."""
        self.prepare([piece for piece, _ in held], [piece for piece, _ in wanted])
        me = 0 if self._mesh is None else self._mesh.rank()
        num_bytes = 0
        flying: list[tuple[Tensor, Handle]] = []
        for number, transfer in enumerate(self._transfers):
            if transfer.source == transfer.to == me:
                num_bytes += copy_local(transfer.copies, held, wanted)
            elif transfer.source == me:
                while len(flying) >= _IN_FLIGHT:
                    flying.pop(0)[1].wait()
                flying.append(self._send(transfer, number, held))
            elif transfer.to == me:
                num_bytes += self._receive(transfer, number, wanted)
        for _, handle in flying:
            handle.wait()
        return num_bytes

    def prepare(self, held: list[Piece], wanted: list[Piece]) -> None:
        """Make the plan, or find that the last one still fits. `ValueError` on every rank where
        something wanted is held by nobody."""
        mesh = self._mesh
        has_changed = self._key != (held, wanted)
        if mesh is not None:
            has_changed = bool(mesh.max_int(WORLD, int(has_changed)))
        if not has_changed:
            return
        mine = [[p.to_json() for p in held], [p.to_json() for p in wanted]]
        everyone = [mine] if mesh is None else mesh.gather_json(WORLD, mine)
        self._held = [[Piece.from_json(fields) for fields in have] for have, _ in everyone]
        wants = [[Piece.from_json(fields) for fields in want] for _, want in everyone]
        self.copies = make_plan(self._held, wants)
        self._transfers = list(_bundle(self.copies, self._held, self._bucket_bytes))
        self._key = (held, wanted)
        self.num_plans += 1

    def _send(self, transfer: _Transfer, tag: int, held: Held) -> tuple[Tensor, Handle]:
        assert self._mesh is not None, "one rank sends nothing"
        parts = []
        for copy in transfer.copies:
            piece, tensor = held[copy.source_piece]
            parts.append(copy.box.of(tensor.detach(), piece.box).reshape(-1))
        bucket = torch.cat(parts).to(self._mesh.device)
        handle = self._mesh.send(WORLD, bucket, transfer.to, tag=tag, is_async=True)
        return bucket, handle

    def _receive(self, transfer: _Transfer, tag: int, wanted: Held) -> int:
        assert self._mesh is not None, "one rank receives nothing"
        copies = transfer.copies
        dtype = getattr(torch, self._held[transfer.source][copies[0].source_piece].dtype)
        numel = sum(copy.box.numel for copy in copies)
        bucket = torch.empty(numel, dtype=dtype, device=self._mesh.device)
        self._mesh.recv(WORLD, bucket, transfer.source, tag=tag)
        num_bytes = at = 0
        with torch.no_grad():
            for copy in copies:
                piece, tensor = wanted[copy.to_piece]
                target = copy.box.of(tensor, piece.box)
                target.copy_(bucket[at : at + copy.box.numel].view(copy.box.shape))
                at += copy.box.numel
                num_bytes += target.numel() * target.element_size()
        return num_bytes


def _bundle(
    copies: Sequence[Copy], held: Sequence[Sequence[Piece]], bucket_bytes: int
) -> Iterator[_Transfer]:
    """Messages of at most `bucket_bytes`, each of one pair and dtype. All ranks walk them in the
    same order, so none waits for another in a circle."""
    groups: dict[tuple[int, int, str], list[Copy]] = {}
    for copy in copies:
        dtype = held[copy.source][copy.source_piece].dtype
        groups.setdefault((copy.source, copy.to, dtype), []).append(copy)
    for (source, to, dtype), members in groups.items():
        width = getattr(torch, dtype).itemsize
        taken: list[Copy] = []
        size = 0
        for copy in members:
            if taken and size + copy.box.numel * width > bucket_bytes:
                yield _Transfer(source, to, tuple(taken))
                taken, size = [], 0
            taken.append(copy)
            size += copy.box.numel * width
        yield _Transfer(source, to, tuple(taken))
