"""From a Hugging Face folder and a mesh to a training engine, in any layout.

    check_layout(layout, ModelConfig.from_folder(folder), config)    # before any process starts
    engine = build_engine(folder, config, mesh)                      # on every rank

Supervised and reinforcement learning both build their engines here. Each rank maps the folder's
tensors and copies its part of them, so the whole model is in nobody's memory twice; the masters
start from the folder's values, whatever the model then computes in.

Left out: starting the ranks (rendezvous.py introduces them), a critic whose layers, matrices or
experts are split.
Next: engine.py, pipeline_engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch

from nanoengine.config import EngineConfig
from nanoengine.formats.hf import (
    check_memory,
    load_model,
    load_stages,
    model_class,
    read_state,
    say_difference,
)
from nanoengine.heads.value_engine import ValueEngine, value_model
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.expert_parallel import ExpertParallel, check_experts
from nanoengine.parallel.layout import Layout, SplitConfig
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.pipeline_engine import PipelineEngine
from nanoengine.parallel.schedules import make_schedule
from nanoengine.parallel.stage import Stage, check_stages, make_stages
from nanoengine.parallel.tensor_parallel import TensorParallel, check_heads
from nanoengine.parallel.zero import check_zero
from nanoengine.state.whole_engine import Engine


def check_layout(
    layout: Layout, shape: ModelConfig, config: EngineConfig, split: SplitConfig | None = None
) -> None:
    """`ValueError`, before any process starts, for what the engines of this layout would refuse."""
    split = SplitConfig() if split is None else split
    check_heads(shape, layout.tp)
    check_experts(shape, layout)
    check_zero(config.zero, layout)
    if layout.cp > 1 and config.share_prefix:
        raise ValueError(
            f"share_prefix=True with cp={layout.cp}: a prompt that several sequences share is not "
            "cut over ranks; set share_prefix to False, or cp to 1"
        )
    if layout.pp > 1:
        make_schedule(split.schedule, layout.pp, 1, split.chunks)
        check_stages(shape, layout.pp, split.chunks)


def build_engine(
    folder: Path | str,
    config: EngineConfig,
    mesh: Mesh | None = None,
    split: SplitConfig | None = None,
) -> Engine:
    """The model of `folder`, this rank's part of it, and its engine. Without a mesh this process
    trains alone, on a CPU. `ValueError` as for `check_layout` and `load_model`."""
    mesh = Mesh.alone() if mesh is None else mesh
    split = SplitConfig() if split is None else split
    if mesh.size() == 1:
        return Engine(load_model(folder, device=str(mesh.device)), config, mesh)
    path = Path(folder)
    shape = ModelConfig.from_folder(path)
    say_difference(path, shape)
    check_layout(mesh.layout, shape, config, split)
    check_memory(shape, torch.float32, mesh.device, num_parts=mesh.size(("tp", "pp", "ep")))
    models = _make_models(shape, mesh, split)
    try:
        load_stages(models, read_state(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if mesh.size("pp") > 1:
        stages = cast("Sequence[Stage]", models)
        return PipelineEngine(stages, config, mesh, schedule=split.schedule)
    return Engine(models[0], config, mesh)


def build_value_engine(
    folder: Path | str, config: EngineConfig, mesh: Mesh | None = None
) -> ValueEngine:
    """A critic with the body of the model in `folder` and a value head of zeros. Its mesh may share
    samples and tokens out (dp, cp, ZeRO); `ValueError` for one that splits the model."""
    mesh = Mesh.alone() if mesh is None else mesh
    policy = load_model(folder, device=str(mesh.device))
    return ValueEngine(value_model(policy), config, mesh)


def _make_models(shape: ModelConfig, mesh: Mesh, split: SplitConfig) -> Sequence[Transformer]:
    """This rank's part of the model, or its pipeline stages, with zeros for weights."""
    matrices = TensorParallel.of(mesh, shape, sequence_parallel=split.sequence_parallel)
    experts = ExpertParallel.of(mesh, shape)
    if mesh.size("pp") > 1:
        return make_stages(mesh, shape, split.chunks, split=matrices, experts=experts)
    device = str(mesh.device)
    return [model_class(shape)(shape, device=device, split=matrices, experts=experts)]
