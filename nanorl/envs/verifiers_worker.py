"""Plays episodes of a `verifiers` environment (https://github.com/PrimeIntellect-ai/verifiers).

Run by the Python in which `verifiers` is installed, as `python -P verifiers_worker.py`; it imports
nothing of this project. Lines of JSON on standard input ask, lines on the old standard output
answer; what the environment prints goes to standard error.

    {"env": "my_env", "config": {...}, "folders": [...]}      first; {"ready": {...}} or {"refused"}
    {"id": 1, "tasks": 100}                                   a line {"id": 1, "task": {...}} each
    {"id": 2, "play": {...}, "client": {...}, "key": "..", "model": ".."}
    {"id": 2, "cancel": true}

A request ends with {"id", "result"} or {"id", "error"}. The end of standard input ends the worker,
with all that it started. Left out: environments with several agents, and those of verifiers before
0.4, whose environments are made in another way.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

MAX_LINE_BYTES = 64 << 20
KEY = "NANORL_EPISODE_API_KEY_"
"""Begins the names of variables with the episodes' keys: verifiers reads keys from variables, and
keeps those named API_KEY from the programs that it starts."""

Json = dict[str, Any]


class RefusedError(ValueError):
    """The environment cannot be played as it is configured."""


def make_config(vf: Any, name: str, given: Mapping[str, Any]) -> tuple[Any, str]:
    """The environment's configuration, and the name of its one agent.

    Rollouts that failed are not played again here: the run does that, from their beginning. An
    agent whose place nobody names plays on this machine, if its program runs nothing that the model
    writes.
    """
    raw = copy.deepcopy(dict(given))
    raw.setdefault("taskset", {}).setdefault("id", name)
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
                f'model writes; say where, as config={{"{role}": {{"runtime": {{"type": '
                f'"docker"}}}}}}, or choose one that only talks: {{"{role}": {{"harness": '
                f'{{"id": "null"}}}}}}'
            )
        raw[role] = {**(raw.get(role) or {}), "runtime": {"type": "subprocess"}}
        config = vf.resolve_env_config(raw)
    once = vf.RetryConfig()
    agent = getattr(config, role).model_copy(update={"retries": once})
    return config.model_copy(update={"retries": once, role: agent}), role


def _import_verifiers() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("verifiers"):
            raise
        raise RefusedError(
            f"{sys.executable} has no verifiers 0.4 or newer; it wants an environment of its own: "
            "run scripts/install_verifiers.sh, or name the Python that has it: "
            "--env-args python=PATH"
        ) from None


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
        self._config, self.role = make_config(self._vf, spec["env"], spec["config"])
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
        "stop": trace.stop_condition,
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
        except Exception as error:  # whatever an environment raises while it is loaded
            self.say({"refused": f"{type(error).__name__}: {error}"})
            return
        async with player.serving():
            self.say({"ready": {"role": player.role}})
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


async def main() -> None:
    """Serve standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    serving = asyncio.ensure_future(Worker(answers).serve(requests))
    loop.add_signal_handler(signal.SIGTERM, serving.cancel)
    with suppress(asyncio.CancelledError, BrokenPipeError):
        await serving


if __name__ == "__main__":
    asyncio.run(main())
