"""A supervised fine-tuning run on a jsonl file of chats, in one process or split over many.

    SftRun(SftConfig(data=Path("chats.jsonl"), steps=100)).train()

Packed micro-batches, loss on the assistant's tokens alone, resumable bit for bit in the same layout
and in any other up to the order of sums. A run directory holds config.json, metrics.jsonl (one line
a step), checkpoints/ and, at the end, model/ (a Hugging Face folder).

Each process of the layout makes its own SftRun. Only the first prints and writes; all of them step,
save and export together. `SftRank` is one as an actor, for processes that a scheduler starts.
Left out: starting the processes and reading the command line (scripts/train_sft.py).
Next: chats.py (chats and the loss), engine.py (a step).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from nanoengine.build import build_engine, check_layout
from nanoengine.config import EngineConfig
from nanoengine.formats.sources import resolve_model
from nanoengine.formats.template_files import template_files
from nanoengine.model.config import ModelConfig
from nanoengine.packing import Sample
from nanoengine.parallel.dealing import deal
from nanoengine.parallel.device import enter_device, resolve_device, worker_thread
from nanoengine.parallel.layout import WORLD, LayoutConfig
from nanoengine.parallel.meeting_store import MeetingPoint, MeetingStore
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.rendezvous import join_mesh, open_store
from nanoengine.plan.footprint import mfu
from nanoengine.sft.chats import Order, num_loss_tokens, read_chats, sft_loss
from nanoengine.state.checkpoint import latest_checkpoint
from nanoengine.state.export import export_hf
from nanoengine.state.run_folder import RunFolder
from nanoengine.stop_signals import Interrupted, StopSignals
from nanoengine.text.tokenizer import ChatTokenizer

LAYOUT = ("tp", "pp", "dp", "cp", "ep", "zero", "sequence_parallel", "schedule", "chunks")
FREE_ON_RESUME = (
    *(*LAYOUT, "out", "resume", "save_every", "micro_batch_tokens", "peak_flops"),
    "device",  # another one rounds differently, as another layout does
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True)
class SftConfig(LayoutConfig):
    """Fine-tune a model on chats."""

    data: Path | None = None
    """jsonl: {"messages": [{"role": ..., "content": ...}, ...]} a line."""
    model: str = "smollm2-135m-instruct"
    """Hugging Face folder, or a name that resolves to one."""
    out: Path = Path("runs/sft")
    resume: bool = False
    """Go on from the last checkpoint in --out."""
    steps: int = 100
    """Optimizer steps."""
    batch_size: int = 16
    """Chats a step, over all processes."""
    max_tokens: int = 2048
    """Longer chats are left out."""
    micro_batch_tokens: int = 2048
    """Rows of one forward and backward pass of one process."""
    lr: float = 2e-5
    schedule_lr: Literal["constant", "cosine", "linear"] = "cosine"
    warmup_steps: int = 10
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    dtype: Literal["fp32", "bf16"] = "fp32"
    activation_checkpointing: bool = False
    device: str = "auto"
    """auto (CUDA if there is any), cpu, cuda or cuda:N; each process takes a GPU of its own."""
    seed: int = 0
    save_every: int = 50
    """Steps between checkpoints, written in the background; one more at the end."""
    peak_flops: float | None = None
    """What one process's device can do a second; with it the MFU is reported."""

    @property
    def world(self) -> int:
        return self.layout.world

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "max_tokens", "save_every", "tp", "pp", "dp", "cp", "ep")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("lr", "weight_decay", "max_grad_norm", "peak_flops"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}={value}: must be 0 or positive, and finite")

    def to_json(self) -> dict[str, Any]:
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def of_run(cls, out: Path) -> SftConfig:
        """Read the options of the run in the folder `out`, to be resumed there."""
        file = out / "config.json"
        if not file.is_file():
            raise ValueError(f"--resume: {file} does not exist; name the run's folder with --out")
        saved = json.loads(file.read_text())
        return cls(**saved | {"data": Path(saved["data"]), "out": out, "resume": True})

    def check_resumes(self, run: SftConfig) -> None:
        """`ValueError` if this is not `run` with changes that leave its result the same (up to the
        order of sums)."""
        theirs = run.to_json()
        for name, value in self.to_json().items():
            if name not in FREE_ON_RESUME and value != theirs[name]:
                raise ValueError(
                    f"--resume: {name}={value} differs from the run's {theirs[name]}; leave it "
                    "out, or start another run"
                )


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
        if self.is_first:
            self.run_folder = RunFolder(
                config.out,
                is_resumed=config.resume,
                written=("metrics.jsonl", "checkpoints", "model"),
            )
        try:
            self._build()
        except BaseException:  # Ctrl-C too: nobody else can release what was built
            self.release()
            raise

    def _build(self) -> None:
        """Everything that can be wrong with the options comes up before config.json is written."""
        config = self.config
        self.folder = resolve_model(config.model)
        assert config.data is not None, "the options were parsed, which asks for it"
        tokenizer = ChatTokenizer.from_folder(self.folder)
        self.samples, self.num_long = read_chats(config.data, tokenizer, config.max_tokens)
        torch.manual_seed(config.seed)
        split = config
        self.engine = build_engine(self.folder, engine_config(config), self.mesh, split)
        self.order = Order(len(self.samples), config.seed)
        if config.resume and latest_checkpoint(self.checkpoints) is not None:
            self.order.taken = self.engine.load(self.checkpoints)["taken"]
        elif config.resume and self.is_first:
            print(f"no checkpoint under {self.checkpoints}: from the beginning", flush=True)
        if self.is_first:
            self.run_folder.begin(config.to_json())
        self.mesh.barrier()

    @property
    def is_finished(self) -> bool:
        """True once all steps were taken."""
        return self.engine.version == self.config.steps

    def release(self) -> None:
        """Let others have the run's folder."""
        if self.is_first:
            self.run_folder.close()

    def train(self) -> None:
        """All steps that are left, then the export. Raises `Interrupted` after saving on Ctrl-C."""
        try:
            with StopSignals() as signals:
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
                f"{len(self.samples)} chats ({self.num_long} longer than {config.max_tokens} "
                f"tokens left out), layout {self.mesh.layout} on {config.device}, from step "
                f"{engine.version}",
                flush=True,
            )
        has_to_stop = False
        with progress_bar(self.is_first, config.steps, engine.version) as advance:
            while not (self.is_finished or has_to_stop):
                row = self._step()
                if self.is_first:
                    with open(self.metrics, "a") as file:
                        file.write(json.dumps(row) + "\n")
                    advance(describe(row))
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
        batch = [self.samples[i] for i in self.order.take(self.config.batch_size)]
        mine = deal(batch, self.mesh.layout).hand(batch, self.mesh.rank())
        result = self.engine.train_step(mine, sft_loss, num_loss_tokens)
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
            export_hf(self.mesh if self.config.world > 1 else None, self.engine.models, target)
        if self.is_first:
            for name in (*TOKENIZER_FILES, *template_files(self.folder)):
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
    check_layout(config.layout, shape, engine_config(config), config)


def engine_config(config: SftConfig) -> EngineConfig:
    return EngineConfig(
        dtype=config.dtype,
        lr=config.lr,
        schedule=config.schedule_lr,
        warmup_steps=min(config.warmup_steps, config.steps - 1),
        total_steps=config.steps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        micro_batch_tokens=config.micro_batch_tokens,
        activation_checkpointing=config.activation_checkpointing,
        zero=config.zero,
    )


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
