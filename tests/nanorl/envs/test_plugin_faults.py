"""200 rollouts of environments with tools, rewards, judges and environment servers; a tenth of them
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
from test_hosting import held, holds_no_more_than, resident_bytes, sleeper
from waiting import eventually

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.collector import RolloutCollector, RolloutsFailed
from nanorl.cli import main
from nanorl.envs.catalog import load_kind
from nanorl.envs.judged import JudgedKind
from nanorl.envs.rewards.function_reward import as_reward
from nanorl.envs.tasks.tiny_model import build_tiny_model
from nanorl.options.agent_kit import AgentKit
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig
from nanorl.rollout_json import to_json
from nanorl.run.heldout_success import evaluate
from nanorl.serving.env_server import EnvServer, ServeLimits
from nanorl.task import Task
from nanorl.types import Rollout, Status

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
    """The rollouts of all groups, and how many attempts failed: a busy machine may add some, whose
    deadline is that of the ones that hang."""
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
        plain, _ = await batch_of(kit, tasks)
        before = resident_bytes()
        arm(tasks)
        faulty, num_failed = await batch_of(kit, tasks)
        assert resident_bytes() - before < 128 << 20
        return plain, faulty, num_failed
    finally:
        kit.close()


def check_equal(plain: list[Rollout], faulty: list[Rollout]) -> None:
    assert len(plain) == NUM_GROUPS * GROUP_SIZE
    assert [to_json(one) for one in faulty] == [to_json(one) for one in plain]
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
    assert eventually(lambda: not sleeper()), "what the code started lives on"
    assert holds_no_more_than(before), held()


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
    assert holds_no_more_than(before), held()


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
                plain, _ = await batch_of(kit, tasks)
                before = resident_bytes()
                wanted = ("/step", "/score", "/step", "/reset", "/step")
                left = list(zip(wanted, fault_servers.FAULTS, strict=True))
                count = [0]

                def choose(head: bytes, body: bytes) -> str:
                    count[0] += 1
                    if (
                        left
                        and count[0] > 20 * (len(met) + 1)
                        and left[0][0].encode() in head.split(b"\r\n")[0]
                    ):
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
    assert num_failed >= len(met)
    check_equal(plain, faulty)
    assert holds_no_more_than(before), held()


# -- failures that never end -------------------------------------------------------------------

SMALL = (
    *("--preset", "tiny", "--rl.steps", "6", "--rl.tasks-per-step", "2", "--rl.group-size", "2"),
    *("--evaluation.num-tasks", "2", "--threads", "1", "--warm-start.steps", "0"),
)


def test_a_run_that_can_only_fail_ends_and_names_the_error_of_the_user(
    tmp_path: Path, arms: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The evaluation before it passes; no rollout of the training ever does."""
    before = held()[2]
    env = ("--env", f"{FILE}:NeverTrains", "--env-workers", "0")
    status = main(["train", *SMALL, *env, "--out", str(tmp_path / "run")])
    said = capfd.readouterr().err
    assert status == 2
    assert re.search(r"rollouts in a row failed, each 3 times, the last one of: .*board", said)
    assert "plugin_faults.py" in said and "Traceback" not in said
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") < 6
    assert eventually(lambda: held()[2] <= before), held()


def test_a_run_with_an_environment_and_a_reward_of_the_user_trains_in_workers(
    tmp_path: Path, arms: Path
) -> None:
    before = held()[2]
    status = main(
        [
            *("train", *SMALL),
            *("--env", f"{FILE}:Plain", "--reward", f"{FILE}:score"),
            *("--rl.steps", "1", "--out", str(tmp_path / "run")),
        ]
    )
    assert status == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["heldout_success_after"] is not None
    assert eventually(lambda: held()[2] <= before), held()


def test_an_evaluation_with_a_reward_that_always_raises_names_it(folder: Path, arms: Path) -> None:
    kit = AgentKit(
        options(env=f"{FILE}:Plain", reward=f"{FILE}:never_scores", env_workers=0), folder
    )
    try:
        tasks = kit.kind.tasks(3).heldout(3, 0)
        play = partial(_play, kit, Speaker(kit.tokenizer, 0, False))
        with pytest.raises(RolloutsFailed, match=r"3 of 3 .*ZeroDivisionError: the mean of no"):
            in_time(evaluate(play, tasks, name="x"))
    finally:
        kit.close()


def test_training_with_a_step_that_always_raises_ends_and_names_it(
    folder: Path, arms: Path
) -> None:
    kit = AgentKit(options(env=f"{FILE}:NeverSteps", env_workers=0), folder)

    async def train() -> None:
        play = partial(_play, kit, Speaker(kit.tokenizer, 0, False))
        collector = RolloutCollector(play, run_seed=11)
        for place, task in enumerate(kit.kind.tasks(3).batch(0, 4)):
            group = await collector.run_group(
                task, group_id=f"g{place}", size=4, sampling=SamplingParams()
            )
            assert group == [] and place == 0, "the second task ends it"

    try:
        with pytest.raises(RolloutsFailed, match=r"8 rollouts in a row .*the board was never set"):
            in_time(train())
    finally:
        kit.close()


def test_one_task_that_cannot_be_played_costs_its_group_and_no_more() -> None:
    async def play(task: Task, *, rollout_id: str, **_: Any) -> Rollout:
        status = Status.FAILED if task.answer in broken else Status.FINISHED
        return Rollout(
            task_id=task.task_id, group_id="g", rollout_id=rollout_id, tokens=[1], loss_mask=[0],
            logps=[0.0], versions=[-1], status=status, error="of the weather",
        )  # fmt: skip

    async def sizes(*answers: int) -> list[int]:
        collector = RolloutCollector(play, run_seed=0, max_retries=0)
        groups = [
            await collector.run_group(
                Task("?", answer), group_id=f"g{n}", size=4, sampling=SamplingParams()
            )
            for n, answer in enumerate(answers)
        ]
        return [len(group) for group in groups]

    broken = {1, 2}
    assert in_time(sizes(1, 1, 1)) == [0, 0, 0], "one task"
    assert in_time(sizes(1, 3, 2, 3)) == [0, 4, 0, 4], "others succeed in between"
    with pytest.raises(RolloutsFailed, match=r"8 rollouts in a row .* of the weather"):
        in_time(sizes(3, 1, 2))


class ClosedReward:
    """A reward with something to give back."""

    is_closed = False

    async def score(self, rollout: Any, task: Any, transcript: Any) -> float:
        return 0.0

    def close(self) -> None:
        self.is_closed = True


def test_a_judged_environment_closes_its_reward() -> None:
    reward = ClosedReward()
    JudgedKind(load_kind(f"{FILE}:Plain", {}), reward).close()
    assert reward.is_closed
    JudgedKind(load_kind(f"{FILE}:Plain", {}), as_reward(plugin_faults.score)).close()
