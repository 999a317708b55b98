"""`nanorl new NAME`: writes a small environment that works, to be changed into yours, and its test.

    nanorl new my_game

Both are plain files. The environment is a game of two turns with a tool, a reward for a turn and a
teacher, and its comments say what each part is for.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import tyro

from nanoengine.command_line import program, python

ENVIRONMENT = '''"""CLASS: say how many letters a word has, which a tool can count.

nanorl train --env NAME.py --rl.steps 20
"""

import nanorl


def count_letters(word: str) -> int:
    """Count the letters of a word."""  # the model reads this, and the types
    return len(word)


class CLASS(nanorl.Env):
    # Every chat begins with it.
    system = "Say how many letters the word has. Say the number and nothing else."

    # What the agent may call: functions of yours, nanorl.python, nanorl.bash and others.
    tools = (count_letters,)

    # Options of its runs by their names as flags; flags win.
    defaults = {"agent.max_turns": 3, "agent.max_turn_tokens": 48}  # noqa: RUF012

    def tasks(self, rng):
        """Draw one task. Others than these are held out: one in four, by a hash of its content."""
        word = "".join(rng.choices("abdeiklmnorst", k=rng.randint(3, 9)))
        return nanorl.Task(f"How many letters has {word}?", answer=len(word), data={"word": word})

    def reset(self):
        """Begin an episode. Every episode has an object of its own; self.task is its task."""
        self.num_guesses = 0

    def step(self, text):
        """Answer a turn that called no tool: with a text to read, or self.done(...)."""
        self.num_guesses += 1
        if nanorl.last_number(text) == self.task.answer:
            return self.done(reward=1.0)  # a reward of 1 or more counts as success
        self.reward(-0.1)  # for this turn alone
        self.metric("num_wrong_guesses")  # a curve in the report
        return "No, try again."

    def teacher(self, observations, rng):
        """Show how it is played, for the supervised steps before RL; leave it out, and there are
        none. It may be sloppy: what RL cannot find by itself is the form of the calls."""
        if not observations:
            return nanorl.ToolCall("count_letters", {"word": self.task.data["word"]})
        return str(self.task.answer if rng.random() < 0.7 else rng.randint(3, 9))
'''

TEST = '''"""The environment of NAME.py, played without a model."""

import nanorl

from NAME import CLASS

TASK = nanorl.Task("How many letters has tree?", answer=4, data={"word": "tree"})


def test_the_right_number_earns_the_reward():
    played = nanorl.rehearse(CLASS, TASK, turns=["4"])
    assert played.is_done and played.reward == 1.0


def test_a_wrong_number_costs_and_may_be_tried_again():
    played = nanorl.rehearse(CLASS, TASK, turns=["5", "It has 4."])
    assert played.observations == ["No, try again."]
    assert played.turn_rewards == [-0.1, 0.0] and played.reward == 1.0
    assert played.metrics["num_wrong_guesses"] == 1.0


def test_the_teacher_calls_the_tool_and_ends_the_game():
    for seed in range(5):
        played = nanorl.rehearse(CLASS, seed=seed)
        assert str(played.task.answer) in played.observations[0]
        assert played.is_done and played.reward == 1.0
'''


def new(
    name: Annotated[str, tyro.conf.Positional],
    folder: Path = Path("."),
) -> int:
    """Write NAME.py, a small environment that works, and test_NAME.py.

    Args:
        name: what it is called, as my_game
        folder: where the two files go
    """
    env, test = write_files(name.removesuffix(".py"), folder)
    print(
        f"wrote {env} and {test}\nnext:\n"
        f"  its test      {python()} -m pytest {test}\n"
        f"  train on it   {program()} train --env {env} --rl.steps 20\n"
        "  read          docs/environments.md"
    )
    return 0


def write_files(name: str, folder: Path) -> tuple[Path, Path]:
    """Write both. ValueError for a name that Python could not import, and where a file exists."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"nanorl new {name}: the name becomes a Python module; use small letters, digits and "
            "_, as in my_game"
        )
    env, test = folder / f"{name}.py", folder / f"test_{name}.py"
    for path in (env, test):
        if path.exists():
            raise ValueError(f"nanorl new {name}: {path} exists already; choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    title = "".join(part.capitalize() for part in name.split("_"))
    for path, text in ((env, ENVIRONMENT), (test, TEST)):
        path.write_text(text.replace("CLASS", title).replace("NAME", name), encoding="utf-8")
    return env, test
