"""Environments of `verifiers` (https://github.com/PrimeIntellect-ai/verifiers), played by its code.

    nanorl train --env verifiers --env-args env=my_env
    nanorl train --env verifiers --env-args env=environments/my_env client=train \\
        'config={"agent": {"harness": {"id": "null"}}, "taskset": {"num_tasks": 64}}'

`env` is the name of an installed environment or its folder, as `vf-init` lays it out; `config` is
what its configuration takes. The rows of its taskset are the tasks, its rubric gives the reward.
verifiers wants other versions of packages than we do, so it runs in a Python of its own
(scripts/install_verifiers.sh, or python=PATH), and calls the policy by HTTP through its own client:
`eval` sends messages, in the API that the environment's program speaks; `train` sends token ids,
which its renderer made (`renderer` configures one).
Left out: environments with several agents; versions before 0.4. See verifiers_worker.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.envs.env import Env
from nanorl.envs.verifiers_process import VerifiersProcess
from nanorl.task import Task, split_of

CLIENTS = ("eval", "train")
OWN_PYTHON = Path(__file__).resolve().parents[2] / ".venv-verifiers" / "bin" / "python"
"""Where scripts/install_verifiers.sh puts it."""
NAMES_OF_A_ROW = ("idx", "id", "name")
MODEL = "policy"
"""The name by which its clients call the policy. /v1/models lists another one, so that they leave
it to the endpoint to say that a prompt is too long: there it is noted as a limit of the episode."""


class VerifiersPlayer:
    """Holds what all episodes of a process share: verifiers' own process, and the files of a
    tokenizer for renderers."""

    def __init__(self, process: VerifiersProcess, client: Mapping[str, Any]) -> None:
        self.process = process
        self._client = dict(client)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def client(self, base_url: str, tokenizer: ChatTokenizer) -> dict[str, Any]:
        """The configuration of verifiers' client."""
        given = {**self._client, "base_url": base_url}
        if given["type"] == "train":
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="nanorl-verifiers-")
                tokenizer.save(self._folder.name)
            given.setdefault("renderer_model_name", self._folder.name)
        return given

    def close(self) -> None:
        self.process.close()
        if self._folder is not None:
            self._folder.cleanup()


class Verifiers(Env):
    """One episode, which the agent loop "verifiers" has played by verifiers."""

    loop = "verifiers"

    def __init__(
        self,
        env: str = "",
        config: Mapping[str, Any] | None = None,
        python: str = "",
        client: str = "eval",
        renderer: Mapping[str, Any] | None = None,
        max_tasks: int = 10_000,
        timeout_s: float = 600.0,
    ) -> None:
        """`max_tasks` is the number of rows that are read at most, of tasksets without an end too;
        `timeout_s` the wall-clock limit of an episode. ValueError names what cannot be."""
        if not env:
            raise ValueError("--env verifiers: name an environment, as --env-args env=my_env")
        for name, text in (("env", env), ("python", python)):
            if not isinstance(text, str):
                raise ValueError(f"--env-args {name}={text}: must be a text")
        if client not in CLIENTS:
            raise ValueError(f"--env-args client={client}: choose from {', '.join(CLIENTS)}")
        if renderer is not None and client != "train":
            raise ValueError("--env-args renderer=...: is of client=train")
        for name, value in (("config", config), ("renderer", renderer)):
            if not isinstance(value, Mapping | None):
                raise ValueError(f"--env-args {name}={value}: must be a JSON object")
        if type(max_tasks) is not int or max_tasks < 1:
            raise ValueError(f"--env-args max_tasks={max_tasks}: must be a positive whole number")
        if type(timeout_s) not in (int, float) or not timeout_s > 0:
            raise ValueError(f"--env-args timeout_s={timeout_s}: must be positive seconds")
        self.name, self._folders = find_environment(env)
        self._python = python or str(OWN_PYTHON if OWN_PYTHON.exists() else sys.executable)
        self._config = dict(config or {})
        self._client = {"type": client} | ({"renderer": dict(renderer)} if renderer else {})
        self._max_tasks = max_tasks
        self.timeout_s = timeout_s

    def setup(self) -> VerifiersPlayer:
        process = VerifiersProcess(
            self._python, env=self.name, config=self._config, folders=self._folders
        )
        return VerifiersPlayer(process, self._client)

    def tasks(self) -> list[Task]:  # type: ignore[override]
        """Its rows. ValueError where it cannot be loaded."""
        rows = self.shared.process.tasks(self._max_tasks)
        if not rows:
            raise ValueError(
                f"--env verifiers env={self.name}: its taskset has no row; say what it is to load: "
                """'config={"taskset": {...}}'"""
            )
        return [_task(given) for given in rows]


def find_environment(env: str) -> tuple[str, list[str]]:
    """The name by which verifiers finds an environment, and the folders to look for it in, none for
    an installed one. ValueError where a path leads to none."""
    path = Path(env).expanduser()
    if "/" not in env and not path.exists():
        return env, []
    path = path.resolve()
    name = path.stem.replace("-", "_")
    if path.suffix == ".py" and path.is_file():
        return name, [str(path.parent)]
    if (path / name / "__init__.py").is_file():  # a project, as vf-init makes one
        return name, [str(path)]
    if (path / "__init__.py").is_file():
        return name, [str(path.parent)]
    raise ValueError(
        f"--env-args env={env}: no environment is there; a folder holds {name}/__init__.py, as "
        f"vf-init makes it, and one that is installed is named without a path: env={path.name}"
    )


def _task(given: Mapping[str, Any]) -> Task:
    user = {"role": "user", "content": given["prompt"]}
    system = [{"role": "system", "content": given["system"]}] if given["system"] else []
    # Not by its place and names: a row that occurs twice is never trained on and held out.
    told = {name: value for name, value in given["row"].items() if name not in NAMES_OF_A_ROW}
    split = split_of(json.dumps(told, sort_keys=True))
    return Task([*system, user], kind="verifiers", data={"row": given["row"]}, split=split)
