"""The doctor: every finding against a planted defect, the alarms of a run, and the verb itself."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_doubles import EOS, OTHER_EOS, START, TEMPLATE, tiny_tokenizer

from nanorl.cli import main
from nanorl.envs.tasks.tiny_model import build_tiny_model
from nanorl.flow.replay_policy import ReplayPolicy
from nanorl.inspection.doctor.machine_limits import free_memory_bytes
from nanorl.inspection.doctor.minutes import Speed, expected_minutes, minutes_finding
from nanorl.inspection.doctor.preconditions import (
    disk_finding,
    heldout_findings,
    memory_finding,
    missing_teacher,
    prompt_finding,
    system_finding,
    teacher_finding,
    template_findings,
)
from nanorl.observability.alarms.alarms import Evidence, RunAlarms, rollout_findings
from nanorl.observability.alarms.finding import Finding, Severity, findings_text, in_order, verdict
from nanorl.observability.alarms.silence import silence_pays
from nanorl.options.agent_config import AgentConfig
from nanorl.options.phase_config import RLConfig, WarmStartConfig
from nanorl.options.run_config import RunConfig
from nanorl.sandbox.base import SandboxUnavailable
from nanorl.task import Task
from nanorl.types import Rollout, Status, TurnSpan

CONFIG = RunConfig(
    warm_start=WarmStartConfig(steps=0),
    agent=AgentConfig(max_turns=2, max_turn_tokens=8, max_context_tokens=64),
)
TOKENIZER = tiny_tokenizer()


def rollout(
    reward: float = 0.0, said: str = "42", end: int | None = EOS, *, saw: str = "", **more: Any
) -> Rollout:
    """One turn after a prompt of one token, and what it observed."""
    action = TOKENIZER.encode(said) + ([] if end is None else [end])
    observed = TOKENIZER.encode(saw)
    tokens = [START, *action, *observed]
    mask = [0, *[1] * len(action), *[0] * len(observed)]
    last = 1 + len(action)
    return Rollout(
        task_id="t", group_id="g", rollout_id="r", tokens=tokens, loss_mask=mask,
        logps=[-0.5 * one for one in mask], versions=[one - 1 for one in mask],
        turn_spans=[TurnSpan(action_start=1, action_end=last, observation_end=len(tokens))],
        reward=reward, **more,
    )  # fmt: skip


def groups(make: Callable[[int], Rollout], num_groups: int = 3, size: int = 2) -> list[Any]:
    return [[make(group * size + member) for member in range(size)] for group in range(num_groups)]


def evidence(make: Callable[[int], Rollout], **more: Any) -> Evidence:
    given: dict[str, Any] = {"config": CONFIG, "has_tools": False, "tokenizer": TOKENIZER}
    return Evidence(groups=groups(make), **given | more)


def found(make: Callable[[int], Rollout], **more: Any) -> dict[str, Finding]:
    return {one.name: one for one in rollout_findings(evidence(make, **more))}


def well(number: int) -> Rollout:
    return rollout(float(number % 2), said=str(number))


def test_rollouts_that_are_well_give_no_finding() -> None:
    assert not found(well)
    called = {"num_executions": 1.0, "num_tool_errors": 0.0}
    assert not found(lambda n: replace(well(n), metrics=called), has_tools=True)


TOOL_ERROR = {"num_executions": 1.0, "num_tool_errors": 1.0}
DEFECTS: dict[str, tuple[Callable[[int], Rollout], str]] = {
    "bad_rewards": (lambda n: replace(well(n), reward=float("nan")), "finite number"),
    "other_stop_token": (
        lambda n: rollout(said="4", end=START, status=Status.TRUNCATED_TURN), "eos_token_id"
    ),
    "no_end_of_turn": (
        lambda n: rollout(said="la la", end=None, status=Status.TRUNCATED_TURN), "--warm-start"
    ),
    "cut_turns": (
        lambda n: rollout(n % 2, str(n), None if n % 2 else EOS, status=Status.TRUNCATED_TURN),
        "to 16, say",
    ),
    "cut_contexts": (
        lambda n: replace(well(n), status=Status.TRUNCATED_CONTEXT), "max-observation-tokens"
    ),
    "cut_by_turns": (
        lambda n: replace(
            well(n), status=Status.TRUNCATED_CONTEXT, turn_spans=well(n).turn_spans * 2
        ),
        "how many turns",
    ),
    "no_signal": (lambda n: rollout(0.0, str(n)), "easier tasks"),
    "never_success": (lambda n: rollout(0.4 * (n % 2), str(n)), "earns 1.0"),
    "always_success": (lambda n: rollout(1.0 + n, str(n)), "only a solved task"),
    "cut_observations": (
        lambda n: rollout(n % 2, str(n), saw="x", metrics={"num_cut_observations": 1.0}),
        "max-observation-tokens",
    ),
    "identical_rollouts": (lambda n: rollout(n % 2, "the same"), "--rl.temperature"),
    "unread_calls": (lambda n: rollout(n % 2, f"run({n})"), "Env.parser"),
    "malformed_calls": (
        lambda n: rollout(n % 2, f"run({n}", metrics={"num_malformed_calls": 1.0}), "well-formed"
    ),
    "tool_errors": (
        lambda n: rollout(
            n % 2, str(n), saw=f"Error: list index {n} out of range", metrics=TOOL_ERROR
        ),
        "call the tool yourself",
    ),
    "agent_failures": (
        lambda n: replace(well(n), metrics={"agent_failed": 1.0}, error="ValueError: no number"),
        "let the model try again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found_and_alone(name: str) -> None:
    make, remedy = DEFECTS[name]
    has_tools = name in ("unread_calls", "malformed_calls", "tool_errors")
    all_found = found(make, has_tools=has_tools)
    # These rollouts are all alike, or earn nothing, as well: no other way of planting them.
    beside = {"no_signal", "identical_rollouts"} if "_turn" in name or "stop" in name else set()
    assert name in all_found and all_found.keys() - beside <= {name}
    assert remedy in all_found[name].remedy


def test_what_was_seen_is_quoted() -> None:
    make = DEFECTS["unread_calls"][0]
    assert "'run(0)<|im_end|>'" in found(make, has_tools=True)["unread_calls"].seen
    errors = found(DEFECTS["tool_errors"][0], has_tools=True)["tool_errors"]
    assert "Error: list index 0 out of range" in errors.seen
    stop = found(DEFECTS["other_stop_token"][0])["other_stop_token"]
    assert "'<|im_start|>'" in stop.seen and "add 257" in stop.remedy
    assert stop.severity is Severity.ERROR


def test_all_ones_ask_for_harder_tasks_and_few_groups_with_signal_are_a_note() -> None:
    solved = found(lambda n: rollout(1.0, str(n)))["no_signal"]
    assert solved.seen == "all 6 rewards are 1" and solved.remedy == "give harder tasks"
    rare = Evidence(
        config=CONFIG, tokenizer=TOKENIZER, has_tools=False,
        groups=groups(lambda n: rollout(float(n == 0), str(n)), num_groups=8),
    )  # fmt: skip
    (note,) = rollout_findings(rare)
    assert note.seen == "1 of 8 groups have unequal rewards" and note.severity is Severity.NOTE


def test_failed_rollouts_name_the_line_and_are_an_error_where_nothing_else_was_played() -> None:
    text = "Guess.step raised KeyError: 'x' (guess.py, line 7: y['x'])"
    some = found(well, errors=[text, "other", text])["failures"]
    assert "3 of 9" in some.seen and text in some.seen and some.severity is Severity.WARNING
    nothing = Evidence(config=CONFIG, groups=[], errors=[text], tokenizer=TOKENIZER, has_tools=True)
    (only,) = rollout_findings(nothing)
    assert only.severity is Severity.ERROR


def test_what_a_warm_start_teaches_is_a_note_before_it() -> None:
    ahead = replace(CONFIG, warm_start=WarmStartConfig(steps=9))
    make = DEFECTS["no_end_of_turn"][0]
    before = found(make, config=ahead, is_untrained=True)["no_end_of_turn"]
    assert before.severity is Severity.NOTE and "(9 steps)" in before.remedy
    assert found(make, config=ahead)["no_end_of_turn"].severity is Severity.ERROR


# -- before anything is played -------------------------------------------------------------------


def test_a_template_is_missing_broken_or_ends_turns_with_another_token() -> None:
    def names(template: str | None, eos: int = EOS) -> list[str]:
        tokenizer = tiny_tokenizer(template, (eos,))  # type: ignore[arg-type]
        return [one.name for one in template_findings(tokenizer)]

    assert names(TEMPLATE) == []
    assert names(None) == ["no_template"]
    assert names("{{ raise_exception('no') }}") == ["bad_template"]
    assert names(TEMPLATE, OTHER_EOS) == ["template_without_eos"]


def test_a_system_message_must_be_taken_and_shown() -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    refuses = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    hides = "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"
    assert system_finding(TOKENIZER, chat) is None
    for template, seen in ((refuses, "no system"), (hides, "leaves the system message out")):
        one = system_finding(tiny_tokenizer(template), chat)
        assert one is not None and seen in one.seen and one.severity is Severity.ERROR
        assert system_finding(tiny_tokenizer(template), chat[1:]) is None


def test_prompts_must_leave_room_for_a_turn() -> None:
    assert prompt_finding([10, 56], CONFIG) is None
    tight, too_long = prompt_finding([10, 57], CONFIG), prompt_finding([64], CONFIG)
    assert tight is not None and tight.severity is Severity.WARNING
    assert too_long is not None and too_long.severity is Severity.ERROR
    assert "--agent.max-context-tokens 80" in too_long.remedy


def test_held_out_tasks_are_enough_and_not_trained_on() -> None:
    train = [Task(f"task {n}", n, split="train") for n in range(9)]
    held = [Task(f"task {n}", n, split="heldout") for n in range(100, 130)]
    assert heldout_findings(train, held) == []
    (few,) = heldout_findings(train, held[:4])
    assert few.name == "few_heldout" and "25%" in few.why
    common = [replace(train[0], split="heldout", task_id="another")]
    (overlap,) = heldout_findings(train, held + common)
    assert overlap.name == "heldout_overlap" and "1 of 31" in overlap.seen
    # The same words with another answer are another task.
    assert heldout_findings(train, [*held, Task("task 0", 77, split="heldout")]) == []


def test_a_teacher_must_exist_work_and_earn_something() -> None:
    warm = replace(CONFIG, warm_start=WarmStartConfig(steps=3))
    missing = missing_teacher(warm, has_teacher=False)
    assert missing is not None and missing.severity is Severity.ERROR
    assert missing_teacher(warm, has_teacher=True) is None
    assert missing_teacher(CONFIG, has_teacher=False) is None
    assert teacher_finding([rollout(0.0), rollout(1.0)], []) is None
    useless = teacher_finding([rollout(0.0), rollout(-1.0)], [])
    assert useless is not None and "none of 2 tasks" in useless.seen
    raised = teacher_finding([], ["KeyError: 'x' (guess.py, line 3: ...)"])
    assert raised is not None and "line 3" in raised.seen


def test_memory_and_disk_are_held_against_what_is_free() -> None:
    gib = 1 << 30
    assert memory_finding(4 * gib, 8 * gib) is None
    tight, too_much = memory_finding(7 * gib, 8 * gib), memory_finding(9 * gib, 8 * gib)
    assert tight is not None and tight.severity is Severity.WARNING
    assert too_much is not None and too_much.severity is Severity.ERROR
    # 12 bytes a parameter, three checkpoints; the model in bf16: 38 bytes.
    assert disk_finding(CONFIG, 10**9, 48 * 10**9) is None
    full = disk_finding(CONFIG, 10**9, 38 * 10**9 - 1)
    assert full is not None and full.severity is Severity.ERROR and "35.4 GiB" in full.seen


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_limits_the_memory_that_is_free(tmp_path: Path, version: int) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert free_memory_bytes(tmp_path) == 5000 << 10
    if version == 2:
        write("proc/self/cgroup", "0::/a/b\n")
        write("sys/fs/cgroup/a/b/memory.max", "max\n")
        write("sys/fs/cgroup/a/b/memory.current", "1\n")
        write("sys/fs/cgroup/a/memory.max", "3000\n")
        write("sys/fs/cgroup/a/memory.current", "2500\n")
        write("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 700\n")
    else:
        write("proc/self/cgroup", "3:cpu,memory:/a\n2:pids:/x\n")
        write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "3000\n")
        write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "2500\n")
        write("sys/fs/cgroup/memory/a/memory.stat", "total_inactive_file 700\n")
    assert free_memory_bytes(tmp_path) == 3000 - 2500 + 700


def test_minutes_count_sampled_and_trained_tokens() -> None:
    config = replace(CONFIG, rl=RLConfig(steps=10, tasks_per_step=2, group_size=3))
    one = rollout(said="123", saw="4")  # 4 of 6 tokens sampled
    minutes = expected_minutes(config, [one], Speed(sampled=4, forward=3.5), num_heldout=10)
    assert minutes.rollouts == pytest.approx(1.0) and minutes.training == pytest.approx(6.0)
    assert minutes.evaluations == pytest.approx(40 * 4 / 4 / 60)
    assert minutes_finding(minutes) is None
    slow = expected_minutes(config, [one], Speed(sampled=4, forward=0.02), num_heldout=10)
    assert minutes_finding(slow) is not None


def test_minutes_count_evaluations_between_steps_and_groups_that_are_trained_on_again() -> None:
    """After 0, 4, 8 and 10 steps, 7 training tasks and the 5 held-out ones there are, 3 times each;
    of 4 groups of a batch 2 are fresh."""
    rl = RLConfig(steps=10, tasks_per_step=2, group_size=3, replay=ReplayPolicy(share=0.5))
    config = replace(CONFIG, rl=replace(rl, replay=ReplayPolicy()))
    more = replace(config.evaluation, every=4, num_tasks_each=7, k=3)
    speed, one = Speed(sampled=4, forward=3.5), rollout(said="123", saw="4")
    before, after = (
        expected_minutes(one_config, [one], speed, num_heldout=5)
        for one_config in (config, replace(config, rl=rl, evaluation=more))
    )
    more_evaluated = 4 * (7 + 5) * 3
    assert after.evaluations - before.evaluations == pytest.approx(more_evaluated * 4 / 4 / 60)
    assert after.rollouts == before.rollouts
    assert after.training == pytest.approx(2 * before.training)


# -- how it is shown -------------------------------------------------------------------------------


def test_errors_come_first_and_are_never_left_out() -> None:
    def finding(name: str, severity: Severity) -> Finding:
        return Finding(name=name, severity=severity, seen=name, why="w", remedy="r")

    mixed = [
        finding("n", Severity.NOTE),
        None,
        *(finding(f"e{n}", Severity.ERROR) for n in "1234567"),
    ]
    ordered = in_order(mixed)
    text = findings_text(ordered)
    assert [one.name for one in ordered][-1] == "n" and text.count("error") == 7
    assert text.endswith("and 1 more: --as-json has them all")
    assert verdict(ordered) == "cannot work: 7 errors"
    assert verdict([finding("w", Severity.WARNING)]) == "fine, but mind 1 warning"
    assert verdict(ordered[-1:]) == verdict([]) == "fine"


# -- during training -------------------------------------------------------------------------------


def said_in(
    num_steps: int, make: Callable[[int], Rollout], has_tools: bool = False, **metrics: Any
) -> dict[int, list[str]]:
    alarms = RunAlarms(CONFIG, TOKENIZER, has_tools=has_tools)
    numbers = {"num_trained_rollouts": 6.0, "success": 0.5} | metrics
    said = {step: alarms.observe(step, numbers, groups(make), []) for step in range(num_steps)}
    return {step: texts for step, texts in said.items() if texts}


def test_a_run_that_is_well_hears_nothing() -> None:
    assert said_in(9, well) == {}


def test_an_alarm_waits_for_three_steps_and_is_said_three_times_at_most() -> None:
    said = said_in(60, DEFECTS["cut_contexts"][0])
    assert list(said) == [2, 8, 20]
    assert "step 2, as in 2 before it: 6 of 6 rollouts were cut off" in said[2][0]
    assert said[20][0].endswith("(not said again)")


def test_a_step_without_effect_is_told_at_once_and_only_under_one_name() -> None:
    said = said_in(4, lambda n: rollout(0.5, str(n)), num_trained_rollouts=0.0)
    assert list(said) == [0] and len(said[0]) == 1
    assert "step 0: it changed nothing: the rollouts of each group got equal rewards" in said[0][0]


def test_a_step_that_groups_of_earlier_steps_taught_is_not_told_that_it_changed_nothing() -> None:
    numbers = {"num_trained_rollouts": 0.0, "replayed_groups": 1.0}
    said = said_in(4, lambda n: rollout(0.5, str(n)), **numbers)
    assert "it changed nothing" not in str(said) and "all 6 rewards are 0.5" in str(said)


def test_an_interruption_begins_the_count_anew() -> None:
    alarms = RunAlarms(CONFIG, TOKENIZER, has_tools=False)
    cut = groups(DEFECTS["cut_contexts"][0])
    numbers = {"num_trained_rollouts": 6.0, "success": 0.5}
    batches = [cut, cut, groups(well), cut, cut]
    assert not any(alarms.observe(n, numbers, one, []) for n, one in enumerate(batches))


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"logp_gap_mean": 0.2}, "log-probs differ by 0.2 nats"),
        ({"success": 0.0}, "success is 0 %"),
        ({"entropy": 0.001}, "entropy of the policy is 0.001"),
    ],
)
def test_numbers_of_a_step_raise_alarms(metrics: dict[str, float], words: str) -> None:
    said = said_in(3, well, **metrics)
    assert list(said) == [2] and words in said[2][0]


def test_entropy_is_estimated_where_it_is_not_measured_and_fine_in_a_good_policy() -> None:
    def sure(number: int) -> Rollout:
        one = well(number)
        return replace(one, logps=[0.0] * len(one.logps))

    (texts,) = said_in(3, sure).values()
    assert "entropy" in texts[0]
    assert said_in(3, sure, success=0.95) == {}


# -- the verb --------------------------------------------------------------------------------------

RAISES = """
import nanorl

class Broken(nanorl.Env):
    def tasks(self, rng):
        return nanorl.Task(f"say {rng.randint(1, 10 ** 6)}", answer=1)

    def score(self, transcript):
        return {}["missing"]
"""


def report_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    status = main(["check", "--as-json", *words])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.xdist_group("doctor")
def test_check_plays_the_preset_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--preset", "tiny", "--threads", "1"]) == 0
    text = capsys.readouterr().out
    assert "16 rollouts of 4 tasks" in text and "the run will take about" in text
    assert "the warm start (1000 steps) comes first" in text
    assert text.startswith("the best of the rollouts") and "verdict: fine" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.xdist_group("doctor")
def test_check_names_the_line_of_an_environment_that_raises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text(RAISES)
    model = build_tiny_model(tmp_path / "model")
    words = ["--preset", "tiny", "--model", str(model), "--env", str(tmp_path / "broken.py")]
    words += ["--out", str(tmp_path / "run"), "--threads", "1"]
    status, report = report_of(words, capsys)
    failures = next(one for one in report["findings"] if one["name"] == "failures")
    assert status == 1 and report["verdict"].startswith("cannot work")
    assert failures["severity"] == "error" and "KeyError: 'missing'" in failures["seen"]
    assert "broken.py, line 9" in failures["seen"]
    assert not (tmp_path / "run").exists()


def test_check_says_what_the_run_would_end_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_tiny_model(tmp_path / "model")
    (tmp_path / "one.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    words = ["--preset", "tiny", "--model", str(model), "--tasks", str(tmp_path / "one.jsonl")]
    status, report = report_of(words, capsys)
    (only,) = report["findings"]
    assert status == 1 and only["name"] == "not_made" and "none of its 1 tasks" in only["seen"]
    assert main(["check", "--fork", str(tmp_path)]) == 2


@pytest.mark.xdist_group("doctor")
def test_check_says_why_there_is_no_sandbox_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SandboxUnavailable("bubblewrap is not installed", "install it")

    monkeypatch.setattr("nanorl.options.agent_kit.run_sandbox", refuse)
    monkeypatch.chdir(tmp_path)
    status, report = report_of(["--preset", "tiny"], capsys)
    (only,) = report["findings"]
    assert status == 1 and (only["name"], only["remedy"]) == ("no_sandbox", "install it")


# -- silence that pays -----------------------------------------------------------------------------


def silent(number: int) -> Rollout:
    return rollout(0.0, str(number), None, status=Status.TRUNCATED_TURN)


def playing(number: int, reward: float = -0.2) -> Rollout:
    return rollout(reward, str(number), turn_rewards=[])


def batch(num_silent: int, rewards: Sequence[float]) -> list[Rollout]:
    return [
        *(silent(number) for number in range(num_silent)),
        *(playing(number, reward) for number, reward in enumerate(rewards)),
    ]


def test_rollouts_that_are_cut_off_and_earn_more_than_those_that_play_are_named() -> None:
    named = silence_pays(batch(5, [-0.2] * 7))
    assert named is not None and named.severity is Severity.WARNING
    assert named.seen == (
        "5 rollouts that were cut off earn more than the 7 that play (0 against -0.2)"
    )
    assert "fall silent" in named.why and "cost nothing" in named.remedy
    assert "silence_pays" in {
        one.name for one in rollout_findings(replace(evidence(well), groups=[batch(4, [-0.2] * 4)]))
    }


def test_an_answer_that_is_never_given_is_silence_too() -> None:
    endless = [replace(one, status=Status.TRUNCATED_CONTEXT) for one in batch(6, [])]
    named = silence_pays([*endless, *batch(0, [-1.0] * 9 + [1.0])])
    assert named is not None and "(0 against -0.8)" in named.seen


@pytest.mark.parametrize(
    ("num_silent", "rewards"),
    [
        (3, [-0.2] * 50),  # too few were cut off
        (50, [-0.2] * 3),  # too few play
        (8, [0.0] * 8),  # both earn nothing: the usual case
        (8, [-0.2] * 7 + [1.0]),  # a bit less, which is luck: one more success turns it round
        (8, [-0.2] * 6 + [0.9] * 2),  # those that play earn more in the mean
        (8, []),
        (0, [-0.2] * 8),
        (8, [float("nan")] * 8),
    ],
)
def test_nothing_is_said_of_silence_without_enough_of_both_or_beyond_luck(
    num_silent: int, rewards: list[float]
) -> None:
    assert silence_pays(batch(num_silent, rewards)) is None


def test_what_was_solved_before_it_was_cut_off_is_no_silence() -> None:
    solved = [replace(one, reward=1.0) for one in batch(8, [])]
    assert silence_pays([*solved, *batch(0, [0.0] * 8)]) is None


def test_luck_is_seldom_taken_for_silence() -> None:
    rng = random.Random(0)
    cries = sum(
        silence_pays([replace(one, reward=rng.gauss(0.0, 1.0)) for one in batch(12, [0.0] * 12)])
        is not None
        for _ in range(400)
    )
    assert cries <= 4


def test_silence_is_told_in_the_first_step_that_shows_it() -> None:
    alarms = RunAlarms(CONFIG, TOKENIZER, has_tools=False)
    numbers = {"num_trained_rollouts": 6.0, "success": 0.5}
    (said,) = alarms.observe(0, numbers, [batch(6, [-0.2] * 6 + [-0.1])], [])
    assert said.startswith("step 0: 6 rollouts that were cut off earn more than the 7 that play")


SILENT_GUESS = Path(__file__).with_name("silent_guess.py")


@pytest.mark.xdist_group("doctor")
@pytest.mark.parametrize(("env", "is_silent"), [(str(SILENT_GUESS), True), ("guess", False)])
def test_check_rehearses_silence_where_no_rollout_plays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], env: str, is_silent: bool
) -> None:
    """The first charges a wrong guess and not silence; the second charges both alike."""
    model = build_tiny_model(tmp_path / "model")
    words = ["--preset", "tiny", "--model", str(model), "--env", env, "--threads", "1"]
    _, report = report_of([*words, "--warm-start.steps", "0"], capsys)
    named = [one["seen"] for one in report["findings"] if one["name"] == "silence_pays"]
    cut_off = (
        "an episode that is cut off in its first turn earns more than one that plays, if badly"
    )
    assert named == ([f"{cut_off} (0 against -0.3)"] if is_silent else [])
    assert not any("Instruct" in one["remedy"] for one in report["findings"])


def test_only_a_model_without_a_chat_template_is_told_to_be_another_one() -> None:
    endless = DEFECTS["no_end_of_turn"][0]
    with_template = found(endless)["no_end_of_turn"].remedy
    assert "--agent.max-turn-tokens 64" in with_template and "Instruct" not in with_template
    assert (
        "-Instruct"
        in found(endless, tokenizer=tiny_tokenizer(template=None))["no_end_of_turn"].remedy
    )
