"""What is said of an episode by HTTP: `POST /episode`.

    {"answer": "42"}                     its answer, which the environment scores
    {"is_done": true}                    no further call will come
    {"reward": 0.5, "metrics": {...}}    its score, from somebody else than its agent

The policy steers its agent, so an agent's key takes an answer and no reward: rewards and metrics
come with a second key, the scorer's (`ReportRules`), which no agent is given. They are bounded,
since one reward without a bound would outweigh all others. Later reports add to earlier ones.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from nanoinfer.dialects.exchange import Json
from nanoinfer.http.api_error import ApiError
from nanoinfer.http.api_key import is_one_of, read_key
from nanoinfer.http.http_io import read_json_body
from nanorl.agents.guard import MAX_ANSWER_BYTES

SCORER_HEADER = "x-scorer-key"
MIN_KEY_CHARS = 16
MAX_METRIC = 1e6
MAX_METRICS = 64
_METRIC = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_OWN = ("agent_", "answered", "ignored_", "num_", "refused_", "reward", "truncated_")
"""How the names of what a run counts itself begin."""


class ReportBody(BaseModel):
    """The body of `POST /episode`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    answer: str | None = Field(None, strict=True, max_length=MAX_ANSWER_BYTES)
    reward: float | None = None
    metrics: dict[str, float] = {}
    is_done: StrictBool = False

    @property
    def is_score(self) -> bool:
        """It says what the episode is worth, which its agent may not."""
        return self.reward is not None or bool(self.metrics)


@dataclass(frozen=True)
class ReportRules:
    """The key with which rewards may be reported, and the largest reward:
    `ReportRules(read_scorer_key(file), 1.0)`."""

    key: str = field(default="", repr=False)
    """The scorer's; empty: there is none, and no reward is taken."""
    max_reward: float = 1.0

    def check(
        self, body: ReportBody, headers: Mapping[str, str], known: Mapping[str, float]
    ) -> None:
        """ApiError 403 for a score without the scorer's key, 400 for one out of bounds. `known` are
        the metrics so far."""
        if not body.is_score:
            return
        if not self.is_scorer(headers):
            raise ApiError(
                403,
                "reward, metrics: an episode's own key takes its answer alone; a scorer sends the "
                f"key of --agent.scorer-key-file, too, as {SCORER_HEADER}",
                "metrics" if body.reward is None else "reward",
            )
        if body.reward is not None and abs(body.reward) > self.max_reward:
            raise ApiError(
                400,
                f"reward: {body.reward:g} lies outside of -{self.max_reward:g} to "
                f"{self.max_reward:g} (--agent.max-reward)",
                "reward",
            )
        for name, value in body.metrics.items():
            _check_metric(name, value)
        if len({*known, *body.metrics}) > MAX_METRICS:
            raise ApiError(400, f"metrics: at most {MAX_METRICS} of an episode", "metrics")

    def is_scorer(self, headers: Mapping[str, str]) -> bool:
        """True for a request with the scorer's key."""
        return is_one_of([headers.get(SCORER_HEADER, "")], [self.key])


def _check_metric(name: str, value: float) -> None:
    if not _METRIC.fullmatch(name):
        raise ApiError(
            400, f"metrics: {name[:80]!r} is no name; use letters, digits, _ . -", "metrics"
        )
    if name.startswith(_OWN):
        raise ApiError(
            400, f"metrics: {name!r} begins as what the run counts; choose another name", "metrics"
        )
    if abs(value) > MAX_METRIC:
        raise ApiError(
            400, f"metrics: {name}={value:g} lies outside of -{MAX_METRIC:g} to {MAX_METRIC:g}",
            "metrics",
        )  # fmt: skip


def read_scorer_key(file: Path) -> str:
    """The only line of `file`. ValueError where it is no key, or where others may read it."""
    flag = f"--agent.scorer-key-file {file}"
    if not file.is_file():
        raise ValueError(
            f"{flag}: there is no such file; make one: (umask 077; openssl rand -hex 32 > {file})"
        )
    if file.stat().st_mode & 0o077:
        raise ValueError(f"{flag}: other users may read it; chmod 600 {file}")
    key = read_key(file, flag="--agent.scorer-key-file") or ""
    if len(key) < MIN_KEY_CHARS or " " in key:
        raise ValueError(
            f"{flag}: must hold one line of at least {MIN_KEY_CHARS} ASCII characters, as "
            "`openssl rand -hex 32` writes it"
        )
    return key


@dataclass(eq=False)
class EpisodeReport:
    """All that was reported so far."""

    answer: str | None = None
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, body: ReportBody) -> None:
        """Add a report."""
        self.answer = self.answer if body.answer is None else body.answer
        self.reward = self.reward if body.reward is None else body.reward
        self.metrics |= body.metrics
        if body.is_done:
            self.done.set()


def read_report(body: Json) -> ReportBody:
    """ApiError 400 names the field that cannot be."""
    return read_json_body(body, ReportBody)
