"""Supervised fine-tuning on a jsonl file of chats, in one process or split over many.

Packed micro-batches, loss on the assistant's tokens alone, resumable bit for bit in the same layout
and in any other up to the order of sums. A run directory holds config.json, metrics.jsonl (one line
a step), checkpoints/ and, at the end, model/ (a Hugging Face folder).

With more than one process in the layout this program starts them with torchrun, unless torchrun
started it. Exit status: 0 finished, 1 something to mend (one message says what), 130 Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LAYOUT = ("tp", "pp", "dp", "cp", "zero", "sequence_parallel", "schedule", "chunks")
FREE_ON_RESUME = (*LAYOUT, "out", "resume", "save_every", "micro_batch_tokens", "peak_flops")


@dataclass(frozen=True, kw_only=True)
class SftConfig:
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
    seed: int = 0
    save_every: int = 50
    """Steps between checkpoints, written in the background; one more at the end."""
    tp: int = 1
    """Processes that share each matrix."""
    pp: int = 1
    """Processes that share the layers."""
    dp: int = 1
    """Processes with samples of their own."""
    cp: int = 1
    """Processes that share the tokens of a sequence."""
    zero: Literal[0, 1, 2, 3] = 0
    """What the dp (and cp) processes share: 1 optimizer state, 2 gradients, 3 parameters."""
    sequence_parallel: bool = False
    """With tp: cut the rows between matrices too."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1"] = "1f1b"
    """Of the pipeline."""
    chunks: int = 1
    """Layer groups a pipeline process (interleaved)."""
    peak_flops: float | None = None
    """Of one process's device; with it the MFU is reported."""

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "max_tokens", "save_every", "tp", "pp", "dp", "cp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")

    def to_json(self) -> dict[str, Any]:
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
        }


def parse(arguments: list[str]) -> SftConfig:
    config = tyro.cli(SftConfig, args=arguments, prog="bash scripts/train_sft.sh")
    if not config.resume:
        if config.data is None:
            raise ValueError("data: missing; give a jsonl file of chats with --data FILE")
        return config
    file = config.out / "config.json"
    if not file.is_file():
        raise ValueError(f"--resume: {file} does not exist; name the run's folder with --out")
    saved = json.loads(file.read_text())
    saved |= {"data": Path(saved["data"]), "out": config.out, "resume": True}
    resumed = tyro.cli(
        SftConfig, default=SftConfig(**saved), args=arguments, prog="bash scripts/train_sft.sh"
    )
    for name, value in resumed.to_json().items():
        if name not in FREE_ON_RESUME and value != json.loads(file.read_text())[name]:
            raise ValueError(
                f"--resume: {name}={value} differs from the run's {saved[name]}; leave it out, "
                "or start another run"
            )
    return resumed


def launch(config: SftConfig, arguments: list[str]) -> int:
    """Replace this process by torchrun, which starts the layout's processes on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(config.world), __file__, *arguments]
    threads = max(1, len(os.sched_getaffinity(0)) // config.world)
    os.execvpe(sys.executable, command, {"OMP_NUM_THREADS": str(threads), **os.environ})


def prepare_folder(config: SftConfig) -> None:
    file = config.out / "config.json"
    if file.exists() and not config.resume:
        raise ValueError(
            f"{config.out} already holds a run: go on with it (--resume --out {config.out}), "
            "choose another --out, or remove it"
        )
    config.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config.to_json(), indent=2) + "\n")


def build_engine(config: SftConfig, folder: Path, mesh: Any) -> Any:
    """The model of `folder`, split over the mesh."""
    from nanoengine.config import EngineConfig
    from nanoengine.engine import Engine
    from nanoengine.model.config import ModelConfig
    from nanoengine.model.hf import load_model
    from nanoengine.model.transformer import Transformer
    from nanoengine.parallel.pipeline_engine import PipelineEngine
    from nanoengine.parallel.stage import make_stages
    from nanoengine.parallel.tensor_parallel import TensorParallel

    settings = EngineConfig(
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
    if config.world == 1:
        return Engine(load_model(folder), settings)
    shape = ModelConfig.from_folder(folder)
    split = TensorParallel.of(mesh, shape, sequence_parallel=config.sequence_parallel)
    engine: Engine
    if config.pp > 1:
        stages = make_stages(mesh, shape, config.chunks, split=split)
        engine = PipelineEngine(stages, settings, mesh, schedule=config.schedule)
    else:
        engine = Engine(Transformer(shape, split=split), settings, mesh)
    whole = load_model(folder)
    engine.load_weights(whole_weights(whole))
    return engine


def whole_weights(model: Any) -> Iterator[tuple[str, Any]]:
    from nanoengine.model.hf import export_state

    return export_state(model)


@contextmanager
def progress_bar(is_shown: bool, total: int, done: int) -> Iterator[Any]:
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


def train(config: SftConfig) -> int:
    import torch

    from nanoengine.export import export_hf
    from nanoengine.footprint import mfu
    from nanoengine.model.sources import resolve_model
    from nanoengine.model.tokenizer import ChatTokenizer
    from nanoengine.packing import balanced_parts
    from nanoengine.parallel.mesh import DATA_AXES, Layout, Mesh
    from nanoengine.sft import num_loss_tokens, sft_loss
    from nanoengine.sft_data import Order, read_chats

    layout = Layout(tp=config.tp, pp=config.pp, dp=config.dp, cp=config.cp)
    mesh = Mesh(layout) if config.world == 1 else Mesh.from_torchrun(layout)
    is_first = mesh.rank() == 0
    if is_first:
        prepare_folder(config)
    mesh.barrier()
    folder = resolve_model(config.model)
    tokenizer = ChatTokenizer.from_folder(folder)
    assert config.data is not None, "parse() asked for it"
    samples, num_long = read_chats(config.data, tokenizer, config.max_tokens)
    torch.manual_seed(config.seed)
    engine = build_engine(config, folder, mesh)
    order = Order(len(samples), config.seed)
    if config.resume and (config.out / "checkpoints").exists():
        order.taken = engine.load(config.out / "checkpoints")["taken"]
    metrics = config.out / "metrics.jsonl"
    if is_first:
        keep_lines(metrics, engine.version)
        print(
            f"{len(samples)} chats ({num_long} longer than {config.max_tokens} tokens left out), "
            f"layout {layout}, from step {engine.version}",
            flush=True,
        )
    seconds = tokens = 0.0
    with progress_bar(is_first, config.steps, engine.version) as advance:
        while engine.version < config.steps:
            begin = time.perf_counter()
            batch = [samples[i] for i in order.take(config.batch_size)]
            mine = balanced_parts(batch, mesh.size(DATA_AXES))[mesh.rank(DATA_AXES)]
            result = engine.train_step([batch[i] for i in mine], sft_loss, num_loss_tokens)
            seconds = time.perf_counter() - begin
            tokens = float(sum(len(sample.tokens) - 1 for sample in batch))
            row = {
                "step": engine.version,
                **result,
                "tokens_per_s": tokens / seconds,
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
            if config.peak_flops is not None:
                length = int(tokens / len(batch))
                shape = engine.model.config
                row["mfu"] = mfu(
                    shape, row["tokens_per_s"], length, config.peak_flops, config.world
                )
            if is_first:
                with open(metrics, "a") as file:
                    file.write(json.dumps(row) + "\n")
                share = f" MFU {row['mfu']:.1%}" if "mfu" in row else ""
                advance(
                    f"loss {row['loss']:.4f} lr {row['lr']:.2e} {row['tokens_per_s']:.0f} tokens/s"
                    f"{share} {row['peak_rss_bytes'] / 1e9:.2f} GB"
                )
            if engine.version % config.save_every == 0 or engine.version == config.steps:
                cursor = {"taken": order.taken}
                engine.save(config.out / "checkpoints", cursor, in_background=True)
    engine.wait_saved()
    target = config.out / "model"
    with engine.optimizer.gathered():
        export_hf(mesh if config.world > 1 else None, engine.models, target)
    if is_first:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, target / name)
        print(f"trained: {target}, a Hugging Face folder; metrics: {metrics}")
    mesh.close()
    return 0


def keep_lines(metrics: Path, steps: int) -> None:
    """Drop the lines of steps that will be taken again."""
    if metrics.exists():
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        kept = [json.dumps(row) + "\n" for row in rows if row["step"] <= steps]
        metrics.write_text("".join(kept))


def main() -> int:
    from nanoengine.checkpoint import CheckpointError
    from nanoengine.engine import NonFiniteLoss

    arguments = sys.argv[1:]
    try:
        config = parse(arguments)
        if config.world > 1 and "RANK" not in os.environ:
            return launch(config, arguments)
        return train(config)
    except KeyboardInterrupt:
        print("\nstopped; go on from the last checkpoint with --resume", file=sys.stderr)
        return 130
    except (ValueError, OSError, CheckpointError, NonFiniteLoss) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
