"""Everybody in nanorl who compares tokens, with two pictures of one size under equal tokens."""

from __future__ import annotations

import ast
import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from pictures import PLACEHOLDER, picture
from test_recording import recording_of
from test_router import make, run

from nanoengine.spans import ImageSpan, content_ids
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.endpoint.call_tree import CallTree
from nanorl.agents.kept_notes import KeptNotes
from nanorl.algorithms.turn_rewards import _states
from nanorl.batching import samples_of
from nanorl.distributed.warm_start import sft_samples
from nanorl.inspection.replay.difference import first_difference
from nanorl.inspection.replay.forced import StoredTurns
from nanorl.observability.store import RolloutStore, content_hash
from nanorl.rollout_json import from_json, to_json
from nanorl.types import Branch, Rollout, TurnSpan

ROOT = Path(__file__).resolve().parents[2]
TOKENS = [5, *[PLACEHOLDER] * 4, 6, 30, 31]


def branch(*names: str) -> Branch:
    """A prompt with a picture, then two sampled tokens."""
    return Branch(
        tokens=TOKENS, loss_mask=[0] * 6 + [1, 1], logps=[0.0] * 6 + [-0.5, -0.25],
        versions=[-1] * 6 + [2, 2], images=[picture(name, 1) for name in names],
        turn_spans=[TurnSpan(action_start=6, action_end=8, observation_end=8)],
    )  # fmt: skip


def rollout(*names: str, rollout_id: str = "r", branches: list[Branch] | None = None) -> Rollout:
    own = branch(*names)
    return Rollout(
        task_id="t-1", group_id="g", rollout_id=rollout_id, tokens=own.tokens,
        loss_mask=own.loss_mask, logps=own.logps, versions=own.versions, images=own.images,
        turn_spans=own.turn_spans, branches=branches or [],
    )  # fmt: skip


def asked(name: str, **options: int) -> SamplingParams:
    return SamplingParams(images=(picture(name, 1),), **options)


def test_a_rollout_refuses_spans_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="with a loss mask"):
        replace(branch(), images=[picture("a", 6, 1)])


def test_samples_bring_their_pictures() -> None:
    (sample,) = samples_of([rollout("a")], version=2)
    assert list(sample.images) == [picture("a", 1)]


def test_the_supervised_start_brings_its_pictures() -> None:
    (sample,) = sft_samples([rollout("a")])
    assert list(sample.images) == [picture("a", 1)]


def test_whoever_makes_a_sample_of_a_sequence_brings_its_pictures() -> None:
    """Without them it would be trained as text, placeholders and all, and nothing would show it."""
    found = []
    for file in sorted((ROOT / "nanorl").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Sample"):
                continue
            given = {one.arg: one.value for one in node.keywords}
            if getattr(given.get("tokens"), "attr", "") == "tokens":
                found.append((file.name, "images" in given))
    assert len(found) >= 3
    assert all(has_images for _, has_images in found), found


def test_pictures_come_back_from_json_and_from_the_store(tmp_path: Path) -> None:
    whole = rollout("a", branches=[branch("b"), branch()])
    assert from_json(json.loads(json.dumps(to_json(whole)))) == whole
    old = {name: one for name, one in to_json(rollout()).items() if name != "images"}
    assert from_json(old) == rollout(), "written before there were pictures"
    with RolloutStore(tmp_path / "r.sqlite") as store:
        store.add_group([whole, rollout(rollout_id="text")], step=0, version=0)
        assert store.get("r") == whole
        assert store.get("text") == rollout(rollout_id="text")


def test_the_hash_of_a_rollout_knows_its_picture() -> None:
    hashes = [content_hash(rollout(*names)) for names in ((), ("a",), ("b",), ("a",))]
    assert len(set(hashes)) == 3
    assert hashes[1] == hashes[3]


def test_states_of_turns_differ_by_what_was_seen() -> None:
    assert _states(branch("a")) == _states(branch("a")) != _states(branch("b"))
    assert _states(branch()) == [(5, 9, 9, 9, 9, 6)]


def test_the_first_difference_of_two_rollouts_may_be_a_picture() -> None:
    def text(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    assert first_difference(rollout("a"), rollout("a"), text) is None
    found = first_difference(rollout("a"), rollout("b"), text)
    assert found is not None
    assert (found.kind, found.token) == ("prompt", 1)


def test_a_replay_says_the_stored_turn_after_the_stored_picture_alone() -> None:
    turns = StoredTurns(rollout("a", branches=[branch("b")]), eos_ids={7})
    said = [asyncio.run(turns.generate(TOKENS[:6], asked(name))).ids for name in "abc"]
    assert said == [[30, 31], [30, 31], []]
    assert asyncio.run(turns.generate(TOKENS[:6], SamplingParams())).ids == []


class Says:
    """Answers with two tokens; what was kept is told."""

    def __init__(self, kept: int) -> None:
        self._kept = kept

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        tops = [[(30, -0.5), (self._kept, -0.9)], [(31, -0.25)]]
        return Output(ids=[30, 31], logps=[-0.5, -0.25], versions=[2, 2], top_logps=tops)


def test_kept_tokens_are_those_of_the_call_that_saw_the_picture() -> None:
    notes = KeptNotes(Says(40))
    params = replace(asked("a"), logps_mode="kept", top_k=2)
    asyncio.run(notes.generate(TOKENS[:6], params))
    assert notes.noted(rollout("a")).kept[6:] == [[30, 40], [31]]
    with pytest.raises(ValueError, match="nothing says what was kept"):
        notes.noted(rollout("b"))


def test_calls_go_on_from_a_call_that_saw_the_same_picture() -> None:
    said = Output(ids=[30, 31], logps=[-0.5, -0.25], versions=[2, 2])
    tree = CallTree()
    seen: tuple[ImageSpan, ...] = (picture("a", 1),)
    first = tree.add(TOKENS[:6], said, seen)
    longer = [*TOKENS, 7]
    assert tree.parent_of(longer, seen) is first
    assert tree.parent_of(longer, (picture("b", 1),)) is None
    assert tree.parent_of(longer) is None
    tree.add(longer, said, seen)
    (sequence,) = tree.sequences()
    assert sequence.images == list(seen)
    assert sum(sequence.loss_mask) == 4


def test_calls_that_differ_by_their_picture_are_in_one_order_whoever_ends_first() -> None:
    said = [Output(ids=[30], logps=[-0.5], versions=[2]) for _ in range(3)]
    orders = []
    for names in ("abc", "bac"):
        tree = CallTree()
        for name, output in zip(names, said, strict=True):
            tree.add(TOKENS[:6], output, (picture(name, 1),))
        orders.append([one.images[0].key for one in tree.sequences()])
    assert orders[0] == orders[1]


class Seeds:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        self.seen.append((params.images[0].key, params.seed))
        return Output(ids=[30], logps=[-0.5], versions=[2])


def test_the_seed_of_a_call_depends_on_its_picture_and_not_on_who_came_first() -> None:
    found = []
    for order in ("ab", "ba"):
        generator = Seeds()
        recording = recording_of(generator)
        for name in order:
            asyncio.run(recording.sample(TOKENS[:6], asked(name, max_tokens=1), 1))
        found.append(sorted(generator.seen))
    assert found[0] == found[1]
    assert len({seed for _, seed in found[0]}) == 2


def test_a_router_sends_a_picture_where_it_was_seen() -> None:
    """Two replicas; block by block the prompts are equal tokens, and a third request of the second
    picture goes where the second went."""

    async def scenario() -> None:
        router, replicas = make(2)
        prompt = [5, *[PLACEHOLDER] * 40]
        first, second = replicas.values()

        def params(name: str) -> SamplingParams:
            return SamplingParams(max_tokens=1, images=(picture(name, 1, 40),))

        for name in "ab":
            await router.generate(prompt, params(name))
        assert (len(first.answered), len(second.answered)) == (1, 1)
        for _ in range(3):
            await router.generate(prompt, params("b"))
        assert (len(first.answered), len(second.answered)) == (1, 4)
        said = await router.generate(prompt, replace(params("a"), max_tokens=20))
        turn = content_ids(prompt + said.ids, params("a").images)
        assert set(router._keys(turn)) <= router._homes.keys(), "its next turn finds it again"

    run(scenario)
