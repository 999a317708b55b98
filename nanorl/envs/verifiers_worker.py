"""Plays episodes of a `verifiers` environment (https://github.com/PrimeIntellect-ai/verifiers).

Run by the Python in which `verifiers` is installed, as `python -P verifiers_worker.py`; it imports
nothing of this project. Lines of JSON on standard input ask, lines on the old standard output
answer; what the environment prints goes to standard error.

    {"env": "my_env", "config": {...}, "folders": [...]}      first; {"ready": {}} or {"refused"}
    {"id": 1, "tasks": 100}                                   a line {"id": 1, "task": {...}} each
    {"id": 2, "play": {...}, "client": {...}, "key": "..", "model": ".."}
    {"id": 2, "cancel": true}

A request ends with {"id", "result"} or {"id", "error"}. The end of standard input ends the worker,
with all that it started, in an environment that hangs too: its parent may have been killed. Left
out: environments with several agents, and those of verifiers before 0.4, which are made in another
way.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

OLDEST = (0, 4)  # the version of verifiers
MAX_LINE_BYTES = 64 << 20
MARK = "NANORL_VERIFIERS_WORKER"
"""A variable whose value all that one worker started has in its environment."""
LETTING_GO_S = 10.0  # a worker that does not end by itself within this time hangs
ENDING_S = 10.0  # what was killed has ended by then, unless the kernel holds it
KEY = "NANORL_EPISODE_API_KEY_"
"""Begins the names of variables with the episodes' keys: verifiers reads keys from variables, and
keeps those named API_KEY from the programs that it starts."""

Json = dict[str, Any]


class RefusedError(ValueError):
    """The environment cannot be played as it is configured."""


def make_config(vf: Any, name: str, given: Mapping[str, Any]) -> Any:
    """The environment's configuration. RefusedError where it has not one agent, or where nobody
    says in which place that one may run what the model writes.

    Rollouts that failed are not played again here: the run does that, from their beginning. An
    agent whose place nobody names plays on this machine, if its program runs nothing that the model
    writes.
    """
    raw = copy.deepcopy(dict(given))
    if not isinstance(raw.setdefault("taskset", {}), dict):
        raise RefusedError(f"config taskset={raw['taskset']!r}: must be an object, as {{...}}")
    raw["taskset"].setdefault("id", name)
    config = vf.resolve_env_config(copy.deepcopy(raw))
    roles = [role for role, value in config if isinstance(value, vf.AgentConfig)]
    if len(roles) != 1:
        raise RefusedError(
            f"{name} has the agents {', '.join(roles) or 'none'}; one alone can be trained"
        )
    role = roles[0]
    is_placed = "runtime" in (raw.get(role) or {})
    if not is_placed and isinstance(getattr(config, role).runtime, vf.PrimeConfig):
        harness = vf.load_harness(config.agent_harnesses()[role])
        if harness.EXECUTES_CODE:
            raise RefusedError(
                f"{name}: its agent is the harness {harness.config.id!r}, which runs what the "
                "model writes; say where, by the argument "
                f'\'config={{"{role}": {{"runtime": {{"type": "docker"}}}}}}\', or choose one that '
                f'only talks: \'config={{"{role}": {{"harness": {{"id": "null"}}}}}}\''
            )
        raw[role] = {**(raw.get(role) or {}), "runtime": {"type": "subprocess"}}
        config = vf.resolve_env_config(raw)
    once = vf.RetryConfig()
    agent = getattr(config, role).model_copy(update={"retries": once})
    return config.model_copy(update={"retries": once, role: agent})


def _import_verifiers() -> Any:
    try:
        installed = metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        installed = ""
    if not installed or tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST:
        raise RefusedError(
            f"{sys.executable} has {f'verifiers {installed}' if installed else 'no verifiers'}; "
            "0.4 or newer wants an environment of its own: run bash scripts/install_verifiers.sh, "
            "or name the Python that has it: --env-args python=PATH"
        )
    return importlib.import_module("verifiers.v1")


class PlayedEnvironment:
    """One environment, and its episodes under way."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        """RefusedError, or whatever the environment raises, where it cannot be loaded."""
        for folder in reversed(spec["folders"]):
            sys.path.insert(0, folder)
        # Harnesses that are programs are started by this Python's own uv.
        os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        # Servers of tools are started as modules of the environment, by this Python.
        path = [*spec["folders"], os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        self._vf = _import_verifiers()
        self._config = make_config(self._vf, spec["env"], spec["config"])
        self._env = self._vf.load_environment(self._config)

    def serving(self) -> Any:
        """The context in which episodes can be played."""
        return self._env.serving()

    def tasks(self, most: int) -> Any:
        """The rows of up to `most` tasks, with the texts that open them."""
        for task in self._env.taskset.take(most):
            data = task.data
            yield {
                "row": data.model_dump(mode="json"),
                "system": data.system_prompt or "",
                "prompt": data.prompt_text or data.description or data.name or f"task {data.idx}",
            }

    async def play(self, request: Json) -> Json:
        """The rewards and metrics of one episode."""
        key = f"{KEY}{request['id']}"
        os.environ[key] = request["key"]
        try:
            client = self._client({**request["client"], "api_key_var": key})
            context = self._context(client, request["model"])
            (slot,) = self._env.slots(self._task(request["play"]))
            episode = await self._env.run_slot(slot, context)
        finally:
            del os.environ[key]
        return _outcome(episode)

    def _client(self, given: Json) -> Any:
        kinds = {"eval": self._vf.EvalClientConfig, "train": self._vf.TrainClientConfig}
        return kinds[given["type"]].model_validate(given)

    def _context(self, client: Any, model: str) -> Any:
        make = importlib.import_module("verifiers.v1.clients").ModelContext
        return make(model=model, client=client, sampling=self._vf.SamplingConfig())

    def _task(self, row: Json) -> Any:
        """As verifiers' own server makes a task of what is sent to it."""
        kind = type(self._env.taskset).task_type()
        return kind(kind.data_type().model_validate(row), self._config.taskset.task)


def _outcome(episode: Any) -> Json:
    if not episode.ok or len(episode.traces) != 1:
        errors = [*episode.errors, *(error for one in episode.traces for error in one.errors)]
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else "no trace of it is left"
        return {"failed": last[-2000:]}
    trace = episode.traces[0]
    unknown = [name for name, reward in trace.rewards.items() if reward is None]
    if unknown or not trace.rewards:
        what = ", ".join(unknown) or "any reward"
        return {"failed": f"its rubric did not say {what}"}
    return {
        "reward": trace.reward,
        "rewards": {name: reward.value for name, reward in trace.rewards.items()},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
    }


class Worker:
    """Reads requests and answers them."""

    def __init__(self, answers: Any) -> None:
        """`answers` is the file that answers are written to."""
        self._answers = answers
        self._playing: dict[int, asyncio.Task[None]] = {}

    def say(self, message: Json) -> None:
        self._answers.write(json.dumps(message).encode() + b"\n")
        self._answers.flush()

    async def serve(self, requests: asyncio.StreamReader) -> None:
        """Until there are no more requests."""
        try:
            player = PlayedEnvironment(json.loads(await requests.readline()))
        except RefusedError as error:
            self.say({"refused": str(error)})
            return
        except ModuleNotFoundError as error:
            how = "bash scripts/install_verifiers.sh NAME-OR-FOLDER"
            self.say({"refused": f"{str(error).rstrip('.')}; install what is missing: {how}"})
            return
        except Exception as error:  # whatever an environment raises while it is loaded
            self.say({"refused": f"{type(error).__name__}: {error}"})
            return
        async with player.serving():
            self.say({"ready": {}})
            try:
                while line := await requests.readline():
                    self._take(player, json.loads(line))
            finally:
                for one in self._playing.values():
                    one.cancel()
                await asyncio.gather(*self._playing.values(), return_exceptions=True)

    def _take(self, player: PlayedEnvironment, request: Json) -> None:
        number = request["id"]
        if "tasks" in request:
            self._list(player, number, request["tasks"])
        elif "play" in request:
            playing = asyncio.ensure_future(self._play(player, request))
            self._playing[number] = playing
            playing.add_done_callback(lambda _: self._playing.pop(number))
        elif "cancel" in request and number in self._playing:
            self._playing[number].cancel()

    def _list(self, player: PlayedEnvironment, number: int, most: int) -> None:
        try:
            for task in player.tasks(most):
                self.say({"id": number, "task": task})
        except Exception as error:  # whatever a taskset raises
            self.say({"id": number, "error": f"{type(error).__name__}: {error}"})
        else:
            self.say({"id": number, "result": {}})

    async def _play(self, player: PlayedEnvironment, request: Json) -> None:
        number = request["id"]
        try:
            self.say({"id": number, "result": await player.play(request)})
        except asyncio.CancelledError:
            self.say({"id": number, "error": "cancelled"})
            raise
        except Exception as error:  # whatever an environment raises outside of its own boundaries
            self.say({"id": number, "error": f"{type(error).__name__}: {error}"})


def kill_marked(mark: str, *, spared: int | None = None) -> None:
    """Kill every process but `spared` that was started with this mark in its environment, programs
    that made a session of their own included, and return when they have ended."""
    wanted = f"{MARK}={mark}".encode()
    until = time.monotonic() + ENDING_S
    while time.monotonic() < until:
        environments = {pid: _environment(pid) for pid in _pids() if pid != spared}
        left = [pid for pid, found in environments.items() if wanted in found]
        empty = [pid for pid, found in environments.items() if found == [b""]]
        if not left and not any(map(_is_starting, empty)):
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)  # the kernel ends them in its own time


def _pids() -> list[int]:
    """The ids of all processes; none where there is no /proc."""
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def _environment(pid: int) -> list[bytes]:
    """Nothing of a process that has ended, or is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _is_starting(pid: int) -> bool:
    """True for a process whose environment was empty because it had none yet: the kernel lays it
    out at the end of exec, and who started the program may have been told of it before."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    num_bytes, start, end = (int(fields[place - 3]) for place in (23, 50, 51))  # see proc(5)
    return num_bytes > 0 and (start == 0 or end > start)


def _end_after(requests: int) -> None:
    """End this process with all that it started, if it outlives its requests by LETTING_GO_S."""
    poll = select.poll()
    poll.register(requests, 0)  # only that the other end was closed, read or unread
    poll.poll()
    time.sleep(LETTING_GO_S)
    kill_marked(os.environ[MARK], spared=os.getpid())
    os._exit(1)


def _take_pipes() -> tuple[Any, Any]:
    """The files of requests and answers, which an environment and its programs cannot reach: they
    find an empty standard input, and what they print goes to standard error."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return requests, answers


async def main() -> None:
    """Serve standard input until it ends."""
    source, answers = _take_pipes()
    threading.Thread(target=_end_after, args=(source.fileno(),), daemon=True).start()
    requests = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), source)
    serving = asyncio.ensure_future(Worker(answers).serve(requests))
    loop.add_signal_handler(signal.SIGTERM, serving.cancel)
    with suppress(asyncio.CancelledError, BrokenPipeError):
        await serving


if __name__ == "__main__":
    asyncio.run(main())
