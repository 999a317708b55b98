"""The losses that a client names: those of the Tinker API, and ours as `nanorl:NAME`.

A loss is a sum over all positions of all data; weights and advantages are the client's, and so is
any mean. q is `logprobs`, the log-probs of the policy that sampled; r = exp(logp - q).

    cross_entropy         -logp * weights
    importance_sampling   -r * advantages
    ppo                   -min(r * advantages, clamp(r, low, high) * advantages)
    cispo                 -sg[clamp(r, low, high)] * logp * advantages
    dro                   -(logp * advantages - beta / 2 * (logp - q)^2)

`low` and `high` are `clip_low_threshold` (0.8) and `clip_high_threshold` (1.2), of the config or,
position by position, of the data. `nanorl:NAME` is a loss of algorithms/losses.py; its config
has `OUR_OPTIONS`, its actions are where `mask` (default: advantages) is not 0.
Left out: gspo and stable_reinforce as Tinker has them (nanorl:gspo is the published one), and
losses that the client uploads; its `forward_backward_custom` runs on the client over cross_entropy.
Source: the Tinker documentation, "Loss functions".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from nanoengine.engine import LossFn
from nanoengine.packing import MicroBatch, Sample
from nanorl.algorithms.registry import LOSSES
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.grpo import LossBatch
from nanorl.policy_loss import make_loss
from nanorl.serving.training_service.service_messages import Datum

Config = Mapping[str, float | str]
Columns = Mapping[str, Tensor]
"""The numbers of a micro-batch's predictions, by the name the client gave them; [T]."""

OURS = "nanorl:"
TARGETS = "target_tokens"
OUR_CHOICES = ("old_policy", "correction")
OUR_OPTIONS = (
    *("clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative", *OUR_CHOICES),
    *("correction_cap", "correction_low", "correction_high", "correction_kl", "veto_below"),
)
"""What a loss of ours reads of `AlgorithmSpec` without a reference policy or an entropy. How tokens
are weighed and rewards become advantages is the client's."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The columns that a loss reads of each position, with the default of what a client may leave
    out (None: it may not), and its sum over a micro-batch."""

    columns: Mapping[str, float | None]
    sum_of: Callable[[Tensor, MicroBatch], Tensor]

    def engine_loss(self) -> LossFn:
        return lambda logp_T, _, micro: (self.sum_of(logp_T, micro), {})


def find_loss(name: str, config: Config) -> Loss:
    """The loss of that name and config. `ValueError` says which there are, or what it reads."""
    if name.startswith(OURS):
        return _our_loss(name, config)
    if name not in THEIRS:
        known = [*THEIRS, *(OURS + ours for ours in LOSSES)]
        raise ValueError(f"loss_fn={name!r}: choose from {', '.join(known)}")
    options, columns, formula = THEIRS[name]
    _check_names(name, config, options)
    given = {key: _number(name, key, value) for key, value in config.items()}
    missing = [key for key, default in options.items() if default is None and key not in given]
    if missing:
        raise ValueError(f"loss_fn_config: {name} needs {', '.join(missing)}")
    defaults = {key: given.get(key, default) for key, default in options.items()}
    # A threshold of the data goes before the config's.
    reads = {**columns, **(defaults if "clip_low_threshold" in options else {})}

    def sum_of(logp_T: Tensor, micro: MicroBatch) -> Tensor:
        scalars = {key: logp_T.new_tensor(value) for key, value in defaults.items()}
        return formula(logp_T, {**scalars, **micro.fields_T}).sum()

    return Loss(columns=reads, sum_of=sum_of)


def _cross_entropy(logp_T: Tensor, x: Columns) -> Tensor:
    return -logp_T * x["weights"]


def _importance_sampling(logp_T: Tensor, x: Columns) -> Tensor:
    return -(logp_T - x["logprobs"]).exp() * x["advantages"]


def _clamped(ratio_T: Tensor, x: Columns) -> Tensor:
    return torch.clamp(ratio_T, x["clip_low_threshold"], x["clip_high_threshold"])


def _ppo(logp_T: Tensor, x: Columns) -> Tensor:
    ratio_T = (logp_T - x["logprobs"]).exp()
    return -torch.min(ratio_T * x["advantages"], _clamped(ratio_T, x) * x["advantages"])


def _cispo(logp_T: Tensor, x: Columns) -> Tensor:
    ratio_T = (logp_T - x["logprobs"]).exp()
    return -_clamped(ratio_T, x).detach() * logp_T * x["advantages"]


def _dro(logp_T: Tensor, x: Columns) -> Tensor:
    distance_T = (logp_T - x["logprobs"]) ** 2
    return -(logp_T * x["advantages"] - 0.5 * x["beta"] * distance_T)


_SAMPLED: Mapping[str, float | None] = {"logprobs": None, "advantages": None}
_CLIP: Mapping[str, float | None] = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

THEIRS: Mapping[
    str,
    tuple[
        Mapping[str, float | None], Mapping[str, float | None], Callable[[Tensor, Columns], Tensor]
    ],
] = MappingProxyType(
    {
        "cross_entropy": ({}, {"weights": 1.0}, _cross_entropy),
        "importance_sampling": ({}, _SAMPLED, _importance_sampling),
        "ppo": (_CLIP, _SAMPLED, _ppo),
        "cispo": (_CLIP, _SAMPLED, _cispo),
        "dro": ({"beta": None}, _SAMPLED, _dro),
    }
)
"""Name -> (its options, what it reads of each position, its formula)."""


def _our_loss(name: str, config: Config) -> Loss:
    ours = name.removeprefix(OURS)
    if ours not in LOSSES or ours == "opd":  # opd reads a teacher, which no client sends
        known = ", ".join(OURS + one for one in LOSSES if one != "opd")
        raise ValueError(f"loss_fn={name!r}: choose from {known}")
    _check_names(name, config, OUR_OPTIONS)
    given = {
        key: value if key in OUR_CHOICES else _number(name, key, value)
        for key, value in config.items()
    }
    # The client sends one log-prob of each token: the ratio is against that.
    spec = AlgorithmSpec(**{"old_policy": "rollout", **given, "loss": ours})  # type: ignore[arg-type]
    token_loss = make_loss(spec)

    def sum_of(logp_T: Tensor, micro: MicroBatch) -> Tensor:
        advantage_T = micro.fields_T["advantages"]
        mask_T = micro.fields_T["mask"]
        mask_T = torch.where(mask_T.isnan(), advantage_T != 0, mask_T != 0).to(logp_T.dtype)
        batch = LossBatch(
            rollout_logp_T=micro.fields_T["logprobs"],
            advantage_T=advantage_T,
            mask_T=mask_T,
            weight_T=mask_T,
            sequence_ids_T=micro.local_ids_T,
            num_sequences=len(micro.index),
        )
        return token_loss(logp_T, batch)[0]

    return Loss(columns={**_SAMPLED, "mask": float("nan")}, sum_of=sum_of)


def make_samples(data: list[Datum], loss: Loss, vocab_size: int, max_length: int) -> list[Sample]:
    """The data as the engine reads them: every position is scored. `ValueError` names what is
    wrong with which datum."""
    if not data:
        raise ValueError("data: is empty; send at least one datum")
    return [
        _sample(f"data[{i}]", datum, loss, vocab_size, max_length) for i, datum in enumerate(data)
    ]


def _sample(name: str, datum: Datum, loss: Loss, vocab_size: int, max_length: int) -> Sample:
    n = len(datum.tokens)
    if not 1 <= n <= max_length:
        raise ValueError(f"{name}.model_input: has {n} tokens; must be 1 to {max_length}")
    if TARGETS not in datum.inputs:
        raise ValueError(f"{name}.loss_fn_inputs: {TARGETS} is missing")
    for key, values in datum.inputs.items():
        if key != TARGETS and key not in loss.columns:
            raise ValueError(
                f"{name}.loss_fn_inputs[{key!r}]: this loss does not read it; remove it "
                f"(it reads {', '.join([TARGETS, *loss.columns])})"
            )
        if len(values) != n:
            raise ValueError(
                f"{name}.loss_fn_inputs[{key!r}]: has {len(values)} entries for {n} tokens"
            )
    given_targets = datum.inputs[TARGETS]
    if given_targets.dtype.kind != "i":
        raise ValueError(f"{name}.loss_fn_inputs[{TARGETS!r}]: must be int64, the ids of tokens")
    targets = given_targets.tolist()
    for what, tokens in (("model_input", datum.tokens), (TARGETS, targets)):
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError(f"{name}: {what} has a token outside the vocabulary of {vocab_size}")
    columns: dict[str, list[float]] = {}
    for key, default in loss.columns.items():
        if key not in datum.inputs and default is None:
            raise ValueError(f"{name}.loss_fn_inputs: {key} is missing")
        given = datum.inputs.get(key)
        columns[key] = [0.0, *([default or 0.0] * n if given is None else given.tolist())]
    return Sample(
        tokens=[*datum.tokens, targets[-1]],
        loss_mask=[0] + [1] * n,
        fields=columns,
        targets=[0, *targets],
    )


def _check_names(name: str, config: Config, known: Collection[str]) -> None:
    for key in config:
        if key not in known:
            reads = ", ".join(known) or "nothing"
            raise ValueError(f"loss_fn_config[{key!r}]: {name} does not know it; it knows {reads}")


def _number(name: str, key: str, value: float | str) -> float:
    if isinstance(value, str):
        raise ValueError(f"loss_fn_config[{key!r}]={value!r}: {name} needs a number")
    return value
