"""The recording proxy: real servers, clients and processes, and no network but this machine's."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
from agent_doubles import ScriptedGenerator
from agent_programs import SECRET, TINY, play, written
from forked_runs import SMALL, RunProcess, rows
from web_servers import BINARY, EVENTS, SECRETS, CountingServer, web_server

from nanorl.agents.command import Command
from nanorl.envs.http_record.allow import AllowList
from nanorl.envs.http_record.http_exchange import WebRequest
from nanorl.envs.http_record.record import DamagedRecordError, HttpRecord
from nanorl.envs.http_record.record_config import HttpConfig
from nanorl.envs.http_record.recorder import RecordingProxy
from nanorl.envs.http_record.refusal import NoAnswerError
from nanorl.envs.http_record.upstream import Upstream
from nanorl.observability.store import RolloutStore

Reply = tuple[int, bytes]
Get = Callable[[str], Reply]
ROOT = Path(__file__).resolve().parents[3]
SOON_S = 200.0  # far more than anything here takes


def place(server: CountingServer) -> str:
    return f"127.0.0.1:{server.server_port}"


def with_urllib(proxy: RecordingProxy) -> Get:
    context = ssl.create_default_context(cafile=str(proxy.access.ca_file))
    handler = urllib.request.ProxyHandler(dict.fromkeys(("http", "https"), proxy.access.url))
    opener = urllib.request.build_opener(handler, urllib.request.HTTPSHandler(context=context))

    def get(url: str) -> Reply:
        try:
            with opener.open(url, timeout=SOON_S) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    return get


def with_httpx(proxy: RecordingProxy) -> Get:
    context = ssl.create_default_context(cafile=str(proxy.access.ca_file))
    client = httpx.Client(
        proxy=proxy.access.url,
        verify=context,
        trust_env=False,
        follow_redirects=True,
        timeout=SOON_S,
    )

    def get(url: str) -> Reply:
        reply = client.get(url)
        return reply.status_code, reply.content

    return get


def with_requests(proxy: RecordingProxy) -> Get:
    client = requests.Session()
    client.trust_env = False
    client.proxies = dict.fromkeys(("http", "https"), proxy.access.url)
    client.verify = str(proxy.access.ca_file)

    def get(url: str) -> Reply:
        reply = client.get(url, timeout=SOON_S)
        return reply.status_code, reply.content

    return get


CLIENTS = {"urllib": with_urllib, "httpx": with_httpx, "requests": with_requests}


@pytest.fixture(scope="module")
def server() -> Iterator[CountingServer]:
    with web_server() as one:
        yield one


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "http.sqlite"


def message(reply: Reply) -> str:
    return json.loads(reply[1])["error"]["message"]


def test_what_was_recorded_replays_to_the_byte_without_a_server(
    tmp_path: Path, store: Path
) -> None:
    paths = ("/page?x=1", "/gzip", "/binary", "/events", "/missing")
    ca_file = tmp_path / "ca.pem"
    with web_server() as plain, web_server(ca_file) as secure:
        names = (place(plain), f"localhost:{secure.server_port}")
        urls = [
            f"{scheme}://{name}{path}"
            for scheme, name in zip(("http", "https"), names, strict=True)
            for path in paths
        ]
        config = HttpConfig(mode="record", allow=names, ca_file=ca_file)
        with RecordingProxy(config, store=store) as proxy:
            first = {name: list(map(of(proxy), urls)) for name, of in CLIENTS.items()}
            again = {name: list(map(of(proxy), urls)) for name, of in CLIENTS.items()}
        assert again == first
        assert {len(first["httpx"]), first["httpx"][2]} == {len(urls), (200, BINARY)}
        assert first["urllib"][3] == first["urllib"][8] == (200, b"".join(EVENTS))
        assert first["requests"][1] == (200, b"packed " * 500)
        assert first["urllib"][4] == (404, b"no such page")
        asked = [*plain.asked.values(), *secure.asked.values()]
        assert len(asked) == len(urls) and max(asked) <= len(CLIENTS)  # once by each, at most
    with RecordingProxy(HttpConfig(mode="replay", allow=names), store=store) as proxy:
        for name, of in CLIENTS.items():
            assert list(map(of(proxy), urls)) == first[name]
        counts = proxy.take_counts()
        assert counts["requests"] == counts["replayed"] == len(urls) * len(CLIENTS)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_host_off_the_list_is_refused_and_named(
    server: CountingServer, store: Path, client: str
) -> None:
    with RecordingProxy(HttpConfig(mode="record", allow=(place(server),)), store=store) as proxy:
        get = CLIENTS[client](proxy)
        for url in ("http://off.example/a?token=abc", "https://off.example/a"):
            status, _ = reply = get(url)
            assert status == 403
            assert "off.example is not on the list" in message(reply)
            assert "--http.allow off.example" in message(reply) and "abc" not in message(reply)
        redirected = get(f"http://{place(server)}/away")
        assert redirected[0] == 403 and "off-the-list.example" in message(redirected)
        other = get(f"http://127.0.0.1:{server.server_port + 1}/")
        assert "--http.allow 127.0.0.1:" in message(other)
        assert proxy.take_counts()["host_not_allowed"] == 4


def test_a_name_is_no_way_to_a_private_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after DNS rebinding: the name is allowed, what it points at is not."""
    addresses = {"good.example": "127.0.0.1", "inner.example": "::ffff:10.0.0.7"}

    async def getaddrinfo(self: object, host: str, port: int, **_: object) -> list[Any]:
        return [(0, 0, 0, "", (addresses[host], port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    upstream = Upstream(AllowList(tuple(addresses)), ca_file=None, timeout_s=5, max_bytes=100)
    for name, shown in zip(addresses, ("127.0.0.1", "10.0.0.7"), strict=True):
        request = WebRequest(method="GET", url=f"http://{name}/", headers=(), body=b"")
        with pytest.raises(NoAnswerError, match=rf"{name} has the private address .*{shown}"):
            asyncio.run(upstream.ask(request))


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        ("api.example.org", [("api.example.org", 443)], [("api.example.org", 8443)]),
        ("api.example.org", [("api.example.org", 80)], [("x.api.example.org", 443)]),
        ("*.wiki.org", [("de.wiki.org", 443)], [("wiki.org", 443), ("evilwiki.org", 443)]),
        ("[::1]:8080", [("::1", 8080)], [("::1", 80)]),
        ("Example.ORG:81", [("example.org", 81)], [("example.org", 80)]),
    ],
)
def test_patterns_of_the_list(
    pattern: str, allowed: list[tuple[str, int]], refused: list[tuple[str, int]]
) -> None:
    one = AllowList((pattern,))
    assert all(one.allows(*place) for place in allowed)
    assert not any(one.allows(*place) for place in refused)


@pytest.mark.parametrize(
    ("address", "host", "is_allowed"),
    [
        ("93.184.216.34", "a.example", True),
        ("169.254.169.254", "a.example", False),
        ("10.1.2.3", "a.example", True),
        ("10.1.2.4", "a.example", False),
        ("127.0.0.1", "localhost", True),
        ("fe80::1%eth0", "a.example", False),
        ("0.0.0.0", "a.example", False),
        ("2606:2800:220:1::1", "a.example", True),
        ("::1", "localhost", True),
        ("::1", "a.example", False),
        # private addresses in the clothes of IPv6: mapped, compatible, NAT64, 6to4, Teredo
        ("::ffff:169.254.169.254", "a.example", False),
        ("::169.254.169.254", "a.example", False),
        ("64:ff9b::a9fe:a9fe", "a.example", False),
        ("64:ff9b::127.0.0.1", "a.example", False),
        ("64:ff9b::93.184.216.34", "a.example", True),
        ("64:ff9b::10.1.2.3", "a.example", True),
        ("64:ff9b:1::5db8:d822", "a.example", False),
        ("2002:a9fe:a9fe::1", "a.example", False),
        ("2002:5db8:d822::1", "a.example", True),
        ("2001:0:4136:e378:8000:63bf:5601:5601", "a.example", False),  # of 169.254.169.254
    ],
)
def test_private_addresses_have_to_be_listed(address: str, host: str, is_allowed: bool) -> None:
    listed = AllowList(("a.example", "localhost", "10.1.2.3"))
    assert listed.allows_address(address, host, 443) == is_allowed


@pytest.mark.parametrize("pattern", ["https://a.org", "a.org/x", "*", "a b", "", "*.*.org", "a@b"])
def test_what_is_no_host_is_refused_before_any_work(pattern: str) -> None:
    with pytest.raises(ValueError, match="must be a host such as"):
        HttpConfig(mode="record", allow=(pattern,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow": ("a.org",)}, "nothing reads it with --http.mode off"),
        ({"mode": "record"}, "no host may be asked"),
        ({"mode": "replay", "store": Path("no.sqlite")}, "no such file to replay"),
        ({"mode": "live", "allow": ("a.org",), "timeout_s": 0}, "--http.timeout-s 0"),
    ],
)
def test_options_that_say_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HttpConfig(**options)


@pytest.mark.parametrize("target", ["http://a.org:x/", "http://[::1/", "ftp://a.org/", "/page"])
def test_what_is_no_address_is_refused(store: Path, target: str) -> None:
    with RecordingProxy(HttpConfig(mode="live", allow=("a.org",)), store=store) as proxy:
        told = base64.b64encode(proxy.access.url[7:].partition("@")[0].encode()).decode()
        with socket.create_connection(("127.0.0.1", proxy.access.port)) as plain:
            head = f"GET {target} HTTP/1.1\r\nHost: a.org\r\nProxy-Authorization: Basic {told}"
            plain.sendall(f"{head}\r\n\r\n".encode())
            assert plain.makefile("rb").readline().startswith(b"HTTP/1.1 400 ")


def test_replay_asks_nobody_and_names_what_is_missing(server: CountingServer, store: Path) -> None:
    url = f"http://{place(server)}/known"
    with RecordingProxy(HttpConfig(mode="record", allow=(place(server),)), store=store) as proxy:
        known = with_httpx(proxy)(url)
    before = server.asked.total()
    for allow in ((), (place(server),)):
        config = HttpConfig(mode="replay", allow=allow)
        with RecordingProxy(config, store=store) as proxy:
            assert with_httpx(proxy)(url) == known
            status, _ = reply = with_httpx(proxy)(f"http://{place(server)}/unknown")
            assert status == 504
            for part in ("/unknown", "not in the record", "--http.mode record", place(server)):
                assert part in message(reply)
    assert server.asked.total() == before


def test_equal_requests_at_the_same_time_are_one(server: CountingServer, store: Path) -> None:
    url = f"http://{place(server)}"
    config = HttpConfig(mode="record", allow=(place(server),))
    with RecordingProxy(config, store=store) as proxy, ThreadPoolExecutor(16) as pool:
        same = set(pool.map(lambda _: with_urllib(proxy)(f"{url}/same"), range(16)))
        numbers = [f"{url}/number/{one}" for one in range(16)]
        different = set(pool.map(lambda one: with_urllib(proxy)(one), numbers))
    assert same == {(200, b"GET /same, 1")} and server.asked["GET /same"] == 1
    assert len(different) == 16


def test_body_method_and_chosen_headers_make_a_request_another(
    server: CountingServer, store: Path
) -> None:
    url = f"http://{place(server)}/search"
    config = HttpConfig(mode="record", allow=(place(server),), key_headers=("X-Page",))
    with (
        RecordingProxy(config, store=store) as proxy,
        httpx.Client(proxy=proxy.access.url, trust_env=False, timeout=SOON_S) as client,
    ):
        texts = [
            client.post(url, content=body, headers=headers).text
            for body, headers in [
                ("a", {}),
                ("b", {}),
                ("a", {"X-Page": "2"}),
                ("a", {"User-Agent": "other"}),
            ]
        ]
        head = client.head(f"http://{place(server)}/binary")
    assert texts == ["got a, 1", "got b, 2", "got a, 3", "got a, 1"]
    assert int(head.headers["content-length"]) == len(BINARY) and not head.content


def test_no_secret_is_written_and_none_is_needed_for_a_replay(
    server: CountingServer, store: Path
) -> None:
    url = f"http://{place(server)}/private?api_key={SECRETS[2]}"
    headers = {"Authorization": SECRETS[0], "Cookie": SECRETS[1], "X-Api-Key": SECRETS[0]}
    config = HttpConfig(mode="record", allow=(place(server),))
    with RecordingProxy(config, store=store) as proxy:
        with httpx.Client(proxy=proxy.access.url, trust_env=False, timeout=SOON_S) as client:
            recorded = client.get(url, headers=headers)
        assert proxy.take_counts()["recorded"] == 1
        data = b"".join(file.read_bytes() for file in store.parent.glob("http.sqlite*"))
        assert not [one for one in SECRETS[:2] + SECRETS[3:] if one.encode() in data]
        [(shown,)] = sqlite3.connect(store).execute("SELECT url FROM answers").fetchall()
        assert shown == f"http://{place(server)}/private?api_key=hidden"
    with RecordingProxy(replace(config, mode="replay"), store=store) as proxy:
        assert with_httpx(proxy)(url) == (200, recorded.content)


def test_a_servers_bad_minute_is_not_recorded(server: CountingServer, store: Path) -> None:
    url = f"http://{place(server)}/busy"
    with RecordingProxy(HttpConfig(mode="record", allow=(place(server),)), store=store) as proxy:
        get = with_httpx(proxy)
        assert [get(url)[0] for _ in range(3)] == [503, 200, 200]
        counts = proxy.take_counts()
        assert [counts[name] for name in ("passed_on", "recorded", "replayed")] == [1, 1, 1]


def test_size_time_and_token_are_limits(server: CountingServer, store: Path) -> None:
    url = f"http://{place(server)}"
    config = HttpConfig(mode="live", allow=(place(server), "127.0.0.1:9"))
    with RecordingProxy(replace(config, timeout_s=0.5), store=store) as proxy:
        assert "--http.timeout-s 0.5" in message(with_httpx(proxy)(f"{url}/slow"))
    with RecordingProxy(replace(config, max_body_mb=1), store=store) as proxy:
        get = with_httpx(proxy)
        assert "--http.max-body-mb 1" in message(get(f"{url}/large"))
        assert get("http://127.0.0.1:9/")[0] == 502
        reply = httpx.post(
            f"{url}/a", content=b"x" * (2 << 20), proxy=proxy.access.url, timeout=SOON_S
        )
        assert reply.status_code == 413
        bare = f"http://127.0.0.1:{proxy.access.port}"
        assert httpx.get(f"{url}/a", proxy=bare, timeout=SOON_S).status_code == 407
        with pytest.raises(httpx.ProxyError, match="407"):
            httpx.get("https://example.org", proxy=bare, timeout=SOON_S)
        assert get(f"{url}/live") != get(f"{url}/live"), "nothing is kept in this mode"
    assert not store.exists()


def test_a_killed_recorder_has_kept_what_somebody_has_read(
    server: CountingServer, store: Path
) -> None:
    proxy = RecordingProxy(HttpConfig(mode="record", allow=(place(server),)), store=store)
    get, urls = with_httpx(proxy), [f"http://{place(server)}/kept/{one}" for one in range(5)]
    read = [get(url) for url in urls]
    os.kill(proxy.pid, signal.SIGKILL)
    with pytest.raises(ConnectionError, match="has died"):
        proxy.take_counts()
    proxy.close()
    with RecordingProxy(HttpConfig(mode="replay"), store=store) as proxy:
        assert [with_httpx(proxy)(url) for url in urls] == read


def test_a_damaged_record_is_one_error(server: CountingServer, store: Path) -> None:
    config = HttpConfig(mode="record", allow=(place(server),))
    with RecordingProxy(config, store=store) as proxy:
        with_httpx(proxy)(f"http://{place(server)}/a")
    with sqlite3.connect(store) as database:
        database.execute("UPDATE answers SET body = 'other'")
    with RecordingProxy(config, store=store) as proxy:
        reply = with_httpx(proxy)(f"http://{place(server)}/a")
        assert reply[0] == 502 and "cannot be read as recorded answers" in message(reply)
    whole = store.read_bytes()
    for damage in (b"no database at all", whole[:5000], whole[:-4096] + b"\xff" * 4096):
        store.write_bytes(damage)
        with pytest.raises(ValueError, match=r"http\.sqlite cannot be read as recorded answers"):
            RecordingProxy(config, store=store)
    with RolloutStore(store.with_name("other.sqlite")), pytest.raises(DamagedRecordError):
        HttpRecord(store.with_name("other.sqlite"))


def test_code_that_goes_past_the_proxy_is_told_so(server: CountingServer, store: Path) -> None:
    """In a process of environments, where `enter` was called."""
    code = """
import os, socket, sys, urllib.request
from pathlib import Path
from nanorl.envs.http_record.record_access import HttpAccess
port, token, ca_file, page = sys.argv[1:]
HttpAccess(port=int(port), token=token, ca_file=Path(ca_file)).enter()
print(urllib.request.urlopen(f"http://{page}/entered").read().decode())
left, right = socket.socketpair()
host, number = page.split(":")
try:
    socket.create_connection((host, int(number)))
except PermissionError as error:
    print(error)
"""
    with RecordingProxy(HttpConfig(mode="record", allow=(place(server),)), store=store) as proxy:
        access = proxy.access
        words = [str(access.port), access.token, str(access.ca_file), place(server)]
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True, text=True, timeout=SOON_S,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    page, refusal = done.stdout.splitlines()
    assert page == "GET /entered, 1", done.stderr
    assert f"port {server.server_port}, past the recording proxy" in refusal


@pytest.mark.sandbox
@pytest.mark.parametrize("in_sandbox", [False, True], ids=["plain", "sandboxed"])
def test_an_agent_program_has_the_proxy_and_no_other_network(
    server: CountingServer, store: Path, tmp_path: Path, in_sandbox: bool
) -> None:
    body = f"""
import socket
page = urllib.request.urlopen("http://localhost:{server.server_port}/seen").read().decode()
try:
    urllib.request.urlopen("https://off.example/")
except urllib.error.HTTPError as error:
    page += " " + str(error.code) + error.read().decode()
ask("x")
if {in_sandbox}:
    try:
        socket.create_connection(("127.0.0.1", {server.server_port}))
    except OSError as error:
        page += " " + type(error).__name__
print(page)
"""
    answers: list[str] = []

    class Overheard(Command):
        async def __call__(self, episode: Any) -> None:
            await super().__call__(episode)
            answers.append(episode.answer)

    command = Overheard(command=written(tmp_path, body), in_sandbox=in_sandbox)
    config = HttpConfig(mode="record", allow=(f"localhost:{server.server_port}",))
    with RecordingProxy(config, store=store) as proxy:
        rollout = asyncio.run(play(command, ScriptedGenerator(TINY, [SECRET]), http=proxy.access))
    assert answers, rollout.error
    assert answers[0].startswith("GET /seen, ") and "403" in answers[0]
    assert "off.example is not on the list" in answers[0]
    assert answers[0].endswith("ConnectionRefusedError") == in_sandbox


FETCHING = """
import urllib.request
import nanorl

def page(number: int) -> str:
    \"""Fetch a page.\"""
    return urllib.request.urlopen(f"SITE/page/{number}").read().decode()

class Fetching(nanorl.Env):
    tools = [page]

    def tasks(self, rng):
        return nanorl.Task("Which?", data={"number": rng.randint(1, 10**6)})

    def reset(self):
        return page(self.task.data["number"] % 7)

    def teacher(self, observations, rng):
        return str(len(observations)) if observations else nanorl.ToolCall("page", {"number": 1})

    def step(self, text):
        number = sum(text.encode()) % 7
        if number and "is_read" not in vars(self):
            self.is_read = True
            return page(number)
        return self.done(reward=float(len(text) % 2))
"""


@pytest.mark.sandbox
def test_a_run_replays_its_pages_without_their_server(tmp_path: Path) -> None:
    file, kept = tmp_path / "fetching.py", tmp_path / "record" / "http.sqlite"
    options = (
        *SMALL,
        "--rl.steps",
        "2",
        "--evaluation.num-tasks",
        "1",
        "--env",
        str(file),
        "--agent.max-context-tokens",
        "1024",
    )
    with web_server() as server:
        file.write_text(FETCHING.replace("SITE", f"http://{place(server)}"))
        first = run(tmp_path, "record", *options, "--http.allow", place(server))
        asked = server.asked.total()
    assert asked > 1 and sum(row["http/requests"] for row in first) > 0
    second = run(tmp_path, "replay", *options, "--http.store", str(kept))
    assert sum(row["http/requests"] for row in first) == sum(row["http/requests"] for row in second)
    assert {row["http/recorded"] + row["http/not_in_record"] for row in second} == {0.0}
    assert tokens_of(tmp_path / "record") == tokens_of(tmp_path / "replay") != []


def run(folder: Path, mode: str, *options: str) -> list[dict[str, Any]]:
    out = folder / mode
    process = RunProcess(folder / "log", *options, "--http.mode", mode, "--out", str(out))
    assert process.wait(300) == 0, process.output()
    return rows(out)


def tokens_of(folder: Path) -> list[Any]:
    with RolloutStore(folder / "rollouts.sqlite") as store:
        found = [store.get(entry.rollout_id) for entry in store.entries()]
    return [(one.rollout_id, one.tokens, one.logps, one.reward) for one in found]
