"""The environment of the tiny preset, with a tool that takes 300 ms longer: as a search engine, a
browser or a sandbox on another machine would. For async.json; `--env` takes this file.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from nanorl.envs.base import Environment, Services, TimeStep
from nanorl.envs.code import CodeKind
from nanorl.options.presets import tiny_environment

TOOL_S = 0.3


class SlowEnvironment:
    """Passes everything on, and keeps what a tool answers for a while."""

    def __init__(self, inner: Environment) -> None:
        self._inner = inner

    async def step(self, text: str) -> TimeStep:
        reply = await self._inner.step(text)
        if reply.observation is not None:
            await asyncio.sleep(TOOL_S)
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True, kw_only=True)
class SlowCode(CodeKind):
    """The same tasks, prompts and teacher."""

    def open(self, services: Services) -> Any:
        return SlowEnvironment(super().open(services))


_tiny = tiny_environment()
slow_code = SlowCode(form=_tiny.form, family=_tiny.family, teacher=_tiny.teacher)
