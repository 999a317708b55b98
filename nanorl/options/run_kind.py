"""The environment of a run: the one that `--env` names, or else its preset's; with the reward that
`--reward` names in place of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.envs.catalog import (
    ENVIRONMENTS,
    PRESETS_OWN,
    as_kind,
    is_address,
    load_kind,
    parse_arguments,
)
from nanorl.envs.code import CodeKind
from nanorl.envs.env_kind import EnvKind
from nanorl.envs.judged import JudgedKind
from nanorl.envs.rewards.base import Reward
from nanorl.envs.rewards.load import REWARDS, load_reward
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig
from nanorl.sandbox.backends import open_sandbox
from nanorl.sandbox.base import WorkspaceSandbox
from nanorl.sandbox.choice import AUTO, choose_sandbox

NUM_WORKERS = 2
PICTURES = "pictures"
"""The name of the folder of a run's pictures, in the run's own."""


def run_kind(config: RunConfig, env: object = None) -> EnvKind:
    """The kind of `env` where one is given as an object, or a sequence of them (None: as named)
    where the run names several. ValueError if what is named cannot be found or imported."""
    if isinstance(config.env, tuple):
        return _mix(config, env)
    kind: EnvKind = get_preset(config.preset).environment()
    arguments = parse_arguments(config.env_args)
    if env is not None:
        kind = as_kind(env, arguments)
    elif config.env == PRESETS_OWN:
        if arguments:
            raise ValueError(f"--env-args {arguments}: the environment {PRESETS_OWN} takes none")
    elif config.env:
        kind = load_kind(config.env, arguments)
    if config.tool.max_images:
        kind = _showing(kind, config.tool.max_images)
    if config.reward_args and not config.reward:
        raise ValueError(
            f"--reward-args {' '.join(config.reward_args)}: belong to no reward; name it with "
            "--reward, or give arguments of the environment as --env-args"
        )
    if config.reward:
        given = parse_arguments(config.reward_args)
        reward = load_reward(config.reward, _sandbox_arguments(config) | given)
        kind = _judged(config, kind, reward)
    return kind


def _showing(kind: EnvKind, max_images: int) -> EnvKind:
    """The code environment with a tool that shows the pictures of programs."""
    if not isinstance(kind, CodeKind):
        raise ValueError(
            f"--tool.max-images {max_images}: is of the environment {PRESETS_OWN}, and this is "
            f"{kind.name}; give your own tools = [nanorl.PythonPictures(max_images={max_images})]"
        )
    from nanorl.envs.tools.python_pictures import HINT, PythonPictures  # here: few runs show any

    form = replace(kind.form, system=f"{kind.form.system} {HINT}".strip())
    return replace(kind, form=form, tool=PythonPictures(max_images=max_images))


def _judged(config: RunConfig, kind: EnvKind, reward: Reward) -> EnvKind:
    if not callable(getattr(reward, "score_group", None)):
        return JudgedKind(kind, reward)
    # here: few runs compare by a judge
    from nanorl.envs.group_judged import GroupJudgedKind
    from nanorl.envs.rewards.group_judge import GroupJudgeReward

    if not isinstance(reward, GroupJudgeReward):
        raise ValueError(
            f"--reward {config.reward}: has a score_group and is no group judge, so nothing would "
            "call it; derive its class from nanorl.envs.rewards.group_judge.GroupJudgeReward, or "
            "give the method another name"
        )
    if config.rl.group_size == 1:
        raise ValueError(
            f"--reward {config.reward} with --rl.group-size 1: it compares the rollouts of a "
            "group; raise the group size, or take --reward judge"
        )
    return GroupJudgedKind(kind, reward)


def _mix(config: RunConfig, given: object) -> EnvKind:
    """The environments of a run that names several; some may be given as objects."""
    from nanorl.envs.mix import EnvMix  # here: few runs have several
    from nanorl.options.env_mix import alone, members_of

    members = members_of(config)
    objects = given if isinstance(given, Sequence) else (None,) * len(members)
    kinds = {
        name: run_kind(alone(config, member), one)
        for (name, member), one in zip(members.items(), objects, strict=True)
    }
    return EnvMix(kinds, {name: member.weight for name, member in members.items()})


def members_of_kind(kind: EnvKind) -> Mapping[str, EnvKind]:
    """The environments of a run by their names; one alone has the name ""."""
    found: Mapping[str, EnvKind] = getattr(kind, "members", {"": kind})
    return found


def run_sandbox(config: RunConfig) -> WorkspaceSandbox:
    """The sandbox that a run's options name. SandboxUnavailable where it does not run here."""
    tool = config.tool
    return open_sandbox(
        tool.sandbox,
        tool.limits(),
        num_workers=tool.workers,
        max_workers=tool.max_workers or None,
        allow_unsafe=tool.allow_unsafe_sandbox,
    )


def runs_programs(config: RunConfig, kind: EnvKind) -> bool:
    """Say whether anything that a policy writes is run, by its tools or by the reward."""
    return kind.needs_sandbox or config.reward == "tests"


def settle_sandbox(config: RunConfig, kind: EnvKind) -> tuple[RunConfig, str]:
    """The options with the sandbox that `auto` stands for on this machine, and what a run says of
    it: nothing where its agent runs no programs. SandboxUnavailable where none will do."""
    tool = config.tool
    if not runs_programs(config, kind):
        return config, ""
    if tool.sandbox != AUTO:
        return config, tool.sandbox
    tools = getattr(getattr(kind, "kind", kind), "tools", ())  # a judged kind has another inside
    needs = {getattr(one, "needs_processes", "") for one in tools}
    choice = choose_sandbox(tool.limits(), needs - {""})
    return replace(config, tool=replace(tool, sandbox=choice.name)), str(choice)


def _sandbox_arguments(config: RunConfig) -> dict[str, Any]:
    """The arguments that tell a reward that runs programs of its own where it shall run them; none
    for other rewards."""
    if config.reward != "tests":
        return {}
    tool = config.tool
    return {"sandbox": tool.sandbox, "allow_unsafe_sandbox": tool.allow_unsafe_sandbox}


def num_env_workers(config: RunConfig) -> int:
    """In how many processes the episodes of a run's one environment are played; 0: in the caller's
    own."""
    assert not isinstance(config.env, tuple), "each of several is asked for alone"
    if config.env_workers is not None:
        return config.env_workers
    is_own = config.env in ("", PRESETS_OWN) and not config.reward
    if config.http.mode != "off" and not is_own and not is_address(config.env):
        return NUM_WORKERS  # what may ask for pages does so where the proxy is all it reaches
    is_trusted = config.env in ("", *ENVIRONMENTS) or is_address(config.env)
    return 0 if is_trusted and config.reward in ("", *REWARDS) else NUM_WORKERS


def run_tokenizer(config: RunConfig, folder: Path) -> ChatTokenizer:
    """The tokenizer of a run's model, with the variables that its chat template is given. One of a
    model that sees keeps the run's pictures."""
    variables = parse_arguments(config.agent.template_args)
    if not folder_sees(folder):
        return ChatTokenizer.from_folder(folder, variables)
    from nanoengine.vision.seeing_tokenizer import seeing_tokenizer  # here: few models see

    return seeing_tokenizer(folder, pictures_folder(config), variables)


def folder_sees(folder: Path) -> bool:
    """Say whether a model's folder has a model with a vision tower."""
    from nanoengine.formats.families import sees  # here: it imports torch, and --help needs none

    file = folder / "config.json"  # a folder may have a tokenizer alone
    return file.is_file() and sees(json.loads(file.read_text("utf-8")).get("model_type"))


def pictures_folder(config: RunConfig) -> Path:
    """The folder in which a run keeps its pictures, for all of its processes."""
    return config.run_dir.resolve() / PICTURES
