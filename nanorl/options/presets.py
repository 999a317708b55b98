"""The three recipes that come with the project, as plain functions. Measured in docs/log.md.

smollm2      SmolLM2-135M-Instruct, a real pretrained model, becomes a tool-using agent
tiny         0.66 M parameters from scratch, no download: for tests and the first minutes
tiny_vision  1 M parameters from scratch, a third of them a tower: it learns to see and to look back
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from nanorl.envs.actions import COMPACT, MARKDOWN
from nanorl.envs.catalog import load_kind
from nanorl.envs.code import CodeKind
from nanorl.envs.env_kind import EnvKind
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
    """The options of a run in the preset's own environment."""
    elsewhere: Callable[[], RunConfig]
    """Those that a run in another one begins with, before that one's own defaults."""
    cpu_sizes: Mapping[str, int]  # of `EngineLimits`, where the user gives none
    environment: Callable[[], EnvKind]
    build_model: str = ""
    """Where the function is that writes its model's folder for a seed; "": it is downloaded."""


def smollm2() -> RunConfig:
    plain = smollm2_elsewhere()
    return replace(
        plain,
        save_every=8,
        # Sixteen traces show the form, and no more: what is learned is learned by RL.
        warm_start=WarmStartConfig(steps=2, traces_per_step=8, lr=2e-4, warmup_steps=0),
        rl=replace(plain.rl, steps=24, lr=7e-5, schedule="cosine", temperature=0.9),
        # No turn that solves a task is longer, and a few that ramble hold all others up.
        agent=replace(plain.agent, max_turn_tokens=48),
        evaluation=replace(
            plain.evaluation,
            num_tasks_no_tool=24,
            every=8,
            num_tasks_each=16,
            k=1,
            temperature=0.9,
        ),
    )


def smollm2_elsewhere() -> RunConfig:
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


def tiny_vision() -> RunConfig:
    return RunConfig(
        preset="tiny_vision",
        dtype="bf16",
        save_every=20,
        warm_start=WarmStartConfig(
            steps=1100,
            traces_per_step=64,
            lr=2e-3,
            warmup_steps=20,
            schedule="constant",
            stop_loss=0.08,
        ),
        rl=RLConfig(
            steps=80,
            tasks_per_step=64,
            group_size=8,
            lr=6e-4,
            schedule="constant",
            temperature=1.3,
        ),
        agent=AgentConfig(max_turns=4, max_turn_tokens=4, max_context_tokens=256),
        evaluation=EvaluationConfig(num_tasks=200, num_tasks_untrained=50, num_tasks_hidden=200),
    )


def tiny_vision_elsewhere() -> RunConfig:
    plain = tiny_vision()  # which loss is enough depends on the game
    return replace(plain, warm_start=replace(plain.warm_start, stop_loss=0.0))


def smollm2_environment() -> CodeKind:
    return CodeKind(form=MARKDOWN, family=smollm2_family(), teacher=smollm2_teacher())


def tiny_environment() -> CodeKind:
    return CodeKind(form=COMPACT, family=tiny_family(), teacher=tiny_teacher())


def tiny_vision_environment() -> EnvKind:
    return load_kind("recall", {"size": 6, "num_pictures": 4, "teacher_squares": 9})


_TINY_SIZES: Mapping[str, int] = MappingProxyType(
    {
        "micro_batch_tokens": 8192,
        "max_num_seqs": 192,
        "max_batch_tokens": 4096,
        "cache_mb": 256,
    }
)
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "smollm2": Preset(
            config=smollm2,
            elsewhere=smollm2_elsewhere,
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
            elsewhere=tiny,
            cpu_sizes=_TINY_SIZES,
            environment=tiny_environment,
            build_model="nanorl.envs.tasks.tiny_model:build_tiny_model",
        ),
        "tiny_vision": Preset(
            config=tiny_vision,
            elsewhere=tiny_vision_elsewhere,
            cpu_sizes=MappingProxyType({**_TINY_SIZES, "max_num_seqs": 512}),
            environment=tiny_vision_environment,
            build_model="nanorl.envs.tasks.tiny_vision_model:build_tiny_vision_model",
        ),
    }
)


def get_preset(name: str) -> Preset:
    if name not in PRESETS:
        raise ValueError(f"--preset {name}: no such preset; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
