"""What people get wrong at a command line, each of it answered in one message.

A mistake is a command, what its message has to name of the cause, and what of the remedy. Whatever
goes wrong: the exit status is 2, one `error:` stands on stderr, nothing on the screen looks like a
traceback or a box, and no folder is left behind.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from nanorl import cli
from nanorl.envs.tasks.tiny_model import build_tiny_model
from nanorl.observability.store import RolloutStore
from nanorl.options.presets import tiny

GUESS = """
import nanorl

class Guess(nanorl.Env):
    def __init__(self, most: int = 9):
        self.most = most
    def tasks(self, rng):
        number = rng.randint(1, self.most)
        return nanorl.Task(f"Guess {number}.", answer=number)
    def step(self, text):
        return self.done(reward=float(str(self.task.answer) in text))
"""
FILES = {
    "guess.py": GUESS,
    "half.py": "import nanorl\n\nclass Half(nanorl.Env\n",
    "imports.py": "import numpi\n",
    "nothing.py": "x = 1\n",
    "two.py": GUESS + GUESS.replace("Guess(", "Guess2("),
    "no_tasks.py": GUESS.replace("def tasks", "def task_list"),
    "rewards.py": "def fair(task, text):\n    return 1.0\n\nSIZE = 3\n",
    "plain.txt": "hello\n",
    "broken.jsonl": '{"prompt": "a", "answer": "b"}\n{"prompt": \n',
    "columns.jsonl": '{"question": "a", "solution": "b"}\n',
    "empty.jsonl": "",
    "not.toml": "preset = tiny\n",
    "unknown.toml": 'preset = "tiny"\n[rl]\nstepz = 3\n',
    "noport.txt": "",
    "raises.py": GUESS.replace("self.most = most", "self.most = most + 'x'"),
    "decides.py": GUESS.replace(
        "    def tasks", "    defaults = {'preset': 'tiny'}\n    def tasks"
    ),
    "no_names.py": GUESS.replace("    def tasks", "    defaults = [1]\n    def tasks"),
}
NOBODY = 65534
NEW = ("train", "--preset", "tiny", "--out", "OUT")
ENV = (*NEW, "--env")
CHECK = ("check", "--preset", "tiny", "--env")


class Mistake(NamedTuple):
    """A command; the words of the message that name the cause, and those of the remedy."""

    words: tuple[str, ...]
    cause: tuple[str, ...]
    remedy: tuple[str, ...]


MISTAKES = {
    # -- verbs
    "a verb misspelt": Mistake(("tran",), ("tran",), ("did you mean train",)),
    "a verb in capitals": Mistake(("Eval", "runs/tiny"), ("Eval",), ("did you mean eval",)),
    "no such verb": Mistake(("finetune",), ("finetune",), ("train", "eval")),
    "no verb": Mistake(("--preset", "tiny"), ("--preset",), ("nanorl train --preset tiny",)),
    # -- paths
    "no model": Mistake(("eval",), ("MODEL",), ("nanorl eval --help",)),
    "no such run": Mistake(
        ("eval", "runs/nope"), ("runs/nope", "no such"), ("runs/tiny", "hf:OWNER/NAME")
    ),
    "a run's name misspelt": Mistake(("eval", "runs/tny"), ("runs/tny",), ("did you mean", "tiny")),
    "a run to chat with": Mistake(("chat", "runs/nope"), ("runs/nope",), ("runs/tiny",)),
    "a run to serve": Mistake(("serve", "runs/nope"), ("runs/nope",), ("runs/tiny",)),
    "a file for a model": Mistake(("eval", "plain.txt"), ("plain.txt",), (".gguf",)),
    "no such GGUF file": Mistake(("eval", "no.gguf"), ("no.gguf",), ("give a .gguf file",)),
    "an empty folder for a model": Mistake(("eval", "empty"), ("empty",), ("config.json",)),
    "another tool's config.json": Mistake(("eval", "torn"), ("torn", "JSON"), ("model's",)),
    "no such stage of a run": Mistake(("eval", "runs/tiny:befor"), ("befor",), ("before",)),
    "out that is not empty": Mistake(
        ("eval", "runs/tiny", "--out", "full"), ("full", "not empty"), ("another folder",)
    ),
    "a run to view": Mistake(("view", "nope"), ("nope",), ("config.json",)),
    "nothing to view": Mistake(("view",), ("view",), ("runs/",)),
    "one to compare": Mistake(("compare", "runs/tiny"), ("1 given",), ("two or more",)),
    "no such evaluation": Mistake(
        ("compare", "runs/tiny", "nope"), ("no evaluation",), ("nanorl", "eval")
    ),
    "a run to replay": Mistake(("replay", "nope"), ("nope",), ("config.json",)),
    "a run to export": Mistake(("export", "nope", "--to", "jsonl"), ("nope",), ("config.json",)),
    "no such format": Mistake(
        ("export", "runs/tiny", "--to", "jsnl"), ("jsnl",), ("jsonl", "parquet")
    ),
    "a store": Mistake(("store", "nope"), ("nope",), ("run",)),
    "a run that has no monitor": Mistake(
        ("status", "--run", "runs/tiny"), ("runs/tiny",), ("--monitor.port",)
    ),
    "nothing to scale": Mistake(("scale", "--run", "runs/tiny"), ("one of",), ("--replicas",)),
    "a name that Python cannot import": Mistake(("new", "My-Game"), ("My-Game",), ("my_game",)),
    "a file that is there": Mistake(("new", "guess"), ("guess.py", "exists"), ("another name",)),
    # -- runs
    "a run to go on with": Mistake(
        ("train", "--resume", "--out", "runs/nope"), ("runs/nope",), ("name the run's folder",)
    ),
    "a run to fork": Mistake(("train", "--fork", "runs/nope"), ("runs/nope",), ("folder",)),
    "no such checkpoint": Mistake(
        ("train", "--fork", "runs/tiny@7"), ("runs/tiny@7",), ("--keep-checkpoints",)
    ),
    "both at once": Mistake(
        ("train", "--resume", "--fork", "runs/tiny"), ("--resume",), ("leave one of them out",)
    ),
    "a folder that holds a run": Mistake(
        ("train", "--preset", "tiny", "--out", "runs/tiny"), ("already holds a run",), ("--resume",)
    ),
    "a file in the way": Mistake(
        ("train", "--preset", "tiny", "--out", "plain.txt/x"), ("plain.txt",), ("--out",)
    ),
    # -- names and types of options
    "no such preset": Mistake(("train", "--preset", "tny"), ("tny",), ("tiny", "smollm2")),
    "an option misspelt": Mistake((*NEW, "--rl.stepz", "3"), ("--rl.stepz",), ("--rl.steps",)),
    "an option of another tool": Mistake((*NEW, "--steps", "3"), ("--steps",), ("--rl.steps",)),
    "a word for a number": Mistake((*NEW, "--rl.steps", "x"), ("--rl.steps", "x"), ("number",)),
    "half a step": Mistake((*NEW, "--rl.steps", "2.5"), ("--rl.steps", "2.5"), ("whole number",)),
    "less than no step": Mistake((*NEW, "--rl.steps", "-3"), ("--rl.steps -3",), ("0 or more",)),
    "a word for the seed": Mistake((*NEW, "--seed", "a"), ("--seed", "a"), ("whole number",)),
    "no value": Mistake((*NEW, "--rl.lr"), ("--rl.lr",), ("value",)),
    "a dtype of GPUs": Mistake((*NEW, "--dtype", "fp16"), ("fp16",), ("bf16", "fp32")),
    "a recipe misspelt": Mistake((*NEW, "--algorithm", "grop"), ("grop",), ("grpo",)),
    "a device that is none": Mistake((*NEW, "--device", "gpu"), ("gpu",), ("cuda",)),
    "no tasks": Mistake(("eval", "runs/tiny", "--num-tasks", "0"), ("--num-tasks",), ("1 or",)),
    "a word for tasks": Mistake(
        ("eval", "runs/tiny", "--num-tasks", "ten"), ("--num-tasks", "ten"), ("whole number",)
    ),
    "samples that are all alike": Mistake(
        ("eval", "runs/tiny", "--k", "4", "--temperature", "0"), ("alike",), ("--k 1",)
    ),
    "an option of eval misspelt": Mistake(
        ("eval", "runs/tiny", "--num-task", "3"), ("--num-task",), ("--num-tasks",)
    ),
    "a chat that is too hot": Mistake(
        ("chat", "runs/tiny", "--temperature", "99"), ("temperature 99",), ("0 to 10",)
    ),
    "who is to answer": Mistake(
        ("chat", "runs/tiny", "--model", "traned"), ("traned",), ("trained", "base")
    ),
    "opposites": Mistake(("view", "runs/tiny", "--best", "--worst"), ("opposites",), ("one",)),
    "a torn expression": Mistake(
        ("view", "runs/tiny", "--text", "("), ("--text (",), ("regular expression",)
    ),
    "no file of options": Mistake((*NEW, "--config", "no.toml"), ("no.toml",), ("no such file",)),
    "a file that is not TOML": Mistake((*NEW, "--config", "not.toml"), ("not.toml",), ("TOML",)),
    "a key misspelt": Mistake((*NEW, "--config", "unknown.toml"), ("rl.stepz",), ("steps",)),
    # -- environments
    "no such file": Mistake((*ENV, "gess.py"), ("gess.py",), ("file",)),
    "no such environment": Mistake((*ENV, "gess"), ("gess",), ("did you mean guess",)),
    "a file with a slip": Mistake((*ENV, "half.py"), ("half.py", "SyntaxError"), ("line 3",)),
    "a file that needs a package": Mistake((*ENV, "imports.py"), ("numpi",), ("imports.py",)),
    "a file without one": Mistake((*ENV, "nothing.py"), ("nothing.py",), ("nanorl.Env",)),
    "a file with two": Mistake((*ENV, "two.py"), ("two.py",), ("two.py:Guess",)),
    "no such class": Mistake((*ENV, "guess.py:Gess"), ("Gess",), ("Guess",)),
    "no tasks method": Mistake((*ENV, "no_tasks.py"), ("tasks",), ("tasks",)),
    "no such argument": Mistake((*ENV, "guess.py", "--env-args", "mots=3"), ("mots",), ("most",)),
    "an argument without a value": Mistake(
        (*ENV, "guess.py", "--env-args", "most"), ("most",), ("name=value",)
    ),
    "a constructor that raises": Mistake((*ENV, "raises.py"), ("TypeError",), ("raises.py, line",)),
    "defaults that decide": Mistake((*ENV, "decides.py"), ("preset",), ("leave it out",)),
    "defaults without names": Mistake((*ENV, "no_names.py"), ("defaults",), ("by name",)),
    "an empty folder's name": Mistake(("train", "--out", ""), ("--out",), ("a path",)),
    "an environment to look at": Mistake((*CHECK, "gess.py"), ("gess.py",), ("file",)),
    "an environment to serve": Mistake(("serve-env", "gess.py"), ("gess.py",), ("file",)),
    # -- rewards, agents, tasks, trackers
    "no such reward": Mistake((*NEW, "--reward", "fare"), ("fare",), ("mine.py",)),
    "no such function": Mistake((*NEW, "--reward", "rewards.py:fare"), ("fare",), ("fair",)),
    "a number for a reward": Mistake(
        (*NEW, "--reward", "rewards.py:SIZE"), ("SIZE",), ("function",)
    ),
    "no such agent": Mistake((*NEW, "--agent", "toool"), ("toool",), ("tool", "single_turn")),
    "no such tasks": Mistake((*NEW, "--tasks", "no.jsonl"), ("no.jsonl",), ("file",)),
    "a torn line": Mistake((*NEW, "--tasks", "broken.jsonl"), ("broken.jsonl", "2"), ("JSON",)),
    "columns of other names": Mistake(
        (*NEW, "--tasks", "columns.jsonl"), ("prompt",), ("--task-fields",)
    ),
    "no line": Mistake((*NEW, "--tasks", "empty.jsonl"), ("empty.jsonl",), ("task",)),
    "no such sandbox": Mistake((*NEW, "--sandbox", "bwarp"), ("bwarp",), ("bwrap",)),
    "no such tracker": Mistake((*NEW, "--log", "wandbb"), ("wandbb",), ("wandb",)),
    "a model that is not here": Mistake(
        (*NEW, "--model", "runs/nope"), ("runs/nope",), ("hf:OWNER/NAME",)
    ),
    "a run for a model": Mistake(
        (*NEW, "--model", "runs/tiny"), ("runs/tiny",), ("runs/tiny/model-trained",)
    ),
    "arguments of no reward": Mistake(
        (*ENV, "guess.py", "--reward-args", "a=1"), ("--reward-args a=1",), ("--reward",)
    ),
    "another model to chat with": Mistake(
        ("chat", "runs/tiny", "--base", "nope", "--say", "x"), ("nope",), ("no such folder",)
    ),
    "a word for a step": Mistake(
        ("view", "runs/tiny", "--step", "x"), ("--step", "x"), ("whole number",)
    ),
    "a device that is not there": Mistake(
        (*NEW, "--device", "cuda:99"), ("cuda:99",), ("--device cpu",)
    ),
    "more threads than cores": Mistake((*NEW, "--threads", "9999"), ("9999",), ("at most",)),
    "a group of one": Mistake((*NEW, "--rl.group-size", "1"), ("--rl.group-size",), ("raise it",)),
    "a port that is none: monitor": Mistake(
        (*NEW, "--monitor.port", "99999"), ("99999",), ("65535",)
    ),
    "a module of Python's": Mistake(("new", "json"), ("json",), ("another name",)),
    "a model to train for others": Mistake(
        ("serve-training", "--model", "nope"), ("nope",), ("smollm2", "hf:OWNER/NAME")
    ),
    # -- ports
    "a port in use: serve": Mistake(
        ("serve", "runs/tiny", "--port", "USED"), ("USED", "in use"), ("--port 0",)
    ),
    "a port in use: serve-env": Mistake(
        ("serve-env", "guess.py", "--port", "USED"), ("USED", "in use"), ("--port 0",)
    ),
    "a port in use: view": Mistake(
        ("view", "runs/tiny", "--port", "USED"), ("USED", "in use"), ("--port 0",)
    ),
    "a port in use: serve-training": Mistake(
        ("serve-training", "--model", "runs/tiny/model", "--port", "USED"),
        ("USED", "in use"),
        ("--port 0",),
    ),
    "a port that is none": Mistake(
        ("serve", "runs/tiny", "--port", "99999"), ("99999",), ("65535",)
    ),
    "a host that is none": Mistake(
        ("view", "runs/tiny", "--host", "no.such.host.invalid"), ("no.such.host",), ("--host",)
    ),
    "a server for everybody": Mistake(
        ("serve", "runs/tiny", "--host", "0.0.0.0"), ("0.0.0.0",), ("--api-key-file",)
    ),
}


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder as people have it, which another user may enter: files, and a run that ended."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for file, text in FILES.items():
            (folder / file).write_text(text)
        (folder / "empty").mkdir()
        (folder / "full").mkdir()
        (folder / "full" / "notes.txt").write_text("mine")
        (folder / "torn").mkdir()
        (folder / "torn" / "config.json").write_text("{")
        run = folder / "runs" / "tiny"
        build_tiny_model(run / "model", seed=0)
        build_tiny_model(run / "model-trained", seed=1)
        (run / "config.json").write_text(json.dumps(tiny().to_json() | {"out": str(run)}))
        (run / "metrics.jsonl").write_text('{"step": 0}\n')
        with RolloutStore(run / "rollouts.sqlite"):
            pass
        yield folder


@pytest.fixture(scope="module")
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def said(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command that must end in one, after a look at how it ended."""
    try:
        status = cli.main(list(words))
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert status == 2, shown
    assert "Traceback" not in shown and "│" not in shown, shown
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, shown
    return captured.err[captured.err.index("error: ") :]


OF_EXTRAS = {
    "serve": (("serve", "runs/tiny"), "nanoinfer.server.running", "uvicorn"),
    "serve-env": (("serve-env", "guess.py"), "nanorl.serving.env_server", "uvicorn"),
    "serve-training": (
        ("serve-training", "--model", "runs/tiny/model"),
        "nanorl.serving.training_service.service_running",
        "uvicorn",
    ),
    "two runs to view": (
        ("view", "runs/tiny", "runs/tiny"),
        "nanorl.inspection.viewer.viewer_server",
        "uvicorn",
    ),
    "spans": ((*NEW, "--log", "otel"), "", "opentelemetry"),
    "tables": (("export", "runs/tiny", "--to", "parquet"), "", "pyarrow"),
    "searching": ((*ENV, "search"), "", "bm25s"),
}


@pytest.mark.parametrize("name", OF_EXTRAS)
def test_a_package_that_is_not_installed_is_named_with_what_installs_it(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, ours, package = OF_EXTRAS[name]
    monkeypatch.chdir(place)
    find_spec = importlib.util.find_spec
    hidden = lambda one, *more: None if one.startswith(package) else find_spec(one, *more)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    if ours:  # other tests may have imported it, what it imports, and the commands that name both
        rooms = (f"{ours.rpartition('.')[0]}.", "nanorl.commands.", "nanoinfer.http.")
        for one in [one for one in sys.modules if one.startswith(rooms)]:
            monkeypatch.delitem(sys.modules, one)
    message = said(tuple(f"runs/{name}" if word == "OUT" else word for word in words), capsys)
    assert package in message and "-m pip install -e" in message, message


@pytest.fixture
def nobody(place: Path) -> Iterator[None]:
    """A user who may read the folder and write nothing there; root may do everything."""
    if os.geteuid() != 0:
        places = [place, *(path for path in place.rglob("*") if path.is_dir())]
        for path in places:
            path.chmod(0o555)
        yield
        for path in places:
            path.chmod(0o755)
        return
    roles = "distributed.roles.choose_roles"
    for module in ("commands.new", "commands.evaluate", "commands.train", "run.run", roles):
        importlib.import_module(f"nanorl.{module}")  # the user may not enter Python's folder
    os.seteuid(NOBODY)
    try:
        if not os.access(place, os.X_OK, effective_ids=True):
            pytest.skip(f"another user may not enter {place}")
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    "words",
    [
        ("new", "my_game"),
        ("new", "my_game", "--folder", "games"),
        ("train", "--preset", "tiny", "--out", "runs/mine"),
        ("train", "--preset", "tiny", "--out", "empty"),
        ("eval", "runs/tiny", "--env", "guess.py", "--num-tasks", "1", "--out", "runs/mine"),
    ],
)
def test_a_folder_that_may_not_be_written_is_named(
    words: tuple[str, ...],
    place: Path,
    nobody: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    message = said(words, capsys)
    assert "ermission" in message or "writ" in message, message
    assert words[-1] in message or words[-1] == "my_game", message


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_by_its_cause_and_a_remedy(
    name: str,
    place: Path,
    used_port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    before = sorted(path.relative_to(place) for path in place.rglob("*"))
    mistake = MISTAKES[name]
    names = {"USED": str(used_port), "OUT": f"runs/{re.sub('[^a-z]+', '-', name)}"}
    words, cause, remedy = (tuple(names.get(word, word) for word in part) for part in mistake)
    message = said(words, capsys)
    for part in (*cause, *remedy):
        assert part in message, message
    assert len(message) < 2000, "a message, not a manual"
    left = {path.relative_to(place) for path in place.rglob("*") if "__pycache__" not in path.parts}
    assert left <= set(before), "what went wrong leaves nothing behind"
