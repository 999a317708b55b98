"""Slices of tensors that need not exist: boxes, who holds which, and the list of copies.

A piece says "I hold (or want) this box of the tensor of that name and shape". Pieces come from a
whole parameter, from a tensor-parallel rank's part of a fused one, from a run of ZeRO's flat
buffer, from a file. A plan compares what everybody holds with what everybody wants, once, and lists
the copies; `reshard.py` replays it between processes, `checkpoint.py` reads files with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from nanoengine.parallel.parameter_record import Slice
from nanoengine.state.tensor_file import dtype_name

T = TypeVar("T")


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
    """The box that somebody holds, or wants, of the tensor `name` of shape `whole`."""

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
    return Piece(name, tuple(whole), box, dtype_name(tensor.dtype))


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
    dtype = dtype_name(flat.dtype)
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


def _rectangles(shape: tuple[int, ...], flat: Tensor, first: int) -> Iterator[tuple[Box, Tensor]]:
    """A run of row-major elements as boxes: the end of a row, whole rows, the start of a row; in
    a stack of matrices an incomplete matrix is cut up likewise."""
    if len(shape) == 1:
        if len(flat):
            yield Box((first,), (len(flat),)), flat
        return
    inner, last = math.prod(shape[1:]), first + len(flat)
    at = first
    while at < last:
        row, within = divmod(at, inner)
        if within == 0 and last - at >= inner:
            rows = (last - at) // inner
            size, box = rows * inner, Box((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            yield box, flat[at - first : at - first + size].view(box.shape)
        else:
            size = min(inner - within, last - at)
            for box, view in _rectangles(shape[1:], flat[at - first : at - first + size], within):
                yield Box((row, *box.begin), (1, *box.shape)), view.unsqueeze(0)
        at += size


@dataclass(frozen=True)
class Copy:
    """`box` from piece number `source_piece` of rank `source` into one of rank `to`."""

    source: int
    source_piece: int
    to: int
    to_piece: int
    box: Box


def cover(wanted: Box, sources: Iterable[tuple[Box, T]]) -> tuple[list[tuple[Box, T]], list[Box]]:
    """(what to take from which source, what none of them has), earlier sources first."""
    parts: list[tuple[Box, T]] = []
    missing = [wanted]
    for held, source in sources:
        rest: list[Box] = []
        for box in missing:
            common = box.intersect(held)
            if common is None:
                rest.append(box)
                continue
            parts.append((common, source))
            rest += box.minus(common)
        missing = rest
        if not missing:
            break
    return parts, missing


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
    parts, missing = cover(piece.box, [(source.box, (r, n)) for r, n, source in order])
    for common, (rank, source_number) in parts:
        yield Copy(rank, source_number, to, number, common)
    if missing:
        raise ValueError(f"{piece.name}: nobody holds {missing[0]}; nothing was copied")
