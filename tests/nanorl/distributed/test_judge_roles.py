"""LLM judges as roles of their own: where the judge lives, and what becomes of its process, changes
no verdict.

A judge of random weights never ends with a verdict, so in these runs every reply is one: its
checksum. `calm` is a run of one process; every other run has to end like it, bit for bit.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
from forked_runs import ROOT, RunProcess, rows
from run_outcomes import differences
from test_cluster_runs import status, train_agent
from tiny_text import save_folder
from waiting import turns, until

from nanoinfer.llm import LLM
from nanoinfer.params import Output, SamplingParams
from nanorl.distributed.roles.judge_role import JudgeRole
from nanorl.distributed.roles.judge_routers import JudgeRouters
from nanorl.distributed.roles.replica_clients import ReplicaLost
from nanorl.envs.hosting.environment import HostedEnvironment
from nanorl.envs.judged import JudgedEpisode, JudgedKind
from nanorl.envs.rewards import judge as judge_module
from nanorl.envs.rewards.judge import JudgeReward
from nanorl.envs.rewards.rule import RuleReward
from nanorl.envs.rewards.weighted import WeightedReward
from nanorl.observability.store import RolloutStore
from nanorl.options.agent_kit import AgentKit
from nanorl.options.parts import Parts
from nanorl.options.run_judges import judge_seats
from nanorl.options.run_kind import run_kind

sys.path.insert(0, str(ROOT / "scripts"))
try:
    from fault_run import descendants
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.sandbox
TEMPLATE = "{mark} {prompt} {answer}"
SMALL = (
    *("--preset", "tiny", "--dtype", "fp32", "--threads", "1", "--tool.workers", "1"),
    *("--warm-start.steps", "6", "--warm-start.traces-per-step", "4"),
    *("--rl.steps", "4", "--rl.tasks-per-step", "2", "--rl.group-size", "3"),
    *("--evaluation.num-tasks", "1", "--evaluation.num-tasks-untrained", "0"),
    *("--evaluation.num-tasks-no-tool", "0", "--agent.max-turn-tokens", "12"),
    *("--save-every", "100"),
)
LOCAL = (
    *("--cluster.backend", "local", "--monitor.port", "0"),
    *("--cluster.heartbeat-s", "0.3", "--cluster.hang-s", "8", "--cluster.start-s", "120"),
)
ENVIRONMENT = """\
import nanorl


class Short(nanorl.Env):
    def tasks(self, rng):
        return nanorl.Task(f"Say {rng.randint(1, 99)}.")

    def step(self, text):
        return self.done(answer=text)

    def teacher(self, observations, rng):
        return rng.choice(["yes", "no", "it is", "a b"])
"""
HALVES = """\
import nanorl


class Halves(nanorl.WeightedReward):
    def __init__(self, folder, template):
        asked = {"folder": folder, "template": template, "max_tokens": 6}
        super().__init__({name: (0.5, nanorl.JudgeReward(**asked)) for name in "ab"})
"""
FAULTS = ("kill", "stop", "collector")
"""What happens while a question of a step of RL is under way: of the second, the third, the fourth.
"""


def any_reply(reply: str, mark: str, best: int) -> float:
    """The verdict in a reply of a judge of random weights."""
    return zlib.crc32(reply.encode()) % (best + 1) / best


def read_any_reply(out: Path | None = None) -> None:
    """Have every process of a run read verdicts so. With its folder `out`, a question of the second
    step touches the first file of `FAULTS` beside it, and waits until that is gone; one of the
    third step the second, and so on."""
    judge_module.read_verdict = any_reply
    if out is None:
        return
    generate = JudgeRole.generate

    @wraps(generate)
    async def held(self: JudgeRole, *args: Any, **options: Any) -> Output:
        steps = out / "metrics.jsonl"
        num_steps = len(steps.read_text().splitlines()) if steps.exists() else 0
        for name in FAULTS[:num_steps]:
            marker, once = out.parent / name, out.parent / f"{name}.once"
            if not once.exists():
                once.touch()
                marker.touch()
                while marker.exists():
                    await asyncio.sleep(0.01)
        return await generate(self, *args, **options)

    JudgeRole.generate = held  # type: ignore[method-assign]


Start = Callable[..., RunProcess]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an environment, a reward, and a judge."""
    found = tmp_path_factory.mktemp("judges")
    (found / "short.py").write_text(ENVIRONMENT)
    (found / "halves.py").write_text(HALVES)
    (found / "judge").mkdir()
    save_folder(found / "judge", seed=5)
    return found


def judged(folder: Path) -> tuple[str, ...]:
    return (
        *("--env", str(folder / "short.py"), "--reward", "judge", "--reward-args"),
        *(f"folder={folder / 'judge'}", f"template={TEMPLATE}", "max_tokens=6"),
    )


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts a run called `name`; none outlives the test."""
    started: list[RunProcess] = []

    def start(name: str, *arguments: str, has_faults: bool = False) -> RunProcess:
        prepare = partial(read_any_reply, folder / name if has_faults else None)
        given = (*SMALL, *arguments, "--out", str(folder / name))
        started.append(RunProcess(folder / f"{name}.log", *given, prepare=prepare))
        return started[-1]

    yield start
    for run in started:
        run.process.kill()
        run.process.join()


@pytest.fixture(scope="module")
def calm(folder: Path) -> Path:
    """A run of one process, its engine of the judge included."""
    options = (*SMALL, *judged(folder), "--env-workers", "0", "--out", str(folder / "calm"))
    run = RunProcess(folder / "calm.log", *options, prepare=read_any_reply)
    assert run.wait(LIMIT_S) == 0, run.output()
    return folder / "calm"


LIMIT_S = 400.0  # for all of a run, on a machine that does other things


def changes(run: Path, calm: Path) -> list[str]:
    """What is not as in the calm run; costs aside, for equal questions that meet are one."""
    return [one for one in differences(run, calm) if not one.startswith("metric judge_")]


def test_the_judge_in_one_process_says_what_its_model_says_alone(calm: Path, folder: Path) -> None:
    """Each stored reward is that of a question by hand."""
    llm = LLM(folder / "judge", device="cpu")
    greedy = SamplingParams(max_tokens=6, temperature=0.0)
    tokenizer = LLM(calm / "model-trained", device="cpu").tokenizer
    with RolloutStore(calm / "rollouts.sqlite") as store:
        played = list(store.query())
    tasks = {t.task_id: t for step in range(4) for t in _tasks(calm, step)}
    rewards = set()
    for rollout in played:
        pairs = zip(rollout.tokens, rollout.loss_mask, strict=True)
        said = [token for token, is_said in pairs if is_said]
        expected = 0.0
        if said[-1] in tokenizer.eos_ids and (answer := tokenizer.decode(said[:-1])).strip():
            task = tasks[rollout.task_id]
            mark = hashlib.sha256(f"{task.task_id}\0{answer}".encode()).hexdigest()[:8]
            prompt = TEMPLATE.format(mark=mark, prompt=task.prompt_text, answer=answer)
            (reply,) = llm.chat([[{"role": "user", "content": prompt}]], greedy)
            expected = any_reply(reply.text or "", "", 10)
        assert rollout.reward == expected
        rewards.add(expected)
    assert len(played) == 4 * 6 and len(rewards) > 3, "else this compares little"


def _tasks(run: Path, step: int) -> Any:
    options = (*SMALL, "--env", str(run.parent / "short.py"))
    config = train_agent().parse_arguments(list(options))
    return run_kind(config).tasks(config.seed).batch(step, 2)


def test_judges_in_processes_of_their_own_give_the_same_run(
    calm: Path, start: Start, folder: Path
) -> None:
    """Two of them, and episodes in environment workers."""
    run = start("local", *judged(folder), *LOCAL, "--cluster.judges", "2")
    assert run.wait(LIMIT_S) == 0, run.output()
    assert changes(folder / "local", calm) == []
    for row in rows(folder / "local"):
        assert row["judge_calls"] > 0 and row["judge_cached"] == 0
        assert row["judge_prompt_tokens"] > row["judge_reply_tokens"] > 0
        assert row["judge_s"] > 0 and 0 <= row["idle_judge"] <= 1


def test_a_judge_that_dies_or_hangs_and_a_collector_that_dies_change_no_verdict(
    calm: Path, start: Start, folder: Path
) -> None:
    out = folder / "struck"
    run = start("struck", *judged(folder), *LOCAL, has_faults=True)

    def pid(name: str) -> int:
        found = [one.pid for one in descendants(run.process.pid or 0) if one.name == name]
        assert len(found) == 1, (name, found)
        return found[0]

    strikes = {
        "kill": ("JudgeRole", signal.SIGKILL),
        "stop": ("JudgeRole", signal.SIGSTOP),
        "collector": ("CollectorRole", signal.SIGKILL),
    }
    for name, (role, number) in strikes.items():
        run.await_file(folder / name, LIMIT_S)
        if name == "stop":
            run.await_true(lambda: "num_running" in _judge(out).get("metrics", {}), LIMIT_S)
            assert _judge(out)["kind"] == "judge" and _judge(out)["restarts"] == 1
        os.kill(pid(role), number)
        (folder / name).unlink()
    assert run.wait(LIMIT_S) == 0, run.output()
    assert changes(out, calm) == []
    said = run.output()
    assert said.count("judge-0: ") == 2 and "judge-0: no answer for 8 s" in said, said
    assert "collector: " in said and "the trainer died" not in said


def _judge(out: Path) -> dict[str, Any]:
    roles = {role["name"]: role for role in status(out).get("roles", ())}
    return roles.get("judge-0", {})


def test_a_weighted_reward_asks_the_judges_of_its_parts_there(
    calm: Path, start: Start, folder: Path
) -> None:
    """Half a verdict and half a verdict; the two share one engine."""
    options = (
        *("--env", str(folder / "short.py"), "--env-workers", "0"),
        *("--reward", str(folder / "halves.py"), "--reward-args"),
        *(f"folder={folder / 'judge'}", f"template={TEMPLATE}"),
    )
    run = start("halves", *options, *LOCAL)
    assert run.wait(LIMIT_S) == 0, run.output()
    mine = [one for one in differences(folder / "halves", calm) if not one.startswith("metric ")]
    assert mine == []
    assert "judge-1" not in run.output()
    for row in rows(folder / "halves"):
        assert row["judge_calls"] > 0


# -- what a user meets -----------------------------------------------------------------------------


def parts(*arguments: str) -> Parts:
    return Parts(train_agent().parse_arguments(list(arguments)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--cluster.judges", "2"), "--cluster.judges 2: needs processes of its own"),
        (("--cluster.judges", "0"), "--cluster.judges 0: must be 1 or more"),
        (("HALVES",), r"halves.py with .* local: .* add --env-workers 0, .* or give the judge"),
        (("NO REWARD",), "--cluster.judges 2: no reward of this run has a judge with a folder"),
        (("device=cuda:1",), "device=cuda:1 of the judge .* say device=cuda, or device=cpu"),
        (("device=cuda",), "device=cuda of the judge .* say device=cpu, or --device cuda"),
        (("dtype=fp7",), "dtype='fp7': one of"),
        (("folder=/nowhere",), "/nowhere"),
    ],
)
def test_what_cannot_be_is_said_before_any_work_is_done(
    folder: Path, tmp_path: Path, changed: tuple[str, ...], message: str
) -> None:
    local = ("--cluster.backend", "local", "--device", "cpu")
    given = (*SMALL, *judged(folder), "--out", str(tmp_path / "run"))
    env = ("--env", str(folder / "short.py"), "--out", str(tmp_path / "run"))
    if changed == ("HALVES",):
        arguments = (
            *("--reward", str(folder / "halves.py"), "--reward-args"),
            *(f"folder={folder / 'judge'}", f"template={TEMPLATE}"),
        )
        options = (*SMALL, *local, *env, *arguments)
    elif changed == ("NO REWARD",):
        options = (*SMALL, *local, *env, "--cluster.judges", "2")
    elif "=" in changed[0]:
        rest = [one for one in judged(folder) if not one.startswith(changed[0].split("=")[0] + "=")]
        options = (*SMALL, *rest, *changed, *local, "--out", str(tmp_path / "run"))
    else:
        options = (*given, *changed)
    with pytest.raises((ValueError, SystemExit), match=message):
        parts(*options)


def test_a_run_on_processes_loads_the_model_in_no_other_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the driver nor, with its copies, in environment workers; one process does."""
    loaded: list[Path] = []
    monkeypatch.setattr(
        "nanorl.envs.rewards.judge_models.FolderJudge.load",
        lambda self: loaded.append(self.model.folder),
    )
    given = (*SMALL, *judged(folder), "--out", str(tmp_path / "run"))
    local = parts(*given, "--cluster.backend", "local", "--cluster.judges", "2")
    seats = judge_seats(local.config, local.kind)
    assert loaded == [] and [seat.name for seat in seats] == ["judge-0", "judge-1"]
    inline = parts(*given)
    assert loaded == [folder / "judge"]
    kit = AgentKit(inline.config, inline.folder, kind=inline.kind)
    try:
        assert isinstance(kit.kind, JudgedKind) and kit.kind.reward is inline.kind.reward  # type: ignore[attr-defined]
        episode = kit.environment()
        assert isinstance(episode, JudgedEpisode) and isinstance(episode._env, HostedEnvironment)
    finally:
        kit.close()


def test_rewards_that_name_one_model_share_its_seat_and_wait_as_long_as_the_longest(
    folder: Path,
) -> None:
    config = train_agent().parse_arguments([*SMALL, "--cluster.backend", "local"])
    model = str(folder / "judge")
    reward = WeightedReward(
        {
            "rule": (1.0, RuleReward()),
            "one": (1.0, JudgeReward(folder=model, timeout_s=5)),
            "two": (1.0, JudgeReward(folder=model, best=20, timeout_s=7)),
            "bf16": (1.0, JudgeReward(folder=model, dtype="bf16")),
        }
    )
    kind = JudgedKind(run_kind(config), reward)
    found = [(one.name, one.model.dtype, one.timeout_s) for one in judge_seats(config, kind)]
    assert found == [("judge-0", "fp32", 7.0), ("judge-1", "bf16", 120.0)]


def test_several_environments_have_one_judge_where_they_name_one_model(folder: Path) -> None:
    words = [*SMALL, "--env", str(folder / "short.py"), f"more={folder / 'short.py'}"]
    words += ["--reward", "judge", "--reward-args", f"folder={folder / 'judge'}"]
    config = train_agent().parse_arguments([*words, "--cluster.backend", "local"])
    (seat,) = judge_seats(config, run_kind(config))
    assert seat.name == "judge-0" and seat.model.folder == (folder / "judge").resolve()


# -- one question ----------------------------------------------------------------------------------


class Engine:
    """Takes requests and answers none of them; a beat when it is let."""

    def __init__(self) -> None:
        self.can_beat = asyncio.Event()
        self.num_ended = 0

    async def generate(self, *_: Any) -> Output:
        try:
            return await asyncio.Future()
        finally:
            self.num_ended += 1

    async def beat(self) -> dict[str, float]:
        await self.can_beat.wait()
        return {}


def test_a_reply_is_late_only_where_the_engine_lives() -> None:
    """One that hangs says nothing, so that the same try is made again elsewhere."""

    async def run() -> None:
        role = JudgeRole.__new__(JudgeRole)
        engine = Engine()
        role.__dict__.update(
            _generator=engine, _timeout_s=0.01, _is_drained=False, _num_active=0,
            _is_idle=asyncio.Event(),
        )  # fmt: skip
        asked = asyncio.ensure_future(role.generate([1], SamplingParams()))
        await until(lambda: engine.num_ended)
        await turns()
        assert not asked.done(), "nobody knows yet whether it hangs"
        engine.can_beat.set()
        with pytest.raises(TimeoutError):
            await asked

    asyncio.run(run())


class Client:
    """Dies on its first request, or answers; notes what it was asked."""

    def __init__(self, *, dies: bool) -> None:
        self.dies = dies
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(
        self, ids: list[int], params: SamplingParams, name: str, sampled: Output | None
    ) -> Output:
        self.asked.append((ids, params))
        if self.dies:
            raise ReplicaLost("killed")
        return Output(ids=[1], logps=[0.0], versions=[0], text="Yes", finish_reason="stop")


def test_a_question_waits_for_a_successor_and_is_the_same_try_there(folder: Path) -> None:
    reward = JudgeReward(folder=str(folder / "judge"), max_tokens=6, timeout_s=0.01)
    judge = reward.folder_judge
    assert judge is not None
    config = train_agent().parse_arguments([*SMALL])
    routers = JudgeRouters(JudgedKind(run_kind(config), reward))
    first, second = Client(dies=True), Client(dies=False)

    async def run() -> str:
        asked = asyncio.ensure_future(judge.reply("7?", 0))
        await turns()
        assert not first.asked and not asked.done(), "there is no judge yet"
        routers.set_judges({judge.model: {"judge-0": first}})
        await until(lambda: first.asked)
        await asyncio.sleep(0.02)  # longer than a reply may take: it is no late one
        assert not asked.done()
        routers.set_judges({judge.model: {"judge-0": second}})
        return await asked

    assert asyncio.run(run()) == "Yes"
    assert first.asked == second.asked
    ((ids, params),) = second.asked
    assert (params.temperature, params.seed) == (0.0, 0)
    prompt_tokens = float(len(ids))
    costs = reward.costs.take()
    assert (costs["judge_prompt_tokens"], costs["judge_reply_tokens"]) == (prompt_tokens, 1.0)
