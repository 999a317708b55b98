"""The agent loops beyond the usual one: what the policy reads, what counts, what is kept."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from agent_doubles import EOS, output_of, tiny_tokenizer
from waiting import turns

import nanorl
from nanoinfer.chat.hermes import HermesParser
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.compact import Compact
from nanorl.agents.feedback import Feedback
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent, AgentLoop
from nanorl.agents.loops import load_loop
from nanorl.agents.sub_agents import SubAgents
from nanorl.envs.base import Services
from nanorl.envs.env_class import EnvClassKind
from nanorl.observability.report.transcript import transcript
from nanorl.task import Task
from nanorl.types import Rollout, Status

TINY = tiny_tokenizer()
ROOMY = Limits(
    max_turns=9, max_turn_tokens=400, max_context_tokens=9000, max_observation_tokens=400
)


@dataclass
class Policy:
    """Says what `says` makes of the text that it is given; records what it was asked."""

    says: Callable[[str], str | Output]
    asked: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    sampled: list[tuple[list[int], Output]] = field(default_factory=list)

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        self.asked.append((ids, params))
        await asyncio.sleep(0)
        said = self.says(TINY.decode(ids))
        if isinstance(said, str):
            new = [*TINY.encode(said), EOS]
            is_cut = len(new) > params.max_tokens
            said = output_of(new[: params.max_tokens], "length" if is_cut else "stop")
        self.sampled.append((ids, said))
        return said

    @property
    def prompts(self) -> list[str]:
        return [TINY.decode(ids) for ids, _ in self.asked]


def saying(*texts: str) -> Policy:
    script = iter(texts)
    return Policy(lambda _: next(script))


def play(
    env: type[nanorl.Env],
    loop: AgentLoop,
    policy: Policy,
    task: Task | None = None,
    limits: Limits = ROOMY,
    deadline_s: float | None = 60.0,
) -> Rollout:
    services = Services(tokenizer=TINY, sandbox=None, timeout_s=5.0)
    agent = Agent(generator=policy, tokenizer=TINY, limits=limits, loop=loop, deadline_s=deadline_s)
    opened = EnvClassKind(env).open(services)
    rollout = asyncio.run(
        agent.play(
            task or Task("How much?", answer="42"),
            opened,
            group_id="g",
            rollout_id="r",
            sampling=SamplingParams(seed=5),
        )
    )
    if rollout.status is not Status.FAILED:
        check_tokens(rollout, policy)
    return rollout


def check_tokens(rollout: Rollout, policy: Policy) -> None:
    """Every sampled token is trained on once, right behind what the engine had read."""
    assert rollout.num_action_tokens == sum(len(output.ids) for _, output in policy.sampled)
    for prompt, output in policy.sampled:
        start, end = len(prompt), len(prompt) + len(output.ids)
        assert any(
            one.tokens[:end] == prompt + output.ids
            and one.loss_mask[start:end] == [1] * len(output.ids)
            and one.logps[start:end] == output.logps
            for one in rollout.sequences
        )


class Question(nanorl.Env):
    """Says nothing but whether there was an answer."""


class Count(nanorl.Env):
    """Says how often it was asked, and ends at the word "end"; each turn earns a tenth."""

    def reset(self) -> None:
        self.turns = 0

    def step(self, text: str) -> Any:
        if "end" in text:
            return self.done(answer="42")
        self.turns += 1
        self.reward(0.1)
        self.metric("asked")
        return f"number {self.turns}"


# -- feedback ------------------------------------------------------------------------------------


def test_a_wrong_answer_may_be_tried_again_for_less() -> None:
    policy = saying("41", "42")
    rollout = play(Question, load_loop("feedback", {"discount": 0.25, "message": "No."}), policy)
    assert rollout.reward == 0.25 and not rollout.is_success
    assert rollout.metrics["tries"] == 2.0 and rollout.metrics["solved"] == 1.0
    assert "<|im_start|>user\nNo.<|im_end|>" in policy.prompts[1]
    assert play(Question, Feedback(), saying("42")).reward == 1.0


def test_tries_and_turns_run_out_without_a_message_that_nobody_reads() -> None:
    rollout = play(Question, Feedback(tries=2), saying("1", "2"))
    assert rollout.reward == 0.0 and rollout.status is Status.FINISHED and rollout.num_turns == 2
    short = Limits(max_turns=1, max_turn_tokens=40, max_context_tokens=900)
    rollout = play(Question, Feedback(), saying("1"), limits=short)
    assert rollout.status is Status.FINISHED and rollout.metrics["answered"] == 1.0


def test_a_try_that_is_cut_off_leaves_what_the_best_one_earned() -> None:
    class Partial(nanorl.Env):
        def step(self, text: str) -> Any:
            self.reward(0.5)
            return self.done(reward=0.6) if "first" in text else self.done(answer=text)

        def score(self, transcript: nanorl.Transcript) -> nanorl.Score:
            return nanorl.Score(0.1, turns=[0.0] * transcript.text.count("x"))

    limits = Limits(max_turns=5, max_turn_tokens=20, max_context_tokens=900)
    cut = play(Partial, Feedback(), saying("first", "z" * 30), limits=limits)
    assert cut.reward == 0.6 and cut.status is Status.TRUNCATED_TURN
    assert cut.turn_rewards == [0.5, 0.0] and cut.metrics["answered"] == 0.0
    # The reward that ended the first try is not the second one's, which is judged: 0.1 / 2 < 0.6.
    later = play(Partial, Feedback(tries=2), saying("first", "x x"), limits=limits)
    assert later.reward == 0.6 and later.turn_rewards == [0.0, 0.0]
    judged = play(Partial, Feedback(tries=2, discount=1.0), saying("y", "x x"), limits=limits)
    assert judged.reward == 0.1
    early = play(Partial, Feedback(), saying("x", "z" * 30), limits=limits)
    assert len(early.turn_rewards or [0.0] * early.num_turns) == early.num_turns


# -- compact -------------------------------------------------------------------------------------

SMALL = Limits(max_turns=9, max_turn_tokens=60, max_context_tokens=400, max_observation_tokens=60)


def compacting(text: str) -> str:
    if "Summarise" in text.rpartition("<|im_start|>user")[2]:
        return f"was told: {text.count('number')}"
    return "end" if text.count("number") > 5 or "number 5" in text else "more please, " + "m" * 30


def test_a_full_history_is_summarised_and_both_sequences_are_trained() -> None:
    policy = Policy(compacting)
    rollout = play(Count, Compact(share=0.5), policy, limits=SMALL)
    assert rollout.reward == 1.0 and rollout.status is Status.FINISHED
    assert rollout.branches and all(branch.is_history for branch in rollout.branches)
    first, second = rollout.branches[0], [*rollout.branches, rollout][1]
    assert "was told" in TINY.decode(first.tokens[first.turn_spans[-1].action_start :])
    opening = TINY.decode(second.tokens[: second.turn_spans[0].action_start])
    assert "How much?\n\nYour summary of what was done so far:\nwas told: " in opening
    assert not any(second.loss_mask[: second.turn_spans[0].action_start])
    # What turns earned and counted before is not lost with them.
    assert rollout.metrics["asked"] == 5.0 and rollout.total_reward == pytest.approx(1.5)
    assert rollout.metrics["num_turns"] == rollout.num_turns == len(policy.asked)
    assert len({params.seed for _, params in policy.asked}) == len(policy.asked)


def test_turns_are_counted_over_all_contexts_and_the_last_is_no_summary() -> None:
    limits = Limits(max_turns=5, max_turn_tokens=60, max_context_tokens=400)
    policy = Policy(lambda text: "more please, " + "m" * 45)
    rollout = play(Count, Compact(share=0.3), policy, limits=limits)
    assert rollout.num_turns == 5 and rollout.status is Status.TRUNCATED_CONTEXT
    assert "Summarise" not in policy.prompts[-1].rpartition("<|im_start|>user")[2]


def test_a_summary_that_is_cut_off_is_used_as_far_as_it_came() -> None:
    def says(text: str) -> str:
        if "Summarise" in text.rpartition("<|im_start|>user")[2]:
            return "s" * 100
        return "end" if "sss" in text else "more please, " + "m" * 45

    rollout = play(Count, Compact(share=0.3), Policy(says), limits=SMALL)
    assert rollout.reward == 1.0 and rollout.status is Status.FINISHED
    assert TINY.decode(rollout.tokens).count("s" * 60) == 1


def test_a_history_without_room_ends_the_rollout_as_any_other() -> None:
    limits = Limits(max_turns=9, max_turn_tokens=90, max_context_tokens=150)
    rollout = play(Count, Compact(share=0.9), Policy(lambda _: "m" * 80), limits=limits)
    assert rollout.status is Status.TRUNCATED_CONTEXT and not rollout.branches


# -- sub-agents ----------------------------------------------------------------------------------


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


class WithTool(nanorl.Env):
    system = "Be brief."
    tools = [double]  # noqa: RUF012


def delegating(text: str) -> str:
    """The main agent asks three at once; each of them uses the tool, then answers."""
    last = text.rpartition("<|im_start|>user\n")[2]
    if last.startswith("How much?"):
        calls = [call("delegate", task="part A"), call("double", number=4)]
        return "\n".join([*calls, call("delegate", task="part B"), call("delegate", task="part C")])
    if last.startswith("part"):
        return call("double", number=ord(last[5]))
    if "user\npart" in text:
        return f"found by {text.rpartition('user' + chr(10) + 'part ')[2][0]}"
    return "42"


def test_helpers_of_one_turn_run_side_by_side_and_are_answered_in_order() -> None:
    policy = Policy(delegating)
    rollout = play(WithTool, SubAgents(number=2), policy)
    assert rollout.reward == 1.0 and len(rollout.branches) == 2
    assert not any(branch.is_history for branch in rollout.branches)
    main = TINY.decode(rollout.tokens)
    places = [main.index(text) for text in ("found by A", "found by B", "no more than 2 helpers")]
    assert places == sorted(places) and "Error: no more than 2" in main
    for branch, letter in zip(rollout.branches, "AB", strict=True):
        text = TINY.decode(branch.tokens)
        assert f"<|im_start|>user\npart {letter}<|im_end|>" in text and "How much?" not in text
        assert str(2 * ord(letter)) in text and "Be brief." in text
        assert "delegate" not in text, "by default helpers have no helpers"
    assert "delegate" in main and rollout.num_turns == 2 + 2 * 2
    assert rollout.metrics["num_executions"] == 3.0


def test_results_of_tools_and_helpers_stand_in_the_order_of_the_calls() -> None:
    class WithRole(WithTool):
        parser = HermesParser(role="tool")

    def says(text: str) -> str:
        if "<|im_start|>tool" in text:
            return "42"
        return "found by A" if "user\npart" in text else delegating(text)

    main = TINY.decode(play(WithRole, SubAgents(number=1), Policy(says)).tokens)
    results = main.partition("assistant")[2].partition("<|im_end|>")[2]
    places = [results.index(text) for text in ("found by A", "tool\n8<", "Error: no more than 1")]
    assert places == sorted(places) and results.count("<|im_start|>tool") == 4


def test_seeds_of_helpers_do_not_depend_on_who_is_faster() -> None:
    def seeds(slow: str) -> dict[str, int]:
        class Uneven(Policy):
            async def generate(self, ids: list[int], params: SamplingParams) -> Output:
                if f"user\npart {slow}" in TINY.decode(ids):
                    await turns(50)
                return await super().generate(ids, params)

        policy = Uneven(delegating)
        rollout = play(WithTool, SubAgents(), policy)
        assert [TINY.decode(one.tokens).count("part A") for one in rollout.branches] == [1, 0, 0]
        return {
            text: params.seed
            for text, (_, params) in zip(policy.prompts, policy.asked, strict=False)
        }

    assert seeds("A") == seeds("B")


def test_helpers_of_helpers_end_at_the_depth() -> None:
    def says(text: str) -> str:
        if "user\ndeeper" in text and "delegate" in text.partition("user\n")[0]:
            return (
                "found"
                if "</tool_call>" in text.partition("user\ndeeper")[2]
                else call("delegate", task="deeper")
            )
        if "user\ndeeper" in text:
            return "bottom"
        return "42" if "found" in text or "bottom" in text else call("delegate", task="deeper")

    rollout = play(WithTool, SubAgents(depth=3), Policy(says))
    assert rollout.reward == 1.0 and len(rollout.branches) == 3
    assert sum("bottom" in TINY.decode(one.tokens[-12:]) for one in rollout.branches) == 1


def test_helpers_that_are_cut_off_and_empty_tasks_are_errors_that_the_policy_reads() -> None:
    def says(text: str) -> str:
        if "user\npart" in text:
            return "z" * 500
        return "42" if "Error" in text else call("delegate", task="part A") + call("delegate")

    limits = Limits(
        max_turns=4, max_turn_tokens=300, max_context_tokens=2400, max_observation_tokens=200
    )
    rollout = play(WithTool, SubAgents(), Policy(says), limits=limits)
    text = TINY.decode(rollout.tokens)
    assert rollout.reward == 1.0
    assert "the helper was cut off" in text and "write the whole task" in text


# -- collect_trajectory --------------------------------------------------------------------------

ASYNC = """
async def collect_trajectory(prompt, env, obs_queue, act_queue, bonus=0.5):
    await obs_queue.put(prompt)
    while (text := await act_queue.get()) is not None:
        step = await env.step(text)
        if step.is_done:
            return bonus
        await obs_queue.put(step)
"""
SYNC = """
class Mine:
    def __init__(self, bonus=None):
        self.bonus = bonus

    def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        obs_queue.put(prompt + env.task.answer)
        while (text := act_queue.get()) is not None:
            step = env.step(text)
            if step.is_done:
                return self.bonus
            obs_queue.put(step.observation)
"""


def from_file(folder: Path, code: str, **arguments: Any) -> AgentLoop:
    file = folder / "mine.py"
    file.write_text(code)
    return load_loop(str(file), arguments)


def test_a_coroutine_steers_itself_through_queues_and_returns_the_reward(tmp_path: Path) -> None:
    rollout = play(Count, from_file(tmp_path, ASYNC), saying("one", "two", "end"))
    assert rollout.reward == 0.5 and rollout.metrics["answered"] == 1.0
    assert rollout.turn_rewards == [0.1, 0.1, 0.0]
    other = play(Count, from_file(tmp_path, ASYNC, bonus=2), saying("end"))
    assert other.reward == 2.0


def test_a_plain_function_does_so_in_a_thread_and_leaves_the_reward_to_the_environment(
    tmp_path: Path,
) -> None:
    before = threading.active_count()
    policy = saying("one", "end")
    rollout = play(Count, from_file(tmp_path, SYNC), policy)
    assert rollout.reward == 1.0 and rollout.num_turns == 2
    assert "How much?42" in policy.prompts[0] and "number 1" in policy.prompts[1]
    assert threading.active_count() == before


@pytest.mark.parametrize("code", [ASYNC, SYNC])
def test_the_end_of_a_rollout_reaches_the_function_as_none(tmp_path: Path, code: str) -> None:
    limits = Limits(max_turns=2, max_turn_tokens=40, max_context_tokens=900)
    rollout = play(Count, from_file(tmp_path, code), saying("one", "two"), limits=limits)
    assert rollout.status is Status.TRUNCATED_CONTEXT and rollout.num_turns == 2


HEAD = "async def collect_trajectory(prompt, env, obs_queue, act_queue):\n    "


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("await act_queue.get()", "put another one"),
        (
            "await obs_queue.put(prompt); await act_queue.get(); await act_queue.get()",
            "put another",
        ),
        ("raise KeyError('mine')", r"raised KeyError: 'mine' \(.*mine.py, line 2"),
        ("return 'much'", "'much'"),
        ("await obs_queue.put(7)", "a text, messages"),
        ("import asyncio; await asyncio.sleep(999)", "took longer"),
    ],
)
def test_a_function_that_would_wait_for_ever_or_fails_is_a_failed_rollout(
    tmp_path: Path, body: str, error: str
) -> None:
    deadline = 0.3 if "sleep" in body else 60.0
    rollout = play(Count, from_file(tmp_path, HEAD + body), saying("a"), deadline_s=deadline)
    assert rollout.status is Status.FAILED and re.search(error, rollout.error)


def test_a_function_that_goes_on_after_the_end_is_ended(tmp_path: Path) -> None:
    limits = Limits(max_turns=1, max_turn_tokens=40, max_context_tokens=900)
    stubborn = "while True: await obs_queue.put(prompt); await act_queue.get()"
    rollout = play(Count, from_file(tmp_path, HEAD + stubborn), saying("a"), limits=limits)
    assert rollout.status is Status.TRUNCATED_CONTEXT and rollout.reward == 0.0
    threaded = HEAD.replace("async ", "") + stubborn.replace("await ", "")
    before = threading.active_count()
    rollout = play(Count, from_file(tmp_path, threaded), saying("a"), limits=limits)
    assert rollout.status is Status.TRUNCATED_CONTEXT and threading.active_count() == before


# -- to a reader -------------------------------------------------------------------------------


def test_the_log_shows_what_was_before_a_compaction_and_what_helpers_were_asked() -> None:
    rollout = play(Count, Compact(share=0.5), Policy(compacting), limits=SMALL)
    text = transcript(Task("How much?"), rollout, TINY.decode, title="one")
    places = [
        text.index(part) for part in ("before the history", "Summarise", "(after it)", "end<")
    ]
    assert places == sorted(places)
    rollout = play(WithTool, SubAgents(number=1), Policy(delegating))
    text = transcript(Task("How much?"), rollout, TINY.decode, title="one")
    assert "part A<|im_end|>" in text.partition("(a conversation beside)")[2]


# -- names and options ---------------------------------------------------------------------------


def test_a_task_names_its_own_loop() -> None:
    task = Task("How much?", answer="42", agent="feedback")
    assert play(Question, load_loop("tool"), saying("41", "42"), task).reward == 0.5
    with pytest.raises(
        ValueError, match=r"did you mean feedback.*; ours: command, compact, feedback"
    ):
        play(Question, load_loop("tool"), saying("42"), Task("?", agent="feedbak"))


def test_a_loop_of_ones_own_takes_options(tmp_path: Path) -> None:
    code = (
        "async def helper(episode, n): pass\n"
        "async def patient(episode, *, patience=1):\n"
        "    await episode.start()\n"
        "    for _ in range(patience):\n"
        "        await episode.turn()\n"
        "        episode.observe('go on')\n"
    )
    assert play(Count, from_file(tmp_path, code, patience=3), saying(*"abc")).num_turns == 3
    with pytest.raises(ValueError, match=r"--agent-args hurry=1: the options of .* are: patience"):
        from_file(tmp_path, code, hurry=1)


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("feedback", {"trys": 2}, "the options of feedback are: tries, message, discount"),
        ("feedback", {"tries": "many"}, "tries=many: must be a number, as 3"),
        ("feedback", {"tries": 0}, "--agent-args tries=0: must be 1 or more"),
        ("compact", {"share": 2}, "share=2: must be at most 0.95"),
        ("sub_agents", {"tools": "no"}, "tools=no: must be true or false"),
        ("tool", {"x": 1}, "the options of tool are: none"),
    ],
)
def test_wrong_options_are_one_error_before_any_work(
    name: str, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        load_loop(name, arguments)
