"""The folder of a training run: one process at a time, and none left behind by a bad option.

    with RunFolder(path, is_resumed=False) as folder:    # refuses a folder that another run holds
        ...                                              # build and check everything
        folder.begin(config)                             # config.json: from now on it is a run

The lock is `flock` on the file `lock`, so the kernel releases it however the process ends. Until
`begin`, leaving the block takes away whatever was made in the folder, and the folder if it is new.
Left out: file systems without `flock`, and machines that do not share it (some network mounts).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoengine.state.checkpoint import sync_folder, write_synced

CONFIG, LOCK = "config.json", "lock"


class RunFolder:
    """Holds the lock from construction to `close`."""

    def __init__(
        self,
        path: Path,
        *,
        is_resumed: bool,
        written: Sequence[str] = (),
        take_away: Callable[[Path], bool] = lambda _: False,
    ) -> None:
        """ValueError if another process uses the folder, if it holds a run that is not to be
        resumed, or if it is no run's and holds anything under a name that a run writes (`written`,
        as patterns): that would be overwritten. `take_away` may empty the folder of a run that
        nobody needs, and says whether it did."""
        self.path = path
        self._is_run = is_resumed
        self._new_folders = _made_folders(path)
        self._before = set(os.listdir(path))
        foreign = [] if self._is_run or (path / CONFIG).exists() else _found(path, written)
        if foreign:
            raise ValueError(
                f"--out {path}: holds {' and '.join(foreign[:2])}, which a run would overwrite, "
                "and is no run; choose another folder"
            )
        self._lock = take_lock(path / LOCK)
        has_run = (path / CONFIG).exists() and not is_resumed
        self.is_begun_anew = has_run and take_away(path)
        if has_run and not self.is_begun_anew:
            self.close()
            raise ValueError(
                f"{path} already holds a run, or a model: go on with it (--resume --out {path}) or "
                "choose another --out"
            )

    def begin(self, config: Mapping[str, Any]) -> None:
        """Write config.json, unless the run is a resumed one, which keeps its own."""
        if not self._is_run:
            self.record(config)

    def record(self, config: Mapping[str, Any]) -> None:
        """Write config.json, in place of the one that is there."""
        draft = self.path / f".{CONFIG}"
        write_synced(draft, json.dumps(config, indent=2) + "\n")
        os.replace(draft, self.path / CONFIG)
        sync_folder(self.path)
        self._is_run = True

    def close(self) -> None:
        """Release the lock; what is not a run by now goes away."""
        if not self._is_run:
            self._undo()
        os.close(self._lock)

    def _undo(self) -> None:
        for name in set(os.listdir(self.path)) - self._before:
            entry = self.path / name
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for folder in self._new_folders:
            if os.listdir(folder):  # somebody else has moved in
                return
            folder.rmdir()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _found(folder: Path, patterns: Sequence[str]) -> list[str]:
    return sorted({found.name for pattern in patterns for found in folder.glob(pattern)})


def _made_folders(path: Path) -> list[Path]:
    """`make_folders`, of a run's folder."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"--out {path}: the name is not UTF-8, which safetensors needs; choose another"
        ) from None
    try:
        return make_folders(path)
    except OSError as error:
        raise ValueError(
            f"--out {path}: cannot be made ({error.strerror}: {error.filename}); choose a folder "
            "that you may write into"
        ) from None


def make_folders(path: Path) -> list[Path]:
    """Make `path` and its parents; those that were not there, the innermost first."""
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    return new


def take_lock(path: Path) -> int:
    """The descriptor that holds the lock, with this process's id in the file for others to read.

    ValueError names the process that has it.
    """
    while True:
        # Not through a link, whose file would be emptied: the folder may have come from elsewhere.
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise ValueError(
                f"{path.parent} is in use by another process (pid {holder}): wait for it or stop "
                f"it (kill {holder}), or choose another --out"
            ) from None
        if path.exists() and os.path.samestat(os.fstat(lock), os.stat(path)):
            break
        os.close(lock)  # its holder has just taken the file away: lock the next one
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock
