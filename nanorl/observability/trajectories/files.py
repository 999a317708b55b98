"""A file or a folder that is there as a whole or not at all.

    with whole_file(path, force=False) as file:
        file.write(b"...")

It is written beside its place and moved there at the end. Whatever goes wrong before, a full disk
included, leaves what was there as it was, and nothing half.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

PICTURES = "pictures"
"""In a folder that is exported: the files of pictures, by their hash."""
_PICTURE = re.compile(r"[0-9a-f]{64}\.[a-z]+")


def check_place(path: Path, *, force: bool, suffix: str = "") -> None:
    """ValueError where something is there already that must not be replaced. With `suffix` the
    place is a folder's, of which only files with that suffix, and pictures, may be replaced."""
    if not path.exists():
        return
    if not force:
        raise ValueError(f"{path}: is there already; give --force to replace it, or another --out")
    if path.is_dir() != bool(suffix):
        kind = "a folder" if suffix else "a file"
        raise ValueError(f"{path}: {kind} is written, and there is another thing of that name")
    if suffix:
        others = sorted(one.name for one in path.iterdir() if not _is_ours(one, suffix))
        if others:
            raise ValueError(
                f"{path}: holds {others[0]}, which no export wrote, and would be replaced as a "
                "whole; give another --out"
            )


def _is_ours(one: Path, suffix: str) -> bool:
    if one.name == PICTURES and one.is_dir() and not one.is_symlink():
        return all(_PICTURE.fullmatch(file.name) for file in one.iterdir())
    return one.suffix == suffix


@contextmanager
def whole_file(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """A file to write into, which gets its name at the end. OSError names the file and the fix."""
    check_place(path, force=force)
    temporary = _beside(path)
    try:
        with _explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.unlink(missing_ok=True)
            with open(temporary, "xb") as file:  # not through a link that lies there
                yield file
                file.flush()
                os.fsync(file.fileno())
            check_place(path, force=force)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: Path, *, force: bool, suffix: str) -> Iterator[Path]:
    """An empty folder to write files with `suffix` into, which gets its name at the end."""
    check_place(path, force=force, suffix=suffix)
    temporary, replaced = _beside(path), _beside(path, "old")
    try:
        with _explained(path):
            temporary.mkdir(parents=True)
            yield temporary
            check_place(path, force=force, suffix=suffix)
            if path.exists():
                os.replace(path, replaced)
            os.replace(temporary, path)
    finally:
        if replaced.exists() and not path.exists():
            os.replace(replaced, path)
        for left in (temporary, replaced):
            shutil.rmtree(left, ignore_errors=True)


def _beside(path: Path, kind: str = "tmp") -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{kind}")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = (
            f"cannot write it ({error.strerror or error}): make room on the disk and check that "
            "the folder is writable"
        )
        raise OSError(error.errno, message, str(path)) from error
