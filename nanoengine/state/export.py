"""Hugging Face folders straight from a sharded run: files are mapped, slices copied into the map.

Rank 0 lays the files out (header, then room for the tensors) and maps them into memory; every rank
hands over its slices through the resharding plan. No rank ever holds a whole tensor of its own, and
the page cache is the only buffer.

Left out: writing one file from several hosts (only rank 0 needs to see the folder).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.formats.hf import (
    clear_tensor_files,
    hf_views,
    model_class,
    name_in_folder,
    shard_names,
    write_config,
    write_index,
)
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.mesh import Mesh
from nanoengine.state.reshard import Resharder, model_pieces
from nanoengine.state.slices import Box, Held, Piece
from nanoengine.state.tensor_file import dtype_name, map_safetensors


def export_hf(
    mesh: Mesh | None,
    models: Sequence[Transformer],
    folder: Path | str,
    dtype: torch.dtype | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write what the ranks' `models` (a model, or a rank's pipeline stages) hold together as a
    folder that `transformers` loads; all ranks call it. `ValueError`, before anything is written,
    names a tensor that nobody holds. With ZeRO-3 call it inside `optimizer.gathered()`. Not
    atomic: write to a fresh folder and rename it."""
    config, path = models[0].config, Path(folder)
    held = model_pieces(models)
    kind = dtype if dtype is not None else models[0].dtype
    is_writer = mesh is None or mesh.rank() == 0
    shapes: dict[str, tuple[int, ...]] = {}
    if is_writer:
        whole = model_class(config)(config, device="meta")
        shapes = {name: tuple(view.shape) for name, view in hf_views(whole).items()}
    pieces = {
        name: Piece(name, shape, Box((0,) * len(shape), shape), dtype_name(kind))
        for name, shape in shapes.items()
    }
    resharder = Resharder(mesh)
    resharder.prepare([piece for piece, _ in held], list(pieces.values()))
    files: dict[str, list[str]] = {}
    wanted: Held = []
    if is_writer:
        path.mkdir(parents=True, exist_ok=True)
        clear_tensor_files(path)
        written = {name_in_folder(name, config): shape for name, shape in shapes.items()}
        sizes = {name: math.prod(shape) * kind.itemsize for name, shape in written.items()}
        files = shard_names(sizes, max_shard_bytes)
        views: dict[str, Tensor] = {}
        for file, names in files.items():
            views |= map_safetensors(path / file, {name: written[name] for name in names}, kind)
        wanted = [(pieces[name], views[name_in_folder(name, config)]) for name in pieces]
    resharder.run(held, wanted)
    if is_writer:
        for file in files:
            _sync(path / file)
        write_index(path, files, sizes)
        write_config(path, config, kind)


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
