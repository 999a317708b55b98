"""What a WebAssembly program may ask of its host: its own memory, files that are counted, no more.

Without the runtime: the calls are made as an instance would make them, on a memory of their own.
"""

from __future__ import annotations

import ctypes
import inspect
import io
import random
import struct
import tarfile
from collections.abc import Callable
from typing import Any

import pytest

from nanorl.sandbox.backends.wasi_calls import WasiCalls
from nanorl.sandbox.backends.wasi_files import (
    Errno,
    File,
    FileTree,
    FixedFile,
    Op,
    WasiError,
    find,
    fixed_folder,
)

SIZE, GUARD = 1 << 16, 1 << 12
TMP_BYTES, TMP_ENTRIES = 1 << 20, 64


class Machine:
    """A linear memory between two guards, the calls, and a tree at /tmp."""

    def __init__(self) -> None:
        self.buffer = (ctypes.c_ubyte * (GUARD + SIZE + GUARD))(*b"\xa5" * GUARD)
        ctypes.memset(ctypes.addressof(self.buffer) + GUARD + SIZE, 0xA5, GUARD)
        self.tree = FileTree(TMP_BYTES, TMP_ENTRIES)
        self.calls = WasiCalls(["python"], {"HOME": "/tmp"}, 16)
        fixed = {"lib.zip": FixedFile(b"library"), "tmp": self.tree.root}
        self.calls.mount(fixed_folder(fixed), self.tree)
        self.calls.memory.bind(self, None)

    def data_ptr(self, _: object) -> Any:
        place = ctypes.addressof(self.buffer) + GUARD
        return ctypes.cast(place, ctypes.POINTER(ctypes.c_ubyte))

    def data_len(self, _: object) -> int:
        return SIZE

    @property
    def guards(self) -> set[int]:
        return {*self.buffer[:GUARD], *self.buffer[GUARD + SIZE :]}

    def path(self, path: str) -> tuple[int, int]:
        self.calls.memory.write(64, path.encode())
        return 64, len(path.encode())

    def open(self, path: str, how: int = 0, rights: int = 0x42) -> int:
        self.calls.path_open(3, 0, *self.path(path), how, rights, 0, 0, 0)
        return int.from_bytes(self.calls.memory.read(0, 4), "little")

    def write(self, number: int, data: bytes) -> None:
        self.calls.memory.write(4096, data)
        self.calls.memory.write(16, struct.pack("<II", 4096, len(data)))
        self.calls.fd_write(number, 16, 1, 32)

    def read(self, number: int) -> bytes:
        self.calls.memory.write(16, struct.pack("<II", 4096, 8192))
        self.calls.fd_read(number, 16, 1, 32)
        count = int.from_bytes(self.calls.memory.read(32, 4), "little")
        return self.calls.memory.read(4096, count)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def refused(errno: Errno, function: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(WasiError) as caught:
        function(*arguments)
    assert caught.value.errno is errno


def test_addresses_outside_of_the_instances_memory_are_refused(machine: Machine) -> None:
    calls = machine.calls
    for address in (SIZE, SIZE - 7, 0xFFFFFFF8, 1 << 40, -8):
        refused(Errno.FAULT, calls.clock_time_get, 0, 0, address)
        refused(Errno.FAULT, calls.path_open, 3, 0, address, 8, 0, 2, 0, 0, 0)
        refused(Errno.FAULT, calls.fd_read, 0, address, 1, 0)
    calls.memory.write(0, struct.pack("<II", SIZE - 4, 8))  # a piece that reaches over the end
    refused(Errno.FAULT, calls.fd_write, 1, 0, 1, 16)
    refused(Errno.FAULT, calls.random_get, SIZE - 4, 8)
    assert machine.guards == {0xA5}


def test_no_arguments_reach_beyond_the_memory_or_the_tree(machine: Machine) -> None:
    """Thousands of calls with numbers of all sizes: each answers, and the guards stay as they
    are."""
    rng = random.Random(0)
    names = sorted(machine.calls.by_name().keys() - {"poll_oneoff"})  # which sleeps
    machine.path("tmp/a")
    answers: set[str] = set()
    for number in range(6000):
        if number % 50 == 0:
            machine.calls.memory.write(0, rng.randbytes(512))
        function = machine.calls.by_name()[rng.choice(names)]
        wanted = list(inspect.signature(function).parameters.values())
        is_open = bool(wanted) and wanted[-1].kind is inspect.Parameter.VAR_POSITIONAL
        count = len(wanted) - 1 + 5 if is_open else len(wanted)
        sizes = (4, 8, 70, 4096, SIZE, 1 << 32)
        arguments = [rng.randrange(rng.choice(sizes)) for _ in range(count)]
        if arguments[:1] in ([1], [2]) and function.__name__ == "fd_write":
            continue  # of this process
        try:
            function(*arguments)
            answers.add("done")
        except WasiError as error:
            answers.add(error.errno.name)
        assert machine.tree._num_bytes <= TMP_BYTES
        assert len(machine.tree._numbered) <= TMP_ENTRIES + 1
    assert machine.guards == {0xA5}
    assert {"done", "FAULT", "BADF", "NOENT"} <= answers


def test_what_is_long_is_refused_before_it_is_copied(machine: Machine) -> None:
    refused(Errno.NAMETOOLONG, machine.calls.path_open, 3, 0, 0, 5000, 0, 2, 0, 0, 0)
    refused(Errno.NAMETOOLONG, machine.open, "tmp/" + "x" * 256, 1)
    refused(Errno.INVAL, machine.calls.fd_read, 0, 0, 1 << 30, 0)
    refused(Errno.INVAL, machine.calls.poll_oneoff, 0, 0, 1 << 30, 0)


def test_paths_lead_nowhere_but_into_the_tree(machine: Machine) -> None:
    for path in ("../../etc/passwd", "tmp/../../../etc/passwd", "etc/passwd", "proc/self/mem"):
        refused(Errno.NOENT, machine.open, path)
    refused(Errno.ROFS, machine.open, "new", 1)
    refused(Errno.ROFS, machine.open, "lib.zip", 0, 0x40)
    refused(Errno.ROFS, machine.calls.path_unlink_file, 3, *machine.path("lib.zip"))
    refused(Errno.NOTSUP, machine.calls.path_symlink, 0, 0, 3, 0, 0)
    touch = machine.calls.path_filestat_set_times
    refused(Errno.ROFS, touch, 3, 0, *machine.path("lib.zip"), 0, 0, 0)
    refused(Errno.NOENT, touch, 3, 0, *machine.path("etc/passwd"), 0, 0, 0)
    assert machine.read(machine.open("tmp/.././lib.zip", 0, 2)) == b"library"
    folder = machine.open("tmp", 0, 2)
    refused(
        Errno.NOTCAPABLE,
        machine.calls.path_open,
        folder,
        0,
        *machine.path("../lib.zip"),
        0,
        2,
        0,
        0,
        0,
    )


def test_files_hold_what_was_written(machine: Machine) -> None:
    number = machine.open("tmp/a", 1)
    machine.write(number, b"hello")
    machine.write(number, b" there")
    machine.calls.fd_seek(number, -5, 2, 0)
    assert machine.read(number) == b"there"
    machine.calls.fd_filestat_set_size(number, 5)
    assert machine.tree.get("a") == b"hello"
    refused(Errno.EXIST, machine.open, "tmp/a", 1 | 4)
    machine.calls.path_create_directory(3, *machine.path("tmp/d"))
    refused(Errno.NOTDIR, machine.open, "tmp/a/b")
    machine.calls.memory.write(512, b"tmp/d/b")
    machine.calls.path_rename(3, *machine.path("tmp/a"), 3, 512, 7)
    refused(Errno.NOTEMPTY, machine.calls.path_remove_directory, 3, *machine.path("tmp/d"))
    machine.calls.memory.write(512, b"tmp/d/d")
    refused(Errno.INVAL, machine.calls.path_rename, 3, *machine.path("tmp/d"), 3, 512, 7)
    assert machine.tree.get("d/b") == b"hello"


def test_bytes_and_names_are_counted_until_nobody_holds_them(machine: Machine) -> None:
    half = TMP_BYTES // 2 + 1
    number = machine.open("tmp/a", 1)
    machine.calls.fd_filestat_set_size(number, half)
    machine.calls.path_unlink_file(3, *machine.path("tmp/a"))
    other = machine.open("tmp/b", 1)
    refused(Errno.NOSPC, machine.calls.fd_filestat_set_size, other, half)  # a is open still
    machine.calls.fd_close(number)
    machine.calls.fd_filestat_set_size(other, half)
    refused(Errno.NOSPC, machine.calls.fd_filestat_set_size, other, 1 << 60)
    with pytest.raises(WasiError, match="NOSPC"):
        for n in range(TMP_ENTRIES + 1):
            machine.calls.fd_close(machine.open(f"tmp/n{n}", 1))


def test_descriptors_are_few_and_ones_own(machine: Machine) -> None:
    with pytest.raises(WasiError, match="MFILE"):
        for _ in range(20):
            machine.open("lib.zip", 0, 2)
    refused(Errno.BADF, machine.calls.fd_read, 99, 16, 1, 32)
    refused(Errno.BADF, machine.write, 0, b"to stdin")
    refused(Errno.NOTSUP, machine.calls.fd_close, 1)
    refused(Errno.BADF, machine.calls.fd_prestat_get, 4, 0)


def test_a_copy_follows_by_doing_the_same_changes() -> None:
    """Of a session: the program's tree is a fork's, and the server's is to become its equal."""
    theirs, ours = (FileTree(TMP_BYTES, TMP_ENTRIES) for _ in range(2))
    for tree in (theirs, ours):
        tree.put("deep/a.txt", b"before")
    theirs.on_change = ours.change
    rng = random.Random(1)
    for number in range(300):
        path = f"{rng.choice(['', 'deep/', 'other/'])}{rng.randrange(8)}"
        try:
            if rng.random() < 0.3:
                theirs.remove(path)
            elif rng.random() < 0.2:
                names = f"{rng.randrange(8)}/{rng.randrange(8)}".encode()
                theirs.change(Op.RENAME, theirs.root.number, theirs.root.number, names)
            else:
                theirs.put(path, rng.randbytes(number))
        except WasiError:
            continue
    assert len(theirs._numbered) > 5
    assert contents(theirs) == contents(ours)


def contents(tree: FileTree) -> dict[str, bytes | None]:
    with tarfile.open(fileobj=io.BytesIO(tree.archive())) as archive:
        found = {one.name: archive.extractfile(one) for one in archive.getmembers()}
        return {name: file.read() if file else None for name, file in found.items()}


def test_folders_may_be_deeper_than_pythons_stack() -> None:
    tree = FileTree(1 << 20, 4000)
    folder = tree.root
    for _ in range(3000):
        tree.change(Op.MAKE_FOLDER, folder.number, data=b"d")
        folder = folder.entries["d"]  # type: ignore[assignment]
    assert len(contents(tree)) == 3000
    assert not isinstance(find(tree.root, "d/d/d"), File)


def test_a_tree_that_is_too_long_to_list_is_refused_and_not_built() -> None:
    """A program may nest folders of long names without ever naming a whole path: their paths
    together have gigabytes, which the process that serves it would have to hold."""
    tree = FileTree(1 << 20, 5000)
    tree.put_folder("n" * 255 for _ in range(2000))
    with pytest.raises(WasiError, match="NAMETOOLONG"):
        tree.archive()


def test_a_folder_goes_neither_into_itself_nor_into_one_that_is_gone() -> None:
    tree = FileTree(1 << 20, 100)
    inner, gone = tree.put_folder(["a", "b"]), tree.put_folder(["gone"])
    with pytest.raises(WasiError, match="INVAL"):
        tree.change(Op.RENAME, tree.root.number, inner.number, b"a/x")
    tree.remove("gone")
    with pytest.raises(WasiError, match="NOENT"):
        tree.change(Op.RENAME, tree.root.number, gone.number, b"a/x")
    assert list(tree.root.entries) == ["a"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b", "n" * 256])
def test_a_name_that_is_none_is_refused_whoever_asks(name: str) -> None:
    tree = FileTree(1 << 20, 100)
    with pytest.raises(WasiError):
        tree.change(Op.MAKE_FILE, tree.root.number, data=name.encode())
    assert not tree.root.entries
