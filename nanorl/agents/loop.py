"""What a loop over turns is, and the table of loops by name.

A loop is one coroutine for one rollout. While it waits for its tool, the engine decodes others; so
a loop holds no lock and no thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.tokens import Limits
from nanorl.envs.base import Environment
from nanorl.types import Rollout, Task


class Generator(Protocol):
    """An inference engine, seen from a loop."""

    async def generate(self, ids: list[int], params: SamplingParams) -> Output: ...


class Reward(Protocol):
    """Scores an answer on the host."""

    def __call__(self, answer: str | None, expected: str) -> float: ...


class AgentLoop(Protocol):
    """Runs one rollout. Infrastructure failures come back as status FAILED, never as reward 0."""

    async def __call__(
        self,
        task: Task,
        *,
        group_id: str,
        rollout_id: str,
        generator: Generator,
        env: Environment,
        tokenizer: ChatTokenizer,
        sampling: SamplingParams,
        limits: Limits,
        reward: Reward,
    ) -> Rollout: ...


@dataclass(frozen=True)
class AgentLoops:
    """An immutable table of loops by name; `register` returns a larger one."""

    loops: Mapping[str, AgentLoop]

    def register(self, name: str, loop: AgentLoop) -> AgentLoops:
        if name in self.loops:
            raise ValueError(f"agent {name!r} is registered already: choose another name")
        return AgentLoops(MappingProxyType({**self.loops, name: loop}))

    def __getitem__(self, name: str) -> AgentLoop:
        if name not in self.loops:
            raise ValueError(f"agent {name!r}: choose one of {', '.join(sorted(self.loops))}")
        return self.loops[name]


def turn_seed(seed: int, turn: int) -> int:
    """The engine seed of one turn: 63 bits, a function of the rollout's seed and the turn alone."""
    digest = hashlib.blake2b(f"{seed}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
