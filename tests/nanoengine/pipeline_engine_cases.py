"""Training runs over a pipeline, and their checkpoints, for the tests of the same name."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import parallel_cases
import torch
from parallel_cases import Case, Result
from pool import Rank
from torch import Tensor

from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample
from nanoengine.parallel import pipeline_engine
from nanoengine.parallel.expert_parallel import ExpertParallel
from nanoengine.parallel.layout import DATA_AXES, Layout
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.parameter_record import record_of
from nanoengine.parallel.pipeline_engine import PipelineEngine
from nanoengine.parallel.stage import make_stages
from nanoengine.parallel.tensor_parallel import TensorParallel
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanoengine.state.export import export_hf
from nanoengine.state.reshard import Resharder, model_pieces
from nanoengine.state.whole_engine import Engine


@dataclass(frozen=True, kw_only=True)
class Run:
    """A case of parallel_cases with a schedule; four layers, so that two chunks fit two ranks."""

    case: Case
    schedule: str = "1f1b"
    chunks: int = 1
    bug: str = ""


def config_of(case: Case) -> ModelConfig:
    return replace(parallel_cases.model_config(case), **{"num_layers": 4, **dict(case.shape)})


def whole_model(case: Case) -> Transformer:
    """Random in every parameter, norms and biases too."""
    model = Transformer(config_of(case), parallel_cases.DTYPES[case.dtype])
    model.init_weights(seed=0, std=0.15)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.repack()
    return model


def make_engine(run: Run, mesh: Mesh | None = None) -> Engine:
    case = run.case
    whole = whole_model(case)
    if mesh is None or mesh.size() == 1:
        return Engine(whole, parallel_cases.engine_config(case))
    split = TensorParallel.of(mesh, whole.config, sequence_parallel=case.sequence_parallel)
    experts = ExpertParallel.of(mesh, whole.config)
    dtype = parallel_cases.DTYPES[case.dtype]
    models: list[Any]
    if mesh.size("pp") == 1:
        models = [Transformer(whole.config, dtype, split=split, experts=experts)]
    else:
        models = make_stages(mesh, whole.config, run.chunks, dtype, split=split, experts=experts)
    with torch.no_grad():
        for model in models:
            for name, parameter in model.named_parameters():
                value, part = whole.get_parameter(name), record_of(parameter).slice
                parameter.copy_(value if part is None else part.take(value))
            model.repack()  # as loading does: copies of the old weights, to be found out of date
    if mesh.size("pp") == 1:
        return Engine(models[0], parallel_cases.engine_config(case), mesh)
    return PipelineEngine(models, parallel_cases.engine_config(case), mesh, schedule=run.schedule)


def reference(case: Case) -> Result:
    return parallel_cases._train(case, make_engine(Run(case=case)))


def train(rank: Rank, runs: list[Run]) -> list[tuple[Result, list[Tensor], int]]:
    """For each run: its result, the log-probs after it of all samples, and the live activations."""
    found = []
    for run in runs:
        engine = make_engine(run, rank.mesh(run.case.layout))
        forget = mock.patch.object(pipeline_engine, "sum_tied_gradients", lambda *_: None)
        if run.bug == "tied gradients not summed":
            with forget:
                result = parallel_cases._train(run.case, engine)
        else:
            result = parallel_cases._train(run.case, engine)
        vocab_size = engine.model.config.vocab_size
        samples = parallel_cases.make_samples(9, vocab_size=vocab_size)
        logps = engine.forward_logprobs(samples)
        peak_live = engine.peak_live if isinstance(engine, PipelineEngine) else 0
        found.append((result, logps, peak_live))
    return found


def scores(rank: Rank, run: Run) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies of the usual samples."""
    engine = make_engine(run, rank.mesh(run.case.layout))
    samples = parallel_cases.make_samples()
    return engine.forward_logprobs(samples, temperature=0.7, entropy=True)


# -- checkpoints ---------------------------------------------------------------------------------


@dataclass
class Saved:
    """Whole tensors that the ranks hold together, told by rank 0, and what resuming gave."""

    state: dict[str, Tensor]
    cursor: dict[str, Any] = field(default_factory=dict)
    random: list[float] = field(default_factory=list)
    loss: float = 0.0


def draw(step: int, mesh: Mesh) -> list[Sample]:
    samples = []
    generator = torch.Generator().manual_seed(step)
    for n in (9, 17, 5, 12):
        tokens = torch.randint(0, parallel_cases.VOCAB, (n,), generator=generator).tolist()
        samples.append(Sample(tokens=tokens, loss_mask=[0] + [1] * (n - 1)))
    return samples[mesh.rank(DATA_AXES) :: mesh.size(DATA_AXES)]


def steps(engine: Engine, first: int, last: int) -> float:
    loss = 0.0
    for step in range(first, last):
        loss = engine.train_step(draw(step, engine.mesh), sft_loss, num_loss_tokens)["loss"]
    return loss


def state_of(engine: Engine) -> dict[str, Tensor]:
    """Every master and moment whole, on every rank, by the resharding plan."""
    from nanoengine.state.engine_state import optimizer_pieces
    from nanoengine.state.slices import make_piece

    held = optimizer_pieces(engine.optimizer)
    mine = {piece.name: piece.whole for piece, _ in held}
    shapes: dict[str, tuple[int, ...]] = {}
    for names in engine.mesh.gather_json(("pp", "dp", "ep", "cp", "tp"), mine):
        shapes |= {name: tuple(shape) for name, shape in names.items()}
    dtype = held[0][1].dtype
    whole = {name: torch.empty(shape, dtype=dtype) for name, shape in sorted(shapes.items())}
    mesh = engine.mesh if engine.mesh.size() > 1 else None
    Resharder(mesh).run(held, [(make_piece(name, t), t) for name, t in whole.items()])
    return whole


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def save_midway(rank: Rank, run: Run, root: str, in_background: bool) -> Saved:
    """Ten steps; a checkpoint after five."""
    engine = make_engine(run, rank.mesh(run.case.layout))
    seed_all(100 + rank.rank)
    steps(engine, 0, 5)
    engine.save(Path(root), {"step": 5}, in_background=in_background)
    drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
    loss = steps(engine, 5, 10)
    engine.wait_saved()
    return Saved(state_of(engine), {"step": 5}, drawn, loss)


def resume(rank: Rank, run: Run, root: str) -> Saved:
    """The last five steps, from the checkpoint."""
    engine = make_engine(run, rank.mesh(run.case.layout))
    steps(engine, 20, 21)  # state that loading must replace
    seed_all(7)
    cursor = engine.load(Path(root))
    drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
    loss = steps(engine, 5, 10)
    return Saved(state_of(engine), cursor, drawn, loss)


def load_refused(rank: Rank, run: Run, root: str) -> tuple[str, bool]:
    """The message, and whether the weights stayed as they were."""
    from nanoengine.state.tensor_file import CheckpointError

    engine = make_engine(run, rank.mesh(run.case.layout))
    before = state_of(engine)
    try:
        engine.load(Path(root))
    except CheckpointError as error:
        after = state_of(engine)
        return str(error), all(torch.equal(after[name], before[name]) for name in before)
    raise AssertionError("the checkpoint was taken")


# -- export --------------------------------------------------------------------------------------


def export(rank: Rank, folder: str, family: str) -> dict[str, Any]:
    """A TP2 x PP2 run: into a full model on rank 0, a TP2 inference layout on ranks 2 and 3, and a
    Hugging Face folder. Also what the engine's own iterator gives."""
    case = Case(layout=Layout(pp=2, tp=2), dtype="fp32", family=family)
    engine = make_engine(Run(case=case), rank.mesh(case.layout))
    steps(engine, 0, 2)
    config = engine.model.config
    resharder = Resharder(engine.mesh, bucket_bytes=20_000)
    full = [Transformer(config)] if rank.rank == 0 else []
    held = model_pieces(engine.models)
    for _ in range(2):  # the plan is kept
        num_bytes = resharder.run(held, model_pieces(full))
    inference = rank.mesh(Layout(dp=2, tp=2))
    split = TensorParallel(inference)
    halves = [Transformer(config, split=split)] if rank.rank >= 2 else []
    Resharder(engine.mesh).run(held, model_pieces(halves))
    export_hf(engine.mesh, engine.models, folder, max_shard_bytes=60_000)
    return {
        "num_plans": resharder.num_plans,
        "bytes": num_bytes,
        "full": [{piece.name: t.clone() for piece, t in model_pieces([m])} for m in full],
        "halves": [
            [(piece.name, piece.box.begin, t.clone()) for piece, t in model_pieces([m])]
            for m in halves
        ],
        "exported": {name: tensor.clone() for name, tensor in engine.export_state()},
    }


def export_experts(
    rank: Rank, run: Run, folder: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the engine tells of its weights, at first and after loading twice them; writes a folder
    of the first."""
    engine = make_engine(run, rank.mesh(run.case.layout))
    before = {name: tensor.clone() for name, tensor in engine.export_state()}
    with engine.optimizer.gathered():
        export_hf(engine.mesh, engine.models, folder)
    engine.load_weights((name, tensor * 2) for name, tensor in before.items())
    return before, {name: tensor.clone() for name, tensor in engine.export_state()}
