"""Moves tensors between layouts: who holds which slice is compared once, then slices are copied.

Every rank describes what it has and what it wants as pieces: boxes of whole tensors that need not
exist anywhere. All ranks gather the descriptions, intersect the boxes and get the same list of
copies, which is kept for the next time. Replaying it costs the bytes and nothing else:

    same rank       dst.narrow().copy_(src.narrow()), no buffer and no message
    other rank      slices packed into a bucket, sent, unpacked; at most a few buckets are alive

A replica (the same box on several ranks) is read from the wanting rank itself where it can be, else
from the replicas in turn. Copies convert the dtype. Checkpoints use the same pieces with files in
place of ranks (`sharded_checkpoint.py`).

Left out: quantising on the way, and pieces that are not boxes (ZeRO's runs of a flat buffer are cut
into at most three boxes a matrix here).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoengine.model.config import ModelConfig
from nanoengine.model.hf import (
    hf_slices,
    hf_views,
    write_config,
    write_layout,
)
from nanoengine.model.layers import Slice
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.mesh import WORLD, Handle, Mesh

BUCKET_BYTES = 64 << 20
_IN_FLIGHT = 2  # buckets a rank has sent and not yet seen taken


@dataclass(frozen=True, order=True)
class Box:
    """A rectangle of indices: [begin, begin + shape) in each dimension."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        begin = tuple(max(a, b) for a, b in zip(self.begin, other.begin, strict=True))
        ends = zip(self.begin, self.shape, other.begin, other.shape, strict=True)
        end = [min(a + n, b + m) for a, n, b, m in ends]
        shape = tuple(e - b for b, e in zip(begin, end, strict=True))
        return Box(begin, shape) if all(n > 0 for n in shape) else None

    def minus(self, hole: Box) -> Iterator[Box]:
        """The rest around a box inside this one, as disjoint boxes."""
        begin, shape = list(self.begin), list(self.shape)
        for d in range(len(begin)):
            before = hole.begin[d] - begin[d]
            after = begin[d] + shape[d] - hole.begin[d] - hole.shape[d]
            for offset, size in ((0, before), (shape[d] - after, after)):
                if size > 0:
                    start = [*begin[:d], begin[d] + offset, *begin[d + 1 :]]
                    yield Box(tuple(start), (*shape[:d], size, *shape[d + 1 :]))
            begin[d], shape[d] = hole.begin[d], hole.shape[d]

    def of(self, tensor: Tensor, within: Box) -> Tensor:
        """The view of this box in the tensor that holds the box `within`."""
        for d, (begin, size) in enumerate(zip(self.begin, self.shape, strict=True)):
            tensor = tensor.narrow(d, begin - within.begin[d], size)
        return tensor


@dataclass(frozen=True)
class Piece:
    """What somebody holds, or wants, of the tensor `name` of shape `whole`."""

    name: str
    whole: tuple[int, ...]
    box: Box
    dtype: str = "float32"

    def to_json(self) -> list[Any]:
        return [self.name, self.whole, self.box.begin, self.box.shape, self.dtype]

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Piece:
        name, whole, begin, shape, dtype = fields
        return cls(name, tuple(whole), Box(tuple(begin), tuple(shape)), dtype)


Held = list[tuple[Piece, Tensor]]
"""Pieces with the tensors (views) that hold them, each of its box's shape."""


def make_piece(name: str, tensor: Tensor, part: Slice | None = None) -> Piece:
    """The piece of a tensor that is whole, or one run of a split dimension."""
    whole, begin = list(tensor.shape), [0] * tensor.ndim
    if part is not None:
        assert len(part.runs) == 1, "a fused parameter has several pieces; see cut_parameter"
        whole[part.dim], begin[part.dim] = part.whole, part.runs[0][0]
    box = Box(tuple(begin), tuple(tensor.shape))
    return Piece(name, tuple(whole), box, str(tensor.dtype).removeprefix("torch."))


def cut_parameter(
    name: str,
    shape: Sequence[int],
    part: Slice | None,
    flat: Tensor,
    first: int = 0,
) -> Held:
    """The pieces of a (fused, split, flat and sharded) parameter: `flat` holds the elements from
    number `first` on of the rank's own parameter of `shape`; `part` says where that lies in the
    whole one."""
    shape = tuple(shape)
    dtype = str(flat.dtype).removeprefix("torch.")
    found: Held = []
    for local, view in _rectangles(shape, flat, first):
        if part is None:
            found.append((Piece(name, shape, local, dtype), view))
            continue
        whole = (*shape[: part.dim], part.whole, *shape[part.dim + 1 :])
        at = 0
        for lo, hi in part.runs:
            begin, size = [0] * len(shape), list(shape)
            begin[part.dim], size[part.dim] = at, hi - lo
            inner = local.intersect(Box(tuple(begin), tuple(size)))
            if inner is not None:
                moved = list(inner.begin)
                moved[part.dim] += lo - at
                box = Box(tuple(moved), inner.shape)
                found.append((Piece(name, whole, box, dtype), inner.of(view, local)))
            at += hi - lo
    return found


def _rectangles(
    shape: tuple[int, ...], flat: Tensor, first: int
) -> Iterator[tuple[Box, Tensor]]:
    """A run of row-major elements as boxes: the end of a row, whole rows, the start of a row."""
    if len(shape) == 1:
        if len(flat):
            yield Box((first,), (len(flat),)), flat
        return
    assert len(shape) == 2, f"parameters are vectors and matrices, not {shape}"
    columns, last = shape[1], first + len(flat)
    at = first
    while at < last:
        row, column = divmod(at, columns)
        if column == 0 and last - at >= columns:
            rows = (last - at) // columns
            size, box = rows * columns, Box((row, 0), (rows, columns))
        else:
            size = min(columns - column, last - at)
            box = Box((row, column), (1, size))
        yield box, flat[at - first : at - first + size].view(box.shape)
        at += size


@dataclass(frozen=True)
class Copy:
    """`box` from piece number `source_piece` of rank `source` into one of rank `to`."""

    source: int
    source_piece: int
    to: int
    to_piece: int
    box: Box


def make_plan(held: Sequence[Sequence[Piece]], wanted: Sequence[Sequence[Piece]]) -> list[Copy]:
    """Every copy that fills all wanted pieces, in an order that depends on the arguments alone.

    `ValueError` names a tensor that nobody holds (in full), or holds in another shape.
    """
    by_name: dict[str, list[tuple[int, int, Piece]]] = {}
    for rank, pieces in enumerate(held):
        for number, piece in enumerate(pieces):
            by_name.setdefault(piece.name, []).append((rank, number, piece))
    copies: list[Copy] = []
    for to, pieces in enumerate(wanted):
        for number, piece in enumerate(pieces):
            if piece.name not in by_name:
                raise ValueError(f"{piece.name} is missing: no rank holds it; nothing was copied")
            copies += _fill(piece, to, number, by_name[piece.name])
    return copies


def _fill(
    piece: Piece, to: int, number: int, sources: Sequence[tuple[int, int, Piece]]
) -> Iterator[Copy]:
    for _, _, source in sources:
        if source.whole != piece.whole:
            raise ValueError(
                f"{piece.name} is {source.whole} here and {piece.whole} there; nothing was copied"
            )
    turn = to % max(1, len(sources))  # replicas share the work
    order = [s for s in sources if s[0] == to]
    order += [s for s in (*sources[turn:], *sources[:turn]) if s[0] != to]
    open_boxes = [piece.box]
    for rank, source_number, source in order:
        rest: list[Box] = []
        for box in open_boxes:
            common = box.intersect(source.box)
            if common is None:
                rest.append(box)
                continue
            yield Copy(rank, source_number, to, number, common)
            rest += box.minus(common)
        open_boxes = rest
        if not open_boxes:
            return
    raise ValueError(f"{piece.name}: nobody holds {open_boxes[0]}; nothing was copied")


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
        self.num_plans = 0

    def run(self, held: Held, wanted: Held) -> int:
        """All ranks call it together. Returns the bytes this rank wrote."""
        self._prepare([piece for piece, _ in held], [piece for piece, _ in wanted])
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

    def _prepare(self, held: list[Piece], wanted: list[Piece]) -> None:
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
        self._transfers = list(_bundle(make_plan(self._held, wants), self._held, self._bucket_bytes))
        self._key = (held, wanted)
        self.num_plans += 1

    def _send(self, transfer: _Transfer, tag: int, held: Held) -> tuple[Tensor, Handle]:
        assert self._mesh is not None, "one rank sends nothing"
        parts = []
        for copy in transfer.copies:
            piece, tensor = held[copy.source_piece]
            parts.append(copy.box.of(tensor.detach(), piece.box).reshape(-1))
        bucket = torch.cat(parts)
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


# -- models --------------------------------------------------------------------------------------


def model_pieces(models: Sequence[Transformer]) -> Held:
    """The weights of a model, or of the stages a rank holds, under their Hugging Face names. The
    tensors are views: what is copied into them is in the model (then `repack` it)."""
    found: dict[str, tuple[Piece, Tensor]] = {}
    for model in models:
        slices = hf_slices(model)
        for name, view in hf_views(model).items():
            found.setdefault(name, (make_piece(name, view, slices.get(name)), view))
    return list(found.values())


def export_hf(
    mesh: Mesh | None,
    models: Sequence[Transformer],
    config: ModelConfig,
    folder: Path | str,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a Hugging Face folder from a sharded model; all ranks call it. Rank 0 maps the file
    into memory and slices are copied into the map, so no rank holds a whole tensor of its own.
    `ValueError` before anything is written if a tensor is incomplete."""
    held = model_pieces(models)
    wanted: Held = []
    path = Path(folder)
    if mesh is None or mesh.rank() == 0:
        kind = dtype if dtype is not None else held[0][1].dtype
        path.mkdir(parents=True, exist_ok=True)
        shapes = {name: tuple(view.shape) for name, view in hf_views(_meta(config)).items()}
        views = write_layout(path, shapes, kind)
        wanted = [(make_piece(name, view), view) for name, view in views.items()]
    Resharder(mesh).run(held, wanted)
    if wanted:
        write_config(path, config, wanted[0][1].dtype)


def _meta(config: ModelConfig) -> Transformer:
    return Transformer(config, device="meta")


def check_names(
    wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """What is wrong with stored whole tensors, given the names and shapes that are wanted."""
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is unknown" for name in stored if name not in wanted]
    return problems + [
        f"{name} is {stored[name]}, must be {shape}"
        for name, shape in wanted.items()
        if name in stored and stored[name] != shape
    ]
