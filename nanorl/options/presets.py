"""The two recipes that come with the project, as plain functions. Measured in docs/log.md.

smollm2  SmolLM2-135M-Instruct, a real pretrained model, becomes a tool-using agent
tiny     0.66 M parameters from scratch, no download: for tests and the first minutes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nanorl.envs.actions import COMPACT, MARKDOWN
from nanorl.envs.code import CodeKind
from nanorl.envs.tasks.smollm2 import smollm2_family
from nanorl.envs.tasks.teachers import smollm2_teacher, tiny_teacher
from nanorl.envs.tasks.tiny import tiny_family
from nanorl.options.agent_config import AgentConfig, ToolConfig
from nanorl.options.phase_config import EvaluationConfig, RLConfig, WarmStartConfig
from nanorl.options.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Holds what a preset name stands for: default options, and the environment."""

    config: Callable[[], RunConfig]
    cpu_sizes: Mapping[str, int]  # of `EngineLimits`, where the user gives none
    environment: Callable[[], CodeKind]


def smollm2() -> RunConfig:
    return RunConfig(
        preset="smollm2",
        save_every=7,  # a checkpoint is 1.6 GB and costs as long as a third of a step
        warm_start=WarmStartConfig(steps=80, traces_per_step=8, lr=1e-4),
        rl=RLConfig(steps=14, tasks_per_step=16, group_size=4, lr=6e-5, temperature=0.7),
        agent=AgentConfig(
            max_turns=4, max_turn_tokens=96, max_context_tokens=512, max_observation_tokens=64
        ),
        evaluation=EvaluationConfig(num_tasks=210, num_tasks_no_tool=28),
    )


def tiny() -> RunConfig:
    return RunConfig(
        preset="tiny",
        dtype="bf16",
        save_every=20,
        # The sandbox is the bottleneck of both phases: traces are trained on six times, and RL ends
        # soon after its plateau, with the rate decayed to 0.
        warm_start=WarmStartConfig(
            steps=1000, traces_per_step=32, epochs=6, lr=3e-3, warmup_steps=20, drill_fraction=0.3
        ),
        rl=RLConfig(
            steps=36, tasks_per_step=48, group_size=4, lr=5e-4, schedule="cosine", temperature=0.7
        ),
        agent=AgentConfig(
            max_turns=4, max_turn_tokens=48, max_context_tokens=256, max_observation_tokens=32
        ),
        tool=ToolConfig(timeout_s=2.0),
        evaluation=EvaluationConfig(num_tasks=418, num_tasks_untrained=105, num_tasks_no_tool=209),
    )


def smollm2_environment() -> CodeKind:
    return CodeKind(form=MARKDOWN, family=smollm2_family(), teacher=smollm2_teacher())


def tiny_environment() -> CodeKind:
    return CodeKind(form=COMPACT, family=tiny_family(), teacher=tiny_teacher())


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "smollm2": Preset(
            config=smollm2,
            cpu_sizes=MappingProxyType(
                {
                    "micro_batch_tokens": 1024,
                    "max_num_seqs": 64,
                    "max_batch_tokens": 1024,
                    "cache_mb": 512,
                }
            ),
            environment=smollm2_environment,
        ),
        "tiny": Preset(
            config=tiny,
            cpu_sizes=MappingProxyType(
                {
                    "micro_batch_tokens": 8192,
                    "max_num_seqs": 192,
                    "max_batch_tokens": 4096,
                    "cache_mb": 256,
                }
            ),
            environment=tiny_environment,
        ),
    }
)


def get_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"--preset {name}: no such preset; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
