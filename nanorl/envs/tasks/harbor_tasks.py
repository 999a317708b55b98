"""Task directories in the Harbor layout, one folder a task.

    my-task/task.toml        timeouts and metadata
    my-task/instruction.md   what the policy reads
    my-task/environment/     the files of the working folder; a Dockerfile says where they go
    my-task/tests/           test.sh, which writes a number from 0 to 1 to
                             /logs/verifier/reward.txt or reward.json; or, without one, test_*.py
                             with plain test functions, which never share a process with what they
                             test
    my-task/solution/        not read here

There is no container: of a Dockerfile FROM is taken as it is, WORKDIR, COPY and ADD of local files,
RUN of commands that need no network, and what changes nothing (LABEL, CMD, a few ENV) count. Any
other line, several services, GPUs, images of one's own, and steps are refused, with the line: a
task that is not set up as its author meant would only teach nonsense.
Format: harborframework.com/docs/tasks
Left out: limits of CPU and storage (the sandbox has its own), `[verifier] env`, and MCP servers.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from nanorl.sandbox.grading import test_names
from nanorl.sandbox.protocol import FOLDERS
from nanorl.task import Task, split_of

_DEFAULT_FOLDER = "/app"
_WITHOUT_EFFECT = frozenset({"FROM", "LABEL", "MAINTAINER", "CMD", "ENTRYPOINT", "EXPOSE", "SHELL"})
_HARMLESS_VARIABLES = ("PYTHON", "DEBIAN_FRONTEND", "PIP_", "LANG", "LC_", "TZ")
_NEED_A_NETWORK = frozenset(
    {"apt", "apt-get", "apk", "yum", "dnf", "pip", "pip3", "uv", "uvx", "conda", "npm", "yarn"}
    | {"cargo", "go", "curl", "wget", "git", "useradd", "adduser"}
)


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """The state in which a task's episode begins."""

    folder: str = _DEFAULT_FOLDER
    files: dict[str, bytes] = field(default_factory=dict)  # path in the folder -> contents
    commands: tuple[str, ...] = ()  # run there before the episode


def read_harbor_tasks(folder: Path | str) -> list[Task]:
    """The tasks of all folders in `folder` that hold a task.toml, in the order of their names.

    Everything about them is read, and refused where it must be, now: ValueError names the file.
    """
    root = Path(folder)
    found = sorted(path.parent for path in root.glob("*/task.toml"))
    if (root / "task.toml").is_file():
        found = [root]
    if not found:
        raise ValueError(f"{str(folder)!r} holds no folder with a task.toml; give the one above")
    return [_read_task(path.resolve()) for path in found]


def read_workplace(task_folder: Path) -> Workplace:
    """The workplace that `environment/` describes. ValueError for one that cannot be had here."""
    environment = task_folder / "environment"
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (environment / name).exists():
            raise ValueError(f"{environment / name}: several services cannot be had in the sandbox")
    if not environment.is_dir():
        return Workplace()
    dockerfile = environment / "Dockerfile"
    if not dockerfile.is_file():
        return Workplace(files=_files_under(environment))
    return _Dockerfile(dockerfile).workplace()


def read_tests(task_folder: Path) -> dict[str, bytes]:
    """The files of `tests/`."""
    return _files_under(task_folder / "tests")


def _read_task(folder: Path) -> Task:
    config = _read_config(folder / "task.toml")
    instruction = folder / "instruction.md"
    if not instruction.is_file():
        raise ValueError(f"{instruction} is missing: it is what the policy reads")
    workplace, tests = read_workplace(folder), read_tests(folder)
    if "test.sh" not in tests and not any(_is_python_test(name) for name in tests):
        raise ValueError(f"{folder / 'tests'} holds neither test.sh nor a test_*.py")
    if "test.sh" not in tests:
        for name in filter(_is_python_test, tests):
            test_names(str(folder / "tests" / name), tests[name].decode())
    prompt = instruction.read_text(encoding="utf-8").strip()
    digest = hashlib.sha256(prompt.encode())
    for name, content in sorted(
        {**workplace.files, **{f"t/{n}": c for n, c in tests.items()}}.items()
    ):
        digest.update(f"{len(name)}:{name}{len(content)}:".encode() + content)
    identity = f"{folder.name}-{digest.hexdigest()[:12]}"
    verifier = config.get("verifier", {})
    data = {
        "path": str(folder),
        "verifier_timeout_s": float(verifier.get("timeout_sec", 120.0)),
        "agent_timeout_s": float(config.get("agent", {}).get("timeout_sec", 600.0)),
    }
    return Task(
        prompt, kind=f"harbor/{folder.name}", data=data, task_id=identity, split=split_of(identity)
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    environment = config.get("environment", {})
    refused = {
        "several steps": bool(config.get("steps")) or (path.parent / "steps").is_dir(),
        "a GPU": bool(environment.get("gpus")),
        "another system than Linux": environment.get("os", "linux") != "linux",
        "an image of its own": bool(environment.get("docker_image")),
        "MCP servers": bool(environment.get("mcp_servers")),
        "variables of the verifier": bool(config.get("verifier", {}).get("env")),
    }
    for what, is_wanted in refused.items():
        if is_wanted:
            raise ValueError(f"{path}: the task needs {what}, which cannot be had in the sandbox")
    return config


class _Dockerfile:
    """One Dockerfile, line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.context = _files_under(path.parent)
        self.folder = ""
        self.copied: dict[str, bytes] = {}  # absolute path -> contents
        self.commands: list[str] = []

    def workplace(self) -> Workplace:
        for number, line in self._lines():
            word, _, rest = line.partition(" ")
            self._instruction(word.upper(), rest.strip(), f"{self.path}:{number}")
        folder = self.folder or _DEFAULT_FOLDER
        if folder not in FOLDERS:
            self._refuse(f"{self.path}", f"WORKDIR {folder}; it can be {', '.join(FOLDERS)}")
        files = {}
        for path, content in self.copied.items():
            if not PurePosixPath(path).is_relative_to(folder):
                self._refuse(f"{self.path}", f"a file at {path}, outside of the WORKDIR {folder}")
            files[str(PurePosixPath(path).relative_to(folder))] = content
        return Workplace(folder=folder, files=files, commands=tuple(self.commands))

    def _lines(self) -> list[tuple[int, str]]:
        """Instructions with the numbers of their first lines, continued ones joined."""
        lines: list[tuple[int, str]] = []
        is_open = False
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            if is_open:
                lines[-1] = (lines[-1][0], f"{lines[-1][1]} {text.removesuffix(chr(92)).strip()}")
            else:
                lines.append((number, text.removesuffix("\\").strip()))
            is_open = text.endswith("\\")
        return lines

    def _instruction(self, word: str, rest: str, where: str) -> None:
        if word == "WORKDIR":
            self.folder = str(PurePosixPath(self.folder or "/", rest))
        elif word in ("COPY", "ADD"):
            self._copy(rest, where)
        elif word == "RUN":
            words = set(shlex.split(rest.replace("&&", " ").replace(";", " "), comments=True))
            if needed := sorted(words & _NEED_A_NETWORK):
                self._refuse(where, f"`{needed[0]}`, which needs a network or another system")
            self.commands.append(rest)
        elif word == "ENV":
            if not rest.startswith(_HARMLESS_VARIABLES):
                self._refuse(where, f"the variable {rest.partition('=')[0]}")
        elif word not in _WITHOUT_EFFECT and not (word == "USER" and rest == "root"):
            self._refuse(where, f"{word}")

    def _copy(self, rest: str, where: str) -> None:
        if rest.startswith("["):
            words = list(json.loads(rest))
        else:
            words = shlex.split(rest)
        options = [word for word in words if word.startswith("--")]
        if any(not option.startswith(("--chown", "--chmod")) for option in options):
            self._refuse(where, f"{options[0]}")
        *sources, target = [word for word in words if not word.startswith("--")]
        base = PurePosixPath(self.folder or "/", target)
        is_folder = target.endswith("/") or target in (".", "./") or len(sources) > 1
        for source in sources:
            self._copy_one(source, base, is_folder, where)

    def _copy_one(self, source: str, base: PurePosixPath, is_folder: bool, where: str) -> None:
        """A folder's contents, or files by a pattern, as `docker build` copies them."""
        name = str(PurePosixPath(source.removeprefix("/")))
        prefix = "" if name == "." else f"{name}/"
        inside = {path: data for path, data in self.context.items() if path.startswith(prefix)}
        for path, data in inside.items():
            self.copied[str(base / path.removeprefix(prefix))] = data
        matching = [path for path in self.context if fnmatch.fnmatchcase(path, name)]
        for path in matching:
            last = PurePosixPath(path).name
            is_into = is_folder or len(matching) > 1 or str(base) == (self.folder or "/")
            self.copied[str(base / last if is_into else base)] = self.context[path]
        if not inside and not matching:
            raise ValueError(f"{where}: {source} is not in {self.path.parent}")

    def _refuse(self, where: str, what: str) -> None:
        raise ValueError(
            f"{where}: the task needs {what}, which cannot be had in the sandbox; put what it "
            "needs into environment/, or leave the task out"
        )


def _files_under(folder: Path) -> dict[str, bytes]:
    paths: Sequence[Path] = sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in paths
        if path != folder / "Dockerfile" and "__pycache__" not in path.parts
    }


def _is_python_test(name: str) -> bool:
    return name.startswith("test_") and name.endswith(".py")
