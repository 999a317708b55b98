"""A meeting's store does what torch's does, for those who know its secret and for nobody else."""

from __future__ import annotations

import gc
import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nanoengine.parallel import meeting_server
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.meeting_server import MeetingServer
from nanoengine.parallel.meeting_store import MeetingPoint, MeetingStore
from nanoengine.parallel.meeting_wire import MOST_BYTES, fields_of, frame, is_proof, proof
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.rendezvous import LOOPBACK, join_mesh, open_store

SHORT, LONG = timedelta(milliseconds=50), timedelta(seconds=60)


@pytest.fixture
def meeting() -> Iterator[MeetingPoint]:
    store, point = open_store()
    yield point
    store.close()


def client(point: MeetingPoint, timeout_s: float = 20.0) -> MeetingStore:
    return MeetingStore(point, timeout_s=timeout_s)


# -- what it does ------------------------------------------------------------------------------


def everything(store: dist.Store) -> list[Any]:
    """What a store answers to calls of every kind, or the kind of the error that it raises."""

    def error_of(call: Callable[[], Any]) -> str:
        try:
            return repr(call())
        except Exception as error:
            return type(error).__name__

    store.set("bytes", bytes(range(256)))  # type: ignore[arg-type]
    store.set("empty", b"")  # type: ignore[arg-type]
    store.set("text", "a text")
    store.set("text", "another text")
    store.set("ключ/ü", "x")
    store.wait(["bytes", "text"])
    store.wait(["bytes"], LONG)
    store.wait([])
    return [
        *(store.get(name) for name in ("bytes", "empty", "text", "ключ/ü")),
        *(store.add("counter", amount) for amount in (1, 6, 0, -9)),
        store.get("counter"),
        *(store.check(keys) for keys in (["bytes"], ["bytes", "no"], ["no"])),
        store.compare_set("new", "", "first"),
        store.compare_set("new", "wrong", "second"),
        store.compare_set("new", "first", "third"),
        store.compare_set("absent", "wrong", "value"),
        store.check(["absent"]),
        *(store.delete_key(name) for name in ("text", "text")),
        store.check(["text"]),
        error_of(lambda: store.wait(["bytes", "never"], SHORT)),
        error_of(lambda: dist.PrefixStore("p", store).wait(["never"], SHORT)),
        dist.PrefixStore("p", store).set("key", "below"),
        dist.PrefixStore("p", store).get("key"),
        store.get("p/key"),
        dist.PrefixStore("p", store).delete_key("key"),
        error_of(lambda: dist.PrefixStore("p", store).add("n", 3)),
    ]


def test_the_store_answers_what_torchs_store_answers(meeting: MeetingPoint) -> None:
    theirs = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    assert everything(client(meeting)) == everything(theirs)


def test_the_store_has_as_many_keys_as_were_set(meeting: MeetingPoint) -> None:
    """torch's counts one of its own more, through a prefix or not."""
    store = client(meeting)
    for name in "abca":
        store.set(name, name)
    assert store.num_keys() == dist.PrefixStore("p", store).num_keys() == 3


def test_a_wait_ends_when_another_client_sets_the_key(meeting: MeetingPoint) -> None:
    with ThreadPoolExecutor(8) as threads:
        one, other = client(meeting), client(meeting)
        waiting = [threads.submit(one.get, "late") for _ in range(4)]
        waiting += [threads.submit(dist.PrefixStore("", one).get, "late")]
        both = threads.submit(one.wait, ["late", "later"])
        assert one.add("while others wait", 1) == 1  # threads of one store do not queue
        other.set("late", b"now")
        assert [future.result(20) for future in waiting[:4]] == [b"now"] * 4
        other.set("/late", b"now")
        assert waiting[4].result(20) == b"now"
        assert not both.done()
        other.set("later", b"")
        both.result(20)


def test_a_counter_that_threads_share_loses_nothing(meeting: MeetingPoint) -> None:
    stores = [client(meeting) for _ in range(2)]
    with ThreadPoolExecutor(8) as threads:
        totals = list(threads.map(lambda i: stores[i % 2].add("n", 1), range(400)))
    assert sorted(totals) == list(range(1, 401))


def test_a_call_that_waits_too_long_says_so_and_the_next_one_works(meeting: MeetingPoint) -> None:
    """Only the calls that wait in vain have little time: the others are answered by a thread."""
    store, other = client(meeting), client(meeting)
    for one in (store, other):
        assert one.num_keys() == 0  # it is connected
        one.set_timeout(SHORT)
        with pytest.raises(dist.DistStoreError, match=r"get never: no answer after 0\.05 s"):
            one.get("never")
        one.set_timeout(LONG)
        with pytest.raises(dist.DistStoreError, match="wait never"):
            one.wait(["never"], SHORT)
    store.set("never", b"late")
    assert store.get("never") == other.get("never") == b"late"


def test_a_value_of_megabytes_arrives_and_one_beyond_the_bound_is_refused(
    meeting: MeetingPoint,
) -> None:
    store, value = client(meeting), secrets.token_bytes(3 << 20)
    store.set("big", value)
    assert client(meeting).get("big") == value
    with pytest.raises(ValueError, match="bytes for a store: at most"):
        store.set("big", bytes(MOST_BYTES))
    assert store.get("big") == value


PROGRAM = """
import sys, pickle
from nanoengine.parallel.rendezvous import open_store
store, point = open_store()
sys.stdout.buffer.write(pickle.dumps(point)); sys.stdout.buffer.flush()
sys.stdin.read()
"""


def test_the_end_of_the_servers_process_ends_every_call_at_once() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    store = client(pickle.load(server.stdout), timeout_s=250.0)
    with ThreadPoolExecutor() as threads:
        store.set("key", b"")
        waiting = [threads.submit(store.get, "never"), threads.submit(store.wait, ["never"])]
        assert store.check(["key"])
        server.kill()
        server.wait()
        for one in waiting:
            with pytest.raises(dist.DistNetworkError):
                one.result(60)
    for call in (lambda: store.get("key"), lambda: store.set("key", b"")):
        with pytest.raises(dist.DistNetworkError, match=r"has ended|cannot be reached"):
            call()


def test_a_store_that_nobody_refers_to_any_more_ends_its_server() -> None:
    store, point = open_store()
    client(point).set("key", b"")
    num_threads = threading.active_count()
    del store
    gc.collect()
    with pytest.raises(dist.DistNetworkError):
        while True:
            client(point).get("key")
    for thread in threading.enumerate():
        if thread.name == "meeting":
            thread.join(20)
    assert threading.active_count() < num_threads


def test_nothing_shows_the_secret(meeting: MeetingPoint) -> None:
    assert len(meeting.secret) == 32
    for text in (repr(meeting), str(meeting), repr((meeting,)), f"{meeting}"):
        assert repr(meeting.secret)[2:-1] not in text and "secret" not in text
    assert pickle.loads(pickle.dumps(meeting)) == meeting
    store, other = open_store()
    assert other.secret != meeting.secret
    store.close()


# -- who is let in -----------------------------------------------------------------------------


def greet(point: MeetingPoint) -> tuple[socket.socket, bytes]:
    """A connection, and the server's nonce."""
    sock = socket.create_connection((point.host, point.port), 20)
    return sock, receive(sock, 32)


def receive(sock: socket.socket, count: int) -> bytes:
    read = b""
    while len(read) < count and (page := sock.recv(count - len(read))):
        read += page
    return read


def is_shut(sock: socket.socket) -> bool:
    """Whether the server hangs up without another byte."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


ORDER = frame(b"set", b"key", b"a stranger's")
GARBAGE = {
    "an order without a proof": ORDER.ljust(64, b"\0"),
    "zeros": bytes(64),
    "noise": bytes(range(64)),
    "torch's own greeting": b"\x09\xce\xf7\x85\x3c".ljust(64, b"\0"),
    "HTTP": b"POST / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(64),
    "a megabyte": bytes(1 << 20),
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
def test_who_does_not_prove_the_secret_is_not_heard(meeting: MeetingPoint, said: bytes) -> None:
    sock, _ = greet(meeting)
    with closing(sock):
        with suppress(ConnectionError):  # it may be shut before all is said
            sock.sendall(said)
        assert is_shut(sock)
    store = client(meeting)
    assert store.num_keys() == 0 and store.add("key", 1) == 1


def test_the_wrong_secret_is_refused_and_the_right_one_is_not(meeting: MeetingPoint) -> None:
    wrong = MeetingPoint(meeting.host, meeting.port, bytes(32))
    for call in (lambda s: s.get("key"), lambda s: s.set("key", b""), lambda s: s.num_keys()):
        with pytest.raises(dist.DistNetworkError, match="the secret is not the one of this meet"):
            call(client(wrong))
    assert client(meeting).num_keys() == 0


def test_a_proof_is_good_for_one_connection_and_in_one_direction(meeting: MeetingPoint) -> None:
    """Recorded and played back; thrown back at its maker; made for the other side."""
    ours, secret = bytes(range(32)), meeting.secret
    sock, theirs = greet(meeting)
    said = ours + proof(secret, b"client", theirs, ours)
    with closing(sock):
        sock.sendall(said + ORDER)
        assert is_proof(receive(sock, 32), secret, b"server", theirs, ours)
        assert receive(sock, 4) == bytes(4)  # the answer to the order
    for forged in (
        lambda theirs: said,
        lambda theirs: theirs + proof(secret, b"server", theirs, theirs),
        lambda theirs: ours + proof(secret, b"client", ours, theirs),
        lambda theirs: ours + proof(secret, b"client", theirs + ours),
        lambda theirs: ours + proof(secret, b"client", theirs, ours)[:-1] + b"?",
    ):
        sock, theirs = greet(meeting)
        with closing(sock):
            sock.sendall(forged(theirs))
            assert is_shut(sock)


@contextmanager
def impostor(answer: Callable[[bytes], bytes]) -> Iterator[MeetingPoint]:
    """Listens in a server's place, without the secret; `answer` is what it says to a proof."""
    with socket.create_server((LOOPBACK, 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with closing(sock):
                sock.sendall(bytes(32))
                sock.sendall(answer(receive(sock, 64)) + frame(b"a stranger's"))

        thread = threading.Thread(target=serve)
        thread.start()
        yield MeetingPoint(LOOPBACK, listener.getsockname()[1], secrets.token_bytes(32))
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [lambda said: bytes(32), lambda said: said[32:], lambda said: said[:32]],
    ids=["zeros", "the client's proof", "the client's nonce"],
)
def test_a_server_that_does_not_prove_the_secret_is_not_believed(
    answer: Callable[[bytes], bytes],
) -> None:
    with impostor(answer) as point, pytest.raises(dist.DistNetworkError, match="is not this run's"):
        client(point).get("key")


def test_a_silent_server_is_not_waited_for_longer_than_the_store_waits() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        point = MeetingPoint(LOOPBACK, listener.getsockname()[1], bytes(32))
        with pytest.raises(dist.DistNetworkError, match="says nothing"):
            client(point, timeout_s=0.1).get("key")


def test_silent_strangers_keep_nobody_out_and_are_shown_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting_server, "PROOF_S", 0.2)
    store, point = open_store()
    silent = [greet(point)[0] for _ in range(20)]
    silent[0].sendall(bytes(40))  # and one that stops in the middle
    assert client(point).add("key", 1) == 1  # while they are there
    for sock in silent:
        assert is_shut(sock)
        sock.close()
    assert client(point).add("key", 1) == 2
    store.close()


def test_more_strangers_than_there_is_room_for_lose_their_places_not_the_ranks(
    meeting: MeetingPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While connections are opened as fast as a thread can, all ranks get in and stay in; what the
    server holds of strangers is bounded."""
    monkeypatch.setattr(meeting_server, "MOST_STRANGERS", 32)
    before = num_descriptors()
    early = client(meeting)
    early.set("key", b"early")
    stop, held = threading.Event(), list[socket.socket]()

    def flood() -> None:
        while not stop.is_set():
            sock = socket.socket()
            sock.settimeout(20)
            sock.connect((meeting.host, meeting.port))
            held.append(sock)
            if len(held) > 400:
                held.pop(0).close()

    thread = threading.Thread(target=flood)
    thread.start()
    while len(held) < 300:
        assert early.get("key") == b"early"
    late = [client(meeting) for _ in range(20)]
    assert all(one.get("key") == b"early" for one in late)  # all before them were accepted, too
    ours = len(held) + 2 * (1 + len(late))
    assert num_descriptors() < before + ours + 2 * 32
    stop.set()
    thread.join()
    for sock in held:
        sock.close()
    assert early.get("key") == b"early"


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_strangers_who_hang_up_at_any_moment_leave_the_server_serving(
    meeting: MeetingPoint,
) -> None:
    """With a reset, too, and before the server has even looked."""
    store = client(meeting)
    for count in (0, 1, 31, 63):
        for _ in range(50):
            sock = socket.create_connection((meeting.host, meeting.port))
            sock.sendall(bytes(count))
            linger = (1).to_bytes(4, sys.byteorder) + bytes(4)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            sock.close()
    assert store.add("key", 1) == 1


def test_a_member_that_talks_nonsense_loses_its_connection_alone(meeting: MeetingPoint) -> None:
    store = client(meeting)
    store.set("word", b"no number")
    nonsense = (
        frame(b"eval", b"1"),
        frame(b"set", b"key"),
        frame(b"get", b"a", b"b"),
        frame(b"add", b"word", b"1"),
        frame(b"add", b"key", b"one"),
        frame(),
        (MOST_BYTES + 1).to_bytes(4, "big"),
        (8).to_bytes(4, "big") + (9).to_bytes(4, "big") + bytes(4),
        (5).to_bytes(4, "big") + (0).to_bytes(4, "big") + bytes(1),
        frame(b"get", b"never") + frame(b"count"),
    )
    for said in nonsense:
        sock, theirs = greet(meeting)
        with closing(sock):
            sock.sendall(bytes(32) + proof(meeting.secret, b"client", theirs, bytes(32)))
            receive(sock, 32)
            sock.sendall(said)
            assert is_shut(sock), said
    assert store.get("word") == b"no number" and store.num_keys() == 1


def test_a_server_without_a_descriptor_left_serves_who_is_there() -> None:
    """It accepts nobody for as long; then it does."""
    program = """
import os, resource, socket
from nanoengine.parallel.meeting_store import MeetingStore
from nanoengine.parallel.rendezvous import open_store
store, point = open_store()
store.set("key", b"v")
other = MeetingStore(point, timeout_s=20)
address = (point.host, point.port)
taken = []
resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
os.close(taken.pop())
stranger = socket.create_connection(address)       # the last one: nobody can accept it
assert store.get("key") == b"v"
for one in taken:
    os.close(one)
assert other.get("key") == b"v"
print("served")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "served\n", done.stderr


# -- the bytes ---------------------------------------------------------------------------------


def test_fields_come_back_as_they_were_and_nothing_else_is_taken_for_them() -> None:
    fields = [b"", b"a", bytes(range(256)), b""]
    body = frame(*fields)[4:]
    assert fields_of(body) == fields and fields_of(b"") == []
    for end in range(1, len(body)):
        try:
            assert fields_of(body[:end]) == fields[: len(fields_of(body[:end]))]
        except ValueError:
            continue
    with pytest.raises(ValueError, match="longer than its frame"):
        fields_of((7).to_bytes(4, "big") + b"six...")


def test_a_proof_is_of_all_that_was_said_field_by_field() -> None:
    said = (b"client", b"ab", b"c")
    good = proof(b"secret", *said)
    assert is_proof(good, b"secret", *said)
    for other in (
        (b"client", b"a", b"bc"),
        (b"clientab", b"c"),
        (b"client", b"c", b"ab"),
        said[:2],
    ):
        assert not is_proof(good, b"secret", *other)
    assert not is_proof(good, b"Secret", *said) and not is_proof(b"", b"secret", *said)


def test_a_mesh_of_one_process_needs_no_server(meeting: MeetingPoint) -> None:
    assert join_mesh(meeting, Layout(), 0).size() == 1
    assert Mesh(Layout()).size() == 1
    with pytest.raises(ValueError, match=r"host='203\.0\.113\.7': not an IPv4 address"):
        MeetingServer("203.0.113.7", bytes(32))
