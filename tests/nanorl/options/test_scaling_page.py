"""docs/scaling.md: every option that it names exists, and its tables are the estimator's."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoengine.plan.estimate import (
    HARDWARE,
    Estimate,
    Workload,
    best_variant,
    model_shape,
    parse,
    plans,
)
from nanoengine.plan.footprint import Plan
from nanoinfer.server.config import ServerConfig
from nanorl.cli import VERBS
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "scaling.md").read_text("utf-8")


def commands() -> list[list[str]]:
    """The words of every command in a block of shell, continued lines joined, without comments."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def options(record: Any, prefix: str = "") -> Iterator[str]:
    """The flags of a dataclass, of its type or filled in."""
    for field in dataclasses.fields(record):
        name = prefix + field.name.replace("_", "-")
        kind = getattr(record, field.name, field.default_factory)
        if dataclasses.is_dataclass(kind):
            yield from options(kind, f"{name}.")
        else:
            yield f"--{name}"


RUN = set(options(get_preset("tiny").config()))


def flags(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if word.startswith("--")}


def known(words: list[str]) -> tuple[set[str], set[str]] | None:
    """(the flags of ours that a command names, those that there are); None: not our program."""
    line = " ".join(words)
    if "scripts/train_agent.sh" in line or "train_agent.sbatch" in line:
        start = next(i for i, word in enumerate(words) if "scripts/" in word)
        return flags(words[start:]), RUN
    if words[0] == "nanorl":
        module, _, name = VERBS[words[1]].place.partition(":")
        verb = inspect.signature(getattr(importlib.import_module(module), name))
        return flags(words), {f"--{each.replace('_', '-')}" for each in verb.parameters}
    if "nanoinfer.server" in words:
        return flags(words), set(options(ServerConfig))
    return None


def test_every_option_of_every_command_exists() -> None:
    checked = 0
    for words in commands():
        if found := known(words):
            given, there = found
            assert given <= there, (words, given - there)
            checked += 1
        elif "nanoengine.plan.estimate" in words:
            parse(words[words.index("nanoengine.plan.estimate") + 1 :])  # exits if it cannot
        else:
            assert words[0] in ("ray", "curl", "pip", "VLLM_SERVER_DEV_MODE=1"), words
    assert checked > 10


def test_every_option_that_the_text_names_exists() -> None:
    sections = {flag.split(".")[0] for flag in RUN if "." in flag}
    named = set(re.findall(r"--[a-z][a-z-]*\.[a-z][a-z-]*(?:\.[a-z-]+)?", PAGE))
    assert {flag.split(".")[0] for flag in named} <= sections
    assert named <= RUN, named - RUN
    assert {"--cluster.backend", "--learner.dp", "--rollout.replicas", "--monitor.port"} <= named


@pytest.mark.parametrize("words", [w for w in commands() if "train_agent" in " ".join(w)], ids=str)
def test_the_config_accepts_what_a_command_asks_for(words: list[str]) -> None:
    import tyro

    start = next(i for i, word in enumerate(words) if "scripts/" in word)
    ours = ["--cluster.backend", "ray", "--cluster.address", "FIRST:6379"]  # the Slurm script's
    given = [*(ours if words[0] == "sbatch" else []), *words[start + 1 :]]
    config = tyro.cli(RunConfig, default=get_preset("tiny").config(), args=given)
    assert isinstance(config, RunConfig)


ROWS = [
    [cell.strip() for cell in row.strip("|\n ").split("|")]
    for row in PAGE.splitlines()
    if re.match(r"\| \S+ \| \d+ x ", row)
]


def first_layout(model: str, num_gpus: int, card: str) -> Estimate:
    """The layout that the estimator lists first, with the defaults of its command line."""
    sequence = 4096
    workload = Workload(
        model=model_shape(model), seq_len=sequence, batch_tokens=1 << 19, micro_tokens=sequence
    )
    found = []
    for plan in plans(num_gpus, Plan(sequence_parallel=True), []):
        try:
            found.append(best_variant(workload, plan, HARDWARE[card], []))
        except ValueError:  # it cannot split this model
            continue
    return min(found, key=lambda one: (not one.fits, one.step_s))


def test_the_tables_are_what_the_estimator_puts_first() -> None:
    assert len(ROWS) >= 15
    for model, card, *cells in ROWS:
        num_gpus, name = card.split(" x ")
        best = first_layout(model, int(num_gpus), name)
        assert best.fits, (model, card)
        memory, plan = best.memory, best.plan
        kept = memory.params + memory.grads + memory.optimizer
        assert cells == [
            *(str(plan), str(plan.zero), "yes" if plan.checkpointing else "no"),
            *(f"{memory.total / 1e9:.1f}", f"{kept / 1e9:.1f}"),
        ], (model, card)


def test_qwen3_8b_fits_no_single_card() -> None:
    assert not any(first_layout("qwen3-8b", 1, card).fits for card in HARDWARE)
