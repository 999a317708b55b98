"""The options of whoever plays a rollout: the agent, and the sandbox of its programs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nanorl.agents.limits import Limits
from nanorl.bounds import COUNT, NATURAL, POSITIVE, Bound, check_record, require
from nanorl.sandbox.base import SandboxName, SandboxSpec, check_safety


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Limits):
    """Limits of one rollout."""

    max_turn_tokens: int = 96
    max_context_tokens: int = 512
    max_observation_tokens: int = 64
    loop: str = ""
    """Who decides when the policy speaks: tool, single_turn, feedback, compact, sub_agents,
    command, or yours as file.py:loop; --agent for short. Empty: the environment's own."""
    loop_args: tuple[str, ...] = ()
    """Its options, as name=value; --agent-args for short."""
    command: str = ""
    """The program that plays with --agent command: "python mine.py"."""
    host: str = "127.0.0.1"
    """Where agents that call the policy through an API reach it: this machine alone, or 0.0.0.0 for
    others too. Every episode has a key of its own."""
    max_calls_at_once: int = 64
    """Requests of one such agent at a time; more are answered 429."""
    scorer_key_file: Path | None = None
    """File with the key by which a scorer of yours, and no agent, reports rewards by HTTP; without
    one none is taken."""
    max_reward: float = 1.0
    """A reward reported by HTTP lies between minus this and this."""
    template_args: tuple[str, ...] = ()
    """Variables of the model's chat template, as enable_thinking=false of Qwen3's."""
    deadline_s: float = 3600.0
    """Wall-clock limit of a rollout; one that takes longer has failed and is played again. 0: none.
    """

    def __post_init__(self) -> None:
        check_record(
            self,
            "agent.",
            deadline_s=NATURAL,
            max_calls_at_once=COUNT,
            max_reward=POSITIVE,
            max_turns=Bound(1, 1000, "each is an execution in the sandbox"),
            max_turn_tokens=COUNT,
            max_response_tokens=COUNT,
            max_context_tokens=COUNT,
            max_observation_tokens=COUNT,
            max_images=COUNT,
            max_image_tokens=COUNT,
        )
        require(
            self.max_context_tokens > self.max_turn_tokens,
            "agent.max-context-tokens",
            self.max_context_tokens,
            f"larger than agent.max-turn-tokens={self.max_turn_tokens}",
        )
        if self.command and self.loop not in ("", "command"):
            raise ValueError(
                f"--agent.command {self.command!r} with --agent {self.loop}: only --agent command "
                "runs a program; leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class ToolConfig:
    """The sandbox that runs the model's programs."""

    timeout_s: float = 2.0
    """Wall-clock limit of one execution."""
    memory_mb: int = 256
    """Memory of one execution, children included."""
    workers: int = 2
    """Warm sandbox processes."""
    max_workers: int = 0
    """So many while programs wait; those beyond `workers` end after half a minute of idleness. 0:
    never more than `workers`."""
    python: str = ""
    """The interpreter that runs the programs, outside of /tmp; empty: the system's, or this one."""
    sandbox: SandboxName = "auto"
    """What keeps programs in (docs/sandbox.md): auto is bwrap where that runs, else wasm. Others by
    name: oci (podman or docker), gvisor, microvm; landlock and rlimits only with
    --allow-unsafe-sandbox. One that is named and does not run here is refused."""
    image: str = ""
    """The system that programs see: of oci the name of a local image, of microvm a folder; both
    from scripts/make_sandbox_image.sh."""
    allow_unsafe_sandbox: bool = False
    """Permit sandboxes from which programs can reach this machine."""
    max_images: int = 0
    """PNG files that a program leaves in out/ and that a model that sees is shown, at most; 0: only
    what it prints is read."""

    def limits(self) -> SandboxSpec:
        """The limits of one execution."""
        return SandboxSpec(
            timeout_s=self.timeout_s,
            memory_bytes=self.memory_mb << 20,
            python=self.python or None,
            image=self.image or None,
        )

    def __post_init__(self) -> None:
        cores = os.cpu_count() or 1
        check_record(
            self,
            "tool.",
            timeout_s=Bound(0.01, 3600, "a rollout waits so long for each execution"),
            memory_mb=Bound(32, 1 << 20),
            workers=Bound(1, 16 * cores, f"16 processes for each of the {cores} cores here"),
            max_workers=Bound(0, 16 * cores, f"16 processes for each of the {cores} cores here"),
            max_images=Bound(0, 64),
        )
        require(
            not 0 < self.max_workers < self.workers,
            "tool.max-workers",
            self.max_workers,
            f"0 or at least tool.workers={self.workers}",
        )
        check_safety(self.sandbox, self.allow_unsafe_sandbox)
