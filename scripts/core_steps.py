"""One decode step and one GRPO step of the tiny preset, and which files of ours they enter.

docs/core.md lists those files in reading order; tests/test_core_page.py holds the page to them.

    decode   `LLMEngine.step` while every sequence decodes
    grpo     `Learner.train_and_publish`: groups of rollouts become one optimizer step, and its
             weights the inference engine's

Both use the parts that `train_agent.sh --preset tiny` is made of, on a CPU. Weights are random and
never give a right answer, so the reward is the share of even tokens: groups have to differ.
Left out: what happens once, in the first steps (the traced one is a later one), C++, which Python
cannot see, and the loop around the two steps: agents, environments and sandbox (docs/tour.md).
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo_on_a_page import to_rollout  # noqa: E402
from house import PACKAGES  # noqa: E402

from nanoinfer.async_engine import AsyncEngine  # noqa: E402
from nanoinfer.params import SamplingParams  # noqa: E402
from nanorl.agents import kit  # noqa: E402
from nanorl.parts import Parts  # noqa: E402
from nanorl.presets import get_preset  # noqa: E402
from nanorl.roles.inline import InlineRoles  # noqa: E402
from nanorl.scorers.scored_learner import make_learner  # noqa: E402
from nanorl.types import Rollout  # noqa: E402
from nanorl.weights.in_process import make_publisher  # noqa: E402

Entered = dict[str, list[str]]  # file -> its functions, both in the order of their first call
PROMPTS = [list(range(5, 25)), list(range(30, 42))]
GROUP, LENGTH = 4, 8


def files_entered(work: Callable[[], object]) -> Entered:
    """The files of our packages in which functions are called while `work` runs, in this thread."""
    found: dict[str, dict[str, None]] = {}
    roots = tuple(f"{ROOT / package}/" for package in PACKAGES)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = event == "call" and not code.co_name.startswith("<")
        if is_function and code.co_filename.startswith(roots):
            file = str(Path(code.co_filename).relative_to(ROOT))
            found.setdefault(file, {})[code.co_qualname] = None

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return {file: list(functions) for file, functions in found.items()}


def trace_steps() -> dict[str, Entered]:
    """What a decode step and a GRPO step enter."""
    with tiny_roles() as roles:
        return {"decode": trace_decode(roles), "grpo": trace_grpo(roles)}


@contextmanager
def tiny_roles() -> Iterator[InlineRoles]:
    """The roles of a run of the tiny preset. Nothing here calls the sandbox, so machines that
    cannot isolate programs may trace too."""
    config = get_preset("tiny").config()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(kit, "run_sandbox"):
        config = replace(config, out=Path(folder), device="cpu", threads=1)
        roles = InlineRoles(Parts(config))
        try:
            yield roles
        finally:
            roles.close()


def trace_decode(roles: InlineRoles) -> Entered:
    """A step in the middle of a generation."""
    engine = roles.rollout_engine
    for prompt in PROMPTS:
        for seed in range(GROUP):
            engine.add(prompt, sampling(roles, seed))
    for _ in range(LENGTH // 2):
        engine.step()
    entered = files_entered(engine.step)
    while engine.num_unfinished:
        engine.step()
    return entered


def trace_grpo(roles: InlineRoles) -> Entered:
    """The second of two steps, each on rollouts that the present weights sampled."""
    roles.engine.restart(roles.parts.rl_config())
    publisher = make_publisher(roles.engine, AsyncEngine(roles.rollout_engine, executor=Here()))
    learner = make_learner(
        roles.parts.config, engine=roles.engine, publisher=publisher, thread=Here()
    )
    with asyncio.Runner() as runner:
        runner.run(learner.publish(0))
        runner.run(learner.train_and_publish(play(roles, step=0), 1))
        groups = play(roles, step=1)
        return files_entered(lambda: runner.run(learner.train_and_publish(groups, 2)))


class Here(Executor):
    """Runs everything in the caller's thread, the only one that is traced."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def sampling(roles: InlineRoles, seed: int, **options: Any) -> SamplingParams:
    temperature = roles.parts.config.rl.temperature
    return SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=seed, **options)


def play(roles: InlineRoles, step: int) -> list[list[Rollout]]:
    """A group of rollouts for each prompt, scored as `grpo_on_a_page.py` scores them."""
    outputs = iter(roles.rollout_engine.generate(PROMPTS, sampling(roles, step, n=GROUP)))
    return [
        [to_rollout(step, group, member, prompt, next(outputs)) for member in range(GROUP)]
        for group, prompt in enumerate(PROMPTS)
    ]


if __name__ == "__main__":
    for title, entered in trace_steps().items():
        print(f"{title}: {len(entered)} files, {sum(map(len, entered.values()))} functions")
        for file, functions in entered.items():
            print(f"  {file}: {', '.join(functions)}")
