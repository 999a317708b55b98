"""200 rollouts of environments with tools, rewards, judges and environment servers, a tenth of which
meets one that hangs, dies, floods or talks nonsense: the batch is the one without, nothing is left.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import fault_servers
import plugin_faults
import pytest
from agent_doubles import output_of
from test_hosting import held, resident_bytes, sleeper

from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.kit import AgentKit
from nanorl.collector import RolloutCollector, RolloutsFailed
from nanorl.commands.train import main
from nanorl.config import RunConfig
from nanorl.envs.remote.server import EnvServer, ServeLimits
from nanorl.evaluate import evaluate
from nanorl.presets import get_preset
from nanorl.store import RolloutStore
from nanorl.tasks.tiny_model import build_tiny_model
from nanorl.types import Rollout, Task

assert sleeper, "a fixture"
pytestmark = [
    pytest.mark.xdist_group("hosting"),
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the local back end needs Linux"),
]
FILE = str(Path(plugin_faults.__file__))
NUM_GROUPS, GROUP_SIZE = 10, 5  # of each of four arrangements: 200 rollouts
IN_PROCESS = ("hang", "exit", "kill", "flood", "garbage")
DEADLINE_S = 3.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where faults are armed; temporary files go beside it, and none may stay."""
    arms, scratch = tmp_path / "arms", tmp_path / "scratch"
    arms.mkdir()
    scratch.mkdir()
    monkeypatch.setenv("PLUGIN_FAULTS", str(arms))
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(FILE).parent), *os.sys.path]))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield arms
    assert not list(scratch.iterdir()), "temporary files were left"


@dataclass
class Speaker:
    """Says what follows from the seed of the turn, with a call of a tool in every other turn."""

    tokenizer: ChatTokenizer
    number: int
    has_tool: bool

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        await asyncio.sleep(0)
        assert params.seed is not None
        text = "word " * (1 + params.seed % 7) + "." * (params.seed % 5)
        if self.has_tool and params.seed % 2:
            call = {"name": "lookup", "arguments": {"number": self.number}}
            text = f"<tool_call>{json.dumps(call)}</tool_call>"
        return output_of([*self.tokenizer.encode(text), min(self.tokenizer.eos_ids)])


def options(**given: Any) -> RunConfig:
    config = get_preset("tiny").config()
    return replace(
        config,
        env_deadline_s=DEADLINE_S,
        tool=replace(config.tool, timeout_s=30.0),  # a tool that hangs meets the deadline first
        agent=replace(config.agent, max_turns=8, max_turn_tokens=200, max_context_tokens=4096),
        **given,
    )


async def batch_of(kit: AgentKit, tasks: list[Task]) -> tuple[list[Rollout], int]:
    """The rollouts of all groups, and how many attempts failed."""
    rollouts, num_failed = [], 0
    for place, task in enumerate(tasks):
        speaker = Speaker(kit.tokenizer, task.data.get("number", 0), kit.kind.has_tools)
        play = partial(_play, kit, speaker)
        collector = RolloutCollector(play, run_seed=11)
        group = await collector.run_group(
            task, group_id=f"g{place}", size=GROUP_SIZE, sampling=SamplingParams()
        )
        rollouts += group
        num_failed += len(collector.take_failed())
    return rollouts, num_failed


async def _play(kit: AgentKit, speaker: Speaker, task: Task, **names: Any) -> Rollout:
    return await kit.play(task, speaker, **names)


def in_time(run: Coroutine[Any, Any, Any]) -> Any:
    async def limited() -> Any:
        return await asyncio.wait_for(run, 200)

    return asyncio.run(limited())


Arm = Callable[[list[Task]], None]


async def twice(
    config: RunConfig, folder: Path, arm: Arm
) -> tuple[list[Rollout], list[Rollout], int]:
    """The batch without faults and with them, of one kit, and how many attempts failed then."""
    kit = AgentKit(config, folder)
    try:
        tasks = list(kit.kind.tasks(3).batch(0, NUM_GROUPS))
        plain, num_failed = await batch_of(kit, tasks)
        assert num_failed == 0
        before = resident_bytes()
        arm(tasks)
        faulty, num_failed = await batch_of(kit, tasks)
        assert resident_bytes() - before < 128 << 20
        return plain, faulty, num_failed
    finally:
        kit.close()


def check_equal(plain: list[Rollout], faulty: list[Rollout]) -> None:
    assert len(plain) == NUM_GROUPS * GROUP_SIZE
    assert [one.to_json() for one in faulty] == [one.to_json() for one in plain]
    assert len({one.total_reward for one in plain}) > 1, "a batch that says something"


@pytest.mark.parametrize(
    ("what", "reward"),
    [("Tooled", ""), ("Plain", f"{FILE}:score")],
    ids=["an environment with a tool", "a reward"],
)
def test_code_of_the_user_that_misbehaves_changes_no_batch(
    what: str,
    reward: str,
    folder: Path,
    arms: Path,
    sleeper: Callable[[], list[int]],
) -> None:
    def arm(tasks: list[Task]) -> None:
        for place, fault in enumerate(IN_PROCESS):
            number = tasks[2 * place].data["number"]
            name = "reward" if reward else "step" if place % 2 == 0 else "tool"
            (arms / f"{name}-{number}-{fault}").touch()

    before = held()
    config = options(env=f"{FILE}:{what}", reward=reward)
    plain, faulty, num_failed = in_time(twice(config, folder, arm))
    assert not list(arms.iterdir()), "every fault was committed"
    assert num_failed >= len(IN_PROCESS)
    check_equal(plain, faulty)
    assert not sleeper(), "what the code started lives on"
    assert held() == before


def once_each(tasks: list[Any], tell: Callable[[bytes, bytes], Any]) -> fault_servers.Fault:
    """Every second of `tasks` meets a fault, once, as `tell` finds it in a request."""
    left = dict(zip(tasks[::2], fault_servers.FAULTS, strict=True))
    return lambda head, body: left.pop(tell(head, body), "")


def test_a_judge_that_misbehaves_changes_no_batch(folder: Path, arms: Path) -> None:
    pytest.importorskip("openai")
    faults: list[fault_servers.Fault] = [lambda head, body: ""]

    async def verdict(head: bytes, body: bytes) -> bytes:
        asked = json.loads(body)["messages"][0]["content"]
        mark, said = re.search(r"\[(\w+)\]\n(.*)\n\[\1\]", asked, re.DOTALL).groups()  # type: ignore[union-attr]
        content = f"Fine.\nVerdict {mark}: {len(said) % 11}"
        choice = {"index": 0, "message": {"role": "assistant", "content": content}}
        reply = {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice]}
        return fault_servers.http(json.dumps(reply).encode())

    async def run() -> Any:
        async with fault_servers.misbehaving(verdict, lambda h, b: faults[0](h, b)) as url:
            given = (f"address={url}/v1", "model=m", f"timeout_s={DEADLINE_S}")
            config = options(env=f"{FILE}:Plain", reward="judge", reward_args=given, env_workers=0)

            def arm(tasks: list[Task]) -> None:
                numbers = [str(task.data["number"]).encode() for task in tasks]

                def tell(head: bytes, body: bytes) -> Any:
                    found = re.search(rb"Number (\d+)\?", body)
                    return found and found[1]

                faults[0] = once_each(numbers, tell)

            return await twice(config, folder, arm)

    before = held()
    plain, faulty, _ = in_time(run())
    check_equal(plain, faulty)
    assert held() == before


def test_an_environment_server_that_misbehaves_changes_no_batch(folder: Path, arms: Path) -> None:
    faults: list[fault_servers.Fault] = [lambda head, body: ""]
    met: list[str] = []

    def fault(head: bytes, body: bytes) -> str:
        found = faults[0](head, body)
        met.extend([found] if found else [])
        return found

    @asynccontextmanager
    async def serving() -> AsyncIterator[str]:
        kit = AgentKit(options(env=f"{FILE}:Plain", env_workers=0), folder)
        try:
            async with (
                EnvServer(kit, ServeLimits()).listening("127.0.0.1", 0) as url,
                fault_servers.misbehaving(fault_servers.passing_on(url), fault) as address,
            ):
                yield address
        finally:
            kit.close()

    async def run() -> Any:
        async with serving() as url:
            given = (f"timeout_s={DEADLINE_S}",)
            # The constructor asks at once and waits for the answer, which comes from this loop.
            make = partial(options, env=url, env_args=given)
            kit = await asyncio.to_thread(lambda: AgentKit(make(), folder))
            try:
                source = await asyncio.to_thread(kit.kind.tasks, 3)
                tasks = list(await asyncio.to_thread(source.batch, 0, NUM_GROUPS))
                plain, num_failed = await batch_of(kit, tasks)
                assert num_failed == 0
                before = resident_bytes()
                wanted = ("/step", "/score", "/step", "/reset", "/step")
                left = list(zip(wanted, fault_servers.FAULTS, strict=True))
                count = [0]

                def choose(head: bytes, body: bytes) -> str:
                    count[0] += 1
                    if left and count[0] > 20 * (len(met) + 1) and left[0][0].encode() in head.split(b"\r\n")[0]:
                        return left.pop(0)[1]
                    return ""

                faults[0] = choose
                faulty, num_failed = await batch_of(kit, tasks)
                assert resident_bytes() - before < 128 << 20
                return plain, faulty, num_failed
            finally:
                kit.close()

    before = held()
    plain, faulty, num_failed = in_time(run())
    assert met == list(fault_servers.FAULTS)
    assert num_failed == len(met)
    check_equal(plain, faulty)
    assert held() == before
