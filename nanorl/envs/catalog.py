"""Finds the environment that a user names or gives: one of ours, one that a package offers
(installed.py), a file, `module:Class`, a class.

kind = load_kind("maze.py", {})
kind = as_kind(Guess)
kind = load_kind("http://127.0.0.1:8900", {})   # an environment server: nanorl serve-env
kind = load_kind("gymnasium:FrozenLake-v1", {"render_mode": "ansi"})
kind = load_kind("openenv:http://127.0.0.1:8000", {})
kind = load_kind("verifiers", {"env": "my_env"})
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

from nanorl.envs.env import Env
from nanorl.envs.env_class import EnvClassKind
from nanorl.envs.env_kind import EnvKind
from nanorl.envs.installed import with_installed
from nanorl.envs.tool_class import ToolClassKind, is_tool_class
from nanorl.plugins import is_path, load_object

GYMNASIUM, OPENENV = "gymnasium:", "openenv:"
"""What `--env` begins with for environments of these two kinds."""
PRESETS_OWN = "code"
"""The name of the environment that a preset trains in where nobody names another one."""

ENVIRONMENTS: Mapping[str, str] = MappingProxyType(
    {
        PRESETS_OWN: "nanorl.envs.code:CodeEnv",
        "answer": "nanorl.envs.shipped.answer:Answer",
        "album": "nanorl.envs.shipped.album:Album",
        "alphabet_sort": "nanorl.envs.shipped.alphabet_sort:AlphabetSort",
        "guess": "nanorl.envs.shipped.guess:Guess",
        "harbor": "nanorl.envs.harbor:Harbor",
        "humaneval": "nanorl.envs.shipped.humaneval:HumanEval",
        "look_back": "nanorl.envs.shipped.look_back:LookBack",
        "math": "nanorl.envs.shipped.math:MathProblems",
        "panel": "nanorl.envs.shipped.panel:Panel",
        "recall": "nanorl.envs.shipped.recall:Recall",
        "reasoning_gym": "nanorl.envs.shipped.reasoning_gym:ReasoningGym",
        "repair": "nanorl.envs.repair:Repair",
        "reverse_text": "nanorl.envs.shipped.reverse_text:ReverseText",
        "search": "nanorl.envs.shipped.search:SearchCorpus",
        "verifiers": "nanorl.envs.verifiers:Verifiers",
        "wordle": "nanorl.envs.shipped.wordle:Wordle",
    }
)
"""The environments that come with the project, by the names that `--env` takes."""


def is_address(spec: str) -> bool:
    """Say whether `--env` names a server, which plays its episodes itself."""
    return spec.startswith(("http://", "https://", OPENENV))


def load_kind(spec: str, arguments: Mapping[str, Any]) -> EnvKind:
    """The environment that `--env` names."""
    if spec.startswith(GYMNASIUM):
        from nanorl.envs.gym_text import GymText  # here: few runs need it

        return EnvClassKind(GymText, {"make": spec.removeprefix(GYMNASIUM), **arguments})
    if spec.startswith(OPENENV):
        from nanorl.envs.open_env import OpenEnvText  # here: few runs need it

        return EnvClassKind(OpenEnvText, {"address": spec.removeprefix(OPENENV), **arguments})
    if is_address(spec):
        from nanorl.envs.remote.client import RemoteKind  # here: few runs need it

        return RemoteKind(spec, arguments)
    known = ENVIRONMENTS if is_path(spec) else with_installed(ENVIRONMENTS, spec)
    found = load_object(spec, what="env", known=known, fits=is_environment)
    return as_kind(found, arguments)


def as_kind(given: Any, arguments: Mapping[str, Any] | None = None) -> EnvKind:
    """The kind of a class, or of an object that is one already."""
    if isinstance(given, type) and issubclass(given, Env):
        return EnvClassKind(given, arguments)
    if is_tool_class(given):
        return ToolClassKind(given, arguments)
    if is_kind(given):
        return given
    raise ValueError(f"{given!r} is no environment: derive a class from nanorl.Env")


def is_environment(value: Any) -> bool:
    is_short = isinstance(value, type) and issubclass(value, Env) and value is not Env
    return is_short or is_tool_class(value) or is_kind(value)


def is_kind(value: Any) -> bool:
    """Say whether `value` is an object that serves as an `EnvKind` as it is."""
    methods = (getattr(value, name, None) for name in ("open", "tasks", "demonstrator"))
    return not isinstance(value, type | ModuleType) and all(map(callable, methods))


def parse_arguments(pairs: Sequence[str], flag: str = "--env-args") -> dict[str, Any]:
    """`["family=chain_sum", "level=2"]` as arguments; values are JSON, or else texts. ValueError
    names the `flag` that they came from."""
    arguments = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{flag} {pair}: write name=value")
        try:
            arguments[name] = json.loads(text)
        except json.JSONDecodeError:
            arguments[name] = text
    return arguments
