"""A conversation with an agent: whose tokens it is made of, its tools, stopping, asking again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest
from agent_doubles import EOS, CodeEpisode, FakeSandbox, exec_result, output_of, tiny_tokenizer

from nanoinfer.options.streams import StreamChunk
from nanoinfer.params import SamplingParams
from nanorl.agents.conversation import Conversation, Listener, Reply
from nanorl.agents.limits import Limits
from nanorl.sandbox.base import SandboxFailure, SandboxSpec
from nanorl.sandbox.pool import SandboxPool
from nanorl.task import Task

TOKENIZER = tiny_tokenizer()
CALL = "```python\nprint(6 * 7)\n```"
LIMITS = Limits(max_turns=3, max_turn_tokens=64, max_context_tokens=1000)


@dataclass
class ScriptedEngine:
    """Streams the scripted texts (or ids), a token at a time; waits forever after `stalls_after`
    tokens of an output."""

    script: list[str | list[int]]
    stalls_after: int | None = None
    prompts: list[list[int]] = field(default_factory=list)
    asked: list[SamplingParams] = field(default_factory=list)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream(
        self, ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[StreamChunk, None]:
        self.prompts.append(ids)
        self.asked.append(params)
        said = self.script[len(self.prompts) - 1]
        made = [*TOKENIZER.encode(said), EOS] if isinstance(said, str) else said
        is_cut = len(made) > params.max_tokens
        output = output_of(made[: params.max_tokens], "length" if is_cut else "stop")
        text = TOKENIZER.decode(output.ids, skip_special=True)
        for place, token in enumerate(output.ids):
            if place == self.stalls_after:
                self.stalled.set()
                await asyncio.Event().wait()
            yield StreamChunk(
                ids=[token],
                logps=[output.logps[place]],
                versions=[3],
                text=TOKENIZER.decode([token], skip_special=True),
            )
        yield StreamChunk(output=dataclasses.replace(output, text=text))


def conversation(
    sandbox: Any = None, limits: Limits = LIMITS, sampling: SamplingParams | None = None
) -> Conversation:
    opens = None if sandbox is None else lambda: CodeEpisode(sandbox)
    return Conversation(TOKENIZER, limits, sampling or SamplingParams(seed=5), opens)


def say(talk: Conversation, engine: Any, *texts: str) -> list[Reply]:
    async def all_of_them() -> list[Reply]:
        return [await talk.say(prompt(text), engine, "trained") for text in texts]

    return asyncio.run(all_of_them())


def prompt(text: str) -> Task:
    return Task(text)


def test_every_prompt_extends_the_tokens_held_and_what_was_sampled_stays_as_it_was() -> None:
    split_ab = [*TOKENIZER.encode("a"), *TOKENIZER.encode("b")]  # encoded again it is one token
    assert TOKENIZER.encode("ab") != split_ab
    sandbox = FakeSandbox([exec_result(stdout=b"42\n")])
    engine = ScriptedEngine([CALL, [*split_ab, EOS], "Answer: 1"])
    talk = conversation(sandbox)
    say(talk, engine, "first", "second")
    tokens = talk.to_json()["tokens"]
    sampled = [[*TOKENIZER.encode(CALL), EOS], [*split_ab, EOS], TOKENIZER.encode("Answer: 1")]
    ends = [*engine.prompts[1:], tokens]
    for before, after, said in zip(engine.prompts, ends, sampled, strict=True):
        assert after[: len(before) + len(said)] == before + said
    whole = TOKENIZER.decode(tokens)
    assert whole.count("<|im_start|>system") == 1, "the system message stands at the head alone"
    assert [whole.index(text) for text in ("first", "Output:\n42", "second")] == sorted(
        whole.index(text) for text in ("first", "Output:\n42", "second")
    )


def test_the_listener_hears_the_text_as_it_comes_and_what_the_tool_answered() -> None:
    sandbox = FakeSandbox([exec_result(stdout=b"42\n")])
    heard: list[tuple[str, str]] = []
    listener = Listener(
        on_text=lambda text: heard.append(("agent", text)),
        on_observation=lambda text: heard.append(("tool", text)),
    )
    engine = ScriptedEngine([CALL, "Answer: 42"])
    reply = asyncio.run(conversation(sandbox).say(prompt("6 * 7?"), engine, "trained", listener))
    place = heard.index(("tool", "Output:\n42"))
    assert len(heard) > 10, "a piece a token"
    assert "".join(text for _, text in heard[:place]) == CALL
    assert "".join(text for _, text in heard[place + 1 :]) == "Answer: 42"
    assert (reply.answer, reply.end, reply.text) == ("42", "done", "Answer: 42")
    assert [turn["role"] for turn in reply.turns] == ["agent", "tool", "agent"]
    assert reply.num_tokens == len(CALL) + len("Answer: 42") + 2


@pytest.mark.sandbox
def test_the_programs_of_the_agent_really_run() -> None:
    with SandboxPool(SandboxSpec(timeout_s=20.0), num_workers=1) as sandbox:
        [reply] = say(conversation(sandbox), ScriptedEngine([CALL, "Answer: 42"]), "6 * 7?")
    assert reply.turns[1] == {"role": "tool", "text": "Output:\n42"}


def test_another_model_is_asked_in_the_same_place_and_the_conversation_stays() -> None:
    sandbox = FakeSandbox([exec_result(stdout=b"42\n"), exec_result(stdout=b"42\n")])
    trained = ScriptedEngine(["Answer: 0", CALL, "Answer: 42"])
    base = ScriptedEngine([CALL, "who knows"])
    talk = conversation(sandbox)
    say(talk, trained, "hello", "6 * 7?")
    before = talk.to_json()
    other = asyncio.run(talk.ask_again(base, "base"))
    assert base.prompts[0] == trained.prompts[1], "the tokens before the last message, and it"
    assert base.asked[0].seed == trained.asked[1].seed
    assert (other.model, other.text) == ("base", "who knows")
    assert talk.to_json() == before
    with pytest.raises(ValueError, match="nothing has been said"):
        asyncio.run(conversation().ask_again(base, "base"))


def test_a_reply_that_is_stopped_is_kept_as_far_as_it_came_and_the_conversation_goes_on() -> None:
    engine = ScriptedEngine(["what a long story", "short"], stalls_after=6)
    talk = conversation()

    async def scenario() -> tuple[Reply, Reply]:
        going = asyncio.create_task(talk.say(prompt("tell"), engine, "trained"))
        await engine.stalled.wait()
        going.cancel()
        first = await going
        engine.stalls_after = None
        return first, await talk.say(prompt("shorter"), engine, "trained")

    stopped, after = asyncio.run(scenario())
    assert (stopped.end, stopped.text, stopped.num_tokens) == ("stopped", "what a", 6)
    assert after.end == "done"
    kept = [*engine.prompts[0], *TOKENIZER.encode("what a"), EOS]
    assert engine.prompts[1][: len(kept)] == kept, "an end of turn that nobody sampled follows"


def test_limits_end_a_reply_by_their_names_and_hold_for_each_message() -> None:
    two = exec_result(stdout=b"1\n"), exec_result(stdout=b"1\n")
    limits = Limits(max_turns=2, max_turn_tokens=30, max_context_tokens=1000)
    engine = ScriptedEngine([CALL, CALL, "x" * 40, "fine"])
    turns, turn, done = say(
        conversation(FakeSandbox([*two]), limits), engine, "loop", "long", "last"
    )
    assert [turns.end, turn.end, done.end] == ["turns", "turn", "done"]
    assert [len(reply.turns) for reply in (turns, turn, done)] == [4, 1, 1]


def test_a_message_that_does_not_fit_changes_nothing() -> None:
    talk = conversation(limits=Limits(max_turn_tokens=64, max_context_tokens=120))
    say(talk, ScriptedEngine(["fine"]), "hello")
    before = talk.to_json()
    with pytest.raises(ValueError, match="120 tokens: /reset"):
        say(talk, ScriptedEngine(["never"]), "x" * 200)
    assert talk.to_json() == before
    talk.clear()
    assert talk.to_json() == {"replies": [], "tokens": []}


def test_a_sandbox_that_fails_is_said_to_have_failed_and_is_no_observation() -> None:
    sandbox = FakeSandbox([SandboxFailure("no worker")])
    [reply] = say(conversation(sandbox), ScriptedEngine([CALL]), "6 * 7?")
    assert reply.end == "failed" and "no worker" in reply.note
    assert [turn["role"] for turn in reply.turns] == ["agent"]
