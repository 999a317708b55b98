"""What the ranks do in test_tensor_parallel.py."""

from __future__ import annotations

import torch
from pool import Rank
from torch import Tensor

from nanoengine.model.config import ModelConfig
from nanoengine.model.hf import load_model, read_state
from nanoengine.parallel.mesh import Layout
from nanoengine.parallel.tensor_parallel import TensorParallel
from nanoinfer.config import CacheKind, InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams

GENERATOR = torch.Generator().manual_seed(5)
PROMPTS = [torch.randint(3, 211, (n,), generator=GENERATOR).tolist() for n in (2, 17, 40, 16, 33)]
PARAMS = [
    SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, prompt_logps=True),
    SamplingParams(max_tokens=30, temperature=0.8, seed=7, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.0, seed=8, top_p=0.9, ignore_eos=True),
]


def make_engine(
    folder: str,
    split: TensorParallel | None = None,
    num_blocks: int = 7,
    kind: CacheKind = "auto",
    speculate: int = 0,
) -> LLMEngine:
    """A cache so small that requests are preempted, and prompts computed in chunks."""
    config = InferConfig(
        num_blocks=num_blocks,
        max_batch_tokens=24,
        max_num_seqs=4,
        kv_cache_dtype=kind,
        speculate=speculate,
        speculate_free_rows=64,
    )
    return LLMEngine(load_model(folder, split=split), config)


def outputs(engine: LLMEngine) -> list[Output]:
    requests = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
    return engine.generate([prompt for prompt, _ in requests], [params for _, params in requests])


def on_rank(rank: Rank, folder: str, sequence_parallel: bool) -> tuple[list[Output], int, int]:
    """The outputs, the preemptions, and the elements of this rank's cache."""
    mesh = rank.mesh(Layout(tp=rank.world))
    shape = ModelConfig.from_folder(folder)
    split = TensorParallel.of(mesh, shape, sequence_parallel=sequence_parallel)
    engine = make_engine(folder, split, speculate=3)
    found = outputs(engine)
    engine.check()
    assert engine.metrics()["accepted_tokens"] > 0
    return found, engine._scheduler.num_preemptions, engine._runner.cache.data.numel()


def on_rank_fp8(rank: Rank, folder: str) -> tuple[list[Output], int]:
    """The outputs from a cache of fp8, and the bytes of this rank's."""
    mesh = rank.mesh(Layout(tp=rank.world))
    split = TensorParallel.of(mesh, ModelConfig.from_folder(folder))
    engine = make_engine(folder, split, kind="fp8")
    return outputs(engine), engine._runner.cache.data.nbytes


def update(rank: Rank, folder: str) -> list[Output]:
    """What a rank says after its weights were doubled in place."""
    mesh = rank.mesh(Layout(tp=rank.world))
    engine = make_engine(folder, TensorParallel.of(mesh, ModelConfig.from_folder(folder)))
    engine.update_weights(doubled(folder), version=1)
    return outputs(engine)


def doubled(folder: str) -> list[tuple[str, Tensor]]:
    return [(name, tensor * 2) for name, tensor in read_state(folder)]
