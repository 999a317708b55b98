"""A supervised run on a jsonl file of chats or of pairs of answers, in one process or split over
many.

    SftRun(SftConfig(data=Path("chats.jsonl"), steps=100)).train()
    SftRun(SftConfig(loss="dpo", preferences=Path("pairs.jsonl"), steps=100)).train()

Packed micro-batches, loss on the assistant's tokens alone, resumable bit for bit in the same layout
and in any other up to the order of sums. A run directory holds config.json, metrics.jsonl (one line
a step), checkpoints/ and, at the end, model/ (a Hugging Face folder).

Each process of the layout makes its own SftRun. Only the first prints and writes; all of them step,
save and export together. `SftRank` is one as an actor, for processes that a scheduler starts.
Left out: starting the processes and reading the command line (scripts/train_sft.py).
Next: objective.py (what a run learns from), chats.py (chats and their loss), engine.py (a step).
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nanoengine.build import check_layout
from nanoengine.formats.sources import resolve_model
from nanoengine.formats.template_files import template_files
from nanoengine.model.config import ModelConfig
from nanoengine.packing import Sample
from nanoengine.parallel.dealing import deal
from nanoengine.parallel.device import enter_device, resolve_device, worker_thread
from nanoengine.parallel.layout import WORLD
from nanoengine.parallel.meeting_store import MeetingPoint, MeetingStore
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.rendezvous import join_mesh, open_store
from nanoengine.plan.footprint import mfu
from nanoengine.sft.chats import Order
from nanoengine.sft.objective import Objective, SftObjective, longest
from nanoengine.sft.pair_objectives import DpoObjective, RewardModelObjective
from nanoengine.sft.sft_config import SftConfig
from nanoengine.state.checkpoint import latest_checkpoint
from nanoengine.state.run_folder import RunFolder
from nanoengine.stop_signals import Interrupted, StopSignals

READING_FILES = (
    *("tokenizer.json", "tokenizer_config.json"),
    *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
)
"""By them a model's folder says what becomes of texts, and of pictures."""


OBJECTIVES: dict[str, type[Objective]] = {
    "sft": SftObjective,
    "dpo": DpoObjective,
    "reward_model": RewardModelObjective,
}


class SftRun:
    """A run of `config.steps` optimizer steps, from the start or from its last checkpoint."""

    def __init__(self, config: SftConfig, mesh: Mesh | None = None) -> None:
        """Without a mesh this process trains alone, or was started by torchrun."""
        self.mesh = mesh = mesh_of_process(config) if mesh is None else mesh
        device = str(mesh.device) if config.world == 1 else mesh.device.type
        self.config = config = replace(config, device=device)
        self.is_first = self.mesh.rank() == 0
        self.metrics = config.out / "metrics.jsonl"
        self.checkpoints = config.out / "checkpoints"
        self.objective = OBJECTIVES[config.loss](config)
        if self.is_first:
            self.run_folder = RunFolder(
                config.out,
                is_resumed=config.resume,
                written=("metrics.jsonl", "checkpoints", "model", *self.objective.written),
            )
        try:
            self._build()
        except BaseException:  # Ctrl-C too: nobody else can release what was built
            self.release()
            raise

    def _build(self) -> None:
        """Everything that can be wrong with the options comes up before config.json is written."""
        config, objective = self.config, self.objective
        self.folder = resolve_model(config.model)
        examples, self.num_long = objective.read(objective.tokenizer(self.folder))
        torch.manual_seed(config.seed)
        self.engine = objective.build(self.folder, objective.engine_config(examples), self.mesh)
        self.order = Order(len(examples), config.seed)
        goes_on = config.resume and latest_checkpoint(self.checkpoints) is not None
        if goes_on:
            self.examples = objective.resume(examples)
            self.order.taken = self.engine.load(self.checkpoints)["taken"]
        else:
            if config.resume and self.is_first:
                print(f"no checkpoint under {self.checkpoints}: from the beginning", flush=True)
            drawn = Order(len(examples), config.seed).take(config.steps * config.batch_size)
            self.examples = objective.start(self.engine, examples, set(drawn))
        if self.is_first:
            self.run_folder.begin(config.to_json())
            if not goes_on:
                objective.keep()
        self.mesh.barrier()

    @property
    def is_finished(self) -> bool:
        """True once all steps were taken."""
        return self.engine.version == self.config.steps

    def release(self) -> None:
        """Let others have the run's folder."""
        if self.is_first:
            self.run_folder.close()

    def train(self, *, is_program: bool = False) -> None:
        """All steps that are left, then the export. Raises `Interrupted` after saving on Ctrl-C.
        `is_program` as in StopSignals."""
        try:
            with StopSignals(is_program=is_program) as signals:
                self.take_steps(lambda: signals.is_asked)
            self.export()
        finally:
            self.release()
        self.mesh.close()
        if not self.is_finished:
            raise Interrupted

    def take_steps(self, is_asked_to_stop: Callable[[], bool]) -> None:
        """The steps that are left, at least one, until one of the processes is asked to stop; saves
        at the end of them."""
        config, engine = self.config, self.engine
        if self.is_first:
            keep_lines(self.metrics, engine.version)
            print(
                f"{len(self.examples)} {self.objective.unit} ({self.num_long} longer than "
                f"{config.max_tokens} tokens left out), layout {self.mesh.layout} on "
                f"{config.device}, from step {engine.version}",
                flush=True,
            )
        has_to_stop = False
        with progress_bar(self.is_first, config.steps, engine.version) as advance:
            while not (self.is_finished or has_to_stop):
                row = self._step()
                if self.is_first:
                    with open(self.metrics, "a") as file:
                        file.write(json.dumps(row) + "\n")
                    advance(self.objective.describe(row) + describe(row))
                # They may be asked in different steps: what one process knows, all obey.
                has_to_stop = bool(self.mesh.max_int(WORLD, int(is_asked_to_stop())))
                is_last = has_to_stop or self.is_finished
                if is_last or engine.version % config.save_every == 0:
                    cursor = {"taken": self.order.taken}
                    engine.save(self.checkpoints, cursor, in_background=True)
            engine.wait_saved()

    def _step(self) -> dict[str, Any]:
        """One optimizer step on this process's share of the next batch; the row of metrics."""
        begin = time.perf_counter()
        objective = self.objective
        examples = [self.examples[i] for i in self.order.take(self.config.batch_size)]
        dealt = deal([longest(example) for example in examples], self.mesh.layout)
        mine = objective.samples(dealt.hand(examples, self.mesh.rank()))
        result = objective.row(self.engine.train_step(mine, objective.loss, objective.weight))
        batch = [sample for example in examples for sample in example]
        num_tokens = sum(len(sample.tokens) - 1 for sample in batch)
        tokens_per_s = num_tokens / (time.perf_counter() - begin)
        row = {
            "step": self.engine.version,
            **result,
            "tokens_per_s": tokens_per_s,
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        return row | self._mfu(batch, tokens_per_s)

    def _mfu(self, batch: list[Sample], tokens_per_s: float) -> dict[str, float]:
        if self.config.peak_flops is None:
            return {}
        length = sum(len(sample.tokens) - 1 for sample in batch) // len(batch)
        peak, world = self.config.peak_flops, self.config.world
        return {"mfu": mfu(self.engine.model.config, tokens_per_s, length, peak, world)}

    def export(self) -> None:
        """Write the trained model, if all steps were taken; all processes call it."""
        if not self.is_finished:
            return
        target = self.config.out / "model"
        with self.engine.optimizer.gathered():
            self.objective.write(self.engine, self.mesh, target)
        if self.is_first:
            for name in (*READING_FILES, *template_files(self.folder)):
                if (self.folder / name).is_file():
                    (target / name).parent.mkdir(exist_ok=True)
                    shutil.copyfile(self.folder / name, target / name)
            done = f"trained: {target}, a Hugging Face folder; metrics: {self.metrics}"
            print(done, flush=True)


class SftRank:
    """A process of a run as an actor. It computes in a thread of its own, so that it hears `stop`;
    what its SftRun raises, its methods raise."""

    def __init__(self, config: SftConfig, rank: int) -> None:
        """A GPU, if the run is to have one, is this process's only one."""
        self._config, self._rank = config, rank
        self._device = resolve_device(config.device)
        self._thread = worker_thread("train", self._device, torch.get_num_threads())
        self._store: MeetingStore | None = None
        self._has_to_stop = False

    async def open_store(self) -> MeetingPoint:
        """For rank 0: where the others, on the same machine, find it."""
        self._store, meeting = open_store()
        return meeting

    async def build(self, meeting: MeetingPoint | None) -> None:
        """Everything that can be wrong with the options comes up here."""
        self._run: SftRun = await self._compute(self._build, meeting)

    def _build(self, meeting: MeetingPoint | None) -> SftRun:
        layout, mesh = self._config.layout, None
        if meeting is not None:
            place = (meeting, layout, self._rank)
            mesh = join_mesh(*place, store=self._store, device=self._device)
        return SftRun(self._config, mesh)

    async def take_steps(self) -> bool:
        """True if all steps were taken, False if `stop` came before."""
        await self._compute(self._run.take_steps, lambda: self._has_to_stop)
        return self._run.is_finished

    async def stop(self) -> None:
        """After the step that is under way."""
        self._has_to_stop = True

    async def finish(self) -> None:
        """Export the model, if all steps were taken, and let go of everything."""
        await self._compute(self._run.export)
        self._run.release()
        await self._compute(self._run.mesh.close)

    async def _compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *arguments)


def mesh_of_process(config: SftConfig) -> Mesh:
    """The mesh of a process alone, or of one that torchrun started, on the device that it is to
    have."""
    rank, world = int(os.environ.get("LOCAL_RANK", 0)), config.world
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device = resolve_device(config.device, local_rank=rank, num_local=num_local)
    enter_device(device)
    make_mesh = Mesh if world == 1 else Mesh.from_torchrun
    return make_mesh(config.layout, device=device)


def check_model(config: SftConfig) -> None:
    """`ValueError`, before any process starts, for a model that is not there or cannot be split as
    the options say. Fetches a model that has to be fetched, once for all processes."""
    shape = ModelConfig.from_folder(resolve_model(config.model))
    objective = OBJECTIVES[config.loss](config)
    check_layout(config.layout, shape, objective.engine_config([]), config)


@contextmanager
def progress_bar(is_shown: bool, total: int, done: int) -> Iterator[Callable[[str], None]]:
    columns = (
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, disable=not is_shown) as progress:
        task = progress.add_task("", total=total, completed=done)
        yield lambda text: progress.update(task, advance=1, description=text)


def describe(row: dict[str, Any]) -> str:
    """The progress bar's line about a step."""
    share = f" MFU {row['mfu']:.1%}" if "mfu" in row else ""
    return (
        f"loss {row['loss']:.4f} lr {row['lr']:.2e} {row['tokens_per_s']:.0f} tokens/s{share} "
        f"{row['peak_rss_bytes'] / 1e9:.2f} GB"
    )


def keep_lines(metrics: Path, steps: int) -> None:
    """Drop the lines of steps that will be taken again."""
    if metrics.exists():
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= steps]
        metrics.write_text("".join(kept))
