"""The loop `command`: a program plays the rollout, through nothing but an API.

    nanorl train --agent command --agent.command "python mine.py" --tasks questions.jsonl

It is started anew for each rollout, in an empty working folder, with

    OPENAI_BASE_URL, OPENAI_API_KEY         the policy, for OpenAI's clients and those like them
    ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY   the same for Anthropic's
    NANORL_TASK                             `{"task_id", "prompt", "messages", "files"}` as JSON
    task.json                               the same as a file, beside the task's own files

and its answer is what it leaves in answer.txt, or else the last line that it prints; a reward it
cannot report, since the policy steers it (nanorl/agents/endpoint/report.py). The answer of
the task is never among what it is given; `data`, where some environments keep their tests, only
with `--agent-args with_data=true`. What the policy said in the program's calls is trained on.

A program that fails, or is ended at its limit, is scored as it stands, with the metric
`agent_failed`: a policy that says nonsense may be the reason. One that had no answer to any call
says nothing of the policy; its rollout FAILED and is played again. NANORL_TASK is left out where it
is longer than a variable may be.

    --agent-args in_sandbox=true            no network but the policy (and the recording proxy of
                                            --http.mode, where there is one), no file but its own
    --agent-args timeout_s=600 memory_mb=4096 reads='["lib"]'

A sandboxed program sees this Python environment, the files that its command names and those of
`reads`, all of them read-only. Left out: a warm process that plays several rollouts; a coroutine
does that (loops.py).
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from nanorl.agents.agent_program import ProgramResult, ProgramStart, run_program
from nanorl.agents.api_agent import agent_task, finish, note_failure
from nanorl.agents.episode import Episode
from nanorl.bounds import check_number
from nanorl.sandbox.agent_box import AgentBox, python_folders
from nanorl.sandbox.base import SandboxSpec
from nanorl.sandbox.host_machine import find_bwrap
from nanorl.types import InfrastructureError

if TYPE_CHECKING:
    from nanorl.agents.endpoint.endpoint_server import ApiSession
    from nanorl.envs.http_record.record_access import HttpAccess

LOG = logging.getLogger("nanorl.agents")
# An environment variable may be 128 KiB long (MAX_ARG_STRLEN of execve(2)), its name included.
MAX_VARIABLE_BYTES = 120_000
TASK_FILE = "task.json"
_SAID_CHARS = 2000
# Frameworks send traces and fetch price lists on their own, the one with a key that is not theirs.
QUIET: Mapping[str, str] = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, kw_only=True)
class Command:
    """The loop with its options."""

    is_behind_api: ClassVar[bool] = True
    command: str = ""
    """As in a shell, without one: quotes count, pipes do not. --agent.command for short."""
    timeout_s: float = 300.0
    """Wall-clock limit of one life of the program."""
    in_sandbox: bool = False
    memory_mb: float = 2048
    """Of all its processes together, in the sandbox."""
    reads: Sequence[str] = ()
    """Files and folders that a sandboxed program sees beside those that its command names."""
    with_data: bool = False
    """Give it the task's `data` too."""

    def __post_init__(self) -> None:
        check_number("--agent-args timeout_s=", self.timeout_s, 0, is_open=True)
        check_number("--agent-args memory_mb=", self.memory_mb, 64)
        if isinstance(self.reads, str) or not all(isinstance(one, str) for one in self.reads):
            raise ValueError(
                f"--agent-args reads={self.reads}: write a list of paths, reads='[\"lib\"]'"
            )
        for one in self.reads:
            if not Path(one).exists():
                raise ValueError(f"--agent-args reads: there is no {one!r}")
        self.argv()
        if self.in_sandbox:
            find_bwrap(SandboxSpec())  # SandboxUnavailable before any work is done

    def argv(self) -> list[str]:
        """The words of the command, files and the executable by whole paths: the program runs in a
        folder of its own. ValueError where there is nothing to run."""
        flag = f"--agent.command {self.command!r}"
        try:
            words = shlex.split(str(self.command))
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from None
        if not words:
            raise ValueError(f'{flag}: say what to run: --agent.command "python mine.py"')
        found = shutil.which(words[0], path=_search_path())
        if found is None:
            raise ValueError(f"{flag}: there is no executable {words[0]!r} here or on the PATH")
        for word in words[1:]:
            if word.endswith(".py") and not Path(word).exists():
                raise ValueError(f"{flag}: there is no file {word!r} in {os.getcwd()}")
        files = [os.path.abspath(word) if Path(word).exists() else word for word in words[1:]]
        return [os.path.abspath(found), *files]

    def check_hidden(self, file: Path) -> None:
        """ValueError where a sandboxed program would see `file`; one that is not sandboxed can read
        whatever its user can."""
        if not self.in_sandbox:
            LOG.warning(
                "an agent program outside of a sandbox can read %s; --agent-args in_sandbox=true",
                file,
            )
            return
        for one in (*self._readable(self.argv()), *python_folders(), Path("/usr")):
            if file.resolve().is_relative_to(one.resolve()):
                raise ValueError(
                    f"--agent.scorer-key-file {file}: the agent program sees all of {one}; move "
                    "the key elsewhere"
                )

    def _readable(self, argv: Sequence[str]) -> list[Path]:
        """The paths that a sandboxed program sees beside its Python."""
        named = [Path(word) for word in argv[1:] if word.startswith("/")]
        return [*named, *(Path(one).absolute() for one in self.reads)]

    async def __call__(self, episode: Episode) -> None:
        async with episode.record() as session:
            task = agent_task(episode, session)
            told = {
                "task_id": task.task_id,
                "prompt": task.prompt,
                "messages": task.messages,
                "files": task.files,
            }
            if self.with_data:
                told["data"] = episode.task.data
            result = await self.run(told, session, episode.http)
            said = (result.stderr.strip() or result.stdout.strip() or "nothing")[-_SAID_CHARS:]
            outcome = f"the agent program {self.command!r} {result.how} and said: {said}"
            if session.recording.num_answers == 0:
                raise InfrastructureError(f"{outcome}\nNo call of it had been answered")
            if result.is_failed:
                note_failure(episode, session, outcome)
                episode.metrics[f"agent_{result.reason or 'exited'}"] += 1.0
            await finish(episode, session, answer_of(result))

    async def run(
        self, told: dict[str, Any], session: ApiSession, http: HttpAccess | None
    ) -> ProgramResult:
        """One life of the program, which is `told` of its task. InfrastructureError where it
        cannot even be started."""
        text = json.dumps(told, ensure_ascii=False)
        argv, split = self.argv(), urlsplit(session.url)
        box, url = None, session.url
        if self.in_sandbox:
            certificates = [http.ca_file] if http else []
            readable = [one for one in (*self._readable(argv), *certificates) if one.exists()]
            box = AgentBox(readable=readable, memory_bytes=int(self.memory_mb) << 20)
            url = f"http://127.0.0.1:{split.port}"  # what stands for it inside
        environment = {
            **(boxed_environment() if self.in_sandbox else own_environment()),
            **QUIET,
            **(http.environment(no_proxy=split.hostname or "127.0.0.1") if http else {}),
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": session.key,
        }
        if len(text.encode()) <= MAX_VARIABLE_BYTES:
            environment["NANORL_TASK"] = text
        start = ProgramStart(
            argv=argv,
            environment=environment,
            files={**checked_files(told["files"]), TASK_FILE: text},
            endpoints=(
                (split.hostname or "127.0.0.1", split.port or 80),
                *([("127.0.0.1", http.port)] if http else []),
            ),
            box=box,
        )
        return await run_program(start, timeout_s=self.timeout_s)


def answer_of(result: ProgramResult) -> str | None:
    """The answer file, or else the last line that was printed, which a program that failed never
    meant as one. None without either."""
    if result.answer is not None:
        return result.answer.strip()
    if result.is_failed:
        return None
    lines = result.stdout.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def own_environment() -> dict[str, str]:
    """This process's environment. Its Python comes first, its keys stay here, and a proxy is not
    asked for this machine."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("ANTHROPIC_AUTH_TOKEN",)
    }
    around = [one for one in (kept.get("NO_PROXY") or kept.get("no_proxy"), "127.0.0.1") if one]
    return {
        **kept,
        "PATH": _search_path(),
        "NO_PROXY": ",".join(around),
        "no_proxy": ",".join(around),
    }


def boxed_environment() -> dict[str, str]:
    """A sandboxed program's: nothing of this process's but where its Python is."""
    return {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"]),
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def checked_files(files: Mapping[str, str]) -> dict[str, str]:
    """The files of a task. ValueError for a name that leads out of the working folder."""
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ValueError(f"a task's file {name!r} lies outside of the working folder")
    return dict(files)


def _search_path() -> str:
    """The PATH with this Python's own folder first: `python` is the one that has the packages."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
