"""docs/environments.md: every block of code and every command of it works, runs made short."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanorl
from nanorl.cli import main
from nanorl.commands.rehearsal import rehearse
from nanorl.envs.catalog import load_kind
from nanorl.options.parts import load_tasks
from nanorl.options.run_kind import run_kind
from nanorl.run.parse import parse_arguments

pytestmark = pytest.mark.xdist_group("heavy")
ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "environments.md").read_text("utf-8")
SHORT = shlex.split("""
    --preset tiny --dtype fp32 --threads 1 --rl.steps 1 --rl.tasks-per-step 1
    --rl.group-size 2 --agent.max-context-tokens 1020 --agent.max-turn-tokens 6 --agent.max-turns 2
    --warm-start.traces-per-step 2 --warm-start.epochs 1 --warm-start.drill-fraction 0
    --evaluation.num-tasks 2 --evaluation.num-tasks-untrained 0 --evaluation.num-tasks-no-tool 0
    --engine.max-num-seqs 4 --engine.cache-mb 32""")
IN_PYTHON = """dict(dtype="fp32", threads=1, rl=dict(tasks_per_step=1, group_size=2),
    evaluation=dict(num_tasks=2, num_tasks_untrained=0, num_tasks_no_tool=0))"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def files() -> dict[str, str]:
    """The blocks that say which file they are."""
    named = ((re.match(r"# (\w+\.py)\n", block), block) for block in blocks("python"))
    return {match[1]: block for match, block in named if match}


COMMANDS = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
TRAININGS = [words[2:] for words in COMMANDS if words[:2] == ["nanorl", "train"]]
# Of test_env_server.py and test_env_adapters.py, which have the servers and the package.
ELSEWHERE = ("http:", "openenv:", "gymnasium:")
NEW_RUNS = [
    words
    for words in TRAININGS
    if not {"--resume", "--fork"} & {*words} and not words[1].startswith(ELSEWHERE)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the reader's files are, as the working folder."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(ROOT / "examples", folder / "examples")
    for name, text in files().items():
        (folder / name).write_text(text)
    rows = "".join(f"What is {i} + 1?,{i + 1}\n" for i in range(20))
    (folder / "questions.csv").write_text(f"question,solution\n{rows}")
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        script = [sys.executable, "examples/make_harbor.py", "my-tasks"]
        subprocess.run(script, check=True)
        yield folder
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))
        sys.modules.pop("maze", None)


def test_the_page_names_only_commands_that_are_run_here() -> None:
    assert len(TRAININGS) > 10 and len(files()) >= 6
    others = {" ".join(words[:2]) for words in COMMANDS if words[1] != "train"}
    assert others == {
        *("nanorl new", "python -m", "python examples/make_harbor.py"),
        *("nanorl view", "nanorl chat", "nanorl eval", "nanorl compare"),
        *("nanorl check", "nanorl serve-env"),  # of test_doctor.py and test_env_server.py
    }


@pytest.mark.parametrize("words", NEW_RUNS, ids=" ".join)
def test_every_run_finds_what_it_names(folder: Path, words: list[str]) -> None:
    config = parse_arguments(words)
    kind = run_kind(config)
    try:
        tasks = load_tasks(config, kind)
        assert tasks.heldout and tasks.train.batch(0, 2)
    finally:
        kind.close()


@pytest.mark.parametrize(
    "name",
    [
        *("maze.py", "word_game.py", "own_reward.py", "make_harbor.py", "reasoning_gym.toml"),
        *("corridor.py", "drawers.py", "farm.py", "drinks.py", "duel.py", "screenshots.py"),
    ],
)
def test_an_example_is_thirty_lines_at_most(name: str) -> None:
    text = (ROOT / "examples" / name).read_text("utf-8")
    _, _, code = text.split('"""', 2) if text.startswith('"""') else ("", "", text)
    lines = [line for line in code.splitlines() if line.strip() and not line.startswith("#")]
    assert 0 < len(lines) <= 30


@pytest.mark.parametrize("name", ["shop.py", "hall.py", "examples/word_game.py"])
def test_a_teacher_of_the_page_plays_its_environment(folder: Path, name: str) -> None:
    played = rehearse(str(folder / name))
    assert played.turns and played.observations and "{" not in played.observations[0]


def test_the_first_environment_of_the_page_is_the_example() -> None:
    _, _, example = (ROOT / "examples" / "maze.py").read_text("utf-8").split('"""', 2)
    assert files()["maze.py"].removeprefix("# maze.py\n").strip() == example.strip()


def test_the_class_of_tools_counts(folder: Path) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"amount": 5}}\n</tool_call>'
    task = next(t for t in load_kind("counter.py", {}).tasks(0).batch(0, 1))
    told = nanorl.Task(task.prompt, answer=5)
    assert rehearse(str(folder / "counter.py"), told, turns=[call]).reward == 1.0


RUNS = [
    *[words for words in NEW_RUNS if any("examples/" in word for word in words)][:3],
    *[words for words in NEW_RUNS if any(word in ("counter.py", "harbor") for word in words)],
    *[words for words in NEW_RUNS if any("patient" in w or "centred" in w for w in words)],
]


@pytest.mark.sandbox
@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_the_examples_train(folder: Path, words: list[str], tmp_path: Path) -> None:
    steps = [] if "counter.py" in words or "answer" in words else ["--warm-start.steps", "1"]
    assert main(["train", *words, *SHORT, *steps, "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "summary.json").is_file()


def test_python_blocks_and_then_the_commands_about_a_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = [block for block in blocks("python") if not block.startswith("# ")]
    assert len(programs) == 2
    for program in programs:
        exec(program.replace("steps=1,", f"steps=1, options={IN_PYTHON},"), {})
    for words in COMMANDS:
        if words[:2] == ["nanorl", "view"]:
            assert main([*words[1:], "--terminal"]) == 0  # the page: test_viewer_browser.py
        if words[:2] == ["nanorl", "compare"]:
            assert main(words[1:]) == 0
        if words[:2] == ["nanorl", "eval"]:
            assert main([*words[1:], "--num-tasks", "2"]) == 0
            assert "2 held-out tasks, played 8 times each" in capsys.readouterr().out
        if {"--resume", "--fork"} & {*words}:
            assert parse_arguments(words[2:]).rl.steps == 40


def test_what_nanorl_new_writes_passes_its_test_and_the_linter(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new", "my_game"]) == 0
    said = capsys.readouterr().out
    assert "nanorl train --env my_game.py" in said and "pytest test_my_game.py" in said
    assert rehearse("my_game.py").is_done
    tested = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_game.py"]
    done = subprocess.run(tested, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout
    for check in (["check"], ["format", "--check"]):
        lint = [sys.executable, "-m", "ruff", *check, "--no-cache", "--config"]
        lint += [str(ROOT / "pyproject.toml"), "my_game.py", "test_my_game.py"]
        assert subprocess.run(lint, cwd=folder).returncode == 0
    assert main(["new", "my_game"]) == 2 and "exists already" in capsys.readouterr().err
    assert main(["new", "my-game"]) == 2 and "small letters" in capsys.readouterr().err
