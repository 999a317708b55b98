"""Loads what a user names: a name of ours, `module:attribute`, `file.py` or `file.py:attribute`.

    load_object("maze.py", what="environment", known={}, fits=is_environment)
    load_object("my_rewards:by_length", what="reward", known=REWARDS, fits=callable)

A file is imported under a name of its own made of its path, so two files of one name do not meet
and what is pickled in one process is found in another. Its folder is on `sys.path` while it is
imported, so it can import its neighbours.
Left out: entry points of installed packages (envs/installed.py has those of environments).
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, MappingProxyType, ModuleType
from typing import Any

Fits = Callable[[Any], bool]
FORMER = {
    "nanorl.rewards.math": "nanorl.envs.rewards.math_reward",
    "nanorl.rewards": "nanorl.envs.rewards",
    "nanorl.tasks": "nanorl.envs.tasks",
    "nanorl.tools": "nanorl.envs.tools",
}
"""Where objects stand now that the options of an older run name by the module of that time."""
LOOPS: Mapping[str, str] = MappingProxyType(
    {
        "tool": "nanorl.agents.loop:tool",
        "single_turn": "nanorl.agents.loop:single_turn",
        "feedback": "nanorl.agents.feedback:Feedback",
        "compact": "nanorl.agents.compact:Compact",
        "sub_agents": "nanorl.agents.sub_agents:SubAgents",
        "command": "nanorl.agents.command:Command",
        "verifiers": "nanorl.agents.verifiers_loop:verifiers",
    }
)
"""The agent loops of ours (agents/loops.py): here, since data may name one without loading any."""
_WANTED = {
    "env": "an environment is a class derived from nanorl.Env (docs/environments.md)",
    "reward": "a reward is a function of the task and the transcript (docs/environments.md)",
    "agent": "an agent loop is a class with a method play, or a function (docs/agents.md)",
}


def load_object(spec: str, *, what: str, known: Mapping[str, str], fits: Fits) -> Any:
    """The object that `spec` names.

    `known` maps our names to "module:attribute"; `fits` says whether an object is a `what`. Where
    only a module or a file is named, it must define exactly one that fits. ValueError, with the
    rule and what there is, where nothing fits or the user's code cannot be imported.
    """
    spec = known.get(spec, spec)
    place, _, attribute = spec.rpartition(":") if _names_attribute(spec) else (spec, "", "")
    if not is_path(place) and "." not in place and ":" not in spec and not _can_find(place):
        names = ", ".join(sorted(known)) or "none"
        near = difflib.get_close_matches(spec, known, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"--{what} {spec}: no {what} is called that{meant}; ours: {names}. Yours: a file "
            "(mine.py), or module:name"
        )
    module = import_place(place, what)
    if not attribute:
        return _the_only_one(module, what, fits, spec)
    found: Any = module
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ValueError(
                f"--{what} {spec}: {place} defines no {attribute!r}{_alike(name, found)}"
            )
        found = getattr(found, name)
    if not fits(found):
        raise ValueError(f"--{what} {spec}: {found!r:.80} is none; {_wanted(what)}")
    return found


def is_path(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def import_place(place: str, what: str = "module") -> ModuleType:
    """The module of that name, or of that file. ValueError with the lines of the user's own code
    that led to it if it cannot be imported."""
    try:
        return _import_file(Path(place)) if is_path(place) else importlib.import_module(_now(place))
    except FileNotFoundError:
        raise ValueError(f"--{what} {place}: there is no such file") from None
    except Exception as error:  # a plug-in boundary: whatever the user's module raises
        raise ValueError(
            f"--{what} {place}: importing it raised {type(error).__name__}: {error}"
            f"{where_raised(error)}"
        ) from error


def _now(place: str) -> str:
    """The name of a module today."""
    for old, new in FORMER.items():
        if place == old or place.startswith(f"{old}."):
            return new + place.removeprefix(old)
    return place


def spec_of(found: Any) -> str | None:
    """The text by which other processes find a class or function; None if they cannot, as where it
    was typed into a notebook or lives inside a function."""
    module = sys.modules.get(found.__module__)
    name = getattr(found, "__qualname__", "")
    if not name or "<locals>" in name:
        return None
    file = getattr(module, "__file__", None)
    if found.__module__ == "__main__" or found.__module__.startswith(_PREFIX):
        return f"{Path(file).resolve()}:{name}" if file else None
    return f"{found.__module__}:{name}"


_PREFIX = "nanorl_plugin_"
_PATHS = sysconfig.get_paths()
_FOLDERS = (*(_PATHS[name] for name in ("stdlib", "purelib", "platlib")), Path(__file__).parent)
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)
"""Where code stands that is not the user's."""


class _Fresh(SourceFileLoader):
    """Compiles the text that is there. Python's cache takes a file for the one it knows if size and
    second are the same, and then who edits and runs at once plays the old code."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(path)
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"{_PREFIX}{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_Fresh(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up
    folder, before = str(path.parent), sys.dont_write_bytecode
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True  # nor of the user's files that this one imports
    try:
        spec.loader.exec_module(module)
    except BaseException:  # the user's code may raise anything; half a module must not stay
        del sys.modules[name]
        raise
    finally:
        sys.dont_write_bytecode = before
        sys.path.remove(folder)
    return module


def _names_attribute(spec: str) -> bool:
    place, colon, attribute = spec.rpartition(":")
    return bool(place and colon and attribute.replace(".", "").isidentifier())


def _can_find(name: str) -> bool:
    return name.isidentifier() and importlib.util.find_spec(name) is not None


def _the_only_one(module: ModuleType, what: str, fits: Fits, spec: str) -> Any:
    own = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
        and fits(value)
    }
    if len(own) == 1:
        return next(iter(own.values()))
    if not own:
        raise ValueError(f"--{what} {spec}: it defines no {what}; {_wanted(what)}")
    names = " or ".join(f"{spec}:{name}" for name in own)
    raise ValueError(f"--{what} {spec}: it defines more than one; name the one, {names}")


def _alike(name: str, found: Any) -> str:
    """Suggest the name that was meant, for the error, where `found` has no such name."""
    near = difflib.get_close_matches(name, [one for one in vars(found) if one[0] != "_"], n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _wanted(what: str) -> str:
    return _WANTED.get(what, f"write a function, as the page of {what} shows")


def where_raised(error: Exception) -> str:
    """The line of the user's file that raised, in brackets after a blank: the last one that is
    neither ours nor a library's, or else the last one."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return _line(own[-1] if own else frames[-1]) if frames else ""


def caller(file: str) -> str:
    """The line that called into `file`, written as `where_raised` does."""
    calls = (one for one in reversed(traceback.extract_stack()[:-1]) if one.filename != file)
    return next(map(_line, calls), "")


def _line(frame: traceback.FrameSummary) -> str:
    return f" ({frame.filename}, line {frame.lineno}: {frame.line})"
