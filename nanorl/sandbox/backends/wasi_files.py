"""The files that a WebAssembly program sees: trees in memory, counted as they grow.

A `FileTree` is what a program may write to; what else it sees is fixed (`fixed_folder`,
`FixedFile`). Nothing of the machine is in it, and there are no links and no devices. Every change
of a tree goes through `change`, so that a copy in another process follows by doing the same changes
in the same order: both number their entries alike.
"""

from __future__ import annotations

import io
import mmap
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum

MOST_NAME_BYTES, MOST_PATH_BYTES = 255, 4096
_MOST_LISTED_BYTES = 32 << 20  # of all paths of a tree: deep folders with long names have gigabytes


class Errno(IntEnum):
    """Answers of WASI preview 1 that are used here."""

    SUCCESS = 0
    BADF = 8
    EXIST = 20
    FAULT = 21
    ILSEQ = 25
    INVAL = 28
    ISDIR = 31
    MFILE = 33
    NAMETOOLONG = 37
    NOENT = 44
    NOMEM = 48
    NOSPC = 51
    NOTDIR = 54
    NOTEMPTY = 55
    NOTSOCK = 57
    NOTSUP = 58
    ROFS = 69
    SPIPE = 70
    NOTCAPABLE = 76


class WasiError(Exception):
    """The answer to a call that is refused."""

    def __init__(self, errno: Errno) -> None:
        super().__init__(errno.name)
        self.errno = errno


class Op(IntEnum):
    """Changes of a tree. Their arguments are numbers of entries, a number, and bytes."""

    MAKE_FILE = 1  # parent, 0, name
    MAKE_FOLDER = 2  # parent, 0, name
    WRITE = 3  # file, offset, data
    RESIZE = 4  # file, size
    REMOVE = 5  # parent, 0, name
    RENAME = 6  # parent, other parent, name + b"/" + other name


class File:
    """A file, and how many descriptors hold it."""

    is_fixed = False

    def __init__(self, number: int) -> None:
        self.number = number
        self.data: bytearray | mmap.mmap | bytes = bytearray()
        self.num_opened = 0
        self.is_linked = True
        self.changed_ns = time.time_ns()

    @property
    def size(self) -> int:
        return len(self.data)


class FixedFile(File):
    """One that nobody writes to."""

    is_fixed = True

    def __init__(self, data: mmap.mmap | bytes) -> None:
        super().__init__(-1)
        self.data = data


class Folder:
    """A folder, by the names in it."""

    def __init__(self, number: int, entries: dict[str, Entry] | None = None) -> None:
        self.number = number
        self.entries: dict[str, Entry] = {} if entries is None else entries
        self.changed_ns = time.time_ns()
        self.size = 0

    @property
    def is_fixed(self) -> bool:
        return self.number < 0


Entry = File | Folder


def fixed_folder(entries: Mapping[str, Entry]) -> Folder:
    """A folder whose names stay; what is in one of them may be a tree's."""
    return Folder(-1, dict(entries))


def walk(base: Folder, path: str) -> tuple[list[Folder], str]:
    """The folders from `base` to the one that holds the path's last name, and that name, which is
    empty where the path ends at the last of the folders itself. Nothing leads above `base`."""
    *above, name = path.strip("/").split("/")
    chain = [base]
    for part in above:
        _step(chain, part)
    if name in ("", ".", ".."):
        _step(chain, name)
        return chain, ""
    if len(name.encode()) > MOST_NAME_BYTES:
        raise WasiError(Errno.NAMETOOLONG)
    return chain, name


def _step(chain: list[Folder], part: str) -> None:
    if part == "..":
        if len(chain) > 1:
            chain.pop()
        elif not chain[0].is_fixed:  # the root's parent is the root
            raise WasiError(Errno.NOTCAPABLE)
    elif part not in ("", "."):
        chain.append(_as_folder(_named(chain[-1], part)))


def find(base: Folder, path: str) -> Entry:
    """Return the entry that the path leads to."""
    chain, name = walk(base, path)
    return _named(chain[-1], name) if name else chain[-1]


def _named(folder: Folder, name: str) -> Entry:
    if (entry := folder.entries.get(name)) is None:
        raise WasiError(Errno.NOENT)
    return entry


def _as_folder(entry: Entry) -> Folder:
    if not isinstance(entry, Folder):
        raise WasiError(Errno.NOTDIR)
    return entry


class FileTree:
    """Files and folders of one program or session, up to so many bytes and entries."""

    def __init__(self, max_bytes: int, max_entries: int) -> None:
        self.root = Folder(0)
        self.on_change: Callable[[Op, int, int, bytes], None] = lambda *_: None
        self._max_bytes, self._max_entries = max_bytes, max_entries
        self._numbered: dict[int, Entry] = {0: self.root}
        self._next_number = 1
        self._num_bytes = 0

    def change(self, op: Op, number: int, value: int = 0, data: bytes = b"") -> None:
        """Does it, and says so to `on_change`. WasiError, and nothing is done, where it cannot."""
        entry = self._numbered.get(number)
        if entry is None:
            raise WasiError(Errno.NOENT)
        if op in (Op.WRITE, Op.RESIZE):
            self._fill(entry, op, value, data)
        else:
            self._rename(_as_folder(entry), op, value, data.decode())
        entry.changed_ns = time.time_ns()
        self.on_change(op, number, value, data)

    def _fill(self, entry: Entry, op: Op, value: int, data: bytes) -> None:
        if not isinstance(entry, File) or not isinstance(entry.data, bytearray):
            raise WasiError(Errno.ISDIR)
        end = value + len(data)
        if op is Op.WRITE:
            self._resize(entry, max(end, entry.size))
            entry.data[value:end] = data
        else:
            self._resize(entry, value)

    def _resize(self, file: File, size: int) -> None:
        assert isinstance(file.data, bytearray), "a tree's own"
        more = size - file.size
        if more > self._max_bytes - self._num_bytes:
            raise WasiError(Errno.NOSPC)
        if more > 0:
            file.data.extend(bytes(more))
        elif more < 0:
            del file.data[size:]
        self._num_bytes += more

    def _rename(self, parent: Folder, op: Op, value: int, name: str) -> None:
        """The changes of names."""
        if op is Op.REMOVE:
            entry = _named(parent, name)
            if isinstance(entry, Folder) and entry.entries:
                raise WasiError(Errno.NOTEMPTY)
            del parent.entries[name]
            self._forget(entry)
        elif op is Op.RENAME:
            name, _, other_name = name.partition("/")
            if (found := self._numbered.get(value)) is None:  # removed, and still open
                raise WasiError(Errno.NOENT)
            other, moved = _as_folder(found), _named(parent, name)
            _check_name(other_name)
            if _holds(moved, other):
                raise WasiError(Errno.INVAL)  # into itself
            self._take_place(moved, other, other_name)
            other.entries[other_name] = parent.entries.pop(name)
        else:
            self._make(parent, name, is_folder=op is Op.MAKE_FOLDER)

    def _take_place(self, entry: Entry, folder: Folder, name: str) -> None:
        """Remove what has that name so far, if anything, to make way for `entry`. WasiError where
        one is a folder and the other is not, or where the old folder is not empty."""
        old = folder.entries.get(name)
        if old is None or old is entry:
            return
        if isinstance(old, Folder) != isinstance(entry, Folder):
            raise WasiError(Errno.ISDIR if isinstance(old, Folder) else Errno.NOTDIR)
        if isinstance(old, Folder) and old.entries:
            raise WasiError(Errno.NOTEMPTY)
        del folder.entries[name]
        self._forget(old)

    def _make(self, parent: Folder, name: str, *, is_folder: bool) -> None:
        _check_name(name)
        if name in parent.entries:
            raise WasiError(Errno.EXIST)
        if len(self._numbered) > self._max_entries:
            raise WasiError(Errno.NOSPC)
        number = self._next_number
        self._next_number += 1
        entry = Folder(number) if is_folder else File(number)
        self._numbered[number] = parent.entries[name] = entry

    def _forget(self, entry: Entry) -> None:
        """A file that is open keeps its bytes, and is counted, until it is closed."""
        if isinstance(entry, File):
            entry.is_linked = False
        self.release(entry)

    def release(self, entry: Entry) -> None:
        """Drops what has no name any more and is not open."""
        if isinstance(entry, File):
            if entry.is_linked or entry.num_opened or entry.is_fixed:
                return
            self._num_bytes -= entry.size
        self._numbered.pop(entry.number, None)

    # The host's own ways.

    def put(self, path: str, data: bytes) -> None:
        """A file with this content, and the folders above it. WasiError where that cannot be."""
        *above, name = path.strip("/").split("/")
        folder = self.put_folder(above)
        if name not in folder.entries:
            self.change(Op.MAKE_FILE, folder.number, data=name.encode())
        file = folder.entries[name]
        self.change(Op.RESIZE, file.number)
        self.change(Op.WRITE, file.number, data=data)

    def put_folder(self, names: Iterable[str]) -> Folder:
        """The folder below the root that these names lead to; those that are missing are made."""
        folder = self.root
        for name in names:
            if name not in folder.entries:
                self.change(Op.MAKE_FOLDER, folder.number, data=name.encode())
            folder = _as_folder(folder.entries[name])
        return folder

    def get(self, path: str) -> bytes:
        """The content of a file. WasiError where there is none."""
        found = find(self.root, path)
        if not isinstance(found, File):
            raise WasiError(Errno.ISDIR)
        return bytes(found.data)

    def remove(self, path: str) -> None:
        """Remove a file or an empty folder."""
        chain, name = walk(self.root, path)
        self.change(Op.REMOVE, chain[-1].number, data=name.encode())

    def archive(self) -> bytes:
        """All of it as a tar archive."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, entry in _below(self.root):
                info = tarfile.TarInfo(path)
                if isinstance(entry, Folder):
                    info.type, info.mode = tarfile.DIRTYPE, 0o755
                    archive.addfile(info)
                else:
                    info.size = entry.size
                    archive.addfile(info, io.BytesIO(entry.data))
        return buffer.getvalue()


def _holds(entry: Entry, folder: Folder) -> bool:
    todo = [entry]
    while todo:
        one = todo.pop()
        if one is folder:
            return True
        if isinstance(one, Folder):
            todo += one.entries.values()
    return False


def _check_name(name: str) -> None:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise WasiError(Errno.INVAL)
    if len(name.encode()) > MOST_NAME_BYTES:
        raise WasiError(Errno.NAMETOOLONG)


def _below(folder: Folder) -> Iterator[tuple[str, Entry]]:
    """Everything in it, folders before what they hold; a program may nest them deep."""
    todo: list[tuple[str, Entry]] = [("", folder)]
    left = _MOST_LISTED_BYTES
    while todo:
        path, entry = todo.pop()
        if path:
            yield path, entry
        if isinstance(entry, Folder):
            start = f"{path}/" if path else ""
            left -= len(start.encode()) * len(entry.entries)
            left -= sum(len(name.encode()) for name in entry.entries)
            if left < 0:
                raise WasiError(Errno.NAMETOOLONG)
            todo += [(start + name, one) for name, one in sorted(entry.entries.items())]
