"""`nanorl new NAME`: writes a small environment that works, to be changed into yours, and its test.

    nanorl new my_game
    nanorl new my_game --package    # a folder to install: nanorl train --env my_game finds it

Both are plain files. The environment is a question with a tool and a teacher, and its comments say
what each part is for.
"""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path
from typing import Annotated

import tyro

from nanoengine.command_line import program, python

ENVIRONMENT = '''"""CLASS: say how many letters a word has, which a tool can count.

nanorl check --env NAME.py
nanorl train --env NAME.py
"""

import nanorl


class CLASS(nanorl.Env):
    # Every chat begins with it.
    system = "How many letters has the word? Say the number alone."
    # How calls are written: [count(word='tree')] is the shortest form.
    parser = "pythonic"
    # Options of its runs by their names as flags; flags win.
    defaults = {  # noqa: RUF012
        "agent.max_turns": 3,
        "agent.max_turn_tokens": 24,
        "agent.max_context_tokens": 384,
        "warm_start.steps": 10,
        "rl.steps": 10,
        "rl.temperature": 1.0,
    }

    def tasks(self, rng):
        """Draw one task. One in four, chosen by a hash of its content, is never trained on."""
        word = "".join(rng.choices("abdeiklmnorst", k=rng.randint(3, 9)))
        return nanorl.Task(word, answer=len(word))

    def reset(self):
        """Begin an episode. Every episode has an object of its own; self.task is its task."""
        self.num_calls = 0

    def count(self, word: str) -> int:
        """Count letters."""  # the model reads this, and the types
        self.num_calls += 1
        self.metric("num_calls")  # a curve in the report
        return len(word)

    # What the agent may call: methods, functions, nanorl.python, nanorl.bash and others.
    tools = (count,)

    def step(self, text):
        """Answer a turn that called no tool: with a text to read, or self.done(...)."""
        said = nanorl.last_number(text)
        if said is None:
            return "Say a number."
        # A reward of 1 or more counts as success. Let nothing that plays on cost anything: a turn
        # that is cut off earns 0, and would be better.
        return self.done(reward=1.0 if said == self.task.answer else 0.0)

    def teacher(self, observations, rng):
        """Show how it is played, for the supervised steps before RL; leave it out, and there are
        none. It may be sloppy: it shows how a tool is called, and RL finds out that it pays."""
        if not observations and rng.random() < 0.5:
            return nanorl.ToolCall("count", {"word": self.task.prompt})
        return str(self.task.answer if self.num_calls else rng.randint(3, 9))
'''

TEST = '''"""The environment of NAME.py, played without a model."""

import nanorl

from NAME import CLASS

TASK = nanorl.Task("tree", answer=4)


def test_the_right_number_earns_the_reward():
    played = nanorl.rehearse(CLASS, TASK, turns=["Hm.", "It has 4."])
    assert played.observations == ["Say a number."]
    assert played.is_done and played.reward == 1.0


def test_the_tool_counts_and_costs_nothing():
    played = nanorl.rehearse(CLASS, TASK, turns=["[count(word='tree')]", "5"])
    assert "4" in played.observations[0] and played.metrics["num_calls"] == 1.0
    assert played.is_done and played.reward == 0.0


def test_the_teacher_who_calls_the_tool_is_right():
    for seed in range(8):
        played = nanorl.rehearse(CLASS, seed=seed)
        assert played.is_done
        assert played.reward == 1.0 or not played.metrics
'''


def new(
    name: Annotated[str, tyro.conf.Positional],
    folder: Path = Path("."),
    package: bool = False,
) -> int:
    """Write NAME.py, a small environment that works, and test_NAME.py.

    Args:
        name: what it is called, as my_game
        folder: where the files go
        package: write a folder NAME that can be installed, so that --env NAME finds it
    """
    written = write_package(name, folder) if package else write_files(name, folder)
    env, test, *others = written
    nanorl = program()
    steps = {
        "its test": f"{python()} -m pytest {test}",
        "look at it": f"{nanorl} check --env {env}",
        "train on it": f"{nanorl} train --env {env}",
        "read": "docs/environments.md",
    }
    if others:
        install = f"{python()} -m pip install --no-build-isolation -e {env.parent}"
        by_name = f"{nanorl} check --env {env.stem}   {nanorl} train --env {env.stem}"
        steps = {"its test": steps["its test"], "install it": install, "by its name": by_name}
    print(f"wrote {', '.join(map(str, written))}\nnext:")
    print("\n".join(f"  {title:<13} {command}" for title, command in steps.items()))
    return 0


def write_files(name: str, folder: Path) -> list[Path]:
    """Write both. ValueError for a name that Python could not import, and where a file exists."""
    name = _checked(name)
    env, test = folder / f"{name}.py", folder / f"test_{name}.py"
    for path in (env, test):
        if path.exists():
            raise ValueError(f"nanorl new {name}: {path} exists already; choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in ((env, ENVIRONMENT), (test, TEST)):
        path.write_text(text.replace("CLASS", _title(name)).replace("NAME", name), encoding="utf-8")
    return [env, test]


def write_package(name: str, folder: Path) -> list[Path]:
    """Write a folder with both that can be installed. ValueError as for `write_files`, for names
    that are taken, and where the folder exists."""
    # Here: few ask for a package.
    from nanorl.commands.new_package import check_package_name, write_package_files

    name = _checked(name)
    check_package_name(name)
    home = folder / name
    if home.exists():
        raise ValueError(f"nanorl new {name}: {home} exists already; choose another name")
    return [*write_files(name, home), *write_package_files(name, _title(name), home)]


def _checked(name: str) -> str:
    """The name without its ending."""
    name = name.removesuffix(".py")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ValueError(
            f"nanorl new {name}: the name becomes a Python module; use small letters, digits and "
            "_, as in my_game"
        )
    if name in sys.stdlib_module_names or name == "nanorl":
        raise ValueError(
            f"nanorl new {name}: Python's own module {name} could not be imported any more; choose "
            "another name"
        )
    return name


def _title(name: str) -> str:
    """The name of the class."""
    return "".join(part.capitalize() for part in name.split("_"))
