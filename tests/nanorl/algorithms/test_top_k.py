"""Distillation over a teacher's likeliest tokens: by hand, against numpy in fp64 over 200 random
batches, by finite differences, and through the engine, whose log-probs of them are the model's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from layout_cases import TEMPERATURE, write_model
from test_recipe_references import NUM_BATCHES, same, values
from tiny_shapes import DENSE, VOCAB
from torch import Tensor

from nanoengine.build import build_engine
from nanoengine.config import EngineConfig
from nanoengine.heads.scorer import Scorer
from nanoengine.packing import Sample, TopTokens, make_micro_batches
from nanoengine.state.whole_engine import Engine
from nanorl.algorithms.recipes import named_spec
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.algorithms.top_k import topk_kl, with_tail
from nanorl.grpo import LossBatch
from nanorl.policy_loss import make_loss

SPEC = replace(named_spec("opd_topk"), correction="none")


def test_by_hand() -> None:
    """Two of the tokens and all others: policy ½, ¼, ¼; teacher ¾, ⅛, ⅛."""
    own, teacher = values(0.5, 0.25).log()[None], values(0.75, 0.125).log()[None]
    same(with_tail(own).exp()[0], [0.5, 0.25, 0.25])
    reverse = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    same(topk_kl("reverse", own, teacher), [reverse])
    same(topk_kl("forward", own, teacher), [forward])
    same(topk_kl("reverse", own, own), [0.0])


def test_over_the_whole_vocabulary_it_is_the_kl_of_the_policies() -> None:
    generator = torch.Generator().manual_seed(3)
    own, teacher = torch.randn(2, 40, 7, generator=generator, dtype=torch.float64).log_softmax(-1)
    expected = (own.exp() * (own - teacher)).sum(-1)
    torch.testing.assert_close(topk_kl("reverse", own, teacher), expected, rtol=0, atol=3e-6)
    backward = (teacher.exp() * (teacher - own)).sum(-1)
    torch.testing.assert_close(topk_kl("forward", own, teacher), backward, rtol=0, atol=3e-6)
    # Fewer tokens tell less: the KL only falls.
    for k in range(1, 7):
        less = topk_kl("reverse", own[:, :k], teacher[:, :k])
        assert bool((less <= expected + 3e-6).all()) and bool((less >= -1e-12).all())


def drawn() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """log π_θ and log π_T of the teacher's k likeliest tokens of a vocabulary, and a mask."""
    rng = np.random.default_rng(31)
    for _ in range(NUM_BATCHES):
        num, vocab = int(rng.integers(1, 30)), int(rng.integers(3, 40))
        k = int(rng.integers(1, vocab))
        logits = rng.normal(size=(2, num, vocab)) * rng.choice([0.3, 2.0])
        own, teacher = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        top = np.argsort(-teacher, -1)[:, :k]
        found = (np.take_along_axis(one, top, -1) for one in (own, teacher))
        yield *found, (rng.random(num) < 0.7).astype(float)


def as_batch(teacher: np.ndarray, mask: np.ndarray, own: Tensor) -> LossBatch:
    zeros = torch.zeros(len(mask), dtype=torch.float64)
    return LossBatch(
        rollout_logp_T=zeros,
        advantage_T=zeros,
        mask_T=torch.tensor(mask),
        weight_T=torch.tensor(mask) / 3,
        sequence_ids_T=torch.zeros(len(mask), dtype=torch.int64),
        num_sequences=1,
        top_logp_TK=own,
        teacher_top_logp_TK=torch.tensor(teacher),
    )


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_the_loss_and_its_gradient_against_numpy(kind: str) -> None:
    spec = replace(SPEC, distill_kl=kind)
    for own, teacher, mask in drawn():
        leaf = torch.tensor(own, requires_grad=True)
        logp = torch.zeros(len(mask), dtype=torch.float64, requires_grad=True)
        loss, _ = make_loss(spec)(logp, as_batch(teacher, mask, leaf))
        loss.backward()
        p, q = (np.exp(one) for one in (own, teacher))
        p_rest, q_rest = 1 - p.sum(-1, keepdims=True), 1 - q.sum(-1, keepdims=True)
        p_all, q_all = np.hstack([p, p_rest]), np.hstack([q, q_rest])
        if kind == "reverse":
            kl = (p_all * np.log(p_all / q_all)).sum(-1)
            # By log p_k, where the rest falls by what p_k rises.
            slope = p * (np.log(p / q) - np.log(p_rest / q_rest))
        else:
            kl = (q_all * np.log(q_all / p_all)).sum(-1)
            slope = -q + p * q_rest / p_rest
        same(loss, (mask * kl).sum() / 3)
        same(leaf.grad, mask[:, None] * slope / 3)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_gradients_by_finite_differences(kind: str) -> None:
    own, teacher, mask = next(drawn())
    leaf = torch.tensor(own, requires_grad=True)
    loss = make_loss(replace(SPEC, distill_kl=kind))
    logp = torch.zeros(len(mask), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: loss(logp, as_batch(teacher, mask, x))[0], leaf)


def test_a_teacher_that_is_sure_gives_finite_numbers() -> None:
    own, teacher = torch.tensor([[-1e-4, -12.0]]), torch.tensor([[0.0, -30.0]])
    for kind in ("reverse", "forward"):
        leaf = own.clone().requires_grad_()
        loss = topk_kl(kind, leaf, teacher)
        loss.sum().backward()
        assert bool(loss.isfinite().all()) and bool(leaf.grad.isfinite().all())
        assert float(loss.detach()) > 0


# -- through the engine ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    root = tmp_path_factory.mktemp("models")
    config = EngineConfig(lr=0.0, micro_batch_tokens=40, max_grad_norm=0.0)
    folders = [write_model(root / str(seed), DENSE, seed) for seed in range(2)]
    return build_engine(folders[0], config), build_engine(folders[1], config)


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (9, 14, 6)]
    return [Sample(tokens=row, loss_mask=[0, 0, 1, 0] + [1] * (len(row) - 4)) for row in rows]


def whole(engine: Engine, sample: Sample) -> Tensor:
    """fp64 log-probs [tokens, V] of the next token, by the hidden states and the head."""
    (micro,) = make_micro_batches([sample], 100)
    part = engine._scorer.part(micro)
    with torch.no_grad():
        hidden = engine.model(part.ids_N, part.positions_N, part.context)
        logits = hidden.double() @ engine.model.lm_head_weight.double().t()
    return torch.cat([torch.zeros(1, VOCAB).double(), (logits / TEMPERATURE).log_softmax(-1)])


@pytest.mark.parametrize("k", [1, 4, VOCAB])
def test_an_engine_finds_the_likeliest_tokens(engines: tuple[Engine, Engine], k: int) -> None:
    found = engines[1].forward_top(samples(), k, temperature=TEMPERATURE)
    for sample, top in zip(samples(), found, strict=True):
        is_action = torch.tensor(sample.loss_mask).bool()
        expected = whole(engines[1], sample).topk(k).values[is_action]
        torch.testing.assert_close(top.logps[is_action].double(), expected, rtol=0, atol=1e-5)
        assert top.ids.shape == (len(sample.tokens), k)
        assert not top.logps[~is_action].any() and not top.ids[~is_action].any()


def test_a_k_beyond_the_vocabulary_is_refused(engines: tuple[Engine, Engine]) -> None:
    with pytest.raises(ValueError, match=f"k={VOCAB + 1}: must be from 1 to the vocabulary's"):
        engines[0].forward_top(samples(), VOCAB + 1)


def test_what_members_share_is_scored_apart_where_their_teachers_name_other_tokens(
    engines: tuple[Engine, Engine],
) -> None:
    """The same tokens after the same prompt, of which a tree has one row each."""
    policy = engines[0]
    tokens, mask = [3, 4, 5, 6, 7], [0, 0, 1, 1, 1]
    tops = [torch.full((5, 2), first) + torch.arange(2) for first in (8, 20)]
    given = [
        Sample(tokens=tokens, loss_mask=mask, group="g", top=TopTokens(top, torch.zeros(5, 2)))
        for top in tops
    ]
    tree = Scorer(policy.model, share_prefix=True)
    (micro,) = tree.micro_batches(given)
    assert micro.rows_T is not None and micro.num_rows == 4
    told = tree.logprobs(micro, TEMPERATURE, only_masked=True).told(micro).own_top_logp_TK
    expected = whole(policy, given[0])[2:]
    assert told is not None
    for (_, own), top in zip(micro.split(told), tops, strict=True):
        torch.testing.assert_close(own[1:].double(), expected.gather(1, top[2:]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_a_step_has_the_gradient_of_the_kl(engines: tuple[Engine, Engine], kind: str) -> None:
    """Against autograd through the whole tensor of tokens x vocabulary."""
    policy, teacher = engines
    tops = teacher.forward_top(samples(), 4, temperature=TEMPERATURE)
    given = [
        replace(
            one,
            top=top,
            fields={name: [float(m) for m in one.loss_mask] for name in FIELDS},
        )
        for one, top in zip(samples(), tops, strict=True)
    ]
    policy.optimizer.zero_grad()
    loss, _ = policy.forward_backward(given, PolicyLossOf(kind), temperature=TEMPERATURE)
    norm = policy.optimizer.grad_norm()
    model = policy.model
    leaves = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    head = leaves["embedding"]
    total = torch.zeros((), dtype=torch.float64)
    for sample, top in zip(given, tops, strict=True):
        (micro,) = make_micro_batches([sample], 100)
        part = policy._scorer.part(micro)
        args = (part.ids_N, part.positions_N, part.context)
        hidden = torch.func.functional_call(wide(policy), leaves, args)
        logp = (hidden @ head.t() / TEMPERATURE).log_softmax(-1).gather(1, top.ids[1:])
        mask = torch.tensor(sample.loss_mask[1:]).double()
        total = total + (mask * topk_kl(kind, logp, top.logps[1:].double())).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()))
    expected = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    assert loss == pytest.approx(float(total.detach()), rel=1e-5) and loss > 0
    assert norm == pytest.approx(expected, rel=1e-4)


FIELDS = ("rollout_logp", "advantage", "weight", "staleness")


class PolicyLossOf:
    """The recipe's loss, as the engine calls it."""

    def __init__(self, kind: str) -> None:
        from nanorl.policy_loss import PolicyLoss

        self.loss = PolicyLoss(replace(SPEC, distill_kl=kind))

    def __call__(self, *args: object) -> object:
        return self.loss(*args)  # type: ignore[arg-type]


def wide(engine: Engine) -> torch.nn.Module:
    from nanoengine.model.transformer import Transformer

    return Transformer(engine.model.config, torch.float64)


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, "top_k=0"),
        ({"distill_kl": "both"}, "distill_kl='both': choose one of reverse, forward"),
        ({"advantage": "grpo"}, "loss='opd_topk' reads no advantages; set advantage='none'"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **options)


def test_a_loss_without_top_tokens_says_what_is_missing() -> None:
    own, teacher, mask = next(drawn())
    batch = replace(as_batch(teacher, mask, torch.tensor(own)), top_logp_TK=None)
    with pytest.raises(ValueError, match="top_logp_TK is missing: loss='opd_topk' reads it"):
        make_loss(SPEC)(torch.zeros(len(mask)), batch)


def test_samples_with_and_without_top_tokens_do_not_mix() -> None:
    first, second, _ = samples()
    top = TopTokens(torch.zeros(9, 2, dtype=torch.int64), torch.zeros(9, 2))
    with pytest.raises(ValueError, match=r"samples with \[0, 2\] top tokens"):
        make_micro_batches([replace(first, top=top), second], 100)
    with pytest.raises(ValueError, match="top has 9 entries for 14 tokens"):
        replace(second, top=top)
    assert AlgorithmSpec().top_k == 20
