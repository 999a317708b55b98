"""What an engine keeps: checkpoints, bit-equal resume, and its weights for others.

    engine.save(root, {"epoch": 2})     →  EngineState.save       masters, moments, random states
    engine.load(root)                   →  EngineState.load
    engine.export_state()               →  EngineState.export     Hugging Face's names and tensors

All ranks of a mesh call the same methods, and refuse together.

Left out: the format (checkpoint.py) and how it is written (checkpoint_writer.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.memory import release_memory
from nanoengine.formats import hf
from nanoengine.parallel.layout import WORLD
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.parameter_record import record_of
from nanoengine.parallel.sharded_adamw import ShardedAdamW
from nanoengine.parallel.tensor_parallel import gather_slice
from nanoengine.state.checkpoint import (
    Checkpoint,
    get_rng_state,
    open_checkpoint,
    rng_pieces,
    set_rng_state,
)
from nanoengine.state.checkpoint_writer import CheckpointWriter
from nanoengine.state.fingerprint import fingerprints
from nanoengine.state.kept_adamw import AdamW, Kind
from nanoengine.state.slices import Held, Piece, cut_parameter
from nanoengine.state.tensor_file import CheckpointError, dtype_name
from nanoengine.state.whole_engine import Engine

AVERAGE = "average."
"""How the names of an average's pieces begin (weight_average.py)."""


class EngineState:
    """Writes and reads what `engine` holds."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._saver: CheckpointWriter | None = None

    def export(self, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Each Hugging Face tensor once; views where `dtype` is the model's own. Split tensors
        are put together, on every rank: all must run through the iterator."""
        model, optimizer = self._engine.model, self._engine.optimizer
        comes_and_goes = isinstance(optimizer, ShardedAdamW) and optimizer.zero == 3
        with optimizer.gathered():
            slices = hf.hf_slices(model)
            for name, view in hf.export_state(model, dtype):
                if model.experts is not None and hf.is_expert(name):
                    yield from hf.gather_expert(name, view, model.experts)
                    continue
                if name in slices:
                    view = gather_slice(self._engine.mesh, view, slices[name])
                yield name, view.clone() if comes_and_goes else view

    def fingerprints(self) -> dict[str, str]:
        """The fingerprint of each tensor that the engine exports, by name."""
        return fingerprints(self._engine.export_state())

    def load_weights(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights (strictly, by Hugging Face name); the moments stay. Every rank takes
        its part of the whole tensors."""
        with self._engine.optimizer.gathered():
            hf.load_state(self._engine.model, state)
            self._engine.optimizer.read_weights()

    def save(
        self, path: Path | str, cursor: Mapping[str, Any] | None, *, in_background: bool
    ) -> Path | None:
        """Write a checkpoint under `path` (see checkpoint.py) and return its folder.

        `cursor` is the caller's own JSON, such as where the data stands; `load` gives it back.
        All ranks of a mesh call it, each writes its part. `in_background` returns None once the
        state is copied; `wait_saved`, or the next save, waits for the rest.
        """
        engine, whole_mesh = self._engine, self._engine.mesh
        release_memory()  # masters of bf16 weights are made for it, and may find no gap that fits
        rng_tensors, rng_values = get_rng_state(engine.model.device)
        meta = {
            "version": engine.version,
            **engine.optimizer.counts(),
            "dtype": engine.config.dtype,
            "rng": rng_values,
            "cursor": dict(cursor or {}),
        }
        if self._saver is None or self._saver.root != Path(path):
            self.wait_saved()
            mesh = whole_mesh if whole_mesh.size() > 1 else None
            self._saver = CheckpointWriter(path, mesh, keep=engine.config.keep_checkpoints)
        held = [*optimizer_pieces(engine.optimizer), *rng_pieces(whole_mesh.rank(), rng_tensors)]
        held += [] if engine.average is None else engine.average.pieces()
        rank_meta = {"rng": rng_values}
        self._saver.save(engine.version, held, meta, rank_meta, in_background=in_background)
        return None if in_background else self._saver.wait()

    def wait_saved(self) -> Path | None:
        """Wait until the last background save is complete; raises its CheckpointError."""
        return None if self._saver is None else self._saver.wait()

    def load(self, path: Path | str) -> dict[str, Any]:
        """Take over a checkpoint of any layout, or the latest under a root; what follows is
        bit-equal to a run that was never interrupted (of another layout: equal but for the order
        of sums). Returns the cursor. On CheckpointError nothing has changed, on any rank."""
        engine, optimizer, mesh = self._engine, self._engine.optimizer, self._engine.mesh
        self.wait_saved()
        checkpoint = _open_together(Path(path), mesh)
        averaged: Held = []
        if engine.average is not None and any(n.startswith(AVERAGE) for n in checkpoint.names()):
            averaged = engine.average.pieces()
        wanted = [piece for piece, _ in optimizer_pieces(optimizer) + averaged]
        _check(checkpoint, wanted, mesh, is_averaged=bool(averaged))
        for held in (averaged, _pieces(optimizer)):
            for piece, tensor in held:
                checkpoint.read_box(piece.name, piece.box, tensor)
        meta = checkpoint.meta
        optimizer.recount(meta)
        optimizer.phase_start = meta["step_count"] - meta["version"]
        optimizer.write_back()
        if engine.average is not None and not averaged:
            engine.average.follow(1.0)  # from a checkpoint of a phase before: it begins here
        engine.version = meta["version"]
        self._restore_random_states(checkpoint)
        cursor: dict[str, Any] = meta["cursor"]
        return cursor

    def _restore_random_states(self, checkpoint: Checkpoint) -> None:
        """They belong to ranks: of as many ranks as wrote each gets its own back, else all get
        rank 0's."""
        rank, values = 0, checkpoint.meta["rng"]
        if len(checkpoint.ranks) == self._engine.mesh.size():
            rank = self._engine.mesh.rank()
            values = checkpoint.ranks[rank]["rng"]
        prefix = "rng." if rank == 0 else f"rng.{rank}."
        names = [n.replace(prefix, "rng.", 1) for n in checkpoint.names() if n.startswith(prefix)]
        set_rng_state(
            self._engine.model.device,
            names,
            lambda name: checkpoint.read(name.replace("rng.", prefix, 1)),
            values,
        )


def optimizer_pieces(optimizer: AdamW) -> Held:
    """Masters and moments that this rank owns, by the names of the whole model's parameters
    (`master.layers.0.qkv.weight`)."""
    return list(_pieces(optimizer))


def _pieces(optimizer: AdamW) -> Iterator[tuple[Piece, Tensor]]:
    """The same one by one; writing to a tensor before the next is taken restores it."""
    kinds: tuple[Kind, ...] = ("master", "exp_avg", "exp_avg_sq")
    for kind in kinds:
        for entry, values in optimizer.entries(kind):
            parameter = entry.slot.param
            name = f"{kind}.{entry.slot.name}"
            yield from cut_parameter(
                name, parameter.shape, record_of(parameter).slice, values, entry.lo
            )


def _open_together(path: Path, mesh: Mesh) -> Checkpoint:
    """Each rank verifies a share of the files; what one finds damaged, all refuse."""
    problem, checkpoint = "", None
    try:
        checkpoint = open_checkpoint(path, (mesh.rank(), mesh.size()))
    except CheckpointError as error:
        problem = str(error)
    _refuse_together(problem, mesh)
    assert checkpoint is not None, "no problem, so there is a checkpoint"
    return checkpoint


def _check(checkpoint: Checkpoint, wanted: list[Piece], mesh: Mesh, *, is_averaged: bool) -> None:
    """The ranks together want exactly what is stored, in the shapes and dtypes stored; but for an
    average, which an engine that keeps none leaves alone."""
    others = ("rng.",) if is_averaged else ("rng.", AVERAGE)
    mine = {piece.name: [list(piece.whole), piece.dtype] for piece in wanted}
    everyone: dict[str, Any] = {}
    for names in mesh.gather_json(WORLD, mine):
        everyone |= names
    stored = {
        name: [list(checkpoint.shape(name)), dtype_name(checkpoint.dtype(name))]
        for name in checkpoint.names()
        if not name.startswith(others)
    }
    problems = [f"{name} is missing" for name in everyone if name not in stored]
    problems += [f"{name} is unknown" for name in stored if name not in everyone]
    problems += [
        f"{name} is {stored[name][1]} {tuple(stored[name][0])}, must be {dtype} {tuple(shape)}"
        for name, (shape, dtype) in everyone.items()
        if name in stored and stored[name] != [shape, dtype]
    ]
    if problems:
        raise CheckpointError(
            f"checkpoint {checkpoint.folder} is of another model ({'; '.join(problems[:3])}). "
            "Resume with the model and dtype it was written with"
        )


def _refuse_together(problem: str, mesh: Mesh) -> None:
    problems = [text for text in mesh.gather_json(WORLD, problem) if text]
    if problems:
        raise CheckpointError(problems[0])
