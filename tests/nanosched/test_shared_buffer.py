"""Shared memory without a name: one memory in all processes, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from nanosched import SchedulerError, SharedBuffer

SIZE = 100_000


def write_back(connection: Connection) -> None:
    buffer = connection.recv()
    connection.send(bytes(buffer.view()[:5]))
    buffer.view()[-5:] = b"world"
    connection.send(pickle.dumps(buffer))  # handed on by somebody who did not make it


def test_what_one_process_writes_another_reads_in_place() -> None:
    buffer = SharedBuffer(SIZE)
    assert bytes(buffer.view()) == bytes(SIZE)
    buffer.view()[:5] = b"hello"
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=write_back, args=(theirs,))
    process.start()
    ours.send(buffer)
    assert ours.recv() == b"hello"
    again = pickle.loads(ours.recv())
    process.join()
    assert bytes(buffer.view()[-5:]) == b"world"
    again.view()[0] = 7
    assert buffer.view()[0] == 7


def test_a_buffer_that_its_maker_has_closed_cannot_be_opened() -> None:
    buffer = SharedBuffer(SIZE)
    copy, late = pickle.loads(pickle.dumps(buffer)), pickle.loads(pickle.dumps(buffer))
    copy.view()[0] = 1  # opened in time, so it stays
    buffer.close()
    buffer.close()
    assert copy.view()[0] == 1
    with pytest.raises(SchedulerError, match="cannot be opened"):
        late.view()


def test_another_file_at_the_same_descriptor_is_not_taken_for_the_buffer(tmp_path: Path) -> None:
    buffer = SharedBuffer(SIZE)
    late, number = pickle.loads(pickle.dumps(buffer)), buffer._place.fd
    buffer.close()
    (tmp_path / "other").write_bytes(bytes(SIZE))
    handle = os.open(tmp_path / "other", os.O_RDWR)
    os.dup2(handle, number)
    try:
        with pytest.raises(SchedulerError, match="has closed"):
            late.view()
    finally:
        os.close(number)
        if handle != number:
            os.close(handle)


def test_memory_and_descriptor_go_with_the_last_reference() -> None:
    before, num_maps = sorted(os.listdir("/proc/self/fd")), num_buffers()
    buffer = SharedBuffer(SIZE)
    assert num_buffers() == num_maps + 1
    view = buffer.view()
    del buffer
    view[0] = 3  # a view keeps the memory
    del view
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert num_buffers() == num_maps


def num_buffers() -> int:
    """Those that this process has mapped; other tests may hold some."""
    return Path("/proc/self/maps").read_text().count("shared-buffer")


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_a_size_that_is_none_is_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        SharedBuffer(num_bytes)


def test_more_than_there_is_room_for_is_refused() -> None:
    with pytest.raises(SchedulerError, match="no room"):
        SharedBuffer(1 << 62)
