"""Calls of an episode become a tree: every sampled token is trained on once, in its context."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from agent_doubles import EOS, ScriptedGenerator, output_of, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import turns

from nanoinfer.dialects.exchange import ApiCall, message_of
from nanoinfer.http.api_error import ApiError
from nanoinfer.options.logit_edits import GrammarCompiler
from nanoinfer.params import Grammar, Output, SamplingParams
from nanorl.agents.endpoint.call_tree import CallTree
from nanorl.agents.endpoint.recording import Recording, Sampled
from nanorl.agents.limits import Limits

LIMITS = Limits(max_turns=1000, max_turn_tokens=12, max_context_tokens=4000)
Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def call(*messages: Message, **options: Any) -> ApiCall:
    return ApiCall(messages=list(messages), **options)


class Dice:
    """Samples anything; every log-prob that it hands out is a number of its own."""

    def __init__(self) -> None:
        self.num_tokens = 0

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        rng = random.Random(f"{params.seed}/{len(ids)}")
        await turns(rng.randrange(4))
        size = rng.randint(1, params.max_tokens)
        # "a" then "b" is a token by itself where text is encoded again
        sampled = [rng.choice([64, 65, 66, 220, 97]) for _ in range(size)]
        is_ended = rng.random() < 0.7
        if is_ended:
            sampled[-1] = EOS
        logps = [-float(self.num_tokens + i + 1) for i in range(size)]
        self.num_tokens += size
        return Output(
            ids=sampled,
            logps=logps,
            versions=[len(ids) % 3] * size,
            finish_reason="stop" if is_ended else "length",
        )


def recording_of(generator: Any, limits: Limits = LIMITS) -> Recording:
    return Recording(generator, tiny_tokenizer(), limits=limits, sampling=SamplingParams(seed=5))


def check_trained_once(recording: Recording, answered: list[Sampled]) -> None:
    """Every token of an answer has mask 1 in one sequence, behind the ids that it was sampled
    after; nothing else has."""
    places = {}
    for sequence in recording.tree.sequences():
        covered = [0] * len(sequence.tokens)
        for span in sequence.turn_spans:
            for place in range(span.action_start, span.action_end):
                covered[place] = 1
        assert covered == sequence.loss_mask
        for place, mask in enumerate(sequence.loss_mask):
            if mask:
                logp = sequence.logps[place]
                assert logp not in places, "trained twice"
                places[logp] = (sequence.tokens[: place + 1], sequence.versions[place])
            else:
                assert (sequence.logps[place], sequence.versions[place]) == (0.0, -1)
    expected = {
        output.logps[i]: ([*sampled.ids, *output.ids[: i + 1]], output.versions[i])
        for sampled in answered
        for output in (reply.output for reply in sampled.replies)
        for i in range(len(output.ids))
    }
    assert places == expected


class RandomClient:
    """Goes on, forks, asks again, rewrites what was said, forgets, gives up and does it at once."""

    def __init__(self, recording: Recording, rng: random.Random) -> None:
        self.recording, self.rng = recording, rng
        self.histories: list[list[Message]] = [[user("begin")]]
        self.answered: list[Sampled] = []
        self.names: dict[str, list[Message]] = {}

    async def ask(self, messages: list[Message], **options: Any) -> None:
        name = f"answer{len(self.names)}"
        sampled = await self.recording.answer(call(*messages, **options), name)
        self.answered.append(sampled)
        for reply in sampled.replies:
            said = dict(message_of(reply))
            if self.rng.random() < 0.3:  # as clients do
                said["content"] = f" {said['content']}\n"
            self.histories.append([*messages, said, user(self.rng.choice(["and?", "ab", "why?"]))])
        self.names[name] = [*messages, message_of(sampled.replies[0])]

    async def act(self) -> None:
        rng = self.rng
        history = list(rng.choice(self.histories))
        doing = rng.choice(["go on", "again", "rewrite", "forget", "several", "give up", "at once"])
        if doing == "rewrite":
            place = rng.randrange(len(history))
            history[place] = {**history[place], "content": rng.choice(["ab", "other", "aab"])}
        elif doing == "forget" and len(history) > 2:
            del history[: rng.randrange(1, len(history) - 1)]
        if doing == "several":
            await self.ask(history, n=rng.randint(2, 3))
        elif doing == "give up":
            task = asyncio.ensure_future(self.ask(history))
            await turns(rng.randrange(4))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif doing == "at once":
            others = [list(rng.choice(self.histories)) for _ in range(2)]
            await asyncio.gather(*(self.ask(one) for one in (history, history, *others)))
        else:
            await self.ask(history)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_acts=st.integers(1, 12))
def test_whatever_a_client_does_every_token_is_trained_once_in_its_context(
    seed: int, num_acts: int
) -> None:
    async def play() -> None:
        recording = recording_of(Dice())
        client = RandomClient(recording, random.Random(seed))
        for _ in range(num_acts):
            await client.act()
        check_trained_once(recording, client.answered)

    asyncio.run(play())


def test_an_answer_that_comes_back_is_never_encoded_again() -> None:
    tokenizer = tiny_tokenizer()
    a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    assert tokenizer.encode("ab") != [a, b], "encoding would join what was sampled apart"
    generator = ScriptedGenerator(tokenizer, [output_of([a, b, EOS]), output_of([a, EOS])])
    recording = Recording(generator, tokenizer, limits=LIMITS, sampling=SamplingParams())

    async def talk() -> None:
        first = await recording.answer(call(user("x")), "1")
        said = message_of(first.replies[0])
        assert said == {"role": "assistant", "content": "ab"}
        await recording.answer(call(user("x"), said, user("y")), "2")

    asyncio.run(talk())
    (first, _), (second, _) = generator.calls
    after = tokenizer.encode("\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n",
                             allow_special=True)  # fmt: skip
    assert second == [*first, a, b, EOS, *after]
    (only,) = recording.tree.sequences()
    assert sum(only.loss_mask) == 5
    assert [(s.action_start, s.action_end) for s in only.turn_spans] == [
        (len(first), len(first) + 3),
        (len(second), len(second) + 2),
    ]


def test_a_changed_history_is_a_branch_and_not_a_guess() -> None:
    tokenizer = tiny_tokenizer()
    generator = ScriptedGenerator(tokenizer, ["one", "two", "three"])
    recording = Recording(generator, tokenizer, limits=LIMITS, sampling=SamplingParams())

    async def talk() -> list[Sampled]:
        first = await recording.answer(call(user("x")), "1")
        said = message_of(first.replies[0])
        changed = {"role": "assistant", "content": "ONE"}
        return [
            first,
            await recording.answer(call(user("x"), changed, user("y")), "2"),
            await recording.answer(call(user("x"), said, user("y")), "3"),
        ]

    _, second, third = asyncio.run(talk())
    main, branch = recording.tree.sequences()
    assert main.tokens == [*third.ids, *third.replies[0].output.ids]
    assert sum(main.loss_mask) == len("one") + len("three") + 2
    assert branch.tokens == [*second.ids, *second.replies[0].output.ids]
    assert "ONE" in tokenizer.decode(second.ids) and sum(branch.loss_mask) == len("two") + 1


def test_with_other_tools_a_conversation_begins_anew() -> None:
    tokenizer = tiny_tokenizer()
    generator = ScriptedGenerator(tokenizer, ["one", "two", "three"])
    recording = Recording(generator, tokenizer, limits=LIMITS, sampling=SamplingParams())
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    async def talk() -> None:
        first = await recording.answer(call(user("x"), tools=[tool]), "1")
        said = message_of(first.replies[0])
        await recording.answer(call(user("x"), said, user("y"), tools=[tool]), "2")
        await recording.answer(call(user("x"), said, user("y")), "3")

    asyncio.run(talk())
    without, with_tools = recording.tree.sequences()
    assert len(with_tools.turn_spans) == 2 and len(without.turn_spans) == 1
    assert "add" not in tokenizer.decode(without.tokens)


class Seeds:
    """Says the same to everybody, and keeps the seeds that it was given."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        self.seeds.append(params.seed)
        return output_of([64, EOS])


def test_no_two_answers_of_an_episode_are_drawn_with_one_seed() -> None:
    async def asked() -> list[int]:
        seeds = Seeds()
        recording = recording_of(seeds)
        await recording.answer(call(user("x"), n=4), "1")
        await recording.answer(call(user("x")), "2")  # the same prompt, asked again
        await recording.answer(call(user("y"), n=2), "3")
        await recording.complete([1, 2], SamplingParams(n=3))
        return seeds.seeds

    first, again = asyncio.run(asked()), asyncio.run(asked())
    assert len(set(first)) == len(first) == 10
    assert first == again, "which follow from the episode's seed and the prompts alone"


@pytest.mark.parametrize("num_left", [1, 5])
def test_after_an_abort_an_answer_has_the_room_that_was_left(num_left: int) -> None:
    """The engine says at each try as much as it is let."""

    class Aborting:
        def __init__(self) -> None:
            self.calls: list[tuple[list[int], int]] = []

        async def generate(self, ids: list[int], params: SamplingParams) -> Output:
            self.calls.append((list(ids), params.max_tokens))
            if len(self.calls) == 1:
                return output_of([64] * (params.max_tokens - num_left), "abort")
            return output_of([65] * params.max_tokens, "length")

    engine = Aborting()
    recording = recording_of(engine)
    (reply,) = asyncio.run(recording.answer(call(user("x")), "1")).replies
    most = LIMITS.max_turn_tokens
    assert reply.output.ids == [64] * (most - num_left) + [65] * num_left
    (prompt, room), (longer, rest) = engine.calls
    assert (room, rest) == (most, num_left)
    assert longer == [*prompt, *[64] * (most - num_left)]
    assert len(reply.output.logps) == len(reply.output.versions) == most


CALLED = '<tool_call>\n{"name": "go", "arguments": {"where": "here"}}\n</tool_call>'


def of_call(change: dict[str, Any]) -> Message:
    function = {"name": "go", "arguments": {"where": "here"}} | change
    named = {"id": "its own", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [named]}


@pytest.mark.parametrize(
    ("change", "num_sequences"),
    [
        ({}, 1),
        ({"arguments": {"where": "there"}}, 2),
        ({"arguments": {}}, 2),
        ({"name": "come"}, 2),
    ],
    ids=["as it was said", "another argument", "an argument less", "another name"],
)
def test_a_changed_call_of_a_tool_is_a_branch(change: Message, num_sequences: int) -> None:
    tokenizer = tiny_tokenizer()
    generator = ScriptedGenerator(tokenizer, [CALLED, "two"])
    limits = Limits(max_turns=9, max_turn_tokens=200, max_context_tokens=4000)
    recording = Recording(generator, tokenizer, limits=limits, sampling=SamplingParams())
    result = {"role": "tool", "tool_call_id": "its own", "content": "done"}

    async def talk() -> None:
        first = await recording.answer(call(user("x"), tools=[GO]), "1")
        assert first.replies[0].calls, "it was read as a call"
        again = call(user("x"), of_call(change), result, tools=[GO])
        await recording.answer(again, "2")

    asyncio.run(talk())
    assert len(recording.tree.sequences()) == num_sequences
    (_, (second, _)) = generator.calls
    shown = json.dumps({"name": "go", "arguments": {"where": "here"}} | change)
    assert shown in tokenizer.decode(second), "the policy reads the history as it was sent"


PARAMETERS = {
    "type": "object",
    "properties": {"where": {"$ref": "#/$defs/place"}},
    "required": ["where"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["here", "there"]}},
}
GO = {"type": "function", "function": {"name": "go", "description": "", "parameters": PARAMETERS}}
ANSWER = {
    "type": "object",
    "properties": {"size": {"$ref": "#/$defs/size"}},
    "required": ["size"],
    "additionalProperties": False,
    "$defs": {"size": {"type": "integer"}},
}


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"size": 3}', True),
        ('{"name": "go", "arguments": {"where": "there"}}', True),
        ('{"size": "3"}', False),
        ('{"name": "go", "arguments": {"where": "away"}}', False),
        ('{"name": "come", "arguments": {"where": "here"}}', False),
    ],
)
def test_a_schema_of_the_answer_leaves_room_for_calls(text: str, is_allowed: bool) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `grammar` (llguidance)")
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer.encode(text), EOS]
    generator = ScriptedGenerator(tokenizer, [output_of(ids)])
    recording = Recording(generator, tokenizer, limits=LIMITS, sampling=SamplingParams())
    grammar = Grammar("json_schema", json.dumps(ANSWER))
    asked = call(user("x"), tools=[GO], grammar=grammar, max_tokens=200)
    (reply,) = asyncio.run(recording.answer(asked, "1")).replies
    if "name" in text and "come" not in text:
        (use,) = reply.calls
        assert (use.name, reply.text) == ("go", "")
        assert json.loads(use.arguments) == json.loads(text)["arguments"]
    else:
        assert (reply.calls, reply.text) == ((), text)
    ((_, params),) = generator.calls
    assert params.grammar is not None
    matcher = GrammarCompiler(tokenizer, 260).matcher(params.grammar)
    fits = []
    for token in ids:
        fits.append(bool(matcher.allowed()[token]))
        matcher.accept(token)
    assert all(fits) == is_allowed


def test_a_grammar_that_is_no_schema_stays_as_it_is_beside_tools() -> None:
    tokenizer = tiny_tokenizer()
    generator = ScriptedGenerator(tokenizer, ["yes"])
    recording = Recording(generator, tokenizer, limits=LIMITS, sampling=SamplingParams())
    grammar = Grammar("choice", choices=("yes", "no"))
    (reply,) = asyncio.run(
        recording.answer(call(user("x"), tools=[GO], grammar=grammar), "1")
    ).replies
    ((_, params),) = generator.calls
    assert (params.grammar, reply.text) == (grammar, "yes")


def test_a_conversation_goes_on_from_the_name_of_an_answer() -> None:
    tokenizer = tiny_tokenizer()
    generator = ScriptedGenerator(tokenizer, ["one", "two"])
    recording = Recording(generator, tokenizer, limits=LIMITS, sampling=SamplingParams())

    async def talk() -> None:
        await recording.answer(call(user("x")), "first")
        await recording.answer(call(user("y"), continues="first"), "second")
        with pytest.raises(ApiError, match="no answer 'third' in this episode"):
            await recording.answer(call(user("y"), continues="third"), "fourth")

    asyncio.run(talk())
    assert len(recording.tree.sequences()) == 1


def test_limits_are_told_and_remembered() -> None:
    limits = Limits(max_turns=2, max_turn_tokens=12, max_context_tokens=60)
    tokenizer = tiny_tokenizer()
    recording = Recording(
        ScriptedGenerator(tokenizer, ["one", "two"]), tokenizer, limits=limits,
        sampling=SamplingParams(),
    )  # fmt: skip

    async def talk() -> None:
        with pytest.raises(ApiError, match="the context length is 60") as long:
            await recording.answer(call(user("x" * 60)), "1")
        assert long.value.code == "context_length_exceeded"
        assert recording.truncation == "context"
        await recording.answer(call(user("x")), "1")
        assert recording.truncation is None
        await recording.answer(call(user("x")), "2")
        with pytest.raises(ApiError, match="has had its 2 calls"):
            await recording.answer(call(user("x")), "3")

    asyncio.run(talk())


def test_the_order_of_branches_does_not_depend_on_who_was_faster() -> None:
    def grown(order: list[int]) -> list[list[int]]:
        tree = CallTree()
        for i in order:
            tree.add([1, 10 + i], output_of([20 + i]))
        tree.add([1], output_of([5]))
        return [sequence.tokens for sequence in tree.sequences()]

    assert grown([0, 1, 2]) == grown([2, 0, 1]) == [[1, 5], [1, 10, 20], [1, 11, 21], [1, 12, 22]]
