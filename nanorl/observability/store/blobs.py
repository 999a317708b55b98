"""`BlobFolder`: contents of rollouts as files at any address that fsspec knows.

A blob is named by the hash of its bytes, so what is there already is not written again. It is
written before the row that names it and removed after it: a process that dies between the two
leaves a file that nobody names, never a row without its file. `sweep` removes such files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from typing import Any

from nanoengine.extras import missing
from nanorl.observability.store.database import StoreError

_NAME = re.compile(r"[0-9a-f]{64}(\.part)?")
_OWNER = re.compile(r"[0-9a-f]{32}")


def is_local(address: str) -> bool:
    """Say whether the address is one of this machine's files, which fsspec reads as they are."""
    scheme, separator, _ = address.partition("://")
    return "::" not in address and (not separator or scheme == "file")


class BlobFolder:
    """Files below `address`/`owner`; two stores of different owners never meet.

    ValueError where fsspec is missing or knows no such address.
    """

    def __init__(self, address: str, owner: str) -> None:
        try:
            import fsspec  # here: an extra
        except ModuleNotFoundError:
            raise missing(f"--store ...?blobs={address}", "fsspec", extra="blobs") from None
        try:
            self._files, root = fsspec.core.url_to_fs(address)
        except (ValueError, ImportError) as error:
            raise ValueError(f"--store ...?blobs={address}: {error}") from None
        if not _OWNER.fullmatch(owner):
            raise StoreError(f"{address}: {owner!r} is no owner of blobs, which is a number")
        self._address, self._root = address, f"{root.rstrip('/')}/{owner}"

    def put(self, content: bytes) -> str:
        """Write it, unless it is there; its name."""
        name = hashlib.sha256(content).hexdigest()
        path = self._path(name)
        try:
            if not self._files.exists(path):
                self._write(path, content)
        except OSError as error:
            raise self._error("write", name, error) from error
        return name

    def get(self, name: str) -> bytes:
        """StoreError if it is gone, or is not what it was."""
        try:
            content = self._files.cat_file(self._path(name))
        except OSError as error:
            raise self._error("read", name, error) from error
        if hashlib.sha256(content).hexdigest() != name:
            raise StoreError(f"the blob {name} at {self._address} is damaged: restore it")
        return content

    def remove(self, name: str) -> None:
        """One that is gone already is no error."""
        try:
            self._files.rm_file(self._path(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            raise self._error("remove", name, error) from error

    def sizes(self) -> dict[str, int]:
        """The sizes of all blobs in bytes, by name."""
        found: dict[str, Any] = self._files.find(self._root, detail=True)
        named = {path.rpartition("/")[2]: about for path, about in found.items()}
        return {name: about["size"] for name, about in named.items() if _NAME.fullmatch(name)}

    def sweep(self, named: Collection[str]) -> int:
        """Remove those that no row names; their number."""
        unnamed = [name for name in self.sizes() if name not in named]
        for name in unnamed:
            self.remove(name)
        return len(unnamed)

    def _write(self, path: str, content: bytes) -> None:
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        # Under another name first: a local file that was cut off must not pass for the blob. What
        # is named .part is no row's, so `sweep` removes it.
        part = f"{path}.part"
        self._files.pipe_file(part, content)
        self._files.mv(part, path)

    def _path(self, name: str) -> str:
        """StoreError for what a row calls a blob's name and is none: it would lead elsewhere."""
        if not _NAME.fullmatch(name):
            raise StoreError(f"{name!r} is no blob's name: the store is damaged: move it away")
        return f"{self._root}/{name[:2]}/{name}"

    def _error(self, action: str, name: str, error: OSError) -> StoreError:
        return StoreError(
            f"cannot {action} the blob {name} at {self._address}: check the address and its room, "
            f"then go on with --resume ({error})"
        )
