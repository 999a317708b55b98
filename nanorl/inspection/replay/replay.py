"""`replay`: plays stored rollouts of a run again, with the machinery that played them.

Version by version: the weights are made again (weights.py), all chosen rollouts of that version are
played at once, each with its own seed, and compared (difference.py). A run that was resumed with
other options is replayed segment by segment, each with engines and agents of its own options.
Left out: tools that reach out of the sandbox. What they do happens again.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.torch.allocator import reuse_large_buffers
from nanorl.agents.context import Generator
from nanorl.distributed.roles.inline_roles import InlineRoles
from nanorl.envs.group_judged import before_judging
from nanorl.inspection.replay.causes import altered_logp, changed_parts, ranked
from nanorl.inspection.replay.difference import Difference, first_difference
from nanorl.inspection.replay.forced import (
    StoredTurns,
    has_old_cache,
    sampler_scores,
    samples_of,
    versions_of,
    with_scores,
)
from nanorl.inspection.replay.past_run import UNTRAINED, Chosen, PastRun
from nanorl.inspection.replay.replay_result import Replayed, ReplayResult
from nanorl.inspection.replay.tasks import CurrentTasks, changes
from nanorl.inspection.replay.weights import PastWeights
from nanorl.observability.results import WITHHELD
from nanorl.observability.store import content_hash
from nanorl.options.parts import Parts
from nanorl.options.run_kind import PICTURES
from nanorl.run.manifest import manifest_of
from nanorl.task import Task
from nanorl.types import Rollout, Status

EQUAL, UNKNOWN = "equal", "not recorded by the run"


def replay(run: PastRun, chosen: Sequence[Chosen], *, stored_tasks: bool = False) -> ReplayResult:
    """Play the chosen rollouts of the run again, one at least, with today's tasks or with those
    that it stored. ValueError where the run did not keep what that takes."""
    reuse_large_buffers()
    torch.set_num_threads(1)  # of this thread: the engines' own uses several
    start = time.perf_counter()
    result = ReplayResult()
    numbers = [run.segment(one.place) for one in chosen]
    with tempfile.TemporaryDirectory(prefix="nanorl-replay-") as folder:
        carried = None
        for number in range(_first_stretch(run, chosen, min(numbers)), max(numbers) + 1):
            mine = [one for one, its in zip(chosen, numbers, strict=True) if its == number]
            work = SegmentReplay(run, number, mine, stored_tasks=stored_tasks, scratch=Path(folder))
            carried = work.play(carried, result, is_last=number == max(numbers))
    result.seconds = time.perf_counter() - start
    return result


def _first_stretch(run: PastRun, chosen: Sequence[Chosen], number: int) -> int:
    """The segment to begin with, so that all weights can be made: `number`, the first of the chosen
    rollouts, or an earlier one where no checkpoint lies between its begin and them."""
    mine = (one for one in chosen if run.segment(one.place) == number)
    wanted = min(run.version(one) for one in mine)
    while number and not any(run.begin_version(number) <= at <= wanted for at in run.bases):
        number -= 1
    return number


class SegmentReplay:
    """The replay of one segment of a run, with engines, agents and tasks of its own options."""

    def __init__(
        self,
        run: PastRun,
        number: int,
        chosen: Sequence[Chosen],
        *,
        stored_tasks: bool,
        scratch: Path,
    ) -> None:
        config = run.segments[number].config
        if stored_tasks and config.tasks is not None:
            config = replace(config, tasks=_write_tasks(run, scratch), task_fields=())
        self._run, self._number, self._chosen = run, number, chosen
        self._scratch = scratch / f"weights-{number}"
        self._parts = Parts(config)
        self._tasks = None if stored_tasks else CurrentTasks(self._parts)
        self._manifest = manifest_of(self._parts)
        self._rollouts = {one: run.rollout(one) for one in chosen}
        self._scores: dict[Chosen, Scores] = {one: {} for one in chosen}
        self._weights_said = ""

    def play(
        self, carried: tuple[int, Path] | None, result: ReplayResult, *, is_last: bool
    ) -> tuple[int, Path] | None:
        """Play what is chosen, into `result`. `carried` are weights with which the segment may
        begin; returns those with which the next one may, where no checkpoint has them."""
        roles = InlineRoles(self._parts)
        try:
            return asyncio.run(self._play(roles, carried, result, is_last))
        finally:
            roles.close()

    async def _play(
        self,
        roles: InlineRoles,
        carried: tuple[int, Path] | None,
        result: ReplayResult,
        is_last: bool,
    ) -> tuple[int, Path] | None:
        weights = PastWeights(self._run, self._parts, roles)
        try:
            for version in sorted({v for one in self._chosen for v in self._versions(one)}):
                await weights.go_to(version, carried=carried)
                if version != UNTRAINED:  # that model is a part of the manifest
                    result.weights[version] = await self._check(weights)
                result.rollouts += await self._play_version(roles, version)
            result.notes += weights.damaged
            self._note_changes(result)
            self._note_old_caches(result)
            return None if is_last else await self._carry(weights, carried)
        finally:
            await roles.close_loop()

    def _versions(self, one: Chosen) -> set[int]:
        """Those of the weights that it takes."""
        rollout = self._rollouts[one]
        is_scored = self._is_said_again(one) and not has_old_cache(rollout)
        return versions_of(rollout) if is_scored else {self._run.version(one)}

    def _is_said_again(self, one: Chosen) -> bool:
        """Say whether no single policy samples it."""
        rollout = self._rollouts[one]
        return one.phase == "rl" and (len(versions_of(rollout)) > 1 or has_old_cache(rollout))

    async def _check(self, weights: PastWeights) -> str:
        """Compare the weights with those of the run; EQUAL, or what is said of them."""
        differing = await weights.differing()
        if differing is None:
            return UNKNOWN
        if not differing:
            self._weights_said = ""
            return EQUAL
        how = "read from a checkpoint"
        if weights.is_rebuilt:
            how = f"made again by the stored rollouts of step {weights.version - 1}"
        altered = self._run.altered(weights.version - 1) if weights.is_rebuilt else []
        self._weights_said = (
            f"{len(differing)} tensors of version {weights.version} are not those of the run, "
            f"{differing[0]} the first; they were {how}"
        )
        if altered:
            self._weights_said += f", of which {altered[0]} is not as it was stored"
        return self._weights_said

    async def _play_version(self, roles: InlineRoles, version: int) -> list[Replayed]:
        """All that the weights of this version complete, at once."""
        ready = []
        for one in self._chosen:
            versions = self._versions(one)
            if version in versions and len(versions) > 1:
                self._scores[one][version] = await self._score(roles, one)
            if version == max(versions):
                ready.append(one)
        return await asyncio.gather(*(self._play_one(roles, one) for one in ready))

    async def _score(self, roles: InlineRoles, one: Chosen) -> list[list[float]]:
        """Log-probs of all its tokens by the present weights."""
        temperature = self._parts.config.rl.temperature
        if self._parts.config.engine.quantization != "none":
            return await sampler_scores(roles.generator, self._rollouts[one], temperature)
        score = partial(
            roles.engine.forward_logprobs,
            samples_of(self._rollouts[one]),
            temperature=temperature,
        )
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(roles.optimizer_thread, score)
        return [logps.tolist() for logps in found]

    async def _play_one(self, roles: InlineRoles, one: Chosen) -> Replayed:
        then = self._rollouts[one]
        was, task = self._task(one)
        now = await self._again(roles, one, task)
        if self._scores[one]:
            with_scores(now, self._scores[one])
        if now.status == Status.FAILED:
            found: Difference | None = Difference(
                kind="failed", then=then.status.value, now=now.error
            )
        else:
            found = first_difference(before_judging(then), now, self._parts.tokenizer.decode)
        return Replayed(
            rollout_id=then.rollout_id,
            phase=one.phase,
            step=one.place[1],
            version=self._run.version(one),
            is_scored=bool(self._scores[one]),
            difference=found,
            causes=tuple(ranked(found, self._evidence(one, found, was, task))) if found else (),
        )

    def _task(self, one: Chosen) -> tuple[Task | None, Task]:
        """As it was stored, and as it is played. ValueError where there is neither."""
        stored = self._run.task(one)
        now = self._tasks.of(one) if self._tasks is not None else stored
        task = now or stored
        if task is None:
            raise ValueError(
                f"{one.entry.rollout_id}: neither the run nor its source of tasks has its task "
                f"{one.entry.task_id}; put the file of the tasks back"
            )
        return stored, task

    async def _again(self, roles: InlineRoles, one: Chosen, task: Task) -> Rollout:
        """Played as the run did; where the machine fails it, as often as a run would try."""
        config, then = self._parts.config, self._rollouts[one]
        generator: Generator = roles.generator
        if self._is_said_again(one):
            generator = StoredTurns(then, self._parts.tokenizer.eos_ids)
        for _ in range(config.rl.max_retries + 1):
            rollout = await roles.kit.play(
                task,
                generator,
                group_id=then.group_id,
                rollout_id=then.rollout_id,
                sampling=self._run.sampling(one, config),
                withheld=WITHHELD.get(one.phase, ""),
            )
            if rollout.status != Status.FAILED:
                break
        return rollout

    def _evidence(
        self, one: Chosen, found: Difference, was: Task | None, task: Task
    ) -> dict[str, str]:
        """All that differs and could have to do with it."""
        then = self._rollouts[one]
        said = changed_parts(self._run.manifest(one.place), self._manifest)
        said["weights"] = self._weights_said
        said["task"] = "" if was is None else changes(was, task)
        said["store"] = altered_logp(found, self._run.token_stats(one))
        if content_hash(then) != one.entry.content_hash:
            said["store"] = "the stored tokens are not those of their content hash"
        return said

    def _note_changes(self, result: ReplayResult) -> None:
        for place in sorted({one.place for one in self._chosen}):
            then = self._run.manifest(place)
            result.changed |= changed_parts(then, self._manifest)
            said = "the run recorded no manifest: what it ran on is not known"
            if then is None and said not in result.notes:
                result.notes.append(said)

    def _note_old_caches(self, result: ReplayResult) -> None:
        count = sum(has_old_cache(self._rollouts[one]) for one in self._chosen)
        if count:
            result.notes.append(
                f"{count} rollouts went on over keys and values of older weights (--engine."
                "in-flight keep): their log-probs, which no policy gives, were not compared"
            )

    async def _carry(
        self, weights: PastWeights, carried: tuple[int, Path] | None
    ) -> tuple[int, Path] | None:
        """The weights with which the next segment begins, where no checkpoint has them."""
        version = self._run.begin_version(self._number + 1)
        if version == 0 or version in self._run.bases:
            return None
        await weights.go_to(version, carried=carried)
        return await weights.save(self._scratch)


Scores = dict[int, list[list[float]]]
"""Version -> the log-probs of all tokens of each sequence."""


def _write_tasks(run: PastRun, folder: Path) -> str:
    """A file of the tasks that the run stored, which name pictures by their hash."""
    pictures = run.folder.resolve() / PICTURES
    rows = [task.to_json() | {"prompt": _with_files(task.prompt, pictures)} for task in run.tasks()]
    file = folder / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def _with_files(prompt: str | list[Any], pictures: Path) -> str | list[Any]:
    """The prompt with pictures by their files in the run's folder."""
    if isinstance(prompt, str):
        return prompt
    return [
        {**message, "content": [_with_file(part, pictures) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in prompt
    ]


def _with_file(part: Any, pictures: Path) -> Any:
    sha256 = part.get("sha256")
    return {"type": "image", "image": str(pictures / sha256)} if sha256 else part
