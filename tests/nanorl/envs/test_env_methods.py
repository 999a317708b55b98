"""An environment's own methods: as tools of its episode, as its teacher, and spelt wrong."""

from __future__ import annotations

import asyncio
import random
import textwrap
from pathlib import Path
from typing import Any

import pytest
from agent_doubles import tiny_tokenizer

import nanorl
from nanoinfer.chat.hermes import HermesParser
from nanorl.agents.loop import Agent
from nanorl.agents.tokens import Limits
from nanorl.cli import main
from nanorl.distributed.warm_start import WarmStart
from nanorl.envs.base import Services, TeacherError
from nanorl.envs.catalog import as_kind, load_kind
from nanorl.envs.env_kind import shown_action
from nanorl.envs.hosting.environment import EpisodeHost, HostedEnvironment
from nanorl.envs.hosting.host_pool import WorkerPool
from nanorl.options.phase_config import WarmStartConfig
from nanorl.options.run_config import RunConfig
from nanorl.task import Task
from nanorl.types import InfrastructureError

TASK = Task("Find the door.", answer=3)


class Walk(nanorl.Env):
    """A corridor: state, and tools that change it."""

    system = "Walk to the door."

    def tasks(self, rng: random.Random) -> Task:
        return Task("Find the door.", answer=rng.randint(1, 4))

    def reset(self) -> str:
        self.place = 0
        return f"You stand at {self.place}."

    def look(self) -> str:
        """Say where the door is."""
        return f"The door is at {self.task.answer}, you are at {self.place}."

    def move(self, distance: int) -> Any:
        """Walk along the corridor.

        Args:
            distance: how many steps
        """
        self.place += distance
        if self.place == self.task.answer:
            return self.done(reward=1.0)
        self.reward(-0.25)
        self.metric("num_moves")
        return f"You are at {self.place}."

    tools = (look, move)

    def teacher(self, observations: list[str], rng: random.Random) -> Any:
        if len(observations) == 1:  # the opening of `reset`
            assert observations == [f"You stand at {self.place}."]
            return nanorl.ToolCall("look", {})
        return nanorl.ToolCall("move", {"distance": self.task.answer - self.place})


def call(name: str, **arguments: Any) -> str:
    return HermesParser().write(nanorl.ToolCall(name, arguments))


# -- tools -----------------------------------------------------------------------------------------


def test_methods_are_tools_without_their_self_and_play_the_episodes_own_object() -> None:
    kind: Any = as_kind(Walk)
    parameters = [tool.schema["function"]["parameters"] for tool in kind.tools]
    assert [list(one.get("properties", {})) for one in parameters] == [[], ["distance"]]
    turns = [call("move", distance=1), call("look"), call("move", distance=2)]
    played = nanorl.rehearse(Walk, TASK, turns=turns)
    assert played.turn_rewards == [-0.25, 0.0, 0.0] and played.reward == 1.0 and played.is_done
    assert played.metrics["num_moves"] == 1.0
    assert "You are at 1." in played.observations[0]
    assert "The door is at 3, you are at 1." in played.observations[1]


def test_episodes_that_are_played_at_once_do_not_meet() -> None:
    kind = as_kind(Walk)

    async def play(distance: int) -> str:
        episode = kind.open(Services(tokenizer=tiny_tokenizer(), sandbox=None, timeout_s=5.0))
        await episode.reset(TASK)
        for _ in range(3):
            await episode.step(call("move", distance=distance))
        step = await episode.step(call("look"))
        return str(step.observation)

    async def both() -> list[str]:
        return await asyncio.gather(*map(play, (10, 20, 30)))

    said = asyncio.run(both())
    assert [f"you are at {3 * n}." in one for n, one in zip((10, 20, 30), said, strict=True)] == [
        True
    ] * 3


def test_a_subclass_plays_its_own_method_and_methods_set_in_init_are_the_episodes_too() -> None:
    class Run(Walk):
        def look(self) -> str:
            """Look far."""
            return f"far from {self.place}"

    class Late(Walk):
        def __init__(self) -> None:
            self.tools = (self.look,)  # bound to the object that a run asks for its tools

    turns = [call("move", distance=1), call("look")]
    assert "far from 1" in nanorl.rehearse(Run, TASK, turns=turns).observations[1]
    assert "you are at 0" in nanorl.rehearse(Late, TASK, turns=[call("look")]).observations[0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("tools = 'look'", r"Bad\.tools is 'look': it is a list of functions"),
        ("def look(self): ...\n    tools = look", r"Bad\.tools is <.*list of functions"),
        ("tools = ['look']", r"Bad\.tools holds 'look', which is no function.*without quotes"),
        ("tools = [Other.look]", r"tool look: its `self` would have to come from the model"),
    ],
)
def test_tools_that_are_none_are_refused_with_the_rule(body: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_kind(written(body))


def written(body: str) -> Any:
    """The class `Bad` with this body."""
    names: dict[str, Any] = {"nanorl": nanorl}
    other = "class Other:\n    def look(self): ...\n"
    exec(f"{other}class Bad(nanorl.Env):\n    {body}\n", names)
    return names["Bad"]


def test_an_end_that_is_not_returned_and_a_reward_that_is_no_number_name_their_place() -> None:
    class Forgets(Walk):
        def look(self) -> str:
            """Look."""
            self.done(reward=1.0)
            return "there"

        def step(self, text: str) -> Any:
            if text == "end":
                self.done(reward=1.0)
            return self.done(reward="good") if text == "good" else "go on"

        def move(self, distance: int) -> Any:
            """Move."""
            self.reward(float("nan"))

    said = {
        call("look"): r"a tool of Forgets called self\.done.*`return self\.done",
        "end": r"step of Forgets called self\.done.*`return self\.done",
        "good": r"Forgets: done\(reward='good'\) is no finite number "
        r"\(.*test_env_methods\.py, line \d+: return self\.done\(reward=\"good\"\)",
        call("move", distance=1): r"Forgets: reward\(nan\) is no finite number \(.*line \d+: self",
    }
    for turn, message in said.items():
        with pytest.raises(InfrastructureError, match=message):
            nanorl.rehearse(Forgets, TASK, turns=[turn])


# -- the teacher -----------------------------------------------------------------------------------


def test_the_teacher_plays_on_the_object_of_the_episode_and_reads_its_opening() -> None:
    played = nanorl.rehearse(Walk, TASK)
    assert len(played.turns) == 2 and played.reward == 1.0


def test_a_teacher_in_a_worker_is_the_episodes_own_too_and_its_error_is_no_fault_of_the_worker(
    tmp_path: Path,
) -> None:
    file = tmp_path / "walk.py"
    source = Path(__file__).read_text().split("class Walk")[1].split("\n\n\ndef call")[0]
    head = "import random\nfrom typing import Any\n\nimport nanorl\nfrom nanorl import Task\n\n\n"
    file.write_text(f"{head}class Walk{source}\n")

    async def play(pool: WorkerPool, task: Task) -> float:
        env = HostedEnvironment(pool)
        try:
            await env.reset(task)
            script = load_kind(str(file), {}).demonstrator(
                task, random.Random(0), tiny_tokenizer(), env
            )
            seen: list[str] = []
            for _ in range(2):
                step = await env.step(await shown_action(script, seen))
                said = env.format_observation(step.observation) if step.observation else []
                seen += [str(one["content"]) for one in said]
            return float(step.is_done)
        finally:
            await env.close()

    async def run() -> float:
        pool = WorkerPool(EpisodeHost, (Workers, str(file)), num_workers=1)
        try:
            await pool.start()
            with pytest.raises(TeacherError, match=r"Walk\.teacher raised TypeError.*walk\.py"):
                await play(pool, Task("Find the door.", answer="nowhere"))
            return await play(pool, TASK)
        finally:
            pool.close()

    assert asyncio.run(run()) == 1.0


class Workers:
    """Opens the episodes of a file in a worker."""

    def __init__(self, file: str) -> None:
        self.kind = load_kind(file, {})

    def open(self) -> Any:
        return self.kind.open(Services(tokenizer=tiny_tokenizer(), sandbox=None, timeout_s=5.0))


def test_an_error_of_the_teacher_is_one_message_with_its_own_line() -> None:
    class Shy(Walk):
        def teacher(self, observations: list[str], rng: random.Random) -> Any:
            return rng.choice([])  # raises in the standard library

    with pytest.raises(TeacherError) as caught:
        nanorl.rehearse(Shy, TASK)
    text = str(caught.value)
    assert text.startswith("the teacher failed: Shy.teacher raised IndexError: ")
    assert "test_env_methods.py, line" in text and "return rng.choice([])" in text
    assert "\n" not in text


def test_a_class_of_tools_may_have_a_teacher_who_sees_what_reset_set() -> None:
    class Counter:
        def reset(self, answer: str, **task: Any) -> None:
            self.count, self.goal = 0, int(answer)

        def add(self, amount: int) -> str:
            """Add."""
            self.count += amount
            return str(self.count)

        def score(self) -> float:
            return float(self.count == self.goal)

        def teacher(self, observations: list[str], rng: random.Random) -> Any:
            if self.count == self.goal:
                return "done"
            return nanorl.ToolCall("add", {"amount": self.goal - self.count})

    played = nanorl.rehearse(Counter, Task("Count to 5.", answer=5))
    assert played.turns[1] == "done" and played.reward == 1.0


def test_a_warm_start_in_which_every_episode_failed_says_of_what() -> None:
    class Broken(Walk):
        def reset(self) -> str:
            raise KeyError("map")

    warm = WarmStart(RunConfig(warm_start=WarmStartConfig(traces_per_step=2)), kit_of(Broken))
    with pytest.raises(ValueError, match=r"all 2 episodes that the teacher played failed, the fi"):
        asyncio.run(warm.samples(0))


def kit_of(cls: Any) -> Any:
    class Kit:
        kind = as_kind(cls)
        tokenizer = tiny_tokenizer()

        def environment(self) -> Any:
            return self.kind.open(Services(tokenizer=self.tokenizer, sandbox=None, timeout_s=5.0))

        def agent(self, generator: Any) -> Agent:
            return Agent(generator=generator, tokenizer=self.tokenizer, limits=Limits())

    return Kit()


# -- misspelt hooks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def stepp(self, text): ...", "Bad.stepp: .*no such method; did you mean `step`"),
        ("def Step(self, text): ...", "Bad.Step: .*did you mean `step`"),
        ("def tsep(self, text): ...", ""),
        ("def steps(self): ...", "did you mean `step`"),
        ("def rest(self): ...", "did you mean `reset`"),
        ("def task(self, rng): ...", "Bad.task: .*did you mean `tasks`"),
        ("def teach(self, observations, rng): ...", "did you mean `teacher`"),
        ("def set_up(self): ...", "did you mean `setup`"),
        ("def scores(self, transcript): ...", "did you mean `score`"),
        ("sytem = 'Guess.'", "Bad.sytem: .*no such value; did you mean `system`"),
        ("tool = []", "did you mean `tools`"),
        ("default = {}", "did you mean `defaults`"),
        ("parsers = 'hermes'", "did you mean `parser`"),
        ("tasks = [1]", r"Bad.tasks is \[1\], but it is a method; a list .* is `data`"),
        ("step = 3", "Bad.step is 3, but it is a method"),
        ("def system(self): ...", "Bad.system is a method, but it is a value"),
        ("def reward(self): ...", "Bad.reward: `self.reward` is what an environment is given"),
        ("reward = 0.0", "Bad.reward: `self.reward` is what an environment is given"),
        ("def step(self): ...", r"Bad.step\(self\): .*called as step\(self, text\)"),
        ("def score(self): ...", r"Bad.score\(self\): .*called as score\(self, transcript\)"),
        ("def teacher(self, seen): ...", r"called as teacher\(self, observations, rng\)"),
        ("async def setup(self): ...", "Bad.setup is `async`, .*write `def setup`"),
        ("async def tasks(self, rng): ...", "Bad.tasks is `async`, .*write `def tasks`"),
        ("async def tasks(self):\n        yield 1", "Bad.tasks is `async`"),
        # What is the user's own.
        ("def stop(self): ...", ""),
        ("def parse(self, text): ...", ""),
        ("steps = 5", ""),
        ("loot = 5", ""),
        ("def _stepp(self, text): ...", ""),
        ("def rest(self):\n        'Sleep.'\n    tools = [rest]", ""),
        ("def scores(self): ...\n    def score(self, transcript): return max(self.scores())", ""),
        ("def steps(self): ...\n    def reset(self): (lambda: self.steps())()", ""),
        (
            "def reward(self): ...\n    def reset(self): self.reward()",
            "is what an environment is given",
        ),
        ("def tasks(self): ...", ""),
        ("async def reset(self): ...", ""),
        ("async def teacher(self, observations, rng): ...", ""),
        ("def step(self, text, more=None): ...", ""),
        ("teacher = None", ""),
        ("system = property(lambda self: 'a')", ""),
    ],
)
def test_a_misspelt_hook_is_refused_with_the_nearest_name(body: str, message: str) -> None:
    if message:
        with pytest.raises(ValueError, match=message):
            as_kind(written(body))
    else:
        as_kind(written(body))


def test_the_command_says_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "game.py"
    file.write_text(
        textwrap.dedent("""
        import nanorl

        class Game(nanorl.Env):
            def tasks(self, rng):
                return nanorl.Task("a", answer=1)
            def stepp(self, text):
                return self.done(reward=1.0)
        """)
    )
    assert (
        main(["train", "--env", str(file), "--preset", "tiny", "--out", str(tmp_path / "r")]) == 2
    )
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: Game.stepp: ") and "\n" not in said
