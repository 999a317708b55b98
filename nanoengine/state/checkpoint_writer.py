"""Writes checkpoints (checkpoint.py): each rank what it holds, at once or in the background.

A box that several ranks hold is written by one of them. `save` returns when the tensors are copied;
a thread of each rank writes, and rank 0's completes the folder when all parts are there. The ranks
meet in the folder, without collectives, so training goes on meanwhile. Until the rename nothing of
it is visible, so a kill -9 of any rank at any moment leaves the checkpoint before.

Left out: folders that not all ranks see (parts would have to travel), and direct-to-disk I/O.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nanoengine.parallel.layout import WORLD
from nanoengine.parallel.mesh import Mesh
from nanoengine.state.checkpoint import (
    FORMAT,
    clear_leftovers,
    explain_write_error,
    free_name,
    next_serial,
    point_latest,
    prune,
    sync_folder,
    write_meta,
    write_synced,
)
from nanoengine.state.slices import Held, Piece
from nanoengine.state.tensor_file import CheckpointError, write_tensors

_POLL_S = 0.005
_FAILED = "failed"


def choose_writers(held: Sequence[Sequence[Piece]]) -> list[list[int]]:
    """Choose which of its pieces each rank writes: a box once, by the holder with least to do."""
    holders: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for rank, pieces in enumerate(held):
        for number, piece in enumerate(pieces):
            holders.setdefault((piece.name, piece.box), []).append((rank, number))
    chosen: list[list[int]] = [[] for _ in held]
    load = [0] * len(held)
    for (_, box), candidates in sorted(holders.items(), key=lambda item: -item[0][1].numel):
        rank, number = min(candidates, key=lambda candidate: load[candidate[0]])
        chosen[rank].append(number)
        load[rank] += box.numel
    return [sorted(numbers) for numbers in chosen]


def entry_name(piece: Piece) -> str:
    """The name of a box in its file: its tensor's name, and where it begins unless it is all
    of it (`master.norm`, `master.layers.0.down.weight@0,64`)."""
    is_whole = piece.box.shape == piece.whole
    return piece.name if is_whole else f"{piece.name}@{','.join(map(str, piece.box.begin))}"


class CheckpointWriter:
    """Writes this rank's part of checkpoints under `root`, one at a time.

    Without a mesh the caller says which of how many writers this is; the mesh is used in `save`
    alone, on the calling thread.
    """

    def __init__(
        self,
        root: Path | str,
        mesh: Mesh | None = None,
        *,
        rank: int = 0,
        world: int = 1,
        keep: int = 2,
        timeout_s: float = 600.0,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: must be at least 1")
        self.root, self._mesh, self._keep, self._timeout_s = Path(root), mesh, keep, timeout_s
        self._rank = rank if mesh is None else mesh.rank()
        self._world = world if mesh is None else mesh.size()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._result: Path | None = None
        self._key: list[Piece] | None = None
        self._mine: list[int] = []

    def save(
        self,
        step: int,
        held: Held,
        meta: Mapping[str, Any],
        rank_meta: Mapping[str, Any] | None = None,
        *,
        in_background: bool = False,
    ) -> None:
        """All ranks call it with what they hold. `meta` (rank 0's counts) and `rank_meta` (one for
        each rank) must survive JSON. Waits for the save before. Raises CheckpointError on every
        rank if the folder cannot be written; in the background, from the next call or `wait`."""
        self.wait()
        self._choose([piece for piece, _ in held])
        temporary = self.root / f".tmp-{step:08d}"
        self._together(lambda: self._prepare(temporary) if self._rank == 0 else None)
        tensors: dict[str, Tensor] = {}
        pieces: dict[str, Any] = {}
        # 8-byte elements first, so that every tensor is aligned in the file
        for number in sorted(self._mine, key=lambda number: -held[number][1].element_size()):
            piece, tensor = held[number][0], held[number][1].detach()
            entry = entry_name(piece)
            assert entry not in tensors, f"rank {self._rank} holds {entry} twice"
            # a background save must not see later updates
            tensors[entry] = tensor.to("cpu", copy=True) if in_background else tensor
            pieces[entry] = {"name": piece.name, "whole": piece.whole, "begin": piece.box.begin}
        part = {"pieces": pieces, "meta": dict(rank_meta or {})}
        self._result, self._error = None, None
        arguments = (step, temporary, tensors, part, dict(meta))
        if in_background:
            self._thread = threading.Thread(target=self._write, args=arguments, daemon=True)
            self._thread.start()
        else:
            self._write(*arguments)
            self.wait()

    def wait(self) -> Path | None:
        """Wait until the last save is complete. Returns its folder (None: there was none)."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result

    # -- on the calling thread ---------------------------------------------------------------

    def _choose(self, pieces: list[Piece]) -> None:
        """Work out who writes what, once, and again only when the pieces change."""
        if self._mesh is None:
            self._mine = list(range(len(pieces)))
            return
        has_changed = self._key != pieces
        if not self._mesh.max_int(WORLD, int(has_changed)):
            return
        everyone = self._mesh.gather_json(WORLD, [piece.to_json() for piece in pieces])
        held = [[Piece.from_json(fields) for fields in one] for one in everyone]
        self._mine = choose_writers(held)[self._rank]
        self._key = pieces

    def _together(self, work: Any) -> None:
        """Rank 0's work; its failure is everybody's."""
        problem = ""
        try:
            work()
        except OSError as error:
            problem = explain_write_error(self.root, {}, error)
        if self._mesh is not None:
            problem = "".join(self._mesh.gather_json(WORLD, problem))
        if problem:
            raise CheckpointError(problem)

    def _prepare(self, temporary: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        clear_leftovers(self.root)
        temporary.mkdir()

    # -- on the writing thread ---------------------------------------------------------------

    def _write(
        self,
        step: int,
        temporary: Path,
        tensors: dict[str, Tensor],
        part: dict[str, Any],
        meta: dict[str, Any],
    ) -> None:
        try:
            temporary.mkdir(exist_ok=True)  # without a mesh nobody was first
            name = f"rank_{self._rank:05d}"
            file = temporary / f"{name}.safetensors"
            part["file"] = write_tensors(file, tensors)
            write_synced(temporary / f".{name}.json", json.dumps(part))
            os.rename(temporary / f".{name}.json", temporary / f"{name}.json")
            if self._rank == 0:
                self._result = self._complete(step, temporary, meta)
            else:
                self._await(lambda: not temporary.exists(), temporary, "rank 0")
        except OSError as error:
            self._error = CheckpointError(explain_write_error(self.root, tensors, error))
            self._mark_failed(temporary)
        except Exception as error:  # the boundary of the thread: recorded, raised by `wait`
            self._error = error
            self._mark_failed(temporary)

    def _complete(self, step: int, temporary: Path, meta: dict[str, Any]) -> Path:
        parts = []
        for rank in range(self._world):
            path = temporary / f"rank_{rank:05d}.json"
            self._await(path.exists, temporary, f"rank {rank}")
            parts.append(json.loads(path.read_text()))
            path.unlink()
        names = [f"rank_{rank:05d}.safetensors" for rank in range(self._world)]
        write_meta(
            temporary,
            {
                "format": FORMAT,
                "serial": next_serial(self.root),
                "step": step,
                "files": {name: part["file"] for name, part in zip(names, parts, strict=True)},
                "pieces": {name: part["pieces"] for name, part in zip(names, parts, strict=True)},
                "ranks": [part["meta"] for part in parts],
                "meta": meta,
            },
        )
        final = free_name(self.root, step)
        os.rename(temporary, final)
        sync_folder(self.root)
        point_latest(self.root, final.name)
        prune(self.root, self._keep)
        return final

    def _await(self, is_there: Any, temporary: Path, who: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not is_there():
            if (temporary / _FAILED).exists():
                raise CheckpointError(
                    f"{temporary.name} was given up: another rank could not write its part; the "
                    "checkpoint before it is intact"
                )
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{who} wrote nothing for {self._timeout_s:.0f} s: it died or does not see "
                    f"{self.root}; the checkpoint before {temporary.name} is intact"
                )
            time.sleep(_POLL_S)

    def _mark_failed(self, temporary: Path) -> None:
        if self._world == 1:
            shutil.rmtree(temporary, ignore_errors=True)
            return
        try:
            (temporary / _FAILED).touch()
        except OSError:  # then the others' time runs out
            shutil.rmtree(temporary, ignore_errors=True)
