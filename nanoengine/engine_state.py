"""What an engine writes to a checkpoint and takes from one, alone or as one of many ranks.

Tensors go by the names of the whole model's parameters (`master.layers.0.qkv.weight`), and a rank
stores and reads boxes of them, so the layout that reads need not be the one that wrote. Random
states belong to ranks: with as many ranks as before each gets its own back, else all get rank 0's.

A process alone writes one file with whole tensors, at once or (as a run of one rank) in the
background; both are read alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanoengine.checkpoint import (
    Checkpoint,
    CheckpointError,
    open_checkpoint,
    save_checkpoint,
)
from nanoengine.model.layers import slice_of
from nanoengine.optim import AdamW
from nanoengine.parallel.mesh import WORLD, Mesh
from nanoengine.rng import get_rng_state, set_rng_state
from nanoengine.sharded_checkpoint import ShardedWriter, rng_pieces
from nanoengine.slices import Held, Piece, cut_parameter, make_piece

if TYPE_CHECKING:
    from nanoengine.engine import Engine


def save(engine: Engine, path: Path, cursor: dict[str, Any], in_background: bool) -> Path | None:
    rng_tensors, rng_values = get_rng_state(engine.model.device)
    meta = {
        "version": engine.version,
        "step_count": engine.optimizer.step_count,
        "dtype": engine.config.dtype,
        "rng": rng_values,
        "cursor": cursor,
    }
    keep = engine.config.keep_checkpoints
    if isinstance(engine.optimizer, AdamW) and not in_background:
        engine.wait_saved()
        tensors = {**engine.optimizer.state(), **rng_tensors}
        return save_checkpoint(path, engine.version, tensors, meta, keep=keep)
    mesh = engine.mesh if engine.mesh.size() > 1 else None
    if engine._saver is None or engine._saver.root != path:
        engine.wait_saved()
        engine._saver = ShardedWriter(path, mesh, keep=keep)
    held = [*optimizer_pieces(engine), *rng_pieces(engine.mesh.rank(), rng_tensors)]
    rank_meta = {"rng": rng_values}
    engine._saver.save(engine.version, held, meta, rank_meta, in_background=in_background)
    return None if in_background else engine._saver.wait()


def load(engine: Engine, path: Path) -> dict[str, Any]:
    engine.wait_saved()
    mesh = engine.mesh
    wanted = optimizer_pieces(engine)
    checkpoint = _open_together(path, mesh)
    _check(checkpoint, [piece for piece, _ in wanted], mesh)
    for piece, tensor in wanted:
        checkpoint.read_box(piece.name, piece.box, tensor)
    meta = checkpoint.meta
    engine.optimizer.step_count = meta["step_count"]
    engine.optimizer.phase_start = meta["step_count"] - meta["version"]
    engine.optimizer.write_back()
    engine.version = meta["version"]
    rank, values = 0, meta["rng"]
    if len(checkpoint.ranks) == mesh.size():
        rank, values = mesh.rank(), checkpoint.ranks[mesh.rank()]["rng"]
    prefix = "rng." if rank == 0 else f"rng.{rank}."
    names = [n.replace(prefix, "rng.", 1) for n in checkpoint.names() if n.startswith(prefix)]
    set_rng_state(
        engine.model.device,
        names,
        lambda name: checkpoint.read(name.replace("rng.", prefix, 1)),
        values,
    )
    cursor: dict[str, Any] = meta["cursor"]
    return cursor


def optimizer_pieces(engine: Engine) -> Held:
    """Masters and moments that this rank owns; writing to the tensors restores them."""
    return list(_pieces(engine))


def _pieces(engine: Engine) -> Iterator[tuple[Piece, Tensor]]:
    if isinstance(engine.optimizer, AdamW):
        for name, tensor in engine.optimizer.state().items():
            yield make_piece(name, tensor), tensor
        return
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for part, values in engine.optimizer.pieces(kind):  # type: ignore[arg-type]
            parameter = part.slot.param
            name = f"{kind}.{part.slot.name}"
            yield from cut_parameter(name, parameter.shape, slice_of(parameter), values, part.lo)


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


def _check(checkpoint: Checkpoint, wanted: list[Piece], mesh: Mesh) -> None:
    """The ranks together want exactly what is stored, in the shapes and dtypes stored."""
    mine = {piece.name: [list(piece.whole), piece.dtype] for piece in wanted}
    everyone: dict[str, Any] = {}
    for names in mesh.gather_json(WORLD, mine):
        everyone |= names
    stored = {
        name: [list(checkpoint.shape(name)), str(checkpoint.dtype(name)).removeprefix("torch.")]
        for name in checkpoint.names()
        if not name.startswith("rng.")
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
