"""What an agent says of its own episode by HTTP: `POST /episode`.

    {"answer": "42"}                     its answer, which the environment scores
    {"reward": 0.5, "metrics": {...}}    its reward, where its owner scores by himself
    {"is_done": true}                    no further call will come

Later reports add to earlier ones.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field, StrictBool

from nanoinfer.server.http_io import read_json_body
from nanorl.endpoint.exchange import Json


class ReportBody(BaseModel):
    """The body of `POST /episode`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    answer: str | None = Field(None, strict=True)
    reward: float | None = None
    metrics: dict[str, float] = {}
    is_done: StrictBool = False


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
