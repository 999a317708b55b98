"""The console command `nanorl`: one verb for each thing that one does with an agent.

    nanorl train --preset tiny
    nanorl eval runs/tiny-seed0
    nanorl chat runs/tiny-seed0

`VERBS` lists them; only the one that is asked for is imported. A verb is a function whose
parameters are its options (`nanorl VERB --help`); `train` and `check` read their options
themselves, since some decide where the defaults of the others come from.
Exit status: 0 done, 1 the answer is no (`check`, `replay`), 2 with one `error: ...` on stderr that
says what was wrong and how to mend it, 130 stopped with Ctrl-C (nanoengine/command_line.py).
"""

from __future__ import annotations

import difflib
import functools
import importlib
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, NamedTuple

from nanoengine.command_line import plain_errors, program, run_command
from nanorl.version import version_line


class Verb(NamedTuple):
    """A verb of the command line: the place of its code, and a line about it."""

    place: str
    summary: str


VERBS: Mapping[str, Verb] = MappingProxyType(
    {
        "train": Verb("nanorl.commands.train:main", "train an agent; --env maze.py for your own"),
        "algorithms": Verb("nanorl.commands.algorithms:algorithms", "the recipes by their names"),
        "check": Verb("nanorl.commands.check:check", "what will go wrong with a run, before it"),
        "doctor": Verb("nanorl.commands.doctor:doctor", "what ails this machine, or a run"),
        "new": Verb("nanorl.commands.new:new", "write a small environment, to begin with"),
        "eval": Verb("nanorl.commands.evaluate:evaluate_model", "how good a model is, how surely"),
        "compare": Verb("nanorl.commands.compare:compare", "which is better, task by task"),
        "chat": Verb("nanorl.commands.chat:chat", "talk to the agent of a run, its tools running"),
        "view": Verb("nanorl.commands.view:view", "read the rollouts of a run"),
        "store": Verb("nanorl.commands.store:store", "what rollouts a run has kept; drop some"),
        "export": Verb("nanorl.commands.export:export", "rollouts as JSONL, parquet, ATIF, spans"),
        "replay": Verb("nanorl.commands.replay:replay", "play rollouts again: equal, or why not"),
        "trust": Verb("nanorl.commands.trust:trust", "allow what a run of somebody else names"),
        "push": Verb("nanorl.commands.push:push", "upload a run's model and its card to the hub"),
        "serve": Verb("nanorl.commands.serve:serve", "serve a run's model over HTTP, with a page"),
        "serve-training": Verb(
            "nanorl.commands.serve_training:serve_training", "train for clients of the Tinker API"
        ),
        "serve-env": Verb("nanorl.commands.serve_env:serve_env", "play an environment over HTTP"),
        "status": Verb("nanorl.commands.live:status", "what a run does and how its roles are"),
        "scale": Verb("nanorl.commands.live:scale", "change the replicas of a run that goes on"),
        "completion": Verb("nanorl.commands.completion:completion", "verbs and flags on Tab"),
    }
)


MENDABLE = (
    "nanoengine.engine:NonFiniteLoss",
    "nanoengine.state.tensor_file:CheckpointError",
    "nanorl.agents.collector:RolloutsFailed",
    "nanorl.distributed.roles.role:RoleLost",
    "nanorl.observability.store:StoreError",
    "nanorl.sandbox.base:SandboxUnavailable",
    "nanosched:SchedulerLost",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. `arguments` None: those of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: _run(words), mendable_errors)


def mendable_errors() -> tuple[type[RuntimeError], ...]:
    """The errors, besides ValueError and OSError, that a user can mend."""
    return tuple(resolve_name(place) for place in MENDABLE)  # here: they import torch


def usage() -> str:
    """The verbs, a line each."""
    lines = (f"  {name:<14} {verb.summary}" for name, verb in VERBS.items())
    return "\n".join(["usage: nanorl VERB [options]; nanorl VERB --help says more", "", *lines])


def find_verb(name: str) -> Callable[..., Any]:
    """The function that a verb calls."""
    module, _, function = VERBS[name].place.partition(":")
    return getattr(importlib.import_module(module), function)


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    if words[0] == "--version":
        print(version_line())
        return 0
    name, rest = words[0], words[1:]
    if name not in VERBS:
        raise ValueError(f"nanorl {name}: {_meant(name, words)}")
    if name in ("train", "check"):
        return find_verb(name)(rest)
    status = _parsed(name, rest)()
    return status if isinstance(status, int) else 0


def _meant(name: str, words: list[str]) -> str:
    """Guess the verb that was meant by one that does not exist, for the error."""
    if name.startswith("-"):
        return f"a verb comes first: {program()} train {shlex.join(words)}"
    near = difflib.get_close_matches(name.lower(), VERBS, n=1)
    if near:
        return f"no such verb; did you mean {near[0]}?"
    return f"no such verb; there are {', '.join(VERBS)}"


def _parsed(name: str, words: list[str]) -> Callable[[], Any]:
    """The verb's function with its options. What the verb prints later is nobody's to rewrite, so
    the options are read apart from the call."""
    import tyro  # here: help and a wrong verb need none

    call = find_verb(name)

    @functools.wraps(call)
    def with_options(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(call, *args, **kwargs)

    with plain_errors(words):
        return tyro.cli(with_options, args=words, prog=f"nanorl {name}")
