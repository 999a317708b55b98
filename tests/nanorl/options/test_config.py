"""Options that cannot mean anything are refused before any work, by the name of their flag."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine.config import EngineConfig
from nanoinfer.config import InferConfig
from nanorl.algorithms.recipes import RECIPES, named_spec
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.commands.algorithms import algorithms, recipe_text
from nanorl.options.agent_config import AgentConfig, ToolConfig
from nanorl.options.engine_config import EngineLimits
from nanorl.options.phase_config import EvaluationConfig, RLConfig, WarmStartConfig
from nanorl.options.presets import tiny
from nanorl.options.run_config import RunConfig
from nanorl.sandbox.base import SandboxSpec

sys.path[:0] = [str(Path(__file__).resolve().parents[3] / "scripts")]
import train_agent  # noqa: E402

RECORDS = (
    (RunConfig, "--"), (WarmStartConfig, "--warm-start."), (RLConfig, "--rl."),
    (AgentConfig, "--agent."), (ToolConfig, "--tool."), (EvaluationConfig, "--evaluation."),
    (EngineLimits, "--engine."), (AlgorithmSpec, ""),
)  # fmt: skip
FREE = ("seed",)  # any integer is one


def numbers() -> Iterator[tuple[Any, str, str]]:
    """Each numeric field of each record, lists among them, and how a message must name it."""
    for record, prefix in RECORDS:
        hints = typing.get_type_hints(record)
        for field in dataclasses.fields(record):
            kinds = {hints[field.name], *typing.get_args(hints[field.name])}
            if kinds & {int, float} and field.name not in FREE:
                is_spec = record is AlgorithmSpec
                flag = f"{prefix}{field.name.replace('_', '-')} "
                yield record, field.name, f"{field.name}=" if is_spec else flag


NUMBERS = [pytest.param(*case, id=f"{case[0].__name__}.{case[1]}") for case in numbers()]


@pytest.mark.parametrize(("record", "name", "flag"), NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1])
def test_no_number_is_infinite_nan_or_negative(
    record: Any, name: str, flag: str, value: float
) -> None:
    is_list = typing.get_origin(typing.get_type_hints(record)[name]) is tuple
    with pytest.raises(ValueError) as caught:
        record(**{name: (value,) if is_list else value})
    assert str(caught.value).startswith(f"{flag}{value}: "), caught.value


CORES = os.cpu_count() or 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RunConfig(threads=5000), f"--threads 5000: must be at most {4 * CORES}: 4 for"),
        (lambda: ToolConfig(workers=500), f"--tool.workers 500: must be at most {16 * CORES}: 16"),
        (lambda: ToolConfig(timeout_s=1e9), "--tool.timeout-s 1000000000.0: must be at most 3600"),
        (
            lambda: EvaluationConfig(num_tasks=1_000_000),
            "--evaluation.num-tasks 1000000: must be at most 10000: each is played",
        ),
        (
            lambda: RLConfig(tasks_per_step=4096, group_size=64),
            "--rl.tasks-per-step 4096: with --rl.group-size 64 a step has 262144 rollouts",
        ),
        (lambda: RLConfig(temperature=1e-40), "--rl.temperature 1e-40: must be 0.01 or more"),
        (lambda: RLConfig(max_staleness=10**6), "--rl.max-staleness 1000000: must be at most 64"),
        (
            lambda: EngineLimits(max_num_seqs=64, max_batch_tokens=8),
            "--engine.max-batch-tokens 8: must be at least engine.max-num-seqs=64",
        ),
    ],
)
def test_sizes_that_would_hang_are_refused_with_limit_and_reason(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(message), caught.value


WRITTEN_TWICE = {
    "dtype": "a run has two of the engine's three types; its own means both engines",
    "deterministic": "of a run it is a promise that is checked, of an engine a choice of kernels",
    "keep_checkpoints": "a run's number; the critic's engine keeps one more",
    "lm_head_fp32": "nanoinfer cannot import nanoengine.config, where the other one stands",
    "steps": "of the phase whose record it is in",
    "epochs": "of the phase whose record it is in",
    "seed": "of the run, and of its held-out list",
    "algorithm": "of the run a recipe's name, of its RL phase the recipe filled in",
    "quantization": "of the rollout engine, among the sizes of both engines of a run",
    "temperature": "of rollouts that are trained on, and of those that are only looked at",
    "top_k": "of draws how many tokens are kept, of distillation how many are compared",
    "max_images": "of an agent's context, and of what one call of its tool shows",
    "engine": "a run has engines of two kinds; a sandbox's is the one that runs containers",
    **dict.fromkeys(
        ("timeout_s", "python", "image"),
        "SandboxSpec also holds what no run may choose, the walls",
    ),
}
"""Options of two records, neither of which inherits from the other, and why."""


def test_an_option_is_written_once() -> None:
    records = {
        base
        for top in (*(record for record, _ in RECORDS), EngineConfig, InferConfig, SandboxSpec)
        for base in top.__mro__
        if dataclasses.is_dataclass(base)
    }
    homes: dict[str, set[type]] = {}
    for record in records:
        for name in vars(record).get("__annotations__", {}):
            homes.setdefault(name, set()).add(record)
    found = {
        name
        for name, owners in homes.items()
        if not any(all(issubclass(owner, base) for owner in owners) for base in owners)
    }
    assert found == set(WRITTEN_TWICE)


def rl(algorithm: AlgorithmSpec | None = None, **options: Any) -> RLConfig:
    return RLConfig(algorithm=algorithm or AlgorithmSpec(), **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rl(group_size=1), "--rl.group-size 1: --rl.algorithm.advantage grpo compares"),
        (
            lambda: rl(AlgorithmSpec(advantage="gae", dynamic_sampling=True), group_size=1),
            "--rl.group-size 1: --rl.algorithm.dynamic-sampling compares",
        ),
        (
            lambda: rl(AlgorithmSpec(loss="reinforce"), epochs=2),
            "--rl.epochs 2: --rl.algorithm.loss reinforce has no ratio",
        ),
        (
            lambda: rl(AlgorithmSpec(correction="none"), max_staleness=1),
            "--rl.max-staleness 1: nothing answers for stale tokens",
        ),
        (
            lambda: rl(AlgorithmSpec(loss="reinforce", old_policy="rollout"), max_staleness=2),
            "--rl.max-staleness 2: nothing answers for stale tokens",
        ),
        (
            lambda: RunConfig(deterministic=True, rl=rl(max_staleness=2)),
            "--deterministic with --rl.max-staleness 2 and --rl.batch.oversample 0: with staleness",
        ),
        (
            lambda: RunConfig(rl=rl(AlgorithmSpec(overlong_buffer=600))),
            "--rl.algorithm.overlong-buffer 600: must be at most --agent.max-context-tokens 512",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(message), caught.value


def test_what_the_field_does_above_staleness_0_is_accepted() -> None:
    for spec in (
        AlgorithmSpec(),
        AlgorithmSpec(old_policy="rollout"),
        AlgorithmSpec(loss="decoupled_ppo"),
        AlgorithmSpec(loss="reinforce"),
        AlgorithmSpec(correction="icepop"),
        named_spec("opd"),
    ):
        assert rl(spec, max_staleness=4).max_staleness == 4
    assert rl(named_spec("ppo"), group_size=1).group_size == 1


def test_a_config_that_version_0_1_wrote_is_read() -> None:
    """It held every default, bounds of a correction that reads none among them."""
    algorithm = {"correction": "none", "correction_low": 0.5, "correction_high": 2.0}
    config = RunConfig.from_json({"rl": {"algorithm": algorithm}, "preset": "tiny"})
    assert config.rl.algorithm.correction == "none" and config.rl.algorithm.correction_low is None
    kept = RunConfig.from_json({"rl": {"algorithm": algorithm | {"correction": "icepop"}}})
    assert kept.rl.algorithm.bounds == (0.5, 2.0)


@pytest.mark.parametrize("name", RECIPES)
def test_algorithm_sets_the_whole_recipe_and_single_options_go_on_top(name: str) -> None:
    config = train_agent.parse_arguments(["--preset", "tiny", "--algorithm", name])
    assert config.rl.algorithm == named_spec(name) and config.algorithm == name
    assert config.rl == dataclasses.replace(tiny().rl, algorithm=named_spec(name))
    assert RunConfig.from_json(config.to_json()) == config
    flags = ["--algorithm", name, "--rl.algorithm.entropy-coef", "1e-4", "--rl.lr", "1e-3"]
    changed = train_agent.parse_arguments(["--preset", "tiny", *flags])
    assert changed.rl.algorithm == dataclasses.replace(named_spec(name), entropy_coef=1e-4)
    assert changed.rl.lr == 1e-3


def test_an_unknown_algorithm_is_refused_with_all_names() -> None:
    with pytest.raises(ValueError) as caught:
        train_agent.parse_arguments(["--algorithm", "nope"])
    names = ", ".join(RECIPES)
    assert str(caught.value) == f"--algorithm nope: no such algorithm; choose one of {names}"
    assert len(RECIPES) == 27


def test_the_loss_that_ends_a_preset_s_warm_start_is_of_its_own_game_alone() -> None:
    own = train_agent.parse_arguments(["--preset", "tiny_vision"])
    other = train_agent.parse_arguments(["--preset", "tiny_vision", "--env", "album"])
    assert own.warm_start.stop_loss > 0 == other.warm_start.stop_loss


def test_the_verb_for_algorithms_says_what_each_is_and_where_it_was_published(
    capsys: pytest.CaptureFixture[str],
) -> None:
    algorithms()
    shown = " ".join(capsys.readouterr().out.split())
    for name, recipe in RECIPES.items():
        assert f"{name} {recipe.summary}" in shown
        assert re.search(r"\((arXiv \d{4}\.\d{5}|ringtech\.notion\.site/\w+)\)$", recipe.summary), (
            name
        )


@pytest.mark.parametrize("name", RECIPES)
def test_the_options_that_the_verb_gives_for_a_recipe_make_it_from_grpo(name: str) -> None:
    words = [word for line in recipe_text(name).splitlines()[3:] for word in line.split()]
    config = train_agent.parse_arguments(["--preset", "tiny", *words])
    assert config.rl.algorithm == named_spec(name)


def test_a_resumed_run_keeps_its_algorithm_unless_another_is_named(tmp_path: Path) -> None:
    begun = tiny().with_algorithm("gspo")
    (tmp_path / "config.json").write_text(json.dumps(begun.to_json()))
    flags = ["--resume", "--out", str(tmp_path)]
    assert train_agent.parse_arguments(flags).rl.algorithm == named_spec("gspo")
    tuned = [*flags, "--algorithm", "gspo", "--rl.algorithm.clip-low", "1e-3"]
    assert train_agent.parse_arguments(tuned).rl.algorithm.clip_low == 1e-3
    changed = train_agent.parse_arguments([*flags, "--algorithm", "cispo"])
    assert changed.rl.algorithm == named_spec("cispo") and changed.algorithm == "cispo"
