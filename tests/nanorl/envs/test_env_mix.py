"""Several environments in one run: whose task is drawn, and what each of them keeps of its own."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tyro
from agent_doubles import tiny_tokenizer
from mixed_games import Echo, Reverse

import nanorl
from nanoinfer.params import SamplingParams
from nanorl.agents.limits import Limits
from nanorl.agents.mixed_agent import MixedAgent
from nanorl.commands.api import configured
from nanorl.commands.chat_session import _one_of
from nanorl.commands.compare import comparison_text
from nanorl.commands.evaluate import EvalOptions
from nanorl.distributed.warm_start import WarmStart
from nanorl.envs.base import Services
from nanorl.envs.env_class import EnvClassKind
from nanorl.envs.env_kind import shown_action
from nanorl.envs.mix import BLOCK, EnvMix, MixedTasks, environment_of, marked, unmarked
from nanorl.envs.rewards.base import Transcript
from nanorl.flow.curriculum import TaskChooser, load_curriculum
from nanorl.inspection.doctor.checkup import check_run
from nanorl.observability.report.comparison import PairedComparison
from nanorl.observability.report.evaluation import Evaluation, evaluation_text
from nanorl.observability.report.html import environments_section
from nanorl.observability.report.next_steps import next_steps
from nanorl.observability.report.summary import environment_lines
from nanorl.options.env_mix import member_limits, members_of
from nanorl.options.presets import tiny
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import run_kind
from nanorl.options.trust import remember, unknown
from nanorl.run.environment_metrics import environment_metrics
from nanorl.run.manifest import environment
from nanorl.run.parse import _elsewhere, parse_arguments
from nanorl.run.run_outcome import per_type
from nanorl.task import Task
from nanorl.types import Rollout, Status

FILE = Path(__file__).with_name("mixed_games.py")
ECHO, REVERSE = f"{FILE}:Echo", f"{FILE}:Reverse"
BOTH = ("--preset", "tiny", "--env", ECHO, f"back={REVERSE}")


class Numbered:
    """A source whose task of number i says so."""

    def __init__(self, name: str, num_heldout: int = 10**6, fingerprint: str = "") -> None:
        self.name, self.num_heldout, self.fingerprint = name, num_heldout, fingerprint

    def batch(self, step: int, n: int) -> list[Task]:
        return [Task(f"{self.name} {step * n + i}", kind="number") for i in range(n)]

    def heldout(self, n: int, seed: int) -> list[Task]:
        count = min(n, self.num_heldout)
        return [Task(f"{self.name} held out {seed} {i}", kind="number") for i in range(count)]


def mixed(weights: dict[str, float], seed: int = 0, **sources: Numbered) -> MixedTasks:
    return MixedTasks({name: Numbered(name) for name in weights} | sources, weights, seed)


def mix(**weights: float) -> EnvMix:
    kinds = {"echo": EnvClassKind(Echo), "back": EnvClassKind(Reverse)}
    return EnvMix(kinds, {"echo": 1.0, "back": 1.0} | weights)


def rollout(task_id: str, reward: float, group: str = "g") -> Rollout:
    return Rollout(
        task_id=task_id, group_id=group, rollout_id=f"{task_id}-{group}", tokens=[5, 6],
        loss_mask=[0, 1], logps=[0.0, -0.5], versions=[-1, 0], reward=reward,
        status=Status.FINISHED,
    )  # fmt: skip


# -- whose task is drawn -----------------------------------------------------------------------


def test_each_block_has_each_environment_its_share_to_within_one_task() -> None:
    """Against a float64 reference of systematic sampling, for 200 random mixes."""
    rng = random.Random(3)
    for case in range(200):
        names = [f"e{i}" for i in range(rng.randint(2, 6))]
        weights = {name: rng.choice([1.0, 2.0, rng.uniform(0.01, 9.0)]) for name in names}
        block, seed = rng.randrange(10**6), rng.randrange(100)
        tasks = mixed(weights, seed)
        drawn = [tasks.environment_at(block * BLOCK + i) for i in range(BLOCK)]

        same = random.Random(f"environments {seed} {block}")
        points = (np.arange(BLOCK, dtype=np.float64) + same.random()) / BLOCK
        shares = np.array(list(weights.values())) / sum(weights.values())
        owners = np.searchsorted(np.cumsum(shares), points, side="right")
        expected = np.bincount(np.minimum(owners, len(names) - 1), minlength=len(names))
        counts = Counter(drawn)
        assert [counts[name] for name in names] == expected.tolist(), case
        for name, share in zip(names, shares, strict=True):
            assert abs(counts[name] - BLOCK * share) < 1 + 1e-9


def test_an_environment_is_drawn_as_often_as_its_weight_says_and_in_no_fixed_order() -> None:
    tasks = mixed({"a": 2.0, "b": 1.0, "c": 0.05})
    drawn = [tasks.environment_at(i) for i in range(200 * BLOCK)]
    for name, weight in tasks.weights.items():
        assert drawn.count(name) / len(drawn) == pytest.approx(weight / 3.05, abs=0.004)
    blocks = {tuple(drawn[i : i + BLOCK]) for i in range(0, len(drawn), BLOCK)}
    assert len(blocks) > 150
    assert drawn != [mixed({"a": 2.0, "b": 1.0, "c": 0.05}, 1).environment_at(i) for i in range(99)]


@pytest.mark.parametrize("name", ["in_order", "learnable", "pools"])
def test_a_curriculum_chooses_within_the_environment_whose_turn_it_is(name: str) -> None:
    """A game whose rewards vary most would else be played most, whatever its weight."""
    tasks, curriculum = mixed({"a": 2, "b": 1}, seed=3), load_curriculum(name)
    chooser = TaskChooser(tasks, curriculum, seed=0)
    for number in range(120):
        task = chooser.task(number)
        assert task.kind == f"{tasks.environment_at(number)}/number"
        curriculum.observe(task, [0.0, 100.0] if task.kind[0] == "b" else [1.0, 1.0])


def test_a_task_is_a_function_of_seed_and_number_and_its_own_sources() -> None:
    tasks, again = mixed({"a": 2.0, "b": 1.0}), mixed({"a": 2.0, "b": 1.0})
    batch = tasks.batch(3, 8)
    assert batch == [again.batch(number, 1)[0] for number in range(24, 32)]
    for number, task in zip(range(24, 32), batch, strict=True):
        name = environment_of(task.task_id)
        [own] = Numbered(name).batch(number, 1)
        assert unmarked(task) == own and marked(own, name) == task
        assert environment_of(task.kind) == name and task.prompt == f"{name} {number}"


def test_held_out_tasks_are_in_proportion_in_every_beginning_of_the_list() -> None:
    weights = {"a": 3.0, "b": 2.0, "c": 1.0}
    found = [environment_of(task.task_id) for task in mixed(weights).heldout(60, 7)]
    for end in range(1, 61):
        for name, weight in weights.items():
            assert abs(found[:end].count(name) - end * weight / 6) < 1
    assert found.count("a") == 30 and found.count("b") == 20
    few = mixed(weights, a=Numbered("a", num_heldout=4)).heldout(60, 7)
    counts = Counter(environment_of(task.task_id) for task in few)
    assert counts["a"] == 4 and sum(counts.values()) == 60, "the others fill its places"
    assert len({task.task_id for task in few}) == 60


def test_equal_tasks_of_two_environments_are_two_tasks() -> None:
    same = Task("What?", answer="7")
    assert marked(same, "a").task_id != marked(same, "b").task_id
    assert marked(same, "a").split == marked(same, "b").split == same.split


def test_the_fingerprint_is_of_all_lists() -> None:
    weights = {"a": 1.0, "b": 1.0}
    assert mixed(weights).fingerprint == "", "nothing to find again"
    one = mixed(weights, b=Numbered("b", fingerprint="x")).fingerprint
    assert one and one != mixed(weights, b=Numbered("b", fingerprint="y")).fingerprint
    assert one != mixed(weights, a=Numbered("a", fingerprint="x")).fingerprint


# -- what each keeps of its own ----------------------------------------------------------------


def test_an_episode_is_that_of_its_tasks_environment() -> None:
    async def play(task: Task, says: list[str]) -> tuple[str, str, float]:
        env = mix().open(Services(tokenizer=tiny_tokenizer(), sandbox=None, timeout_s=5.0))
        opening = await env.reset(task)
        for text in says:
            step = await env.step(text)
        transcript = Transcript(messages=opening.messages, text=says[-1], answer=step.answer)
        score = await env.score(rollout(task.task_id, 0.0), transcript)
        seen = env.subject.task
        await env.close()
        return opening.messages[0]["content"], f"{seen.kind} {seen.task_id}", score.total

    echo, back = Task("25", kind="echo"), Task("back 25", kind="reverse")
    system, seen, total = asyncio.run(play(marked(echo, "echo"), ["25"]))
    assert (system, seen, total) == ("Say it again.", f"echo {echo.task_id}", 1.0)
    system, seen, total = asyncio.run(play(marked(back, "back"), ["wait", "52"]))
    assert (system, seen, total) == ("Say it backwards.", f"reverse {back.task_id}", 0.5)
    with pytest.raises(ValueError, match=r"'echo-.*' is of no environment of this run.*echo, back"):
        asyncio.run(play(echo, ["25"]))


def test_a_teacher_shows_its_own_environments_tasks() -> None:
    async def shown() -> str:
        kind, task = mix(), marked(Task("25", kind="echo"), "echo")
        env = kind.open(Services(tokenizer=tiny_tokenizer(), sandbox=None, timeout_s=5.0))
        await env.reset(task)
        return await shown_action(
            kind.demonstrator(task, random.Random(0), tiny_tokenizer(), env), []
        )

    assert asyncio.run(shown()) == "25"
    asked: list[Task] = []
    keen: Any = SimpleNamespace(
        demonstrator=lambda task, *rest: asked.append(task), loop="tool", has_tools=False,
        needs_sandbox=False, has_teacher=True,
    )  # fmt: skip
    own = Task("25", kind="echo")
    EnvMix({"it": keen}, {"it": 1.0}).demonstrator(marked(own, "it"), *([None] * 3))  # type: ignore[arg-type]
    assert asked == [own], "the teacher is given its own task"


def test_a_warm_start_plays_the_environments_that_have_a_teacher() -> None:
    kit: Any = SimpleNamespace(kind=mix(back=5.0))
    tasks = WarmStart(tiny(), kit).tasks.batch(0, 30)
    assert {environment_of(task.task_id) for task in tasks} == {"echo"}
    assert mix().has_teacher and not EnvMix({"b": EnvClassKind(Reverse)}, {"b": 1.0}).has_teacher


class Talker:
    """Says nine tokens and never ends a turn, as long as it may."""

    async def generate(self, ids: list[int], params: SamplingParams) -> Any:
        from nanoinfer.params import Output

        count = params.max_tokens
        return Output(
            ids=[7] * count, logps=[-1.0] * count, versions=[0] * count, finish_reason="length"
        )


def test_each_environment_has_its_own_limits_and_loop() -> None:
    played: list[str] = []

    def loop(name: str) -> Any:
        async def play(episode: Any) -> None:
            played.append(name)
            await episode.start()
            while await episode.turn() is not None:
                pass

        return play

    own = {
        "echo": (Limits(max_turn_tokens=8, max_context_tokens=400), loop("one")),
        "back": (Limits(max_turn_tokens=12, max_context_tokens=400), loop("two")),
    }
    agent = MixedAgent(generator=Talker(), tokenizer=tiny_tokenizer(), limits=Limits(), members=own)

    async def tokens(name: str, kind: str, prompt: str) -> int:
        env = mix().open(Services(tokenizer=tiny_tokenizer(), sandbox=None, timeout_s=5.0))
        task = marked(Task(prompt, kind=kind), name)
        found = await agent.play(
            task, env, group_id="g", rollout_id="g-m0", sampling=SamplingParams()
        )
        return found.num_action_tokens

    assert asyncio.run(tokens("echo", "echo", "25")) == 8
    assert asyncio.run(tokens("back", "reverse", "back 25")) == 12
    assert played == ["one", "two"]


# -- options -----------------------------------------------------------------------------------


def limits(*words: str) -> dict[str, tuple[int, int]]:
    config = parse_arguments([*BOTH, *words])
    kind: Any = run_kind(config)
    found = {
        name: member_limits(config, kind.members[name], one)
        for name, one in members_of(config).items()
    }
    return {name: (one.max_turns, one.max_turn_tokens) for name, one in found.items()}


def test_limits_are_each_environments_own_and_at_most_the_runs() -> None:
    assert limits() == {"Echo": (1, 8), "back": (3, 12)}
    assert parse_arguments(list(BOTH)).agent.max_turns == 3, "the most that one of them has"
    assert parse_arguments(list(BOTH)).agent.max_turn_tokens == 12
    assert parse_arguments(list(BOTH)).agent.max_context_tokens == tiny().agent.max_context_tokens
    given = limits("--env-args", "Echo.agent.max_turns=5", "back.agent.max_turn_tokens=20")
    assert given == {"Echo": (5, 8), "back": (3, 20)}
    assert limits("--agent.max-turns", "2") == {"Echo": (1, 8), "back": (2, 12)}
    with pytest.raises(ValueError, match=r"the environment Echo: --agent.max-context-tokens 4"):
        limits("--env-args", "Echo.agent.max_context_tokens=4")


def test_an_environment_without_a_limit_has_the_presets() -> None:
    config = parse_arguments(["--preset", "tiny", "--env", ECHO, "code"])
    kind: Any = run_kind(config)
    code = member_limits(config, kind.members["code"], members_of(config)["code"])
    assert code == tiny().agent == config.agent


def test_other_defaults_have_to_agree_unless_the_user_decides(tmp_path: Path) -> None:
    for name, steps in {"one": 4, "two": 9, "three": 4}.items():
        (tmp_path / f"{name}.py").write_text(
            f"import nanorl\nclass {name.title()}(nanorl.Env):\n"
            f"    defaults = {{'rl.steps': {steps}}}\n"
            "    def tasks(self, rng): return nanorl.Task(str(rng.random()))\n"
            "    def step(self, text): return self.done(reward=1.0)\n"
        )
    one, two, three = (str(tmp_path / f"{name}.py") for name in ("one", "two", "three"))
    with pytest.raises(ValueError, match=r"differ \(rl.steps: one 4, two 9\).*as --rl.steps 4"):
        parse_arguments(["--preset", "tiny", "--env", one, two])
    assert parse_arguments(["--env", one, two, "--rl.steps", "2"]).rl.steps == 2
    assert parse_arguments(["--env", one, three]).rl.steps == 4
    assert parse_arguments(["--env", one, ECHO]).rl.steps == 4, "one that says nothing agrees"


def test_one_environment_is_as_if_there_were_no_others() -> None:
    alone = parse_arguments(["--preset", "tiny", "--env", ECHO])
    assert alone.env == ECHO and alone.envs == (ECHO,)
    assert configured("tiny", [ECHO], {})[0] == configured("tiny", ECHO, {})[0]
    [task] = run_kind(alone).tasks(0).batch(0, 1)
    assert environment_of(task.task_id) == "" and type(run_kind(alone)) is EnvClassKind


def test_arguments_go_to_the_environment_that_they_name() -> None:
    config = parse_arguments([*BOTH, "--env-args", "Echo.most=9"])
    kind: Any = run_kind(config)
    assert kind.members["Echo"].cls is not None and kind.weights == {"Echo": 1.0, "back": 1.0}
    prompts = {int(task.prompt) for task in kind.members["Echo"].tasks(0).batch(0, 40)}
    assert max(prompts) <= 9
    again = RunConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again.env == config.env and isinstance(again.env, tuple)
    assert again.env_args == config.env_args


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env", ECHO, ECHO], "two of them are called Echo; give them names"),
        (["--env", ECHO, ""], "one of several is empty"),
        ([*BOTH[2:], "--env-weights", "1"], "1 for 2 environments"),
        ([*BOTH[2:], "--env-weights", "1", "0"], "must be more than 0"),
        (["--env", ECHO, "--env-weights", "1"], "there is one environment"),
        ([*BOTH[2:], "--env-args", "most=9"], r"which environment it is for; write Echo.most=9"),
        ([*BOTH[2:], "--env-args", "echo.most=9"], r"there are Echo, back"),
        ([*BOTH[2:], "--env-args", "back.most=9"], "Reverse does not take them"),
        ([*BOTH[2:], "--env-args", "back.rl.steps=9"], r"back.rl.steps=9: one environment alone"),
        ([*BOTH[2:], "--env-args", "back.agent.max_turns=x"], "must be a whole number"),
        ([*BOTH[2:], "--env-args", "back.agent.max_turns=0"], "must be 1 or more"),
        ([*BOTH[2:], "--tasks", "mine.jsonl"], "nothing says whose tasks they are"),
        (["--env", ECHO, "nowhere.py"], "there is no such file"),
        (["--env"], "must be text, or a list of texts"),
    ],
)
def test_what_does_not_fit_is_said_before_any_work(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arguments(["--preset", "tiny", *words])


def test_names_are_of_files_classes_addresses_and_ones_own() -> None:
    specs = ("dir/maze.py", "my.envs:Hall", "wordle", "easy=x.py:Maze", "gymnasium:Lake-v1")
    config = replace(tiny(), env=(*specs, "http://127.0.0.1:8900/"))
    found = {name: one.spec for name, one in members_of(config).items()}
    assert found == dict(
        zip(("maze", "Hall", "wordle", "easy", "Lake-v1", "127_0_0_1_8900"),
            (*specs[:3], "x.py:Maze", specs[4], "http://127.0.0.1:8900/"), strict=True)
    )  # fmt: skip


def test_toml_and_python_say_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f"preset = 'tiny'\nenv = ['{ECHO}', 'back={REVERSE}']\nenv_weights = [2, 1]\n"
        "env_args = ['Echo.most=9']\n"
    )
    read = parse_arguments(["--config", str(file)])
    flags = parse_arguments([*BOTH, "--env-weights", "2", "1", "--env-args", "Echo.most=9"])
    assert read == flags and read.env_weights == (2.0, 1.0)
    config, objects = configured("tiny", [Echo, REVERSE], {"env_args": ["Echo.most=9"]})
    assert config.env == (ECHO, REVERSE) and objects == [Echo, None] and config.env_workers == 0
    kind: Any = run_kind(config, objects)
    assert kind.members["Echo"].cls is Echo
    split, objects = configured("tiny", [Echo, REVERSE], {"cluster.backend": "local"})
    assert split.env == (ECHO.replace(str(FILE), "mixed_games"), REVERSE) and objects is None
    with pytest.raises(ValueError, match="names no environment"):
        configured("tiny", [], {})


def test_a_folder_that_names_several_is_trusted_as_one_that_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    options = tiny().to_json() | {"env": ["mine.py", "wordle"]}
    assert unknown(options) == ["--env mine.py wordle"]
    remember(options)
    whole = [str(tmp_path / "mine.py"), "wordle"]
    assert unknown(options) == [] and unknown(options | {"env": whole}) == []
    assert unknown(options | {"env": ["other.py", "wordle"]}) != []
    assert unknown(tiny().to_json() | {"env": ["wordle", "easy=guess"]}) == [], "they come along"


def test_the_manifest_hashes_the_files_of_all() -> None:
    config = replace(tiny(), env=(ECHO, f"back={REVERSE}"))
    assert str(FILE.resolve()) in environment(config)
    named = replace(config, env=("code", f"back={REVERSE}"))
    assert str(FILE.resolve()) in environment(named), "the name before it is no part of the path"


def test_an_evaluation_is_of_several_too(tmp_path: Path) -> None:
    saved: Any = SimpleNamespace(run=None)
    options = EvalOptions(
        model="x", preset="tiny", env=(ECHO, REVERSE), env_weights=(2.0, 1.0), out=tmp_path / "e"
    )
    config = options.run_config(saved)
    assert config.env == (ECHO, REVERSE) and config.env_weights == (2.0, 1.0)
    assert config.agent.max_turns == 3
    one = replace(options, env=ECHO, env_weights=()).run_config(SimpleNamespace(run=config))  # type: ignore[arg-type]
    assert one.env == ECHO and one.env_weights == () and one.agent.max_turns == 1


def test_the_command_line_of_an_evaluation_takes_several() -> None:
    words = ["x", "--env", "a.py", "b.py", "--env-weights", "2", "1", "--env-args", "a.n=1"]
    read = tyro.cli(EvalOptions, args=words)
    assert (read.env, read.env_weights) == (("a.py", "b.py"), (2.0, 1.0))
    assert tyro.cli(EvalOptions, args=["x", "--env", "a.py"]).env in ("a.py", ("a.py",))


def test_a_fork_elsewhere_leaves_names_arguments_and_weights_behind() -> None:
    chosen = {"env": "guess"}
    several = parse_arguments([*BOTH, "--env-args", "Echo.most=9", "--env-weights", "2", "1"])
    one = replace(tiny(), env="wordle", env_args=("words=short",))
    for before in (several, one):
        fork = _elsewhere(before, chosen, None)
        assert (fork.env, fork.env_args, fork.env_weights) == ("guess", (), ())
        assert fork.rl == before.rl


def test_a_chat_is_with_one_of_them() -> None:
    config = parse_arguments([*BOTH, "--env-args", "Echo.most=9"])
    alone = _one_of(config, "Echo", "runs/x")
    assert (alone.env, alone.env_args, alone.env_weights) == (ECHO, ("most=9",), ())
    with pytest.raises(ValueError, match=r"\(none\): runs/x was trained in several.*Echo, back"):
        _one_of(config, "", "runs/x")
    told = re.search(r"chat \S+ --env (\S+)\n", next_steps(config))
    assert told is not None and told[1] in members_of(config), "what a run says next works"
    assert " chat runs/tiny-seed0\n" in next_steps(tiny())


# -- what is said of each ----------------------------------------------------------------------


def test_success_by_environment_adds_up_its_task_types() -> None:
    results = {
        "before": {"per_kind": {"a/x": [1, 4], "a/y": [2, 2], "b/x": [0, 3]}},
        "after": {"per_kind": {"a/x": [3, 4], "a/y": [2, 2], "b/x": [1, 3]}},
    }
    found = per_type(results, environment_of)
    assert found["a"] == {"before": 0.5, "n_before": 6, "after": 5 / 6, "n_after": 6, "n": 6}
    assert found["b"]["after"] == pytest.approx(1 / 3) and list(found) == ["a", "b"]
    assert per_type(results)["a/x"]["after"] == 0.75, "the types are as they were"
    lines = environment_lines({"per_environment": found})
    assert " ".join(lines[0].split()) == "a before RL 50.0% of 6, after RL 83.3% of 6"
    page = environments_section(found, [{"step": 0, "environment/a/success": 0.25}])
    assert "By environment" in page and "83.3" in page and "by environment" in page
    assert environments_section({}, [{"step": 0}]) == "" and environment_lines({}) == []


def test_the_numbers_of_a_step_by_environment() -> None:
    played = [rollout("a/x-1", 1.0), rollout("a/y-2", 0.5), rollout("b/x-1", 0.0)]
    assert environment_metrics(played) == {
        "environment/a/success": 0.5,
        "environment/a/reward": 0.75,
        "environment/a/num_rollouts": 2.0,
        "environment/b/success": 0.0,
        "environment/b/reward": 0.0,
        "environment/b/num_rollouts": 1.0,
    }


def test_evaluations_and_comparisons_say_each_environment() -> None:
    def evaluation(about: dict[str, Any], *rewards: float) -> Evaluation:
        tasks = [marked(Task(str(i)), "ab"[i % 2]) for i in range(len(rewards))]
        pairs = [(t, rollout(t.task_id, r)) for t, r in zip(tasks, rewards, strict=True)]
        return Evaluation.of(pairs, title="it", about=about, seconds=1.0)

    several = {"env": ["a.py", "b.py"]}
    old, new = evaluation(several, 0, 0, 0, 1), evaluation(several, 1, 0, 1, 1)
    found = new.per_environment()
    assert {name: [one.share for one in scores] for name, scores in found.items()} == {
        "a": [1.0, 1.0],
        "b": [0.0, 1.0],
    }
    assert new.to_json()["per_environment"]["b"]["num_tasks"] == 2
    assert "b" in evaluation_text(new)
    text = comparison_text(PairedComparison.of(old, new))
    assert "  a: +100.0 points" in text and "  b: +0.0 points" in text
    alone = evaluation({"env": "a.py"}, 1, 0)
    assert not alone.per_environment() and "per_environment" not in alone.to_json()


def test_check_plays_tasks_of_each(tmp_path: Path) -> None:
    words = [*BOTH, "--threads", "1", "--env-workers", "0", "--warm-start.steps", "4"]
    checkup = check_run(parse_arguments([*words, "--out", str(tmp_path / "run")]))
    names = Counter(environment_of(task.task_id) for task, _ in checkup.played)
    assert names == {"Echo": 8, "back": 8}, checkup.findings
    assert "  Echo: success" in checkup.summary() and "  back: success" in checkup.summary()


def test_the_library_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nanorl.train` gives the list on, with an object in place of each class."""
    import nanorl.commands.train as module

    given: dict[str, Any] = {}

    def run_training(config: RunConfig, **options: Any) -> tuple[RunConfig, dict[str, Any]]:
        given.update(config=config, **options)
        return config, {}

    monkeypatch.setattr(module, "run_training", run_training)
    nanorl.train("tiny", env=[Echo, Reverse], options={"env_weights": [3, 1]})
    assert given["env"] == [Echo, Reverse] and given["config"].env == (ECHO, REVERSE)
    assert given["config"].env_weights == (3.0, 1.0)
    assert "mixed_games" in sys.modules
