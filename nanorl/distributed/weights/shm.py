"""Weights through memory that learner and replicas of one machine share.

    | ledger, one page | tensor | tensor | ...        the whole model once, at fixed places

The buffer is allocated and touched once and then used for every version. Each learner rank copies
what it owns to its place (planned like any change of layout, nanoengine/state/slices.py: no whole
tensor is put together anywhere else), with the checksum taken in the same pass; the ranks exchange
checksums, and the version is complete. Replicas read in place, tp ranks too: the only other copy is
the one into the model.

What a trainer has frozen (a vision tower) is written with the first version and stays in its place.

Left out: several machines (dist.py), and two versions side by side: the ledger makes the sender
wait for the readers of the last one (version_ledger.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name

import torch
from torch import Tensor

from kernels.transport.checksum import checksums, copy_with_checksums
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.layout import WORLD
from nanoengine.parallel.mesh import Mesh
from nanoengine.state.reshard import model_pieces
from nanoengine.state.slices import Box, Copy, Held, Piece, make_plan
from nanoengine.state.whole_engine import Engine
from nanorl.distributed.weights.offer import Named, Offer, WeightEntry, WeightsRefused, verified
from nanorl.distributed.weights.version_ledger import LEDGER_BYTES, ReaderLedger
from nanosched.shared_buffer import SharedBuffer

_FROZEN = "nanoengine.vision.tower_names:frozen_names"
ALIGNMENT = 64
"""Of each tensor: a cache line, and what vector stores want."""
PADDING_BYTES = 1 << 20


def frozen_tensors(models: Sequence[Transformer]) -> set[str]:
    """The Hugging Face names of what is not trained of vision towers, and so never changes."""
    towers = [tower for model in models if (tower := getattr(model, "visual", None)) is not None]
    return {name for tower in towers for name in resolve_name(_FROZEN)(tower)}


def shared_buffer_for(num_bytes: int) -> SharedBuffer:
    """With room for tensors of `num_bytes` together, up to 16,384 of them, and the ledger."""
    return SharedBuffer(LEDGER_BYTES + num_bytes + PADDING_BYTES)


@dataclass(frozen=True)
class _Layout:
    """The places of all that goes into the buffer: the tensors of the whole model, and this rank's
    copies."""

    entries: dict[str, WeightEntry]
    wanted: list[list[Piece]]  # by rank: the whole tensors that each sees to
    copies: list[Copy]  # from this rank
    put_together: list[str]  # tensors from several copies, of which this rank takes the checksum


class ShmSender:
    """One learner rank's end."""

    def __init__(self, key: str, buffer: SharedBuffer) -> None:
        self.key = key
        self._buffer = buffer
        self._pieces: list[Piece] | None = None
        self._layout = _Layout({}, [], [], [])
        self._frozen_names: set[str] = set()  # of all ranks: a pipeline has a tower on one
        self._frozen: dict[str, int] = {}  # what lies there for good, with its checksums

    def send(self, engine: Engine, version: int) -> Offer:
        """See `WeightSender`. `ValueError` if the weights do not fit the buffer; ReadersBusy."""
        mesh = engine.mesh
        ledger = ReaderLedger(self._buffer.view())
        with engine.optimizer.gathered():
            held = model_pieces(engine.models)
            self._prepare(engine, [piece for piece, _ in held])
            ledger.begin_writing()
            sums = self._write(mesh, held)
        self._frozen = {name: sums[name] for name in self._frozen_names}
        entries = tuple(entry.sealed(sums[name]) for name, entry in self._layout.entries.items())
        if mesh.rank() == 0:
            ledger.finish_writing(version)
        return Offer(version=version, entries=entries)

    def _prepare(self, engine: Engine, pieces: list[Piece]) -> None:
        mesh = engine.mesh
        if not mesh.max_int(WORLD, int(pieces != self._pieces)):
            return
        held = [
            [Piece.from_json(fields) for fields in theirs]
            for theirs in mesh.gather_json(WORLD, [piece.to_json() for piece in pieces])
        ]
        self._layout = _lay_out(held, mesh.rank())
        end = max((e.begin + e.num_bytes for e in self._layout.entries.values()), default=0)
        if end > self._buffer.num_bytes:
            raise ValueError(
                f"num_bytes: the weights need {end} bytes of shared memory, the transport was "
                f"opened with {self._buffer.num_bytes}; open it with the model's size"
            )
        frozen = mesh.gather_json(WORLD, sorted(frozen_tensors(engine.models)))
        self._frozen_names = {name for theirs in frozen for name in theirs}
        self._pieces, self._frozen = pieces, {}

    def _write(self, mesh: Mesh, held: Held) -> dict[str, int]:
        """Copy this rank's part; the checksums of all tensors, once all ranks have written."""
        layout, memory = self._layout, as_tensor(self._buffer)
        mesh.barrier()  # every rank has seen that nobody reads
        whole_pieces: dict[str, tuple[Tensor, Tensor]] = {}  # place, source
        with torch.no_grad():
            for copy in layout.copies:
                piece, tensor = held[copy.source_piece]
                whole = layout.wanted[copy.to][copy.to_piece]
                if whole.name in self._frozen:
                    continue
                source = copy.box.of(tensor, piece.box)
                target = copy.box.of(tensor_at(memory, layout.entries[whole.name]), whole.box)
                if copy.box == whole.box:
                    whole_pieces[whole.name] = target, source
                else:
                    target.copy_(source)
            found = copy_with_checksums(*_columns(whole_pieces.values()))
        mesh.barrier()
        rest = [name for name in layout.put_together if name not in self._frozen]
        found += checksums([tensor_at(memory, layout.entries[name]) for name in rest])
        sums = dict(zip((*whole_pieces, *rest), found, strict=True))
        everyone = dict(self._frozen)
        for theirs in mesh.gather_json(WORLD, sums):
            everyone |= theirs
        return everyone


def _columns(pairs: Collection[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [place for place, _ in pairs], [source for _, source in pairs]


def _lay_out(held: Sequence[Sequence[Piece]], rank: int) -> _Layout:
    """Deal the whole tensors out to the ranks, which then read what they hold from themselves: so
    data-parallel ranks share the work."""
    entries: dict[str, WeightEntry] = {}
    wanted: list[list[Piece]] = [[] for _ in held]
    loads = [0] * len(held)
    at = LEDGER_BYTES
    for piece in (piece for pieces in held for piece in pieces):
        if piece.name in entries:
            continue
        entry = WeightEntry(piece.name, piece.whole, piece.dtype, begin=at)
        entries[piece.name] = entry
        at += aligned(entry.num_bytes)
        least = loads.index(min(loads))
        loads[least] += entry.num_bytes
        box = Box((0,) * len(piece.whole), piece.whole)
        wanted[least].append(Piece(piece.name, piece.whole, box, piece.dtype))
    copies = make_plan(held, wanted)
    is_whole = {
        wanted[copy.to][copy.to_piece].name
        for copy in copies
        if copy.box == wanted[copy.to][copy.to_piece].box
    }
    rest = [piece.name for piece in wanted[rank] if piece.name not in is_whole]
    return _Layout(entries, wanted, [copy for copy in copies if copy.source == rank], rest)


class ShmReceiver:
    """One replica's end. Any number of processes read at once."""

    refuses_nan = True

    def __init__(self, key: str, buffer: SharedBuffer) -> None:
        self.key = key
        self._buffer = buffer

    def receive(self, offer: Offer) -> Named:
        ledger, memory = ReaderLedger(self._buffer.view()), as_tensor(self._buffer)
        ledger.require(offer.version)
        yield from verified([(entry, tensor_at(memory, entry)) for entry in offer.entries])
        ledger.require(offer.version)


def aligned(num_bytes: int) -> int:
    """The bytes that a tensor of `num_bytes` takes up."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def as_tensor(buffer: SharedBuffer) -> Tensor:
    """The bytes of the buffer in this process."""
    return torch.frombuffer(buffer.view(), dtype=torch.uint8)


def tensor_at(memory: Tensor, entry: WeightEntry) -> Tensor:
    """The tensor in its place, a view; WeightsRefused if the place is not in the memory."""
    end = entry.begin + entry.num_bytes
    if entry.begin < 0 or end > len(memory):
        raise WeightsRefused(
            f"{entry.name} is offered at bytes {entry.begin}:{end}, the buffer has "
            f"{len(memory)}; nothing was loaded"
        )
    return memory[entry.begin : end].view(entry.torch_dtype).view(entry.shape)
