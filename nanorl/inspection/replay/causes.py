"""Why a rollout came out otherwise: what was recorded then and is another thing now.

Nothing is guessed. Each cause is a recorded fact that is not the same any more; the place of the
first difference decides which of them are likelier: a log-prob depends on weights and arithmetic,
an observation on the task's files and on what runs the programs. Where nothing recorded differs,
that is what is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from nanorl.inspection.replay.difference import Difference, Kind
from nanorl.run.manifest import Manifest
from nanorl.types import TokenStats

_NUMBERS = ("store", "weights", "machine", "packages", "code", "model")
_TEXTS = ("task", "sandbox", "environment", "code", "packages", "machine")
_CAUSES: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        "prompt": ("task", "tasks", "model", "environment", "code", "packages"),
        "token": _NUMBERS,
        "logp": _NUMBERS,
        "observation": _TEXTS,
        "sequences": ("environment", "code", "packages"),
        "status": ("environment", "sandbox", "code", "machine"),
        "reward": ("store", *_TEXTS),
        "failed": ("sandbox", "environment", "machine", "packages", "code"),
    }
)
"""What can bring about a difference of each kind, the likeliest first."""
NOTHING = "nothing that is recorded differs"


class Cause(NamedTuple):
    """Something that is another thing now than it was."""

    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


def ranked(difference: Difference, found: Mapping[str, str]) -> list[Cause]:
    """The causes that can have brought it about, the likeliest first; `found` has what is said of
    everything that differs."""
    return [Cause(name, found[name]) for name in _CAUSES[difference.kind] if found.get(name)]


def changed_parts(then: Manifest | None, now: Manifest) -> dict[str, str]:
    """The differences of the manifests, part by part, in words."""
    if then is None:
        return {}
    found = {}
    for part in now:
        old, new = then.get(part, {}), now[part]
        names = [name for name in old | new if old.get(name) != new.get(name)]
        if part == "code" and "source" not in names:
            continue  # another commit of the same source
        if names:
            found[part] = "; ".join(
                f"{one} {_said(old, one)} -> {_said(new, one)}" for one in names
            )
    return found


def _said(part: Mapping[str, Any], name: str) -> str:
    return str(part[name]) if name in part else "(none)"


def altered_logp(difference: Difference, stats: TokenStats | None) -> str:
    """Evidence, in words, that a stored log-prob was altered since: the trainer computed another
    one for the same token, and that is the replay's."""
    if difference.kind != "logp" or stats is None or "trained_logp" not in stats.values:
        return ""
    trained = stats.values["trained_logp"][difference.sequence][difference.token]
    if repr(trained) != difference.now:
        return ""
    return (
        f"the trainer's own log-prob of this token was {trained!r}, as it is now: the stored "
        "rollout is not what was played"
    )
