"""`Checkup`: a run's parts, made and tried before the run, and everything that was found.

A few training tasks are played several times each by the untrained model, through the run's own
environment, agent loop, reward and sandbox, in one process and with one copy of the weights
(distributed/roles/player.py). What cannot even be made ends the checkup with that finding.
Left out: the layout of a run over several processes, whose memory nanoengine/plan/estimate.py
counts.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from nanoengine.parallel.device import free_bytes
from nanoengine.state.tensor_file import CheckpointError
from nanoinfer.params import SamplingParams
from nanorl.distributed.roles.player import Player
from nanorl.distributed.warm_start import WarmStart
from nanorl.envs.base import TeacherError
from nanorl.envs.mix import environment_of
from nanorl.inspection.doctor.borders import border_findings
from nanorl.inspection.doctor.machine_limits import free_memory_bytes
from nanorl.inspection.doctor.minutes import Minutes, Speed, expected_minutes, minutes_finding
from nanorl.inspection.doctor.preconditions import (
    PROCESS_BYTES,
    disk_finding,
    free_disk_bytes,
    heldout_findings,
    memory_finding,
    missing_teacher,
    prompt_finding,
    system_finding,
    teacher_finding,
    template_findings,
)
from nanorl.inspection.doctor.tool_tokens import described_tools, tools_finding
from nanorl.observability.alarms.alarms import Evidence, rollout_findings
from nanorl.observability.alarms.finding import Finding, Severity, in_order, verdict
from nanorl.observability.alarms.silence import rehearse_silence, rehearsed_silence
from nanorl.observability.report.chat_decode import ChatDecode
from nanorl.observability.report.transcript import transcript
from nanorl.options.parts import Parts
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import members_of_kind, settle_sandbox
from nanorl.options.run_sizes import activation_bytes, resident_bytes
from nanorl.plugins import where_raised
from nanorl.sandbox.base import SandboxUnavailable
from nanorl.task import Task, derive_seed
from nanorl.types import InfrastructureError, Rollout, Status

if TYPE_CHECKING:
    from nanoengine.vision.seeing_config import SeeingConfig
    from nanorl.run.restarts import RunToEnd

NUM_TASKS, NUM_MEMBERS = 4, 4
NUM_TRACES = 8
"""Teachers may be sloppy on purpose: of so few, all fail by accident once in sixty times."""
NUM_TRAINING_TASKS = 512  # compared with the held-out ones
NUM_PROMPTS = 64  # whose length is looked at
DEADLINE_S = 120.0
"""Of a rollout, where the run's own deadline is later: a check is for people who wait."""
FORWARD_TOKENS = 512
_MENDABLE = (ValueError, OSError, CheckpointError, InfrastructureError, SandboxUnavailable)


@dataclass(kw_only=True)
class Checkup:
    """The findings, the worst first, and the rollouts that were played for them."""

    findings: list[Finding] = field(default_factory=list)
    played: list[tuple[Task, Rollout]] = field(default_factory=list)
    """Without rollouts that failed."""
    environments: Sequence[str] = ()
    """Their names, where there are several."""
    seconds: float = 0.0
    minutes: Minutes | None = None
    sandbox: str = ""
    """The one in which the agent's programs ran, and why it is not another; empty: none ran."""
    example: str = ""
    """One rollout as people read it."""

    @property
    def is_workable(self) -> bool:
        return all(one.severity is not Severity.ERROR for one in self.findings)

    @property
    def verdict(self) -> str:
        return verdict(self.findings)

    def summary(self) -> str:
        """Say what was played and what came of it, in a line or two."""
        if not self.played:
            return "nothing was played to its end"
        rollouts = [rollout for _, rollout in self.played]
        count = len(rollouts)
        lines = [
            f"{count} rollouts of {len({task.task_id for task, _ in self.played})} tasks in "
            f"{self.seconds:.0f} s, untrained: success "
            f"{sum(one.is_success for one in rollouts) / count:.0%}, reward "
            f"{sum(one.total_reward for one in rollouts) / count:.3g}, "
            f"{sum(one.num_turns for one in rollouts) / count:.1f} turns, "
            f"{sum(one.num_action_tokens for one in rollouts) / count:.0f} tokens written"
        ]
        lines += self._by_environment()
        if any(sequence.images for one in rollouts for sequence in one.sequences):
            from nanorl.inspection.doctor.picture_findings import pictures_summary  # few runs see

            lines.append(pictures_summary(rollouts))
        lines += [f"sandbox: {self.sandbox}"] if self.sandbox else []
        return "\n".join([*lines, *([self.minutes.text()] if self.minutes else [])])

    def _by_environment(self) -> list[str]:
        """A line for each environment, where there are several."""
        if not self.environments:
            return []
        played: dict[str, list[Rollout]] = {name: [] for name in self.environments}
        for task, rollout in self.played:
            played[environment_of(task.task_id)].append(rollout)
        return [
            f"  {name}: success {sum(one.is_success for one in those) / len(those):.0%}, reward "
            f"{sum(one.total_reward for one in those) / len(those):.3g} of {len(those)} rollouts"
            if those
            else f"  {name}: nothing was played to its end"
            for name, those in played.items()
        ]

    def to_json(self) -> dict[str, Any]:
        rollouts = [rollout for _, rollout in self.played]
        return {
            "verdict": self.verdict,
            "is_workable": self.is_workable,
            "findings": [one.to_json() for one in self.findings],
            "num_rollouts": len(rollouts),
            "rewards": [one.total_reward for one in rollouts],
            "success": sum(one.is_success for one in rollouts) / max(len(rollouts), 1),
            "seconds": self.seconds,
            "sandbox": self.sandbox,
            "minutes": None if self.minutes is None else self.minutes.total,
            "example": self.example,
        }


def check_run(
    config: RunConfig, *, env: object = None, run_to_end: RunToEnd = asyncio.run
) -> Checkup:
    """Make the parts of a run, play with them and say what was found. Nothing is written into the
    run's folder. `env` is an environment given as an object."""
    if config.resume or config.fork:
        flag = "--resume" if config.resume else "--fork"
        raise ValueError(
            f"nanorl check {flag}: it looks at runs that are still to begin; leave {flag} out, or "
            "measure a trained model with nanorl eval"
        )
    checkup = Checkup()
    with TemporaryDirectory(prefix="nanorl-check-") as folder:
        alone = _in_one_process(config, Path(folder))
        try:
            parts = Parts(alone, env=env)
            parts.config, checkup.sandbox = settle_sandbox(parts.config, parts.kind)
            _Examination(config, parts, checkup).run(run_to_end)
        except _MENDABLE as error:
            checkup.findings.append(_not_made(error))
    checkup.findings = in_order(checkup.findings)
    return checkup


def _in_one_process(config: RunConfig, folder: Path) -> RunConfig:
    """The same run with other places for its files, no other processes, and less patience."""
    plain = RunConfig()
    deadline_s = min(config.agent.deadline_s or DEADLINE_S, DEADLINE_S)
    return replace(
        config,
        out=folder / "run",
        cluster=plain.cluster,
        learner=plain.learner,
        rollout=plain.rollout,
        agent=replace(config.agent, deadline_s=deadline_s),
    )


def _not_made(error: Exception) -> Finding:
    """The finding for an error with which the run would end before it begins. The error's message
    says what mends it."""
    if isinstance(error, SandboxUnavailable):
        return Finding(
            name="no_sandbox",
            severity=Severity.ERROR,
            seen=error.reason,
            why="programs that a model writes must not run without walls",
            remedy=error.remedy,
        )
    return Finding(
        name="not_made",
        severity=Severity.ERROR,
        seen=str(error),
        why="the run ends with this message before it begins",
        remedy="as the message says",
    )


class _Examination:
    """One checkup on its way."""

    def __init__(self, config: RunConfig, parts: Parts, checkup: Checkup) -> None:
        """`config` is the user's; that of `parts` is for one process."""
        self.config, self.parts, self.checkup = config, parts, checkup
        checkup.environments = [name for name in members_of_kind(parts.kind) if name]
        self.errors: list[str] = []  # of rollouts
        self.traces: list[Rollout] = []
        self.trace_errors: list[str] = []
        self.silence: Finding | None = None

    def run(self, run_to_end: RunToEnd) -> None:
        found, parts = self.checkup.findings, self.parts
        found += template_findings(parts.tokenizer)
        if parts.pictures is not None:
            # here: it imports rooms that runs of text do without
            from nanorl.inspection.doctor.picture_findings import picture_template_findings

            found += picture_template_findings(parts.tokenizer, cast("SeeingConfig", parts.shape))
        found += self._machine()
        train = parts.tasks.train.batch(0, NUM_TRAINING_TASKS)
        found += heldout_findings(train, parts.tasks.heldout)
        missing = missing_teacher(self.config, has_teacher=parts.kind.has_teacher)
        found += [missing] if missing else []
        if any(one.name in ("no_template", "bad_template") for one in found):
            return  # no task can be opened
        player = Player(parts)
        try:
            run_to_end(self._play(player, train))
        finally:
            player.close()
        self._judge()

    def _machine(self) -> list[Finding]:
        """Before the model is loaded, which takes some of the memory itself."""
        config, parts = self.config, self.parts
        disk = disk_finding(config, parts.num_parameters, free_disk_bytes(config.run_dir))
        found = [disk] if disk else []
        if config.cluster.backend != "inline":
            return found
        needed = resident_bytes(parts.config, parts.shape)
        needed += activation_bytes(
            parts.config, parts.shape, parts.config.engine.micro_batch_tokens
        )
        needed += parts.config.engine.cache_mb << 20
        if parts.device.type == "cpu":
            memory = memory_finding(needed + PROCESS_BYTES, free_memory_bytes())
        else:
            memory = memory_finding(needed, free_bytes(parts.device))
        return [*found, memory] if memory else found

    async def _play(self, player: Player, train: Sequence[Task]) -> None:
        tasks = self._chosen(train)
        try:
            if await self._open(player, tasks, train[:NUM_PROMPTS]):
                start = time.perf_counter()
                await self._rollouts(player, tasks)
                self.checkup.seconds = time.perf_counter() - start
                await self._silence(player, tasks[0])
                await self._speed(player)
            if self.config.warm_start.steps and self.parts.kind.has_teacher:
                await self._teacher(player)
        finally:
            await player.close_loop()

    def _chosen(self, train: Sequence[Task]) -> list[Task]:
        """The tasks to play: the first ones, of several environments as many of each."""
        if not self.checkup.environments:
            first = {task.task_id: task for task in train[: 4 * NUM_TASKS]}
            return list(first.values())[:NUM_TASKS]
        of_each = max(1, NUM_TASKS // len(self.checkup.environments))
        chosen: list[Task] = []
        for name in self.checkup.environments:
            its = {one.task_id: one for one in train if environment_of(one.task_id) == name}
            chosen += list(its.values())[:of_each]
        return chosen

    async def _open(self, player: Player, tasks: Sequence[Task], more: Sequence[Task]) -> bool:
        """Open an episode of each task, without a turn. False where that is no use."""
        tokenizer, found = self.parts.tokenizer, self.checkup.findings
        lengths: list[int] = []
        seen: set[str] = set()
        beside = 0
        for task in tasks:
            env = player.kit.environment()
            try:
                try:
                    opening = await env.reset(task)
                finally:
                    await env.close()
            except Exception as error:  # a plug-in boundary
                self.errors.append(_described(error))
                continue
            if system := system_finding(tokenizer, opening.messages):
                found.append(system)
                return False
            name = environment_of(task.task_id) if self.checkup.environments else ""
            kind = members_of_kind(self.parts.kind)[name]
            if name not in seen:  # the tools of an environment are the same for all its tasks
                seen.add(name)
                tools = described_tools(kind)
                dear = tools_finding(tokenizer, opening, tools)
                found += [dear] if dear else []
                loop = self.config.agent.loop or kind.loop
                if broken := border_findings(tokenizer, opening, tools, loop):
                    found += broken
                    return False
            ids = tokenizer.encode_chat(
                opening.messages, add_generation_prompt=True, tools=opening.tools
            )
            lengths.append(len(ids))
            beside = max(beside, len(ids) - len(tokenizer.encode(task.prompt_text)))
        lengths += [beside + len(tokenizer.encode(task.prompt_text)) for task in more]
        long = prompt_finding(lengths, self.config)
        found += [long] if long else []
        return len(self.errors) < len(tasks)

    async def _rollouts(self, player: Player, tasks: Sequence[Task]) -> None:
        async def play(task: Task, group_id: str, rollout_id: str) -> tuple[Task, Rollout | str]:
            seed = derive_seed(self.config.seed, "check", rollout_id)
            sampling = self.config.rl.sampling(seed)
            try:
                rollout = await player.play(
                    task, group_id=group_id, rollout_id=rollout_id, sampling=sampling
                )
            except Exception as error:  # a plug-in boundary
                return task, _described(error)
            return task, rollout.error if rollout.status is Status.FAILED else rollout

        plays = [
            play(task, f"check-g{number}", f"check-g{number}-m{member}")
            for number, task in enumerate(tasks)
            for member in range(NUM_MEMBERS)
        ]
        for task, result in await asyncio.gather(*plays):
            if isinstance(result, str):
                self.errors.append(result)
            else:
                self.checkup.played.append((task, result))

    async def _silence(self, player: Player, task: Task) -> None:
        """See whether being cut off is worth more than playing. A command is not run for it."""
        if self.config.agent.command:
            return
        try:
            silent, playing = await rehearse_silence(player.kit, task)
        except Exception as error:  # a plug-in boundary
            self.errors.append(_described(error))
            return
        self.errors += [one.error for one in (silent, playing) if one.status is Status.FAILED]
        self.silence = rehearsed_silence(silent, playing)

    async def _speed(self, player: Player) -> None:
        """Time one forward pass, and say how long the run will take."""
        rollouts = [rollout for _, rollout in self.checkup.played]
        num_sampled = sum(one.num_action_tokens for one in rollouts)
        if not num_sampled:
            return
        forward = await self._forward_speed(player)
        speed = Speed(sampled=num_sampled / self.checkup.seconds, forward=forward)
        num_heldout = len(self.parts.tasks.heldout)
        self.checkup.minutes = expected_minutes(self.config, rollouts, speed, num_heldout)

    async def _forward_speed(self, player: Player) -> float:
        """Tokens a second of a forward pass; the better of two, since the first one warms up."""
        count = min(FORWARD_TOKENS, self.parts.shape.max_position_embeddings - 1)
        best = 0.0
        for seed in range(2):
            rng = random.Random(seed)  # other ids each time, so that nothing is cached
            ids = [rng.randrange(self.parts.tokenizer.vocab_size) for _ in range(count)]
            start = time.perf_counter()
            await player.generator.generate(ids, SamplingParams(max_tokens=1))
            best = max(best, count / (time.perf_counter() - start))
        return best

    async def _teacher(self, player: Player) -> None:
        warm = WarmStart(self.parts.config, player.kit)
        for number, task in enumerate(warm.tasks.batch(0, NUM_TRACES)):
            try:
                trace = await warm.play_teacher(task, rollout_id=f"check-teacher-{number}")
            except TeacherError as error:  # its message says everything
                self.trace_errors.append(str(error).removeprefix("the teacher failed: "))
                return
            except Exception as error:  # a plug-in boundary
                self.trace_errors.append(_described(error))
                return
            if trace.status is Status.FAILED:
                self.trace_errors.append(trace.error)
                return
            self.traces.append(trace)

    def _judge(self) -> None:
        """Add what the rollouts and the traces say, and choose one rollout for the reader."""
        checkup, played = self.checkup, self.checkup.played
        groups: dict[str, list[Rollout]] = {}
        for _, rollout in played:
            groups.setdefault(rollout.group_id, []).append(rollout)
        evidence = Evidence(
            config=self.config,
            groups=list(groups.values()),
            errors=self.errors,
            tokenizer=self.parts.tokenizer,
            has_tools=self.parts.kind.has_tools,
            is_untrained=True,
        )
        found = checkup.findings
        found += rollout_findings(evidence)
        if self.parts.pictures is not None:
            from nanorl.inspection.doctor.picture_findings import context_finding  # few runs see

            full = context_finding([rollout for _, rollout in played], self.config)
            found += [full] if full else []
        is_seen = any(one.name == "silence_pays" for one in found)
        further = (
            None if is_seen else self.silence,
            teacher_finding(self.traces, self.trace_errors),
            None if checkup.minutes is None else minutes_finding(checkup.minutes),
        )
        found += [one for one in further if one is not None]
        if played:
            task, rollout = max(played, key=lambda pair: pair[1].total_reward)
            decode = ChatDecode(self.parts.tokenizer)
            checkup.example = transcript(task, rollout, decode, title="the best of the rollouts")


def _described(error: Exception) -> str:
    """Describe what was raised, and the line of the user's code that led to it."""
    return f"{type(error).__name__}: {error}{where_raised(error)}"
