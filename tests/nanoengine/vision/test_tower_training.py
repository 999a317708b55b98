"""What of a tower is trained, how fast and when, beside `torch.optim.AdamW` with groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.formats.hf import load_model
from nanoengine.packing import MicroBatch, Sample
from nanoengine.scoring import PassScorer
from nanoengine.state.whole_engine import Engine
from nanoengine.vision.png import write_png
from nanoengine.vision.seeing_tokenizer import seeing_tokenizer
from nanoengine.vision.sight import Sight
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.5, "max_grad_norm": 0.05}


@dataclass
class Case:
    """A model's folder, and samples with pictures and without."""

    folder: Path
    store: Any
    shown: list[Sample]
    text: list[Sample]

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        model = load_model(self.folder, dtype)
        model.sight = Sight(model, self.store)
        return model

    def engine(self, **options: Any) -> Engine:
        config = EngineConfig(**OPTIONS | {"micro_batch_tokens": 40} | options)
        return Engine(self.model(), config)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("seeing")
    build_tiny_vision_model(folder / "model")
    tokenizer = seeing_tokenizer(folder / "model", folder / "pictures")
    noise = np.random.default_rng(0).integers(0, 256, (2, 48, 48, 3), dtype=np.uint8)
    shas = [tokenizer.store.add(write_png(one)) for one in noise]

    def sample(*pictures: int) -> Sample:
        parts: list[Any] = [{"type": "image", "sha256": shas[one]} for one in pictures]
        chat: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "go"}]}]
        ids = tokenizer.encode_chat(chat, add_generation_prompt=True)
        said = tokenizer.encode("left 3")
        mask = [0] * len(ids) + [1] * len(said)
        images = tuple(tokenizer.images_in(ids, chat, 0))
        return Sample(tokens=ids + said, loss_mask=mask, images=images)

    return Case(folder / "model", tokenizer.store, [sample(0, 1), sample(1), sample(0)], [sample()])


def loss(logp_T: Tensor, _: Any, micro: MicroBatch) -> tuple[Tensor, dict[str, float]]:
    return -(logp_T * micro.loss_mask_T).sum(), {}


def tower_of(model: Any) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.visual.named_parameters()}


def moved(before: dict[str, Tensor], model: Any) -> set[str]:
    return {name for name, one in tower_of(model).items() if not one.equal(before[name])}


MOVES: dict[str, Callable[[str], bool]] = {
    "all": lambda name: True,
    "merger": lambda name: name.startswith(("merger.", "deep_mergers.")),
    "none": lambda name: False,
}


@pytest.mark.parametrize("train", MOVES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_frozen_never_moves_by_a_bit(case: Case, train: str, dtype: str) -> None:
    engine = case.engine(vision_train=train, dtype=dtype)
    wide = tower_of(case.model())
    before = {name: one.to(engine.model.dtype) for name, one in wide.items()}
    decoder = engine.model.layers[0].qkv.weight.detach().clone()
    for batch in (case.shown, case.text, case.shown):
        engine.train_step(batch, loss)
    assert moved(before, engine.model) == {name for name in before if MOVES[train](name)}
    assert not engine.model.layers[0].qkv.weight.equal(decoder)


def test_a_frozen_tower_looks_once_and_without_a_graph(case: Case) -> None:
    """Two pictures, in three steps of two passes and in two scorings."""
    engine = case.engine(vision_train="none", dtype="bf16")
    sight, seen = engine.model.sight, []
    look = sight.look

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(look(*args, **options))
        return seen[-1]

    sight.look = watched
    for _ in range(3):
        engine.train_step(case.shown, loss)
        engine.forward_logprobs(case.shown)
    assert sight.num_looks == 2
    assert len(seen) > 6
    assert not any(rows.features_TE.requires_grad for rows in seen)
    engine = case.engine()
    engine.train_step(case.shown, loss)
    assert engine.model.sight.num_looks > 2, "a trained one looks in each pass"


def test_features_of_a_frozen_tower_change_no_gradient(case: Case) -> None:
    """The decoder's gradients are those of a tower that is trained, to the bit."""
    engines = [case.engine(vision_train=train) for train in ("all", "none")]
    for engine in engines:
        engine.optimizer.zero_grad()
        engine.forward_backward(case.shown, loss)
    whole, frozen = (
        {slot.name: slot.param.main_grad for slot in engine.optimizer.buckets[0].slots}
        for engine in engines
    )
    assert {name for name in whole if not name.startswith("visual.")} == frozen.keys()
    assert all(whole[name].equal(frozen[name]) for name in frozen)


def test_clipping_is_by_the_norm_of_what_is_trained(case: Case) -> None:
    whole, frozen = case.engine(), case.engine(vision_train="none")
    norms = [engine.train_step(case.shown, loss)["grad_norm"] for engine in (whole, frozen)]
    grads = {slot.name: slot.param.main_grad for slot in whole.optimizer.buckets[0].slots}
    squares = {name: float(one.double().square().sum()) for name, one in grads.items()}
    decoder = sum(one for name, one in squares.items() if not name.startswith("visual."))
    assert norms == pytest.approx([sum(squares.values()) ** 0.5, decoder**0.5], rel=1e-6)
    assert norms[0] > norms[1] > OPTIONS["max_grad_norm"]


@pytest.mark.parametrize("vision_lr", [None, 3e-3])
def test_steps_are_those_of_torch_with_groups(case: Case, vision_lr: float | None) -> None:
    """Pictures, text, text, pictures: torch leaves a parameter without a gradient alone, decay,
    momentum and its count of steps included. In fp64, from gradients of plain autograd."""
    model = case.model(torch.float64)
    twin = case.model(torch.float64)
    config = EngineConfig(
        **OPTIONS, dtype="fp64", vision_lr=vision_lr, warmup_steps=3, micro_batch_tokens=400
    )
    engine = Engine(model, config)
    groups = [
        {"params": [], "lr": config.lr * (1.0 if group < 2 else (vision_lr or 1e-2) / config.lr)}
        | {"weight_decay": 0.0 if group % 2 else config.weight_decay}
        for group in range(4)
    ]
    for name, one in twin.named_parameters():
        groups[2 * name.startswith("visual.") + (one.dim() < 2)]["params"].append(one)
    theirs = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    rates = [group["lr"] for group in groups]
    scorer = PassScorer(twin, micro_batch_tokens=400)
    for step, batch in enumerate((case.shown, case.text, case.text, case.shown)):
        engine.train_step(batch, loss)
        theirs.zero_grad(set_to_none=True)
        (micro,) = scorer.micro_batches(batch)
        total, _ = loss(scorer.logprobs(micro, 1.0).logp_T, None, micro)
        total.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), config.max_grad_norm)
        for group, rate in zip(theirs.param_groups, rates, strict=True):
            group["lr"] = rate * min(step + 1, 3) / 3
        theirs.step()
        twin.repack()
        ours = dict(engine.model.named_parameters())
        worst = max((ours[name] - one).abs().max().item() for name, one in twin.named_parameters())
        assert worst <= 1e-12, step


def test_a_run_that_is_resumed_between_text_and_pictures_has_the_same_bits(
    case: Case, tmp_path: Path
) -> None:
    batches = (case.shown, case.text, case.shown, case.text)
    whole, first, rest = (case.engine(dtype="bf16", vision_lr=1e-3) for _ in range(3))
    for batch in batches:
        whole.train_step(batch, loss)
    for batch in batches[:2]:
        first.train_step(batch, loss)
    first.save(tmp_path)
    rest.load(tmp_path)
    for batch in batches[2:]:
        rest.train_step(batch, loss)
    found = dict(rest.model.named_parameters())
    assert all(found[name].equal(one) for name, one in whole.model.named_parameters())
    assert (rest.optimizer.step_count, rest.optimizer.tower_steps) == (4, 2)  # type: ignore[attr-defined]


def test_text_alone_moves_no_tower(case: Case) -> None:
    engine = case.engine(dtype="bf16", weight_decay=0.9)
    before = tower_of(engine.model)
    for _ in range(2):
        engine.train_step(case.text, loss)
    assert moved(before, engine.model) == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"vision_train": "mergers"}, "one of all, merger, none"), ({"vision_lr": 0.0}, "positive")],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)
