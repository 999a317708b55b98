"""What a WebAssembly program may ask for: WASI preview 1, answered from memory.

These functions are all that an instance can reach. They read and write its own linear memory, with
every address checked; clocks, randomness and sleep are real; files are those of wasi_files.py;
sockets and links do not exist. What is as large as the program likes is bounded here: paths, lists
and the bytes of one call.
Source: the witx files of WASI snapshot 1. Next: wasm_guest.py (the process).
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanorl.sandbox.backends.wasi_files import (
    MOST_PATH_BYTES,
    Entry,
    Errno,
    File,
    FileTree,
    Folder,
    Op,
    WasiError,
    find,
    walk,
)

_CREATE, _DIRECTORY, _EXCLUSIVE, _TRUNCATE = 1, 2, 4, 8  # oflags
_APPEND = 1  # fdflags
_MAY_READ, _MAY_WRITE, _ALL_RIGHTS = 1 << 1, 1 << 6, (1 << 64) - 1
_DEVICE, _FOLDER, _FILE = 2, 3, 4  # file types
_ROOT_FD = 3
_MOST_BYTES = 1 << 20  # of one read or write: a caller asks again for the rest
_MOST_PIECES = 1024
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_FDSTAT = struct.Struct("<BxHxxxxQQ")
_FILESTAT = struct.Struct("<QQB7xQQQQQ")
_DIRENT = struct.Struct("<QQIBxxx")
_PIECE = struct.Struct("<II")
_SUBSCRIPTION, _EVENT = struct.Struct("<QB7xI4xQQH6x"), struct.Struct("<QHBxxxxxQHxxxxxx")
_CLOCK, _ABSOLUTE = 0, 1
_CLOCKS: Mapping[int, Callable[[], int]] = {
    0: time.time_ns,
    1: time.monotonic_ns,
    2: time.process_time_ns,
    3: time.thread_time_ns,
}


class GuestMemory:
    """The instance's linear memory. WasiError(FAULT) for what is not in it."""

    def __init__(self) -> None:
        self._place: Callable[[], tuple[int, int]] = lambda: (0, 0)

    def bind(self, memory: Any, store: Any) -> None:
        """From here on it is this one, which may grow."""

        def place() -> tuple[int, int]:
            return ctypes.addressof(memory.data_ptr(store).contents), memory.data_len(store)

        self._place = place

    def read(self, address: int, count: int) -> bytes:
        return ctypes.string_at(self._checked(address, count), count)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(self._checked(address, len(data)), data, len(data))

    def _checked(self, address: int, count: int) -> int:
        base, size = self._place()
        if address < 0 or count < 0 or address + count > size:
            raise WasiError(Errno.FAULT)
        return base + address

    def path(self, address: int, count: int) -> str:
        if count > MOST_PATH_BYTES:
            raise WasiError(Errno.NAMETOOLONG)
        try:
            path = self.read(address, count).decode()
        except UnicodeDecodeError as error:
            raise WasiError(Errno.ILSEQ) from error
        if "\0" in path:
            raise WasiError(Errno.INVAL)
        return path

    def pieces(self, address: int, count: int) -> list[tuple[int, int]]:
        """The parts of a buffer, cut off where they are more than one call moves."""
        if count > _MOST_PIECES:
            raise WasiError(Errno.INVAL)
        found, left = [], _MOST_BYTES
        for start, length in _PIECE.iter_unpack(self.read(address, count * _PIECE.size)):
            found.append((start, min(length, left)))
            left -= found[-1][1]
        return found


@dataclass
class Descriptor:
    """An open file, folder or standard stream (`stream` is then its number)."""

    entry: Entry | None = None
    stream: int = -1
    position: int = 0
    flags: int = 0
    can_read: bool = True
    can_write: bool = False

    @property
    def file(self) -> File:
        if self.entry is None:
            raise WasiError(Errno.SPIPE)
        if not isinstance(self.entry, File):
            raise WasiError(Errno.ISDIR)
        return self.entry

    @property
    def folder(self) -> Folder:
        if not isinstance(self.entry, Folder):
            raise WasiError(Errno.NOTDIR)
        return self.entry


class WasiCalls:
    """The calls of one program, by their names. Each answers with WasiError, or not at all."""

    def __init__(
        self, arguments: Sequence[str], variables: Mapping[str, str], max_open_files: int
    ) -> None:
        self.memory = GuestMemory()
        self.tree: FileTree | None = None
        self.stdin = File(-1)
        self.open_special: Callable[[str], bytes | None] = lambda path: None
        self._arguments = [one.encode() + b"\0" for one in arguments]
        self._variables = [f"{name}={value}\0".encode() for name, value in variables.items()]
        self._max_open_files = max_open_files
        self._open: dict[int, Descriptor] = {
            0: Descriptor(self.stdin, stream=0),
            1: Descriptor(stream=1, can_read=False, can_write=True),
            2: Descriptor(stream=2, can_read=False, can_write=True),
        }

    def mount(self, root: Folder, tree: FileTree | None) -> None:
        """The files that the program sees, and the tree in them that it may write to."""
        self._open[_ROOT_FD] = Descriptor(root)
        self.tree = tree

    def by_name(self) -> dict[str, Callable[..., None]]:
        """All that an instance may import, by its names."""
        listed = (
            *(self.args_get, self.args_sizes_get, self.environ_get, self.environ_sizes_get),
            *(self.clock_res_get, self.clock_time_get, self.random_get, self.sched_yield),
            *(self.poll_oneoff, self.fd_advise, self.fd_close, self.fd_datasync, self.fd_sync),
            *(self.fd_fdstat_get, self.fd_fdstat_set_flags, self.fd_filestat_get),
            *(self.fd_filestat_set_size, self.fd_filestat_set_times, self.fd_pread),
            *(self.fd_prestat_get, self.fd_prestat_dir_name, self.fd_pwrite, self.fd_read),
            *(self.fd_readdir, self.fd_seek, self.fd_tell, self.fd_write),
            *(self.path_create_directory, self.path_filestat_get, self.path_filestat_set_times),
            *(self.path_link, self.path_open, self.path_readlink, self.path_remove_directory),
            *(self.path_rename, self.path_symlink, self.path_unlink_file),
        )
        sockets = ("sock_accept", "sock_recv", "sock_send", "sock_shutdown")
        return {one.__name__: one for one in listed} | dict.fromkeys(sockets, self.no_socket)

    # Arguments, variables, clocks, randomness.

    def args_sizes_get(self, count: int, size: int) -> None:
        self._sizes(self._arguments, count, size)

    def args_get(self, pointers: int, buffer: int) -> None:
        self._texts(self._arguments, pointers, buffer)

    def environ_sizes_get(self, count: int, size: int) -> None:
        self._sizes(self._variables, count, size)

    def environ_get(self, pointers: int, buffer: int) -> None:
        self._texts(self._variables, pointers, buffer)

    def _sizes(self, texts: Sequence[bytes], count: int, size: int) -> None:
        self.memory.write(count, _U32.pack(len(texts)))
        self.memory.write(size, _U32.pack(sum(map(len, texts))))

    def _texts(self, texts: Sequence[bytes], pointers: int, buffer: int) -> None:
        for number, text in enumerate(texts):
            self.memory.write(pointers + 4 * number, _U32.pack(buffer))
            self.memory.write(buffer, text)
            buffer += len(text)

    def clock_res_get(self, clock: int, result: int) -> None:
        self._clock(clock)
        self.memory.write(result, _U64.pack(1000))

    def clock_time_get(self, clock: int, precision: int, result: int) -> None:
        self.memory.write(result, _U64.pack(self._clock(clock)()))

    def _clock(self, clock: int) -> Callable[[], int]:
        if clock not in _CLOCKS:
            raise WasiError(Errno.INVAL)
        return _CLOCKS[clock]

    def random_get(self, buffer: int, count: int) -> None:
        for start in range(0, count, _MOST_BYTES):
            self.memory.write(buffer + start, os.urandom(min(count - start, _MOST_BYTES)))

    def sched_yield(self) -> None:
        """There is nobody else."""

    def poll_oneoff(self, subscriptions: int, events: int, count: int, num_events: int) -> None:
        """Sleeps until the first of the clocks; files and streams are always ready."""
        if not 0 < count <= _MOST_PIECES:
            raise WasiError(Errno.INVAL)
        data = self.memory.read(subscriptions, count * _SUBSCRIPTION.size)
        asked = list(_SUBSCRIPTION.iter_unpack(data))
        ready = [(user, kind) for user, kind, *_ in asked if kind != _CLOCK]
        if not ready:
            waits = [(self._wait_ns(*one[2:]), one[0]) for one in asked]
            time.sleep(max(min(waits)[0], 0) / 1e9)
            ready = [(user, _CLOCK) for left, user in waits if left <= min(waits)[0]]
        for number, (user, kind) in enumerate(ready):
            event = _EVENT.pack(user, 0, kind, 1, 0)
            self.memory.write(events + number * _EVENT.size, event)
        self.memory.write(num_events, _U32.pack(len(ready)))

    def _wait_ns(self, clock: int, timeout: int, _: int, flags: int) -> int:
        return min(timeout - (self._clock(clock)() if flags & _ABSOLUTE else 0), 10**18)

    # Descriptors.

    def fd_close(self, number: int) -> None:
        descriptor = self._descriptor(number)
        if number <= _ROOT_FD:
            raise WasiError(Errno.NOTSUP)
        del self._open[number]
        if isinstance(descriptor.entry, File):
            descriptor.entry.num_opened -= 1
            if self.tree is not None:
                self.tree.release(descriptor.entry)

    def fd_advise(self, number: int, offset: int, count: int, advice: int) -> None:
        self._descriptor(number)

    def fd_datasync(self, number: int) -> None:
        self._descriptor(number)

    def fd_sync(self, number: int) -> None:
        self._descriptor(number)

    def fd_fdstat_get(self, number: int, result: int) -> None:
        one = self._descriptor(number)
        rights = _ALL_RIGHTS
        rights ^= (0 if one.can_read else _MAY_READ) | (0 if one.can_write else _MAY_WRITE)
        stat = _FDSTAT.pack(_type_of(one), one.flags, rights, _ALL_RIGHTS)
        self.memory.write(result, stat)

    def fd_fdstat_set_flags(self, number: int, flags: int) -> None:
        self._descriptor(number).flags = flags & 0x1F

    def fd_filestat_get(self, number: int, result: int) -> None:
        self._stat(self._descriptor(number), result)

    def _stat(self, one: Descriptor, result: int) -> None:
        entry = one.entry
        inode, size, changed = (0, 0, 0) if entry is None else (*_place_of(entry), entry.changed_ns)
        stat = _FILESTAT.pack(1, inode, _type_of(one), 1, size, changed, changed, changed)
        self.memory.write(result, stat)

    def fd_filestat_set_size(self, number: int, size: int) -> None:
        file = self._writable(number)
        self._tree.change(Op.RESIZE, file.number, _offset(size))

    def fd_filestat_set_times(self, number: int, *times: int) -> None:
        self._descriptor(number)

    def path_filestat_set_times(
        self, number: int, _: int, path: int, count: int, *times: int
    ) -> None:
        """Accepted and not kept: a tree knows when its files were written."""
        if find(self._descriptor(number).folder, self.memory.path(path, count)).is_fixed:
            raise WasiError(Errno.ROFS)

    def fd_prestat_get(self, number: int, result: int) -> None:
        self._root(number)
        self.memory.write(result, _U64.pack(1 << 32))  # a folder, whose name is one letter long

    def fd_prestat_dir_name(self, number: int, buffer: int, count: int) -> None:
        self._root(number)
        self.memory.write(buffer, b"/"[:count])

    def _root(self, number: int) -> None:
        if number != _ROOT_FD:
            raise WasiError(Errno.BADF)

    def fd_tell(self, number: int, result: int) -> None:
        self.fd_seek(number, 0, 1, result)

    def fd_seek(self, number: int, offset: int, whence: int, result: int) -> None:
        one = self._descriptor(number)
        if one.stream >= 0:
            raise WasiError(Errno.SPIPE)
        start = {0: 0, 1: one.position, 2: one.file.size}.get(whence)
        if start is None or start + offset < 0:
            raise WasiError(Errno.INVAL)
        one.position = _offset(start + offset)
        self.memory.write(result, _U64.pack(one.position))

    def fd_read(self, number: int, pieces: int, count: int, result: int) -> None:
        one = self._descriptor(number)
        one.position += self._read(one, pieces, count, one.position, result)

    def fd_pread(self, number: int, pieces: int, count: int, offset: int, result: int) -> None:
        self._read(self._descriptor(number), pieces, count, _offset(offset), result)

    def _read(self, one: Descriptor, pieces: int, count: int, offset: int, result: int) -> int:
        if not one.can_read:
            raise WasiError(Errno.BADF)
        start, file = offset, one.file
        for address, length in self.memory.pieces(pieces, count):
            data = bytes(file.data[offset : offset + length])
            self.memory.write(address, data)
            offset += len(data)
        self.memory.write(result, _U32.pack(offset - start))
        return offset - start

    def fd_write(self, number: int, pieces: int, count: int, result: int) -> None:
        one = self._descriptor(number)
        data = b"".join(self.memory.read(*piece) for piece in self.memory.pieces(pieces, count))
        if one.stream > 0:
            done = 0
            while done < len(data):
                done += os.write(one.stream, data[done:])
        else:
            file = self._writable(number)
            offset = file.size if one.flags & _APPEND else one.position
            self._tree.change(Op.WRITE, file.number, offset, data)
            one.position = offset + len(data)
        self.memory.write(result, _U32.pack(len(data)))

    def fd_pwrite(self, number: int, pieces: int, count: int, offset: int, result: int) -> None:
        file = self._writable(number)
        data = b"".join(self.memory.read(*piece) for piece in self.memory.pieces(pieces, count))
        self._tree.change(Op.WRITE, file.number, _offset(offset), data)
        self.memory.write(result, _U32.pack(len(data)))

    def fd_readdir(self, number: int, buffer: int, count: int, cookie: int, result: int) -> None:
        """As many entries as fit, the last one cut off, from the one that `cookie` counts to."""
        entries = list(self._descriptor(number).folder.entries.items())
        data, most = bytearray(), min(count, _MOST_BYTES)
        for position, (name, entry) in enumerate(entries[max(cookie, 0) :], max(cookie, 0) + 1):
            if len(data) >= most:
                break
            text, inode = name.encode(), _place_of(entry)[0]
            kind = _FOLDER if isinstance(entry, Folder) else _FILE
            data += _DIRENT.pack(position, inode, len(text), kind) + text
        self.memory.write(buffer, bytes(data[:most]))
        self.memory.write(result, _U32.pack(min(len(data), most)))

    @property
    def _tree(self) -> FileTree:
        if self.tree is None:
            raise WasiError(Errno.ROFS)
        return self.tree

    def _descriptor(self, number: int) -> Descriptor:
        if number not in self._open:
            raise WasiError(Errno.BADF)
        return self._open[number]

    def _writable(self, number: int) -> File:
        one = self._descriptor(number)
        if not one.can_write:
            raise WasiError(Errno.BADF)
        return one.file

    # Paths.

    def path_open(self, number: int, _: int, path: int, count: int, *more: int) -> None:
        how, rights, __, flags, result = more
        base, name = self._descriptor(number).folder, self.memory.path(path, count)
        if len(self._open) >= self._max_open_files:
            raise WasiError(Errno.MFILE)
        can_write = bool(rights & _MAY_WRITE)
        special = self.open_special(name)
        entry: Entry = File(-1) if special is not None else self._opened(base, name, how)
        if special is not None:
            assert isinstance(entry, File), "made above"
            entry.data, entry.is_linked = special, True
        elif (can_write or how & _TRUNCATE) and isinstance(entry, Folder):
            raise WasiError(Errno.ISDIR)
        elif (can_write or how & _TRUNCATE) and entry.is_fixed:
            raise WasiError(Errno.ROFS)
        if how & _TRUNCATE:
            self._tree.change(Op.RESIZE, entry.number)
        opened = next(n for n in range(_ROOT_FD + 1, 1 << 20) if n not in self._open)
        self.memory.write(result, _U32.pack(opened))
        self._open[opened] = Descriptor(
            entry, flags=flags, can_read=bool(rights & _MAY_READ), can_write=can_write
        )
        if isinstance(entry, File):
            entry.num_opened += 1

    def _opened(self, base: Folder, path: str, how: int) -> Entry:
        chain, name = walk(base, path)
        folder = chain[-1]
        entry = folder.entries.get(name) if name else folder
        if entry is None:
            if not how & _CREATE:
                raise WasiError(Errno.NOENT)
            self._change(Op.MAKE_FILE, folder, name)
            entry = folder.entries[name]
        elif how & _CREATE and how & _EXCLUSIVE:
            raise WasiError(Errno.EXIST)
        if how & _DIRECTORY and not isinstance(entry, Folder):
            raise WasiError(Errno.NOTDIR)
        return entry

    def _change(self, op: Op, folder: Folder, name: str, value: int = 0) -> None:
        if folder.is_fixed:
            raise WasiError(Errno.ROFS)
        self._tree.change(op, folder.number, value, name.encode())

    def _place(self, number: int, path: int, count: int) -> tuple[list[Folder], str]:
        """As `walk`, of a path that must end with a name."""
        chain, name = walk(self._descriptor(number).folder, self.memory.path(path, count))
        if not name:
            raise WasiError(Errno.INVAL)
        return chain, name

    def path_create_directory(self, number: int, path: int, count: int) -> None:
        chain, name = self._place(number, path, count)
        self._change(Op.MAKE_FOLDER, chain[-1], name)

    def path_filestat_get(self, number: int, _: int, path: int, count: int, result: int) -> None:
        entry = find(self._descriptor(number).folder, self.memory.path(path, count))
        self._stat(Descriptor(entry), result)

    def path_remove_directory(self, number: int, path: int, count: int) -> None:
        self._remove(number, path, count, Folder, Errno.NOTDIR)

    def path_unlink_file(self, number: int, path: int, count: int) -> None:
        self._remove(number, path, count, File, Errno.ISDIR)

    def _remove(self, number: int, path: int, count: int, kind: type, otherwise: Errno) -> None:
        chain, name = self._place(number, path, count)
        if not isinstance(find(chain[-1], name), kind):
            raise WasiError(otherwise)
        self._change(Op.REMOVE, chain[-1], name)

    def path_rename(
        self, number: int, path: int, count: int, other: int, to: int, to_count: int
    ) -> None:
        chain, name = self._place(number, path, count)
        to_chain, to_name = self._place(other, to, to_count)
        if find(chain[-1], name) in to_chain:  # into itself
            raise WasiError(Errno.INVAL)
        if to_chain[-1].is_fixed:
            raise WasiError(Errno.ROFS)
        self._change(Op.RENAME, chain[-1], f"{name}/{to_name}", to_chain[-1].number)

    def path_link(self, *arguments: int) -> None:
        raise WasiError(Errno.NOTSUP)

    def path_symlink(self, *arguments: int) -> None:
        raise WasiError(Errno.NOTSUP)

    def path_readlink(
        self, number: int, path: int, count: int, buffer: int, most: int, result: int
    ) -> None:
        find(self._descriptor(number).folder, self.memory.path(path, count))
        raise WasiError(Errno.INVAL)  # it is none

    def no_socket(self, *arguments: int) -> None:
        raise WasiError(Errno.NOTSOCK)


def _type_of(one: Descriptor) -> int:
    if one.stream >= 0:
        return _DEVICE
    return _FOLDER if isinstance(one.entry, Folder) else _FILE


def _place_of(entry: Entry) -> tuple[int, int]:
    """Its number among all files, and its size."""
    return entry.number + 2, entry.size


def _offset(value: int) -> int:
    """A place in a file: never negative."""
    if not 0 <= value < 1 << 62:
        raise WasiError(Errno.INVAL)
    return value
