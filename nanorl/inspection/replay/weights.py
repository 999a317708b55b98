"""The weights of any version of a run, made again: a checkpoint at or before it, then the optimizer
steps from there, each from the rollouts that are stored of it.

An optimizer step is a function of weights, moments and groups, so nothing is generated. What comes
out is compared with the fingerprints that the run recorded, tensor by tensor.
Left out: runs whose trainer had several ranks. Their sums have another order, and the fingerprints
say from which version on that shows.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoengine.state.checkpoint import open_checkpoint, read_cursor
from nanoengine.state.tensor_file import CheckpointError
from nanorl.distributed.roles.inline_roles import InlineRoles
from nanorl.inspection.replay.past_run import UNTRAINED, PastRun
from nanorl.learner import Learner
from nanorl.options.parts import Parts
from nanorl.scorers.references import reference_folders
from nanorl.scorers.scored_learner import make_learner

if TYPE_CHECKING:
    from nanorl.flow.replay_groups import ReplayGroups


class PastWeights:
    """The training engine of `roles` at a version, and its weights in the engine that plays."""

    def __init__(self, run: PastRun, parts: Parts, roles: InlineRoles) -> None:
        self.version = UNTRAINED
        self.is_rebuilt = False
        """Whether the weights come of steps that were made again, and not of a checkpoint."""
        self.damaged: list[str] = []
        """Checkpoints that could not be read."""
        self._run, self._parts, self._roles = run, parts, roles
        self._learner: Learner | None = None
        self._replay: ReplayGroups | None = None  # where the run trains on groups again

    async def go_to(self, version: int, *, carried: tuple[int, Path] | None = None) -> None:
        """Have the weights of that version in both engines. `carried` is a checkpoint of ours that
        has the weights of a version. ValueError where nothing leads there."""
        if version == self.version or version == UNTRAINED:
            assert self.version == version, "the untrained model plays first"
            return
        await self._start(version, carried)
        assert self._learner is not None, "it was started"
        while self.version < version:
            fresh = self._run.groups(self.version)
            groups = fresh if self._replay is None else self._replay.beside(fresh, self.version)
            await self._learner.train_and_publish(groups, self.version + 1)
            if self._replay is not None:
                self._replay.keep(fresh, self.version)
            self.version += 1
            self.is_rebuilt = True

    async def save(self, folder: Path) -> tuple[int, Path]:
        """Save the weights to `folder`, from which another `PastWeights` goes on. ValueError where
        there is a critic, too."""
        if self._parts.config.rl.algorithm.needs_critic:
            raise ValueError(
                f"{self._run.folder}: its options changed where it was resumed, and a critic is "
                "not taken over such a place; replay the steps before it, or those after the next "
                "checkpoint, with --from-step and --to-step"
            )
        kept = {} if self._replay is None else {"flow": {"replay": self._replay.state()}}
        await self._call(self._roles.engine.save, folder, kept)
        return self.version, folder

    async def differing(self) -> list[str] | None:
        """The tensors that are not what the run published, by name; None if it recorded nothing."""
        then = self._run.fingerprints(self.version)
        if then is None:
            return None
        now = await self._call(self._roles.engine.fingerprints)
        return [name for name in then | now if then.get(name) != now.get(name)]

    async def _start(self, version: int, carried: tuple[int, Path] | None) -> None:
        """Load the newest state at or before the version, unless the engine is nearer."""
        bases = [(at, folder) for at, folders in self._run.bases.items() for folder in folders]
        bases += [carried] if carried else []
        bases = sorted((one for one in bases if one[0] <= version), key=lambda one: -one[0])
        for at, folder in bases:
            if self.version >= at:
                return
            if await self._load(folder):
                await self._begin(at, folder)
                return
        if self.version == UNTRAINED:
            if not self._run.begins_with_model:
                raise ValueError(self._no_way(version))
            await self._restart()
            await self._begin(0)

    def _no_way(self, version: int) -> str:
        found = ", ".join(map(str, sorted(self._run.bases))) or "none"
        return (
            f"{self._run.folder}: no checkpoint at or before version {version} (there are: {found}"
            f"{'; damaged: ' + ', '.join(self.damaged) if self.damaged else ''}), so its weights "
            "cannot be made again: runs keep the one with which RL began unless --no-keep-start"
        )

    async def _load(self, folder: Path) -> bool:
        try:
            await self._call(open_checkpoint, folder)  # first: a restart forgets the momentum
        except CheckpointError as error:
            self.damaged.append(str(error))
            return False
        await self._restart()
        await self._call(self._roles.engine.load, folder)
        return True

    async def _restart(self) -> None:
        """Have the engine begin with RL, with an average of its weights where that teaches."""
        engine, spec = self._roles.engine, self._parts.config.rl.algorithm
        await self._call(engine.restart, self._parts.rl_config())
        if spec.has_average:  # before a checkpoint is loaded, which may have one
            await self._call(engine.keep_average, spec.hindsight_rate)

    async def _begin(self, version: int, checkpoint: Path | None = None) -> None:
        """Train on from the version that the engine holds now, and that the checkpoint is of."""
        self.version, self.is_rebuilt = version, False
        roles, config = self._roles, self._parts.config
        # Beyond here a gap between the engines is a finding, and no reason to stop.
        self._learner = make_learner(
            replace(config, deterministic=False),
            engine=roles.engine,
            publisher=roles.publisher,
            thread=roles.optimizer_thread,
            reference=await self._reference(),
            critic=await self._critic(checkpoint),
            scaffold=self._parts.scaffold,
        )
        await self._learner.publish(version)
        self._replay = self._open_replay(checkpoint)

    def _open_replay(self, checkpoint: Path | None) -> ReplayGroups | None:
        if not self._parts.config.rl.replay.share:
            return None
        from nanorl.run.replay_state import replay_of  # few runs replay

        flow = read_cursor(checkpoint).get("flow", {}) if checkpoint else {}
        return replay_of(self._parts.config, flow, self._run.trained)

    async def _reference(self) -> Any:
        config = self._parts.config
        if not config.rl.algorithm.needs_reference:
            return None
        own = self._run.folder / "reference"
        folders = reference_folders(config, own, has_begun=True, write_policy=_write_nothing)
        return await self._roles.open_reference(folders)

    async def _critic(self, checkpoint: Path | None) -> Any:
        """As it was then; one that had learned needs its own checkpoint."""
        if not self._parts.config.rl.algorithm.needs_critic:
            return None
        critic = await self._roles.open_critic(self._run.folder / "critic-start")
        name = read_cursor(checkpoint).get("critic", "") if checkpoint else ""
        folder = self._run.folder / "critic" / name
        if name and not folder.is_dir():
            raise ValueError(f"{folder} is missing: the critic of {checkpoint} is in it")
        if name:
            await self._call(critic.load, folder)
        return critic

    async def _call(self, function: Any, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._roles.optimizer_thread, partial(function, *args))


def _write_nothing(folder: Path) -> None:
    raise AssertionError(f"{folder}: asked for only where RL has not begun")
