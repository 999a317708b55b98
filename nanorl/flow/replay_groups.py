"""`ReplayGroups`: groups that had a signal, kept and trained on again beside the fresh ones.

    kept      a fresh group with a signal whose members earned unlike rewards: the others teach
              nothing, or, by their lengths, turns or parts alone, nothing that was rare
    drawn     `ReplayPolicy.num_groups` a step without replacement, by weight 1 − p, where p is the
              share of the group's members that earned its best reward. So rare successes come
              first (Kimi k1.5 draws problems by 1 − success rate, arXiv 2501.12599, section 2.3.4)
    dropped   once older than `max_age` versions, used `max_uses` times, or, of more than
              `capacity`, the largest p first and of equals the oldest

They join the fresh groups and replace none ("fresh-anchored", arXiv 2606.04560): what costs most,
playing, is as it was, so are tasks, seeds and the number of tries in each step, and where success
is rare a fresh try is the last thing to give up. What is more is the training of so many groups.

Their tokens are of older policies. Each is weighed for that by the algorithm's correction (TIS:
min(π_o/μ, 2)) as a stale token of an asynchronous run is; advantages compare a group's own members,
as ever. A function of (seed, step, what is kept) alone decides which are drawn, so a synchronous
run that is killed and resumed ends with the same bits.

Their names go into every checkpoint. Their rollouts are read back from the run's store, and lie in
the checkpoint themselves where the store lets rollouts go or never had them (a fork's).
Left out: replay of single rollouts in groups of other tasks' tries (RLEP, ARPO), whose advantages
would compare tries of several policies as if they were one's.
"""

from __future__ import annotations

import base64
import json
import math
import random
import zlib
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from nanorl.batch_metrics import batch_metrics, has_signal
from nanorl.flow.replay_policy import ReplayPolicy
from nanorl.grpo import GRPO
from nanorl.rollout_json import from_json
from nanorl.task import derive_seed
from nanorl.types import Rollout, TokenStats
from nanorl.unpacking import unzlib

Group = Sequence[Rollout]


@dataclass(kw_only=True)
class KeptGroup:
    """A group with what is known of its replays.

    KeptGroup(rollouts=[first, second], rarity=0.5, uses=1, is_stored=True)
    """

    rollouts: Group
    rarity: float
    """The share of its members that earned less than the best one; above 0."""
    uses: int = 0
    is_stored: bool
    """The run's store has its rollouts and keeps them."""

    @property
    def name(self) -> str:
        return self.rollouts[0].group_id

    @cached_property
    def version(self) -> int:
        """The policy that sampled the first of its tokens."""
        return min((one.version for one in self.rollouts if one.version >= 0), default=-1)

    @cached_property
    def content(self) -> str:
        """The rollouts as compressed text; `unpack` is the inverse."""
        text = json.dumps(list(self.rollouts), default=vars)
        return base64.b85encode(zlib.compress(text.encode(), 1)).decode()


class ReplayGroups:
    """The groups that one run may train on again. Methods may be called from one thread."""

    def __init__(
        self, policy: ReplayPolicy, spec: GRPO, *, seed: int, num_fresh: int, store_keeps: bool
    ) -> None:
        """A batch has `num_fresh` groups of its own. `store_keeps`: rollouts of finished steps stay
        in the run's store, so that a checkpoint need not hold them."""
        self._policy, self._spec, self._seed = policy, spec, seed
        self._num = policy.num_groups(num_fresh)
        self._store_keeps = store_keeps
        self._kept: list[KeptGroup] = []  # in the order in which they were trained on
        self._drawn: list[KeptGroup] = []  # in the present step

    @property
    def kept(self) -> list[KeptGroup]:
        return list(self._kept)

    @property
    def drawn(self) -> list[Group]:
        """Those that the last batch trained on again."""
        return [one.rollouts for one in self._drawn]

    # -- a step ------------------------------------------------------------------------------------

    def beside(self, fresh: Sequence[Group], step: int) -> list[Group]:
        """The batch of `step`: its fresh groups and, among them, those that are trained on again.
        These are spread evenly, so that with several minibatches none is of them alone."""
        self._draw(step)
        places = [
            ((i + 0.5) / len(groups), kind, group)
            for kind, groups in enumerate((fresh, self.drawn))
            for i, group in enumerate(groups)
        ]
        return [group for *_, group in sorted(places, key=lambda place: place[:2])]

    def _draw(self, step: int) -> None:
        able = [one for one in self._kept if self._is_fit(one, step)]
        able.sort(key=lambda one: self._key(one, step), reverse=True)
        self._drawn = able[: self._num]
        for one in self._drawn:
            one.uses += 1

    def _key(self, one: KeptGroup, step: int) -> tuple[float, str]:
        # Efraimidis and Spirakis 2006: the largest u^(1/w) are a weighted sample without
        # replacement. Each group has a u of its own, so what else is kept does not change it.
        point = random.Random(derive_seed(self._seed, "replay", step, one.name)).random()
        return math.log(max(point, 1e-300)) / one.rarity, one.name

    def _is_fit(self, one: KeptGroup, step: int) -> bool:
        return step - one.version <= self._policy.max_age and one.uses < self._policy.max_uses

    def finish(
        self,
        step: int,
        fresh: Sequence[Group],
        learnt: MutableMapping[str, Any],
        stats: MutableMapping[str, TokenStats],
    ) -> None:
        """Keep what `step` had to teach. `learnt` then counts the fresh rollouts alone and, beside
        them, the replayed ones; `stats` loses those of the latter, which belong to an earlier step.
        """
        again = [one for group in self.drawn for one in group]
        rollouts = [one for group in fresh for one in group]
        for name in batch_metrics([*rollouts, *again], self._spec):
            learnt.pop(name, None)  # also what only a replayed environment counted
        counted = batch_metrics(rollouts, self._spec)
        self._spec.select(rollouts, counted)  # which counts those that it masks
        learnt.update(counted)
        chosen = self._spec.select(again, {})
        learnt["num_trained_rollouts"] -= sum(self._is_trained(one, stats) for one in chosen)
        for one in again:
            stats.pop(one.rollout_id, None)
        self.keep(fresh, step)
        learnt.update(self._metrics(step, again))

    def keep(self, fresh: Sequence[Group], step: int) -> None:
        """Keep those of the fresh groups of `step` that had a signal, and drop what nobody will
        draw any more."""
        for group in fresh:
            earned = [self._spec.earned(one) for one in group]
            # Not of what was earned: with a reward of length no two members earn quite the same,
            # and any group would look rare.
            rewards = [one.total_reward for one in group]
            if len(set(rewards)) < 2 or not all(has_signal(earned, [0] * len(group))):
                continue
            rarity = sum(one != max(rewards) for one in rewards) / len(group)
            self._kept.append(KeptGroup(rollouts=group, rarity=rarity, is_stored=self._store_keeps))
        self._kept = [one for one in self._kept if self._is_fit(one, step + 1)]
        excess = max(0, len(self._kept) - self._policy.capacity)
        ranked = sorted(self._kept, key=lambda one: one.rarity)  # of equals the oldest in front
        gone = {one.name for one in ranked[:excess]}
        self._kept = [one for one in self._kept if one.name not in gone]

    def _is_trained(self, one: Rollout, stats: Mapping[str, TokenStats]) -> bool:
        """Say whether the batch, of which `stats` are, has learnt from its tokens."""
        if not self._spec.is_proportional:
            return one.num_action_tokens > 0
        values = stats[one.rollout_id].values if one.rollout_id in stats else {}
        return any(any(sequence) for sequence in values.get("advantage", ()))

    def _metrics(self, step: int, again: Sequence[Rollout]) -> dict[str, float]:
        metrics = {
            "replay_kept": float(len(self._kept)),
            "replayed_groups": float(len(self._drawn)),
            "replayed_rollouts": float(len(again)),
            "replayed_tokens": float(sum(one.num_tokens for one in again)),
        }
        if again:
            metrics["replayed_age_mean"] = fmean(step - one.version for one in self._drawn)
            metrics["replayed_success"] = fmean(one.is_success for one in again)
        return metrics

    # -- checkpoints -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The kept groups as JSON; `load` is the inverse."""
        return {
            "groups": [
                {
                    "rollouts": [rollout.rollout_id for rollout in one.rollouts],
                    "rarity": one.rarity,
                    "uses": one.uses,
                    "content": "" if one.is_stored and self._store_keeps else one.content,
                }
                for one in self._kept
            ]
        }

    def load(self, state: Mapping[str, Any], stored: Mapping[str, Rollout]) -> None:
        """Go on from there. `stored` has the rollouts of `stored_ids(state)`, as far as the store
        has them; ValueError where it lacks any."""
        missing = [name for name in stored_ids(state) if name not in stored]
        if missing:
            raise ValueError(
                f"the run's store lacks {len(missing)} rollouts that --rl.replay.share would train "
                f"on again, the first is {missing[0]}: put the store back, or go on without the "
                "groups that were kept (--rl.replay.share 0)"
            )
        self._kept = [
            KeptGroup(
                rollouts=unpack(one["content"])
                if one["content"]
                else [stored[name] for name in one["rollouts"]],
                rarity=one["rarity"],
                uses=one["uses"],
                is_stored=not one["content"],
            )
            for one in state.get("groups", ())
        ]


def stored_ids(state: Mapping[str, Any]) -> list[str]:
    """The rollouts that a state names and does not hold."""
    groups = state.get("groups", ())
    return [name for one in groups if not one["content"] for name in one["rollouts"]]


def with_contents(state: Mapping[str, Any], stored: Mapping[str, Rollout]) -> dict[str, Any]:
    """The state with all rollouts in it, for a run whose store never had them."""
    groups = []
    for one in state.get("groups", ()):
        rollouts = [stored[name] for name in one["rollouts"]] if not one["content"] else ()
        content = one["content"] or KeptGroup(rollouts=rollouts, rarity=1, is_stored=False).content
        groups.append(one | {"content": content})
    return {"groups": groups}


def unpack(content: str) -> list[Rollout]:
    """The rollouts of `KeptGroup.content`."""
    found = json.loads(unzlib(base64.b85decode(content)))
    return [from_json(one) for one in found]
