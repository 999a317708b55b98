"""An environment behind an address plays as it does at hand; the server keeps its clients within
limits, and the client keeps itself from what a server may send."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fault_servers
import pytest
from agent_doubles import ScriptedGenerator, tiny_tokenizer
from waiting import until

import nanorl
from nanoinfer.params import SamplingParams
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent
from nanorl.commands.serve_env import kept_secret
from nanorl.envs.base import Environment, Services
from nanorl.envs.env_class import EnvClassKind
from nanorl.envs.env_kind import EnvKind
from nanorl.envs.remote.client import RemoteKind
from nanorl.envs.remote.wire import WireTask
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.rollout_json import to_json
from nanorl.serving import env_server
from nanorl.serving.env_server import SEAL, EnvServer, ServeLimits
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout, Status

TOKENIZER = tiny_tokenizer()
CALL = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'


def double(number: int) -> int:
    """Double a number.

    Args:
        number: Any.
    """
    return 2 * number


class Game(nanorl.Env):
    system = "Play."
    tools = (double,)
    parser = "hermes"
    open_now = 0

    def tasks(self, rng: Any) -> Task:
        return Task("Six times seven?", answer=42, data={"seed": rng.randrange(10**6)})

    def reset(self) -> None:
        Game.open_now += 1

    async def step(self, text: str) -> Any:
        if text == "wait":
            await asyncio.sleep(600)
        if text == "break":
            raise KeyError("a piece is missing")
        if text.isdigit():
            self.metric("num_answers")
            return self.done(answer=text)
        self.reward(-0.1)
        return [{"role": "user", "content": f"{text}?"}]

    def score(self, transcript: Transcript) -> Score:
        is_right = transcript.answer == "42"
        return Score(float(is_right), turns=[], parts={"length": len(transcript.messages) / 3})

    def close(self) -> None:
        Game.open_now -= 1


@dataclass
class Kit:
    """As much of an `AgentKit` as a server asks for."""

    kind: EnvKind

    def environment(self, *, is_tool_enabled: bool = True) -> Environment:
        return self.kind.open(services(is_tool_enabled))


def services(is_tool_enabled: bool = True) -> Services:
    return Services(
        tokenizer=TOKENIZER, sandbox=None, timeout_s=5.0, is_tool_enabled=is_tool_enabled
    )


@contextlib.asynccontextmanager
async def serving(key: str = "", **limits: Any) -> AsyncIterator[tuple[str, EnvServer]]:
    server = EnvServer(Kit(EnvClassKind(Game)), ServeLimits(**limits), key)  # type: ignore[arg-type]
    async with server.listening("127.0.0.1", 0) as url:
        yield url, server


async def kind_at(url: str, **arguments: Any) -> RemoteKind:
    """Its constructor asks the server, which is in this very loop."""
    return await asyncio.to_thread(RemoteKind, url, arguments)


async def first_task(kind: EnvKind) -> Task:
    return await asyncio.to_thread(lambda: kind.tasks(0).batch(0, 1)[0])


def in_time(run: Any) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(run, 250)

    return asyncio.run(limited())


async def play(env: Environment, task: Task, *says: str) -> Rollout:
    agent = Agent(
        generator=ScriptedGenerator(TOKENIZER, list(says)),
        tokenizer=TOKENIZER,
        limits=Limits(max_turns=8, max_turn_tokens=200, max_context_tokens=8192),
    )
    sampling = SamplingParams(seed=1)
    return await agent.play(task, env, group_id="g", rollout_id="r", sampling=sampling)


SCRIPTS = [(CALL, "hm", "42"), ("é?", "41"), (CALL, CALL + CALL, "42"), ("7",)]


def test_an_episode_behind_an_address_is_the_episode_at_hand() -> None:
    async def run() -> None:
        near = EnvClassKind(Game)
        async with serving() as (url, _):
            far = await kind_at(url)
            assert (far.name, far.loop, far.has_tools) == ("game", "tool", True)
            here, there = near.tasks(5), await asyncio.to_thread(far.tasks, 5)
            assert unsealed(await asyncio.to_thread(there.batch, 2, 3)) == here.batch(2, 3)
            assert unsealed(await asyncio.to_thread(there.heldout, 4, 9)) == here.heldout(4, 9)
            task = (await asyncio.to_thread(there.batch, 0, 1))[0]
            for enabled in (True, False):
                for says in SCRIPTS:
                    mine = await play(near.open(services(enabled)), unsealed([task])[0], *says)
                    theirs = await play(far.open(services(enabled)), task, *says)
                    assert to_json(theirs) == to_json(mine), says
                    assert mine.status == Status.FINISHED
        assert Game.open_now == 0

    in_time(run())


def unsealed(tasks: list[Task]) -> list[Task]:
    """Without what the server adds to know them again."""
    return [
        replace(one, data={name: one.data[name] for name in one.data if name != SEAL})
        for one in tasks
    ]


def test_a_client_plays_what_the_server_drew_and_nothing_of_its_own() -> None:
    """A task's data may be a path that the server reads (Harbor's is)."""

    async def run() -> None:
        async with serving() as (url, server):
            kind = await kind_at(url, patience_s=0.01)
            task = await first_task(kind)
            forged = [
                replace(task, data={**task.data, "path": "/etc"}),
                replace(task, answer=43),
                replace(task, files={"a.txt": "1"}),
                replace(task, data={"seed": 1}),
                replace(task, data={"seed": 1, SEAL: "0" * 64}),
            ]
            for one in forged:
                with pytest.raises(InfrastructureError, match=r"403.*did not draw that task"):
                    await kind.open(services()).reset(one)
            assert Game.open_now == 0
            again = Task.from_json(json.loads(json.dumps(task.to_json(), sort_keys=True)))
            assert (await play(kind.open(services()), again, "42")).is_success
            restarted = EnvServer(Kit(EnvClassKind(Game)), ServeLimits(), secret=server._secret)  # type: ignore[arg-type]
            async with restarted.listening("127.0.0.1", 0) as url:
                kind = await kind_at(url)
                assert (await play(kind.open(services()), task, "42")).is_success
        async with serving(takes_tasks=True) as (url, _):
            kind = await kind_at(url)
            assert (await play(kind.open(services()), forged[1], "42")).is_success

    in_time(run())


def test_a_seal_survives_what_json_does_to_a_task() -> None:
    """Keys become texts, in another order than numbers have, and tuples lists."""
    server = EnvServer(Kit(EnvClassKind(Game)), ServeLimits())  # type: ignore[arg-type]
    drawn = WireTask(prompt="p", data={"by": {10: "x", 9: (1, 2)}, "share": 0.1 + 0.2})
    back = WireTask(**json.loads(json.dumps(json.loads(server._sealed(drawn).model_dump_json()))))
    assert server._opened(back).data == {"by": {"10": "x", "9": [1, 2]}, "share": 0.1 + 0.2}


def test_the_secret_that_seals_tasks_is_the_owners_and_stays(tmp_path: Path) -> None:
    first = kept_secret(tmp_path / "cache")
    assert len(first) == 32 and kept_secret(tmp_path / "cache") == first
    assert (tmp_path / "cache" / "serve-env.key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "file").write_text("")
    assert kept_secret(tmp_path / "file") == b""  # there is no place for it


def test_servers_that_start_at_the_same_time_keep_one_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one comes when the file is there, and nothing in it yet."""
    found: list[bytes] = []
    other = threading.Thread(target=lambda: found.append(kept_secret(tmp_path)))
    draw = secrets.token_bytes

    def overtaken(count: int) -> bytes:
        other.start()
        other.join(0.3)  # as long as it takes where it does not wait
        return draw(count)

    monkeypatch.setattr(secrets, "token_bytes", overtaken)
    mine = kept_secret(tmp_path)
    other.join()
    assert len(mine) == 32 and found == [mine]


def test_a_secret_whose_maker_was_killed_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "serve-env.key").touch(mode=0o600)
    made = kept_secret(tmp_path)
    assert len(made) == 32 and kept_secret(tmp_path) == made


def test_what_breaks_or_hangs_in_the_server_fails_the_rollout_and_says_why() -> None:
    async def run() -> None:
        async with serving() as (url, server):
            kind = await kind_at(url)
            task = await first_task(kind)
            broken = await play(kind.open(services()), task, "break")
            assert broken.status == Status.FAILED and "a piece is missing" in broken.error
            server._limits = ServeLimits(call_s=0.5)  # of this call: others may be slow
            hung = await play(kind.open(services()), task, "wait")
            assert hung.status == Status.FAILED and "not finished within 0.5 s" in hung.error
            server._limits = ServeLimits()
            good = await play(kind.open(services()), task, "42")
            assert good.is_success
        assert Game.open_now == 0

    in_time(run())


def test_a_full_server_is_waited_for_and_forgotten_episodes_expire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock of the server goes on only when the test says so."""
    now = [0.0]
    monkeypatch.setattr(env_server, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def run() -> None:
        async with serving(max_episodes=1, idle_s=0.4) as (url, _):
            kind = await kind_at(url, patience_s=60)
            task = await first_task(kind)
            forgotten = kind.open(services())
            await forgotten.reset(task)
            with pytest.raises(InfrastructureError, match=r"429.*1 episodes are open"):
                await (await kind_at(url, patience_s=0.01)).open(services()).reset(task)
            now[0] += 0.5
            rollout = await play(kind.open(services()), task, "42")
            assert rollout.is_success, "once the other had expired"
            with pytest.raises(InfrastructureError, match=r"404.*has expired"):
                await forgotten.step("1")
        assert Game.open_now == 0, "a server that ends closes what it holds"

    in_time(run())


class SlowGame(Game):
    """Opens for ever where it is asked to, and closes when it may."""

    in_reset = in_close = 0
    may_close: asyncio.Event

    async def reset(self) -> None:  # type: ignore[override]
        super().reset()
        if self.task.prompt == "slow":
            SlowGame.in_reset += 1
            await asyncio.sleep(600)

    async def close(self) -> None:  # type: ignore[override]
        SlowGame.in_close += 1
        await SlowGame.may_close.wait()
        super().close()


def test_a_server_that_ends_leaves_no_episode_that_was_being_opened_or_closed() -> None:
    async def run() -> None:
        SlowGame.may_close = asyncio.Event()
        server = EnvServer(Kit(EnvClassKind(SlowGame)), ServeLimits(takes_tasks=True))  # type: ignore[arg-type]
        async with server.listening("127.0.0.1", 0) as url:
            opened = json.loads((await asked(url, "/reset", b'{"task": {"prompt": "quick"}}'))[1])
            bodies = {
                "/reset": {"task": {"prompt": "slow"}},
                "/close": {"episode": opened["episode"]},
            }
            calls = [
                asyncio.create_task(asked(url, path, json.dumps(body).encode()))
                for path, body in bodies.items()
            ]
            await until(lambda: SlowGame.in_reset and SlowGame.in_close)
            assert Game.open_now == 2
            asyncio.get_running_loop().call_later(0.3, SlowGame.may_close.set)
        assert Game.open_now == 0 and not server._episodes
        said = [status for status, _ in await asyncio.gather(*calls)]
        assert said[0] == 503 and said[1] in (200, 503)

    in_time(run())


async def asked(url: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str]:
    """The status and body of a request by hand: GET without a body."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [f"{'POST' if body else 'GET'} {path} HTTP/1.1", f"content-length: {len(body)}"]
    given = {"host": f"{host}:{port}", "connection": "close"} | headers
    lines += [f"{name}: {value}" for name, value in given.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    said = (await reader.read()).decode()
    writer.close()
    return int(said.split()[1]), said.partition("\r\n\r\n")[2]


def test_the_server_keeps_strangers_out(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("secret\n")

    async def run() -> None:
        async with serving("secret") as (url, _):
            assert (await asked(url, "/health"))[0] == 401
            assert (await asked(url, "/health", authorization="Bearer wrong"))[0] == 401
            assert (await asked(url, "/health", authorization="Bearer secret"))[0] == 200
            kind = await kind_at(url, api_key_file=str(key_file))
            assert kind.name == "game"
            with pytest.raises(ValueError, match="401"):
                await kind_at(url)
            named = url.replace("//", "//any:secret@")
            assert (await kind_at(named)).name == "game", "the password of an address is a key"
            password = f"Basic {base64.b64encode(b'any:secret').decode()}"
            page = {"authorization": password, "origin": "http://evil.example"}
            assert (await asked(url, "/health", **page))[0] == 401, "a browser's memory is none"
            assert (await asked(url, "/health", **{"x-api-key": "secret"}))[0] == 200
        async with serving() as (url, server):
            assert (await asked(url, "/health"))[0] == 200
            assert (await asked(url, "/health", host="evil.example"))[0] == 403
            assert (await asked(url, "/health", origin="http://evil.example"))[0] == 403
            with pytest.raises(ValueError, match="open to the network"):
                async with server.listening("0.0.0.0", 0):
                    pass

    in_time(run())


def test_requests_that_cannot_be_are_refused_with_the_field() -> None:
    async def run() -> list[tuple[int, str]]:
        async with serving(max_body_bytes=2000) as (url, _):
            task = {"prompt": "p"}
            bodies = [
                ("/reset", {"task": {"prompt": 7}}, 400, "task.prompt"),
                ("/reset", {"task": task, "colour": 1}, 400, "colour: unknown field"),
                ("/reset", {"seed": -1}, 400, "seed"),
                ("/step", {"episode": "nowhere", "text": "1"}, 404, "no episode"),
                ("/step", {"episode": "nowhere"}, 400, "text"),
                ("/step", {"episode": "x", "text": "y" * 3000}, 413, "2000 bytes"),
                ("/tasks?n=-1", None, 400, "n: must be a natural number"),
                ("/tasks?n=10000000", None, 400, "at most"),
                ("/nowhere", None, 404, "/nowhere"),
            ]
            for path, body, status, words in bodies:
                said = await asked(url, path, json.dumps(body).encode() if body else b"")
                assert said[0] == status and words in said[1], (path, said)
            said = await asked(url, "/step", b"\xff\x00")
            assert said[0] == 400
            drawn = json.loads((await asked(url, "/reset", b'{"seed": 3}'))[1])
            assert drawn["task"]["prompt"] == "Six times seven?", "a seed draws the task"
            score = {"episode": drawn["episode"], "rollout": {"tokens": 1}, "transcript": {
                "messages": [], "text": "", "answer": None, "is_truncated": False}}  # fmt: skip
            said = await asked(url, "/score", json.dumps(score).encode())
            assert said[0] == 400 and "rollout" in said[1]

    in_time(run())
    assert Game.open_now == 0


SAID = {
    "hang": "took longer than 0.5 s|Timeout",
    "hang up": "RemoteDisconnected",
    "flood": "more than 1048576 bytes",
    "garbage": "talks nonsense",
    "500": "answers 500",
}


@pytest.mark.parametrize("fault", fault_servers.FAULTS)
def test_whatever_a_server_sends_is_infrastructure(fault: str) -> None:
    async def refuse(head: bytes, body: bytes) -> bytes:
        raise AssertionError("every request meets the fault")

    async def run() -> None:
        async with serving() as (good, _):
            kind = await kind_at(good, max_bytes=1 << 20)
            if fault == "hang":  # all others are answered
                kind._line.options = replace(kind._line.options, timeout_s=0.5)
            async with fault_servers.misbehaving(refuse, lambda head, body: fault) as bad:
                kind._line.address = bad
                env = kind.open(services())
                with pytest.raises(InfrastructureError, match=f"/reset.*({SAID[fault]})"):
                    await env.reset(Task("?"))
                with pytest.raises(InfrastructureError, match=f"/step.*({SAID[fault]})"):
                    await env.step("1")
                with pytest.raises(ConnectionError, match=f"the tasks of.*({SAID[fault]})"):
                    await asyncio.to_thread(kind.tasks, 0)

    in_time(run())


@pytest.mark.parametrize(
    ("address", "arguments", "message"),
    [
        ("http://127.0.0.1:9", {}, "no environment server answers"),
        ("http://", {}, "an address looks like"),
        ("http://127.0.0.1:9", {"timeout_s": 0}, "must be positive"),
        ("http://127.0.0.1:9", {"colour": 1}, "colour"),
    ],
)
def test_addresses_that_cannot_be_are_refused(
    address: str, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RemoteKind(address, arguments)


def test_a_server_that_is_killed_fails_its_episodes_and_its_successor_plays_on(
    tmp_path: Path,
) -> None:
    """The console command, in a process of its own."""
    game = tmp_path / "game.py"
    game.write_text(
        "import nanorl\n\nclass Game(nanorl.Env):\n"
        "    def tasks(self, rng):\n        return nanorl.Task('?', rng.randrange(10**6))\n"
    )

    def start(port: int = 0) -> tuple[subprocess.Popen[str], str]:
        words = [sys.executable, "-m", "nanorl", "serve-env", str(game), "--workers", "0"]
        server = subprocess.Popen(
            [*words, "--port", str(port)], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"TMPDIR": str(scratch)},
        )  # fmt: skip
        assert server.stdout is not None
        line = server.stdout.readline()
        assert "environment game at http://127.0.0.1:" in line
        return server, line.split()[-1]

    async def run() -> None:
        server, url = await asyncio.to_thread(start)
        try:
            kind = await kind_at(url, patience_s=200)
            task = await first_task(kind)
            env = kind.open(services())
            await env.reset(task)
            server.kill()
            server.wait()
            with pytest.raises(InfrastructureError):
                await env.step("1")
            again = asyncio.create_task(play(kind.open(services()), task, str(task.answer)))
            await asyncio.sleep(0.5)  # it asks in vain
            server.stdout.close()
            server, _ = await asyncio.to_thread(start, int(url.rpartition(":")[2]))
            assert (await again).is_success
            server.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.wait) == 0
        finally:
            server.kill()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    in_time(run())
    left = [one.name for one in scratch.iterdir()]
    assert len(left) == 1, f"{left}: a server that is killed leaves its folder, no other does"


SIGNALLED = """
import builtins, os, signal, sys
from nanorl.cli import main

say = builtins.print

def say_and_be_stopped(*words, **options):
    say(*words, **options)
    if "at http://" in words[0]:
        os.kill(os.getpid(), signal.SIGTERM)

builtins.print = say_and_be_stopped
sys.exit(main(sys.argv[1:]))
"""


def test_who_is_told_the_address_may_stop_the_server_at_once(tmp_path: Path) -> None:
    """A supervisor's signal may come before the server does anything after saying it."""
    game = tmp_path / "game.py"
    game.write_text(
        "import nanorl\n\nclass Game(nanorl.Env):\n    data = [nanorl.Task('?', '1')]\n"
    )
    words = ["serve-env", str(game), "--workers", "0", "--port", "0"]
    ended = subprocess.run(
        [sys.executable, "-c", SIGNALLED, *words], capture_output=True, text=True, timeout=250
    )
    assert (ended.returncode, ended.stdout[-8:]) == (0, "stopped\n"), ended.stderr
