"""Training steps of a small model that sees, on one process or a mesh, as the ranks of a test run
them. What they own and how it is compared: tests/nanoengine/parallel/parallel_cases.py."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from parallel_cases import Result, owned, policy_loss
from pipeline_engine_cases import state_of
from pool import Rank
from torch import Tensor

from nanoengine.build import build_engine
from nanoengine.config import EngineConfig, VisionTrain
from nanoengine.formats.hf import hf_views, load_model, read_state, save_model
from nanoengine.model.config import ModelConfig
from nanoengine.packing import Sample
from nanoengine.parallel.data_parallel import GradientReducer
from nanoengine.parallel.layout import DATA_AXES, Layout, SplitConfig
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.tensor_parallel import TensorParallel
from nanoengine.sft.chats import num_loss_tokens
from nanoengine.spans import ImageSpan
from nanoengine.state.export import export_hf
from nanoengine.state.reshard import Resharder, model_pieces
from nanoengine.state.whole_engine import Engine
from nanoengine.vision.seeing_stage import SeeingStage
from nanoengine.vision.seeing_transformer import PicturePlaces, SeeingTransformer
from nanoengine.vision.sharded_tower_adamw import ShardedTowerAdamW
from nanoengine.vision.sight import Sight
from nanoengine.vision.tower import Grid
from nanoengine.vision.tower_adamw import TowerAdamW

PLACEHOLDER = 200
TEXT = {
    "vocab_size": 211,  # a prime: no number of ranks divides it
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "model_type": "qwen3_vl_text",
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [4, 2, 2]},
}
VISION = {
    "depth": 3,
    "num_heads": 2,
    "hidden_size": 24,
    "intermediate_size": 40,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "out_hidden_size": 48,
    "num_position_embeddings": 25,
}
GRIDS: dict[str, Grid] = {  # 2, 6, 3 and 1 tokens
    "a": (1, 2, 4),
    "b": (1, 4, 6),
    "c": (1, 6, 2),
    "d": (1, 2, 2),
}
SHOWN = ["", "a", "abc", "", "bd", "abc", "", ""]
"""The pictures of each sample: none, one, three ragged ones; some are shared."""


@dataclass(frozen=True, kw_only=True)
class SeeingCase:
    """A layout, and all that may differ beside it."""

    layout: Layout = field(default_factory=Layout)
    zero: int = 0
    split: SplitConfig = field(default_factory=SplitConfig)
    deal: str = "round"  # `deal`
    tied: bool = False
    num_deep: int = 2
    num_experts: int = 0
    budget: int = 60
    share_prefix: bool = False
    activation_checkpointing: bool = False
    shown: tuple[str, ...] = tuple(SHOWN)
    dtype: str = "fp64"
    steps: int = 1
    vision_train: VisionTrain = "all"
    vision_lr: float | None = None
    bug: str = ""


class Drawn:
    """Pixels for every picture, by its key."""

    def values(self, span: ImageSpan) -> Tensor:
        seed = int(hashlib.sha256(span.key.encode()).hexdigest()[:8], 16)
        generator = torch.Generator().manual_seed(seed)
        _, rows, columns = span.grid
        width = VISION["in_channels"] * VISION["temporal_patch_size"] * VISION["patch_size"] ** 2
        return torch.randn(rows * columns, width, generator=generator)


EXPERTS = {
    "model_type": "qwen3_vl_moe_text",
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def build_folder(folder: Path, tied: bool, num_deep: int, num_experts: int) -> Path:
    """A model whose norms and biases a rank could not guess."""
    vision = {**VISION, "deepstack_visual_indexes": list(range(num_deep))}
    fields = {"model_type": "qwen3_vl", "text_config": TEXT, "vision_config": vision}
    if num_experts:
        vision["model_type"] = "qwen3_vl_moe_vision"
        fields["model_type"] = "qwen3_vl_moe"
        fields["text_config"] = {**TEXT, **EXPERTS, "num_experts": num_experts}
    model = SeeingTransformer(ModelConfig.from_hf_dict(fields | {"tie_word_embeddings": tied}))
    model.init_weights(seed=0, std=0.15)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    save_model(model, folder)
    return folder


def make_samples(shown: Sequence[str] = SHOWN) -> list[Sample]:
    """Text between pictures; the last picture of the fifth ends the sample, and so is only
    predicted in part. The sixth begins as the third."""
    samples = []
    for i, keys in enumerate(shown):
        group = min(i, 2) if keys == "abc" else i
        generator = torch.Generator().manual_seed(group)
        tokens: list[int] = torch.randint(0, 190, (5 + group,), generator=generator).tolist()
        images = []
        for key in keys:
            grid = GRIDS[key]
            length = grid[1] * grid[2] // 4
            images.append(
                ImageSpan(start=len(tokens), length=length, key=key, grid=grid, sha256=key * 64)
            )
            tokens += [PLACEHOLDER] * length
            tokens += torch.randint(0, 190, (3,), generator=generator).tolist()
        if i == 4 and images:
            tokens = tokens[: images[-1].end]
        else:
            generator = torch.Generator().manual_seed(100 + i)
            tokens += torch.randint(0, 190, (4 + 2 * i,), generator=generator).tolist()
        inside = {t for span in images for t in range(span.start, span.end)}
        mask = [int(t > 0 and t not in inside and t % 3 != 1) for t in range(len(tokens))]
        advantage = [1.5 - 0.25 * i] * len(tokens)
        samples.append(
            Sample(
                tokens=tokens,
                loss_mask=mask,
                fields={"advantage": advantage},
                images=tuple(images),
                group=f"g{group}",
            )
        )
    return samples


def deal(samples: Sequence[Sample], num_ranks: int, how: str) -> list[list[int]]:
    """Indices for each data rank. `round`: in turn; `text`: the last rank gets those without a
    picture; `empty`: the last rank gets none."""
    hands: list[list[int]] = [[] for _ in range(num_ranks)]
    for i, sample in enumerate(samples):
        if how == "round" or num_ranks == 1:
            hands[i % num_ranks].append(i)
        elif how == "text" and not sample.images:
            hands[-1].append(i)
        else:
            hands[i % (num_ranks - 1)].append(i)
    return hands


def engine_config(case: SeeingCase) -> EngineConfig:
    return EngineConfig(
        dtype=case.dtype,  # type: ignore[arg-type]
        lr=3e-3,
        eps=1e-4,  # a gradient that is all rounding must not become a step of random sign
        weight_decay=0.1,
        max_grad_norm=0.0,
        micro_batch_tokens=case.budget,
        zero=case.zero,
        share_prefix=case.share_prefix,
        bucket_bytes=40_000,
        activation_checkpointing=case.activation_checkpointing,
        vision_train=case.vision_train,
        vision_lr=case.vision_lr,
    )


def make_engine(case: SeeingCase, folder: Path, mesh: Mesh | None = None) -> Engine:
    engine = build_engine(folder, engine_config(case), mesh, case.split)
    for model in engine.models:
        model.sight = Sight(model, Drawn())
    return engine


def train(case: SeeingCase, engine: Engine) -> Result:
    """`case.steps` steps; gradients are those of the last, logps those of a scoring pass after."""
    mesh = engine.mesh
    samples = make_samples(case.shown)
    mine = deal(samples, mesh.size(DATA_AXES), case.deal)[mesh.rank(DATA_AXES)]
    hand = [samples[i] for i in mine]
    with planted(case.bug):
        steps = [
            engine.train_step(hand, policy_loss, num_loss_tokens, temperature=0.7, entropy=True)
            for _ in range(case.steps)
        ]
        optimizer, gradients = engine.optimizer, list(owned(engine))
        num_early = getattr(getattr(optimizer, "reducer", None), "num_early", 0)
        logps = dict(zip(mine, engine.forward_logprobs(hand), strict=True))
    return Result(steps, gradients, logps, {}, num_early)


def run(case: SeeingCase, folder: Path, mesh: Mesh | None = None) -> Result:
    return train(case, make_engine(case, folder, mesh))


def on_rank(rank: Rank, jobs: list[tuple[SeeingCase, Path]]) -> list[Result]:
    return [run(case, folder, rank.mesh(case.layout)) for case, folder in jobs]


# -- what of a tower is trained, and when --------------------------------------------------------


@dataclass
class Trained:
    """What is left of three steps, of which the second shows no picture to anybody."""

    state: dict[str, Tensor]  # whole masters and moments
    logps: list[dict[int, Tensor]]  # after each step, by the sample's index
    norms: list[float]
    counts: dict[str, int]
    frozen: dict[str, bool]  # by name: whether the bits are those of the folder


def train_some(case: SeeingCase, folder: Path, mesh: Mesh | None = None) -> Trained:
    engine = make_engine(case, folder, mesh)
    mesh, logps, norms = engine.mesh, [], []
    for shown in (case.shown, ("",) * len(case.shown), case.shown):
        samples = make_samples(shown)
        mine = deal(samples, mesh.size(DATA_AXES), case.deal)[mesh.rank(DATA_AXES)]
        hand = [samples[i] for i in mine]
        with planted(case.bug):
            told = engine.train_step(hand, policy_loss, num_loss_tokens, entropy=True)
            norms.append(told["grad_norm"])
            logps.append(dict(zip(mine, engine.forward_logprobs(hand), strict=True)))
    read = load_model(folder, engine.model.dtype).visual
    here = [one.visual for one in engine.models if one.visual is not None]
    frozen = {
        name: parameter.equal(read.get_parameter(name))
        for tower in here
        for name, parameter in tower.named_parameters()
        if not parameter.requires_grad
    }
    return Trained(state_of(engine), logps, norms, engine.optimizer.counts(), frozen)


def on_rank_some(rank: Rank, jobs: list[tuple[SeeingCase, Path]]) -> list[Trained]:
    return [train_some(case, folder, rank.mesh(case.layout)) for case, folder in jobs]


# -- bugs planted on purpose -------------------------------------------------------------------


def _taken_apart_for_good(stage: SeeingStage, x_TE: Tensor, rows: PicturePlaces) -> Any:
    stream_TE, deep = _take_apart(stage, x_TE, rows)
    return stream_TE, [one.detach() for one in deep]


def _held_unmoved(places: PicturePlaces, rows_N: Tensor, num_rows: int) -> PicturePlaces:
    held = _held(places, rows_N, num_rows)
    where_T = torch.full((num_rows,), -1)
    where_T[rows_N] = torch.arange(len(rows_N))
    chosen_P = places.chosen_P[where_T[places.places_P] >= 0]
    return replace(held, chosen_P=chosen_P % max(held.num_seen, 1))


def _follow_none(self: Sight) -> None:
    pass


_take_apart, _held = SeeingStage._take_apart, PicturePlaces.held


@contextmanager
def planted(bug: str) -> Iterator[None]:
    patches: dict[str, Any] = {
        "tower gradients of a rank's rows alone": lambda: mock.patch.object(
            GradientReducer, "_sum_partials", lambda self, bucket: None
        ),
        "deep rows without a gradient": lambda: mock.patch.object(
            SeeingStage, "_take_apart", _taken_apart_for_good
        ),
        "chosen rows counted from the pictures of all ranks": lambda: mock.patch.object(
            PicturePlaces, "held", _held_unmoved
        ),
        "a rank without pictures rests alone": lambda: mock.patch.object(
            ShardedTowerAdamW, "_is_shown", TowerAdamW._is_shown
        ),
        "decay in steps of text": lambda: mock.patch.object(
            ShardedTowerAdamW, "_is_shown", lambda self: True
        ),
        "the rate of the rest": lambda: mock.patch.object(
            ShardedTowerAdamW, "tower_lr", ShardedTowerAdamW.lr
        ),
        "rows of old weights": lambda: mock.patch.object(Sight, "_follow", _follow_none),
    }
    if bug in patches:
        with patches[bug]():
            yield
    else:
        yield


# -- weights between layouts -------------------------------------------------------------------


@dataclass
class Kept:
    """Whole masters and moments after a step, or after loading; and the export of a folder."""

    state: dict[str, Tensor]
    counts: dict[str, int]
    exported: dict[str, Tensor] = field(default_factory=dict)
    is_replica_equal: bool = True


def save(rank: Rank, case: SeeingCase, folder: Path, root: Path) -> Kept:
    """A checkpoint after a step with pictures and one without."""
    engine = make_engine(case, folder, rank.mesh(case.layout))
    train(case, engine)
    train(replace(case, shown=("",) * len(case.shown)), engine)  # the tower rests
    engine.save(root)
    return Kept(state_of(engine), engine.optimizer.counts())


def resume(rank: Rank, case: SeeingCase, folder: Path, root: Path) -> Kept:
    """Load it into an engine of another layout, export that, and hand its weights to a replica that
    is split over two ranks."""
    engine = make_engine(case, folder, rank.mesh(case.layout))
    train(case, engine)  # state that loading must replace
    engine.load(root)
    out = root / f"export-{case.layout}"
    split = TensorParallel.of(rank.mesh(Layout(tp=2)), engine.model.config)
    replica = load_model(folder, torch.float64, split=split)
    with engine.optimizer.gathered():
        export_hf(engine.mesh, engine.models, out)
        Resharder(engine.mesh).run(model_pieces(engine.models), model_pieces([replica]))
    engine.mesh.barrier()
    wanted = hf_views(load_model(out, torch.float64, split=split))
    is_equal = all(torch.equal(view, wanted[name]) for name, view in hf_views(replica).items())
    return Kept(state_of(engine), engine.optimizer.counts(), dict(read_state(out)), is_equal)
