"""Weights through a folder per version, which any number of machines may read.

    ROOT/v00000012/manifest.json          version, base version, tensors with their checksums
    ROOT/v00000012/config.json, model.safetensors ..      a Hugging Face folder
    ROOT/v00000013-changes/changes.safetensors            or what has changed since a base version

A folder is written beside its place, flushed to the disk and renamed: it is whole or not there. The
last two versions stay. A full folder is also what an inference server at an address can be told to
load (`/update_weights` with the folder's name below its --weights-root).

With changes, rank 0 and each replica keep the tensors of their last version in host memory. A
replica whose last version is another one raises `BaseVersionMissing` and is given the full folder.

Left out: changes found by each rank on its own part; rank 0 is given whole tensors for that.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kernels.transport.checksum import checksum
from nanoengine.formats.hf import read_state, write_folder
from nanoengine.parallel.layout import WORLD
from nanoengine.plan.footprint import weight_bytes
from nanoengine.state.checkpoint import sync_folder
from nanoengine.state.export import export_hf
from nanoengine.state.tensor_file import dtype_name, write_tensors
from nanoengine.state.whole_engine import Engine
from nanorl.distributed.weights.delta import apply_changes, changes
from nanorl.distributed.weights.offer import (
    BaseVersionMissing,
    Named,
    Offer,
    WeightEntry,
    WeightsRefused,
)

_MANIFEST = "manifest.json"
_CHANGES = "changes.safetensors"
_PLACES, _VALUES = "#places", "#values"  # no Hugging Face name has a #
_FOLDER = re.compile(r"(\.draft-)?v(\d{8,})(-changes)?")


@dataclass(frozen=True, kw_only=True)
class DiskOffer(Offer):
    """A version in a folder."""

    folder: str


class DiskSender:
    """One learner rank's end: all ranks fill the folder that rank 0 lays out and renames."""

    def __init__(self, key: str, root: str, *, has_changes: bool = False) -> None:
        self.key = key
        self._root = Path(root)
        self._has_changes = has_changes
        self._version: int | None = None
        self._kept: dict[str, Tensor] = {}  # with changes: rank 0's copy of that version

    def send(self, engine: Engine, version: int) -> DiskOffer:
        """See `WeightSender`. With changes, a version that is sent again goes out in full. OSError,
        on all ranks, where the disk is full."""
        has_base = self._has_changes and self._version not in (None, version)
        base = self._version if has_base else None
        name = f"v{version:08d}" if base is None else f"v{version:08d}-changes"
        draft = self._root / f".draft-{name}"
        _on_rank_0(engine, lambda: self._make_room(engine, draft))
        tensors: dict[str, Tensor] = {}
        if not self._has_changes:
            with engine.optimizer.gathered():
                export_hf(engine.mesh, engine.models, draft)
        elif self._version != version:
            tensors = self._keep(engine, base)

        def finish() -> list[Any]:
            if self._has_changes:
                self._write(engine, draft, tensors, is_full=base is None)
            state = self._kept.items() if self._has_changes else read_state(draft)
            entries = [_entry(name, tensor) for name, tensor in state]
            self._publish(
                draft,
                self._root / name,
                DiskOffer(version=version, base_version=base, entries=tuple(entries), folder=name),
            )
            return [asdict(entry) for entry in entries]

        found = _on_rank_0(engine, finish)
        self._version = version
        entries = tuple(
            WeightEntry(**fields | {"shape": tuple(fields["shape"])}) for fields in found
        )
        return DiskOffer(
            version=version, base_version=base, entries=entries, folder=str(self._root / name)
        )

    def _make_room(self, engine: Engine, draft: Path) -> None:
        """A fresh draft. Asks for the room first: a file that is written through a map cannot say
        that the disk is full, the process is killed (SIGBUS)."""
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        needed = weight_bytes(engine.model.config, engine.model.dtype)
        free = shutil.disk_usage(draft).free
        if needed > free:
            raise OSError(
                f"{self._root}: a version of the weights takes {needed / 1e9:.2f} GB, and "
                f"{free / 1e9:.2f} GB are free; make room, or choose another transport"
            )

    def _keep(self, engine: Engine, base: int | None) -> dict[str, Tensor]:
        """Take over the engine's tensors (rank 0); returns what has changed since the base."""
        self._version, found = None, {}
        is_keeper = engine.mesh.rank() == 0
        for name, tensor in engine.export_state():  # collective: every rank runs through it
            if not is_keeper:
                continue
            kept, tensor = self._kept.get(name), tensor.detach().cpu()
            if base is None or kept is None:
                self._kept[name] = tensor.clone()
                continue
            changed = changes(kept, tensor)
            if changed is None:
                found[name] = tensor.clone()
            elif len(changed[0]):
                found[name + _PLACES], found[name + _VALUES] = changed
            kept.copy_(tensor)
        return found

    def _write(
        self, engine: Engine, draft: Path, tensors: dict[str, Tensor], *, is_full: bool
    ) -> None:
        if is_full:
            write_folder(draft, engine.model.config, self._kept)
        else:
            write_tensors(draft / _CHANGES, tensors)

    def _publish(self, draft: Path, place: Path, offer: DiskOffer) -> None:
        """Flush, rename, and remove all but this version and the one before."""
        (draft / _MANIFEST).write_text(json.dumps(asdict(offer), indent=1) + "\n")
        for path in (*draft.iterdir(), draft):
            sync_folder(path)
        shutil.rmtree(place, ignore_errors=True)
        os.rename(draft, place)
        sync_folder(self._root)
        kept = {offer.version, offer.base_version, self._version}
        for path in self._root.iterdir():
            named = _FOLDER.fullmatch(path.name)
            if named and int(named[2]) not in kept:
                shutil.rmtree(path, ignore_errors=True)


class DiskReceiver:
    """One replica's end."""

    refuses_nan = True

    def __init__(self, key: str, *, has_changes: bool = False) -> None:
        self.key = key
        self._has_changes = has_changes
        self._version: int | None = None
        self._kept: dict[str, Tensor] = {}  # with changes: the tensors of that version

    def receive(self, offer: Offer) -> Named:
        assert isinstance(offer, DiskOffer), "senders and receivers come from one transport"
        base = offer.base_version
        if base is not None and base != self._version:
            raise BaseVersionMissing(
                f"version {offer.version} came as changes since version {base}; here is "
                + ("none" if self._version is None else f"version {self._version}")
            )
        self._version = None  # until all is verified
        try:
            _require_version(offer)
            yield from self._receive_whole(offer) if base is None else self._receive_changes(offer)
        except (OSError, ValueError, SafetensorError) as error:
            raise WeightsRefused(f"{offer.folder}: {error}") from error
        self._version = offer.version if self._has_changes else None

    def _receive_whole(self, offer: DiskOffer) -> Named:
        expected = {entry.name: entry for entry in offer.entries}
        for name, tensor in read_state(offer.folder):
            if name not in expected:
                raise WeightsRefused(f"{offer.folder} holds {name}, which was not offered")
            expected.pop(name).verify(tensor)
            if self._has_changes:
                self._kept[name] = tensor = tensor.clone()
            yield name, tensor
        if expected:
            raise WeightsRefused(f"{offer.folder} lacks {', '.join(list(expected)[:4])}")

    def _receive_changes(self, offer: DiskOffer) -> Named:
        found = load_file(Path(offer.folder) / _CHANGES)
        for entry in offer.entries:
            name = entry.name
            if name not in self._kept:
                raise WeightsRefused(f"{name} is new, and came as changes; nothing was loaded")
            if name in found:
                self._kept[name] = found[name]
            elif name + _PLACES in found:
                apply_changes(self._kept[name], found[name + _PLACES], found[name + _VALUES])
            yield name, entry.verify(self._kept[name])


def _on_rank_0(engine: Engine, act: Callable[[], Any]) -> Any:
    """Rank 0 acts; all ranks return its (JSON) result, or raise its OSError."""
    answer: list[Any] = ["", None]
    if engine.mesh.rank() == 0:
        try:
            answer[1] = act()
        except OSError as error:
            answer[0] = str(error)
    problem, result = engine.mesh.gather_json(WORLD, answer)[0]
    if problem:
        raise OSError(problem)
    return result


def _require_version(offer: DiskOffer) -> None:
    """WeightsRefused if another version lies in the folder now."""
    manifest = json.loads((Path(offer.folder) / _MANIFEST).read_text())
    if (manifest["version"], manifest["base_version"]) != (offer.version, offer.base_version):
        raise WeightsRefused(
            f"{offer.folder} holds version {manifest['version']}, {offer.version} was offered"
        )


def _entry(name: str, tensor: Tensor) -> WeightEntry:
    entry = WeightEntry(name, tuple(tensor.shape), dtype_name(tensor.dtype))
    return entry.sealed(checksum(tensor))
