"""Checkpoints that survive kill -9, a full disk and a flipped bit: their folders, and reading them.

    ROOT/latest                                     name of the newest complete checkpoint
    ROOT/step_00000012/rank_00000.safetensors ...   the boxes of whole tensors that a rank wrote
    ROOT/step_00000012/meta.json                    which boxes; what the ranks stored; checksums

A checkpoint is written to a hidden temporary folder (checkpoint_writer.py), flushed to the disk,
renamed, and only then named in `latest`, which is itself replaced atomically: at every moment
`latest` names a complete checkpoint or does not exist. Nothing is ever written into an existing
checkpoint.

The format knows names, whole shapes and boxes, not layouts: what is read here are whole tensors, or
any boxes of them, so a run can go on in another layout. Checkpoints of the first format, which had
whole tensors in one file, are read alike. Tensor files are plain safetensors (any reader opens
them). Python objects are JSON, never pickles. Checksums are CRC-32: they find accidents, not
forgeries.

The states of the random generators that a run may use, Python's and NumPy's global ones and
PyTorch's of the CPU and of the engine's GPU, go with the tensors.

Left out: several runs that write to one root; generators that their owner seeds by itself, as the
samplers do.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoengine.state.slices import Box, Held, cover, make_piece
from nanoengine.state.tensor_file import CHUNK_BYTES, CheckpointError, read_header, read_tensor

META, LATEST = "meta.json", "latest"
FORMAT = 2
READABLE_FORMATS = (1, FORMAT)


@dataclass(frozen=True)
class _Part:
    """The place of a box of a tensor."""

    file: str
    at: int  # byte position
    box: Box


class Checkpoint:
    """One complete checkpoint, verified when opened: whole tensors by name, whoever wrote which
    part of them. `read_into` and `read_box` fill a tensor in place."""

    def __init__(self, folder: Path, meta: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        self.folder = folder
        self.meta = meta
        self.ranks = ranks  # what each rank stored for itself
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, torch.dtype] = {}
        self._parts: dict[str, list[_Part]] = {}

    def names(self) -> list[str]:
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        return self._kinds[name]

    def read_into(self, name: str, out: Tensor) -> None:
        """Fill `out`, which must have the stored shape and dtype."""
        if tuple(out.shape) != self.shape(name) or out.dtype != self.dtype(name):
            raise ValueError(
                f"{name}: stored as {self.dtype(name)} {self.shape(name)}, "
                f"asked for as {out.dtype} {tuple(out.shape)}"
            )
        self.read_box(name, Box((0,) * out.ndim, tuple(out.shape)), out)

    def read_box(self, name: str, box: Box, out: Tensor) -> None:
        """Fill `out`, of the box's shape, with that part of a tensor. Reads the rows it needs."""
        parts, missing = cover(box, [(part.box, part) for part in self._parts[name]])
        for common, part in parts:
            self._copy(part, common, common.of(out, box))
        if missing:
            raise CheckpointError(f"{self.folder}: nothing holds {missing[0]} of {name}")

    def read(self, name: str) -> Tensor:
        held = sum(math.prod(part.box.shape) for part in self._parts[name])
        if math.prod(self.shape(name)) > held:  # before memory is taken for it
            raise CheckpointError(f"{self.folder}: nothing holds all of {name}")
        out = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read_into(name, out)
        return out

    def _copy(self, part: _Part, box: Box, out: Tensor) -> None:
        rows = part.box
        if box.shape:
            rows = Box((box.begin[0], *rows.begin[1:]), (box.shape[0], *rows.shape[1:]))
        row_bytes = math.prod(rows.shape[1:]) * out.element_size()
        skipped = rows.begin[0] - part.box.begin[0] if box.shape else 0
        with open(self.folder / part.file, "rb") as file:
            file.seek(part.at + skipped * row_bytes)
            if rows == box and out.is_contiguous():
                read_tensor(file, out)
                return
            staged = torch.empty(rows.shape, dtype=out.dtype)
            read_tensor(file, staged)
        with torch.no_grad():
            out.copy_(box.of(staged, rows))

    def _add_file(self, file: str, pieces: Mapping[str, Any] | None) -> None:
        """Take in a safetensors file; `pieces` says which boxes its entries are. Files of the
        first format have none: their entries are whole tensors under their own names."""
        for entry, where in read_header(self.folder / file).items():
            name, whole, box = entry, where.shape, Box((0,) * len(where.shape), where.shape)
            if pieces is not None:
                name, whole = pieces[entry]["name"], tuple(pieces[entry]["whole"])
                box = Box(tuple(pieces[entry]["begin"]), where.shape)
            self._shapes[name], self._kinds[name] = whole, where.dtype
            self._parts.setdefault(name, []).append(_Part(file, where.begin, box))


def open_checkpoint(path: Path | str, share: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Open and verify a checkpoint: `path` is one, or a root whose `latest` is taken. With `share`
    = (i, n) this is one of n readers that verify a part of the files each.

    Raises CheckpointError naming the damaged file and, where there is one, the checkpoint to use
    instead.
    """
    path = Path(path)
    folder = path if (path / META).exists() or path.name.startswith("step_") else None
    if folder is None:
        folder = latest_checkpoint(path)
        if folder is None:
            raise CheckpointError(f"no checkpoint under {path}: start without --resume")
    try:
        return open_folder(folder, share)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"checkpoint {folder} is damaged ({reason}). {way_on(folder)}"
        ) from error


def latest_checkpoint(root: Path | str) -> Path | None:
    """The checkpoint that `latest` names; the newest one if that file is missing; else None."""
    root = Path(root)
    try:
        name = (root / LATEST).read_text().strip()
        if (
            name and name == Path(name).name and (root / name / META).exists()
        ):  # not out of the folder
            return root / name
    except (FileNotFoundError, NotADirectoryError):
        pass
    complete = list_checkpoints(root)
    return complete[-1] if complete else None


def lost_newest(root: Path | str) -> Path | None:
    """The checkpoint that `latest` names, if it is not complete any more: another one, or none, is
    the newest then."""
    try:
        name = (Path(root) / LATEST).read_text().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Path(root) / name if name and not (Path(root) / name / META).exists() else None


def list_checkpoints(root: Path | str) -> list[Path]:
    """Complete checkpoints in the order in which they were written.

    The order is that of their serial numbers: times of files change when they are copied or the
    clock is set, and steps begin anew with each phase of a run. Checkpoints without a number (of
    earlier versions, or damaged) come first, by time.
    """
    found = [meta.parent for meta in Path(root).glob(f"step_*/{META}")]
    return sorted(
        found, key=lambda folder: (_serial(folder), (folder / META).stat().st_mtime_ns, folder.name)
    )


def next_serial(root: Path) -> int:
    """The serial number of the checkpoint that is written next under `root`."""
    return 1 + max((_serial(folder) for folder in list_checkpoints(root)), default=0)


def _serial(folder: Path) -> int:
    try:
        return int(json.loads(json.loads((folder / META).read_text())["body"])["serial"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def write_meta(folder: Path, record: Mapping[str, Any]) -> None:
    """The last file of a checkpoint: with it the folder is complete."""
    body = json.dumps(record)
    write_synced(folder / META, json.dumps({"crc32": zlib.crc32(body.encode()), "body": body}))
    sync_folder(folder)


def write_synced(path: Path, text: str) -> None:
    # Not through a link: the folder may have come from elsewhere.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def open_folder(folder: Path, share: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Verify everything (or of the files only each n-th, from the i-th on, with share = (i, n));
    any failure is an OSError, ValueError, KeyError or TypeError."""
    record = _read_record(folder)
    if record["format"] not in READABLE_FORMATS:
        raise ValueError(
            f"format {record['format']}: this version reads formats "
            f"{' and '.join(map(str, READABLE_FORMATS))}"
        )
    for name in record["files"]:
        if Path(name).name != name:  # the folder may be somebody else's
            raise ValueError(f"{name[:80]!r} is no name of a file in it")
    first, step = share
    for name, expected in list(record["files"].items())[first::step]:
        verify_file(folder / name, expected)
    checkpoint = Checkpoint(folder, record["meta"], record.get("ranks", []))
    for name in record["files"]:
        checkpoint._add_file(name, record["pieces"][name] if "pieces" in record else None)
    return checkpoint


def _read_record(folder: Path) -> dict[str, Any]:
    outer = json.loads((folder / META).read_text())
    if zlib.crc32(outer["body"].encode()) != outer["crc32"]:
        raise ValueError(f"{folder / META}: the checksum does not match")
    record: dict[str, Any] = json.loads(outer["body"])
    return record


def read_cursor(folder: Path) -> dict[str, Any]:
    """The caller's own JSON in a checkpoint, whose tensors are not looked at. CheckpointError if
    its meta.json is damaged."""
    try:
        cursor: dict[str, Any] = _read_record(folder)["meta"]["cursor"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"checkpoint {folder} is damaged ({reason}). {way_on(folder)}"
        ) from error
    return cursor


def adopt_checkpoint(folder: Path, root: Path, cursor: Mapping[str, Any]) -> Path:
    """Have the checkpoint `folder`, of another root, with another cursor under `root`, as its
    newest. Both then own it: nothing is ever written into the files of a checkpoint, so they are
    shared where the file system can (hard links), and each root deletes its own names of them."""
    record = _read_record(folder)
    record["meta"]["cursor"] = dict(cursor)
    root.mkdir(parents=True, exist_ok=True)
    clear_leftovers(root)
    temporary = root / f".tmp-{folder.name}"
    share_folder(folder, temporary)
    (temporary / META).unlink()  # a name of theirs
    write_meta(temporary, record)
    final = free_name(root, record["step"])
    os.rename(temporary, final)
    sync_folder(root)
    point_latest(root, final.name)
    return final


def share_folder(folder: Path, target: Path) -> None:
    """`target` is `folder` again: hard links, or copies where the file system has none. Only for
    files that are replaced, never written into."""

    def share(source: str, destination: str) -> None:
        try:
            os.link(source, destination)
        except OSError:  # another file system, or one without links
            shutil.copy2(source, destination)

    shutil.copytree(folder, target, copy_function=share)


def verify_file(path: Path, expected: Mapping[str, int]) -> None:
    size, checksum = 0, 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    if size != expected["bytes"]:
        raise ValueError(f"{path} has {size} bytes instead of {expected['bytes']}")
    if checksum != expected["crc32"]:
        raise ValueError(f"{path}: the checksum does not match")


def way_on(folder: Path) -> str:
    others = [other for other in list_checkpoints(folder.parent) if other != folder]
    for other in reversed(others):
        try:
            open_folder(other)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return f"Resume from {other}, the newest undamaged one, or delete {folder}."
    return f"There is no undamaged one under {folder.parent}: delete it and start afresh."


def free_name(root: Path, step: int) -> Path:
    """`step_N`, or `step_N.1`, ... where a run that went back writes the same step again."""
    final, attempt = root / f"step_{step:08d}", 0
    while final.exists():
        attempt += 1
        final = root / f"step_{step:08d}.{attempt}"
    return final


def point_latest(root: Path, name: str) -> None:
    temporary = root / f".tmp-{LATEST}"
    try:
        write_synced(temporary, name + "\n")
        os.replace(temporary, root / LATEST)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(root)


def clear_leftovers(root: Path) -> None:
    """Delete what a killed writer left: half-written folders, and half-deleted ones."""
    for leftover in root.glob(".tmp-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()
    for folder in root.glob("step_*"):
        if not (folder / META).exists():
            shutil.rmtree(folder)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(root: Path, keep: int) -> None:
    """Delete all but the `keep` written last."""
    for folder in list_checkpoints(root)[:-keep]:
        delete_checkpoint(folder)


def forget_newer(folder: Path) -> None:
    """Delete the checkpoints written after `folder`: a run that goes back to it writes them again,
    and until then they would count as the newest."""
    checkpoints = list_checkpoints(folder.parent)
    for newer in checkpoints[checkpoints.index(folder) + 1 :]:
        delete_checkpoint(newer)


def delete_checkpoint(folder: Path) -> None:
    (folder / META).unlink(missing_ok=True)  # from now on it is not a checkpoint
    shutil.rmtree(folder, ignore_errors=True)


def explain_write_error(root: Path, tensors: Mapping[str, Tensor], error: OSError) -> str:
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    previous = latest_checkpoint(root)
    kept = (
        f"The previous checkpoint {previous} is intact." if previous else "There is no earlier one."
    )
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(root).free
        return (
            f"cannot save a checkpoint under {root}: {error.strerror} ({needed / 1e6:.1f} MB "
            f"needed, {free / 1e6:.1f} MB free). {kept} Free some space or choose another folder."
        )
    return f"cannot save a checkpoint under {root}: {error}. {kept} Choose a writable folder."


# -- random generators -----------------------------------------------------------------------------


def get_rng_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, JSON values)."""
    tensors = {"rng.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy_state = [name, [int(key) for key in keys], position, has_gauss, gauss]
    return tensors, {"python": random.getstate(), "numpy": numpy_state}


def set_rng_state(
    device: torch.device, names: list[str], read: Callable[[str], Tensor], values: dict[str, Any]
) -> None:
    """Restore what `get_rng_state` gave; `read` returns a tensor by its name."""
    torch.set_rng_state(read("rng.cpu"))
    if device.type == "cuda" and "rng.cuda" in names:
        torch.cuda.set_rng_state(read("rng.cuda"), device)
    version, internal, gauss = values["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def rng_pieces(rank: int, tensors: Mapping[str, Tensor]) -> Held:
    """Random states, which every rank has of its own: rank 0's keep their names."""
    prefix = "rng." if rank == 0 else f"rng.{rank}."
    names = {name: name.replace("rng.", prefix, 1) for name in tensors}
    return [(make_piece(names[name], tensor), tensor) for name, tensor in tensors.items()]
