"""One decode step, one GRPO step and one rollout of the tiny preset: which files they enter.

docs/core.md lists those files in reading order; tests/test_core_page.py holds the page to them.

    decode   `LLMEngine.step` while every sequence decodes
    grpo     `Learner.train_and_publish`: groups of rollouts become one optimizer step, and its
             weights the inference engine's
    rollout  `CollectorRole.run_group`: a task is played, with one call of a tool, and scored

All use the parts that `train_agent.sh --preset tiny` is made of, on a CPU. Weights are random and
never give a right answer, so for the step the reward is the share of even tokens: groups have to
differ. In the rollout a script says what the preset's teacher would say, in the engine's place: a
program, then its answer. The sandbox is real, so the machine must be able to isolate programs.
Left out: what happens once, in the first steps (the traced one is a later one), C++, which Python
cannot see, and other threads and processes, among them the sandbox's own.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from grpo_on_a_page import to_rollout  # noqa: E402
from house import PACKAGES  # noqa: E402

from nanoengine.text.tokenizer import ChatTokenizer  # noqa: E402
from nanoinfer.async_engine import AsyncEngine  # noqa: E402
from nanoinfer.params import Output, SamplingParams  # noqa: E402
from nanorl.distributed.roles.collector_role import CollectorRole  # noqa: E402
from nanorl.distributed.roles.inline_roles import InlineRoles  # noqa: E402
from nanorl.distributed.roles.role import DirectRole  # noqa: E402
from nanorl.distributed.weights.in_process import make_publisher  # noqa: E402
from nanorl.envs.actions import COMPACT, program  # noqa: E402
from nanorl.envs.tasks.problem import Problem  # noqa: E402
from nanorl.options import agent_kit  # noqa: E402
from nanorl.options.parts import Parts  # noqa: E402
from nanorl.options.presets import get_preset  # noqa: E402
from nanorl.scorers.scored_learner import make_learner  # noqa: E402
from nanorl.task import Task  # noqa: E402
from nanorl.types import Rollout  # noqa: E402

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
def tiny_parts() -> Iterator[Parts]:
    """The light parts of a run of the tiny preset."""
    with tempfile.TemporaryDirectory() as folder:
        config = get_preset("tiny").config()
        yield Parts(replace(config, out=Path(folder), device="cpu", threads=1))


@contextmanager
def tiny_roles() -> Iterator[InlineRoles]:
    """The roles of such a run. Neither step calls the sandbox, so machines that cannot isolate
    programs may trace too."""
    with tiny_parts() as parts, mock.patch.object(agent_kit, "run_sandbox"):
        roles = InlineRoles(parts)
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


def trace_rollout() -> Entered:
    """The second of two rollouts; the first opens the sandbox. SandboxUnavailable where the machine
    cannot isolate programs."""
    with tiny_parts() as parts, asyncio.Runner() as runner:
        script = Script(parts.tokenizer)
        agents = agent_kit.AgentKit(parts.config, parts.folder, kind=parts.kind)
        make = partial(CollectorRole, parts.config, parts.folder, kit=agents, generator=script)
        collector = DirectRole("collector", make)
        sampling = SamplingParams(max_tokens=1, temperature=parts.config.rl.temperature)
        first, second = parts.tasks.train.batch(0, 2)
        groups: list[list[Rollout]] = []

        async def play(task: Task) -> None:
            group = await collector.call(
                CollectorRole.run_group, task, group_id="g", size=1, sampling=sampling
            )
            groups.append(group)

        try:
            script.turns = solution_of(first)
            runner.run(play(first))
            script.turns = solution_of(second)
            entered = files_entered(lambda: runner.run(play(second)))
        finally:
            runner.run(collector.call(CollectorRole.close))
        for (rollout,) in groups:
            assert rollout.reward == 1.0, "the script knows the answer"
            assert rollout.metrics["num_exec_ok"] == 1.0, "the tool was called, and answered"
        return entered


def solution_of(task: Task) -> list[str]:
    """The turns of a policy that calls the tool once and then answers."""
    assert isinstance(task, Problem), "the preset's own tasks come with a solution"
    code = task.solutions[0][-1]
    return [COMPACT.write(program(code)), COMPACT.write_answer(task.answer_text)]


class Script:
    """An engine that samples what is written here, one turn a request."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.turns: list[str] = []
        self._tokenizer = tokenizer

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        text = self._tokenizer.encode(self.turns.pop(0), allow_special=True)
        said = [*text, min(self._tokenizer.eos_ids)]
        count = len(said)
        return Output(ids=said, logps=[-0.1] * count, versions=[0] * count, finish_reason="stop")


class Here(Executor):
    """Runs everything in the caller's thread, the only one that is traced."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:  # as an executor: a future carries whatever was raised
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
    for title, entered in {**trace_steps(), "rollout": trace_rollout()}.items():
        print(f"{title}: {len(entered)} files, {sum(map(len, entered.values()))} functions")
        for file, functions in entered.items():
            print(f"  {file}: {', '.join(functions)}")
