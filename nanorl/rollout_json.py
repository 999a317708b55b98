"""Rollouts as JSON: what travels to another process, into a checkpoint, to a server.

from_json(json.loads(json.dumps(to_json(rollout)))) == rollout
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nanoengine.spans import ImageSpan
from nanorl.types import Branch, Rollout, Status, TurnSpan


def to_json(rollout: Rollout) -> dict[str, Any]:
    """A dict that `json` writes; `from_json` is its inverse."""
    return asdict(rollout)


def from_json(data: dict[str, Any]) -> Rollout:
    """The rollout of such a dict, of one that was written before there were branches, too."""
    given = _with_spans(data)
    shown = data.get("hindsight_images", [])
    given["hindsight_images"] = [ImageSpan.from_json(one) for one in shown]
    given["branches"] = [Branch(**_with_spans(one)) for one in data.get("branches", [])]
    given["status"] = Status(given["status"])
    return Rollout(**given)


def _with_spans(data: dict[str, Any]) -> dict[str, Any]:
    spans = [TurnSpan(**one) for one in data["turn_spans"]]
    images = [ImageSpan.from_json(one) for one in data.get("images", [])]
    return {**data, "turn_spans": spans, "images": images}
