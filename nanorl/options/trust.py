"""What a run's folder may make this machine do: what its user has named here before.

    remember(config.to_json())        # a run begins with these options
    unknown(options)                  # what a folder names and nobody here has named
    require(options, folder)          # ValueError, before anything of it is imported

config.json names code, programs and addresses, and the folder may be somebody else's. What comes
with the project is known; else the user's own word counts, which is kept as digests in a file of
theirs, `named` in $XDG_STATE_HOME/nanorl: each thing with its arguments, and a file by its whole
path, so that another file of the name is another thing.
Left out: what the code itself reads or imports; whether a file has changed since.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nanorl.plugins import LOOPS, is_path

Options = Mapping[str, Any]

PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "env": ("env", "env_args"),
        "reward": ("reward", "reward_args"),
        "agent": ("agent.loop", "agent.loop_args", "agent.command"),
        "sandbox": ("tool.allow_unsafe_sandbox",),
        "loss": ("rl.algorithm.loss",),
        "advantage": ("rl.algorithm.advantage",),
        "curriculum": ("rl.curriculum", "rl.curriculum_args"),
        "servers": ("rollout.addresses", "rollout.api_key_file"),
        "cluster": ("cluster.address",),
        "alerts": ("monitor.alerts",),
        "store": ("store",),
    }
)
"""The options that make a machine do something, by what they are named and remembered as."""
PLAYED = ("env", "reward", "agent", "sandbox")
"""Those that count where episodes are played and nothing is trained."""
_ALIASES = {"agent.loop": "agent", "agent.loop_args": "agent-args"}


def unknown(options: Options, parts: Collection[str] = tuple(PARTS)) -> list[str]:
    """The parts that the options name and that neither came along nor were ever named here, as
    flags."""
    named = {part: values for part, values in _named(options) if part in parts}
    if not named:
        return []
    known = _known()
    return [
        _flags(part, values) for part, values in named.items() if _digest(part, values) not in known
    ]


def require(options: Options, folder: Path, parts: Collection[str] = tuple(PARTS)) -> None:
    """ValueError where something is `unknown`, with how to look at it and allow it."""
    if found := unknown(options, parts):
        raise ValueError(
            f"{folder}: names what nobody has named on this machine: {'; '.join(found)[:300]}. "
            f"A run of somebody else may do anything with it: look at it, then say nanorl trust "
            f"{shlex.quote(str(folder))}"
        )


def require_but(
    options: Options, folder: Path, parts: Collection[str], given: Collection[str]
) -> None:
    """The same, but for parts of which every option that says something was given just now, by the
    user."""
    theirs = [
        part
        for part in parts
        if not all(name in given for name in PARTS[part] if _value(options, name))
    ]
    require(options, folder, theirs)


def remember(options: Options) -> list[str]:
    """The user has named all of this; what of it was new, as flags. Where nothing can be kept, it
    is asked again."""
    new = unknown(options)
    if not new:
        return []
    digests = [_digest(*one) for one in _named(options)]
    try:
        file = _file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # At the end, in one piece: several runs may begin at once.
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as opened:
            opened.write("".join(f"{one}\n" for one in digests))
    except (OSError, RuntimeError):
        return []
    return new


def readable(options: dict[str, Any]) -> dict[str, Any]:
    """The options for looking at: without functions that reading them would import, if they are
    unknown. Nothing that is only read is computed with them."""
    parts = [name for name in ("loss", "advantage") if unknown(options, (name,))]
    if not parts:
        return options
    kept = copy.deepcopy(options)
    for name in parts:
        del kept["rl"]["algorithm"][name]
    return kept


def _named(options: Options) -> Iterator[tuple[str, list[Any]]]:
    """The parts that are not what comes along without arguments, each with its values."""
    for part, names in PARTS.items():
        values = [_value(options, name) for name in names]
        if any(values) and not _is_ours(part, values):
            yield part, values


def _is_ours(part: str, values: Sequence[Any]) -> bool:
    """Say whether a part came along with this package and is given no arguments."""
    first, *rest = values
    if part == "env" and isinstance(first, list) and not any(rest):
        return all(_is_ours(part, [one.rpartition("=")[2]]) for one in first)
    if part == "curriculum":
        from nanorl.flow.curriculum import KNOWN  # here: few options need them

        return first in KNOWN  # their arguments are shares and counts
    if any(rest) or not isinstance(first, str):
        return False
    if part in ("loss", "advantage"):
        from nanorl.algorithms.option_groups import is_own  # here: it imports numpy

        return not is_own(str(first))
    if part == "env":
        from nanorl.envs.catalog import ENVIRONMENTS  # here: few options need them

        return first in ENVIRONMENTS
    if part == "reward":
        from nanorl.envs.rewards.load import REWARDS  # here: few options need them

        return first in REWARDS
    if part == "agent":
        return first in LOOPS and first != "command"
    return False


def _value(options: Options, name: str) -> Any:
    """The value of an option by its dotted name, None where it is not there."""
    value: Any = options
    for part in name.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return list(value) if isinstance(value, tuple) else value


def _digest(part: str, values: Sequence[Any]) -> str:
    if part == "env" and isinstance(values[0], list):  # several, each perhaps a file
        values = [list(map(_whole, values[0])), *values[1:]]
    if part == "curriculum" and not values[1]:
        values = values[:1]  # as it was remembered before it had arguments
    text = json.dumps([part, *map(_whole, values)], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _whole(value: Any) -> Any:
    """A file's whole path, whatever the working folder."""
    if not isinstance(value, str) or "://" in value:
        return value
    place, colon, attribute = value.rpartition(":")
    if colon and is_path(place):
        return f"{Path(place).expanduser().resolve()}:{attribute}"
    return str(Path(value).expanduser().resolve()) if is_path(value) else value


def _flags(part: str, values: Sequence[Any]) -> str:
    words = []
    for name, value in zip(PARTS[part], values, strict=True):
        if value:
            given = value if isinstance(value, list) else [value]
            flag = _ALIASES.get(name, name.replace("_", "-"))
            words += [f"--{flag}", *(shlex.quote(str(one)) for one in given)]
    return " ".join(words)


def _known() -> set[str]:
    try:
        return set(_file().read_text(encoding="ascii").split())
    except (OSError, UnicodeError, RuntimeError):
        return set()


def _file() -> Path:
    """RuntimeError for a user without a home."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "nanorl" / "named"
