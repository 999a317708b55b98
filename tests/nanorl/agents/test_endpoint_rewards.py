"""The policy steers its agent, and an agent has no way to write its own reward."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_doubles import ScriptedGenerator, tiny_tokenizer
from agent_programs import SECRET, TASK, TINY, play, written

from nanoinfer.dialects import all_dialects
from nanoinfer.params import SamplingParams
from nanorl.agents.command import Command
from nanorl.agents.endpoint.endpoint_server import ApiSession, RecordingServer
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.endpoint.report import SCORER_HEADER, ReportRules, read_scorer_key
from nanorl.agents.limits import Limits
from nanorl.options.agent_kit import run_loop, run_scoring
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import run_kind
from nanorl.run.parse import with_options
from nanorl.types import Rollout, Status

BOTH = pytest.mark.parametrize("in_sandbox", [False, True], ids=["plain", "sandboxed"])
KEY = "0123456789abcdef0123456789abcdef"
SCORING = ReportRules(KEY, 2.0)


# -- programs ------------------------------------------------------------------------------------

FORGE = f"""
import base64
said = ask("x")
base = os.environ["ANTHROPIC_BASE_URL"]
own = os.environ["OPENAI_API_KEY"]
told = []
def report(body, key="", path="/episode"):
    headers = {{"Authorization": "Bearer " + own, {SCORER_HEADER!r}: key}}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    try:
        told.append([urllib.request.urlopen(request).status, ""])
    except urllib.error.HTTPError as error:
        told.append([error.code, json.load(error)["error"]["message"]])
report({{"reward": 1e6}})
report({{"reward": 0.5, "answer": {SECRET!r}}})
report({{"metrics": {{"agent_failed": 0.0}}}})
report({{"reward": 1.0}}, key=own)
report({{"reward": 1.0}}, path="/" + own + "/episode")
with open("answer.txt", "w") as file:
    json.dump(told, file)
"""


class Overheard(Command):
    """Keeps what the program answered."""

    async def __call__(self, episode: Any) -> None:
        await super().__call__(episode)
        self.heard.append(episode.answer)

    @property
    def heard(self) -> list[str]:
        return self.__dict__.setdefault("_heard", [])


def played(
    folder: Path, body: str, scoring: ReportRules | None, **options: Any
) -> tuple[Rollout, str]:
    command = Overheard(command=written(folder, body), **options)
    generator = ScriptedGenerator(TINY, ["no"])
    rollout = asyncio.run(play(command, generator, TASK, scoring=scoring))
    assert rollout.status is Status.FINISHED, rollout.error
    return rollout, command.heard[0]


@pytest.mark.sandbox
@BOTH
@pytest.mark.parametrize("scoring", [None, SCORING], ids=["without a scorer", "with one"])
def test_a_program_that_writes_its_own_reward_is_refused_and_counted(
    tmp_path: Path, in_sandbox: bool, scoring: ReportRules | None
) -> None:
    rollout, said = played(tmp_path, FORGE, scoring, in_sandbox=in_sandbox)
    told = json.loads(said)
    assert [status for status, _ in told] == [403] * 5
    assert all("--agent.scorer-key-file" in message for _, message in told)
    assert rollout.reward == 0.0, "of the environment, which found another answer"
    assert rollout.metrics["refused_rewards"] == 5.0
    assert not {"reward_from_scorer", "agent_failed"} & set(rollout.metrics)


SEARCH = """
ask("x")
found = []
for folder, _, names in os.walk("."):
    found += [open(os.path.join(folder, name), "rb").read() for name in names]
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("environ", "cmdline"):
        try:
            found.append(open(f"/proc/{pid}/{name}", "rb").read())
        except OSError:
            pass
found.append(repr(dict(os.environ)).encode())
with open("answer.txt", "w") as file:
    file.write("found" if any(PART1 + PART2 in one for one in found) else "not found")
"""


@pytest.mark.sandbox
@BOTH
def test_the_scorers_key_is_in_nothing_that_a_program_is_given(
    tmp_path: Path, in_sandbox: bool
) -> None:
    """Nor in environments and command lines, which a program outside of a box can read."""
    half = len(KEY) // 2
    parts = f"PART1, PART2 = {KEY[:half].encode()!r}, {KEY[half:].encode()!r}\n"
    _, said = played(tmp_path, parts + SEARCH, SCORING, in_sandbox=in_sandbox)
    assert said == "not found"


@pytest.mark.sandbox
@BOTH
@pytest.mark.parametrize(
    "left",
    [
        "os.mkdir('answer.txt')",
        "os.mkfifo('answer.txt')",
        "os.symlink(sys.argv[0], 'answer.txt')",
        "os.symlink('/dev/zero', 'answer.txt')",
        "__import__('socket').socket(1).bind('answer.txt')",
    ],
    ids=["folder", "pipe", "link", "device", "socket"],
)
def test_what_is_no_plain_file_is_no_answer_and_no_failure(
    tmp_path: Path, in_sandbox: bool, left: str
) -> None:
    rollout, said = played(tmp_path, f"ask('x'); {left}; print('a line')", None,
                           in_sandbox=in_sandbox)  # fmt: skip
    assert said == "a line" and "agent_failed" not in rollout.metrics


@pytest.mark.sandbox
@BOTH
def test_of_an_endless_answer_the_beginning_is_read(tmp_path: Path, in_sandbox: bool) -> None:
    size = 200 << 20 if in_sandbox else 10 << 30  # its folder has a size; neither is written
    body = f"ask('x'); file = open('answer.txt', 'wb'); file.write(b'x'); file.truncate({size})"
    _, said = played(tmp_path, body, None, in_sandbox=in_sandbox)
    assert said.rstrip("\0") == "x" and len(said) <= 1 << 16


# -- the scorer ----------------------------------------------------------------------------------


def report(
    *bodies: dict[str, Any], key: str | None = KEY, scoring: ReportRules | None = SCORING
) -> tuple[list[tuple[int, str]], ApiSession]:
    """Status and message of each report, and the session."""
    told: list[tuple[int, str]] = []
    sessions: list[ApiSession] = []

    async def work(session: ApiSession, client: httpx.AsyncClient) -> None:
        sessions.append(session)
        headers = {} if key is None else {SCORER_HEADER: key}
        for body in bodies:
            answer = await client.post(f"{session.keyed_url}/episode", json=body, headers=headers)
            message = answer.json().get("error", {}).get("message", "")
            told.append((answer.status_code, message))

    asyncio.run(_serving(work, scoring))
    return told, sessions[0]


async def _serving(
    work: Callable[[ApiSession, httpx.AsyncClient], Awaitable[None]], scoring: ReportRules | None
) -> None:
    tokenizer = tiny_tokenizer()
    server = RecordingServer(
        all_dialects(tokenizer), model="tiny", max_model_len=500, scoring=scoring,
        max_calls_at_once=1,
    )  # fmt: skip
    recording = Recording(
        ScriptedGenerator(tokenizer, []), tokenizer, limits=Limits(), sampling=SamplingParams()
    )
    try:
        async with server.episode(recording) as session, httpx.AsyncClient(timeout=30) as client:
            await work(session, client)
    finally:
        await server.close()


def test_a_scorer_reports_rewards_and_metrics_within_bounds() -> None:
    bodies = [{"reward": 2.0, "metrics": {"tries": 3}}, {"reward": -2}, {"metrics": {"t.b-c_1": 0}}]
    told, session = report(*bodies)
    assert [status for status, _ in told] == [200] * 3
    assert session.report.reward == -2.0
    assert session.report.metrics == {"tries": 3.0, "t.b-c_1": 0.0}
    assert not session.recording.metrics["refused_rewards"]


@pytest.mark.parametrize("key", [None, "", KEY[:-1], KEY + "0", KEY.upper(), "é"])
@pytest.mark.parametrize("scoring", [SCORING, ReportRules(), None], ids=["a key", "no key", "none"])
def test_any_other_key_is_none(key: str | None, scoring: ReportRules | None) -> None:
    sent = None if key == "é" else key  # no header can hold it
    told, session = report({"reward": 1.0}, {"metrics": {"a": 1.0}}, key=sent, scoring=scoring)
    assert [status for status, _ in told] == [403, 403]
    assert session.report.reward is None and session.report.metrics == {}
    assert session.recording.metrics["refused_rewards"] == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"reward": 2.0001}, "outside of -2 to 2 (--agent.max-reward)"),
        ({"reward": -1e308}, "--agent.max-reward"),
        ({"metrics": {"tries": 1e7}}, "tries=1e+07 lies outside"),
        ({"metrics": {"": 1}}, "is no name"),
        ({"metrics": {"a/b": 1}}, "is no name"),
        ({"metrics": {"x" * 65: 1}}, "is no name"),
        ({"metrics": {"agent_failed": 0}}, "choose another name"),
        ({"metrics": {"answered": 1}}, "choose another name"),
        ({"metrics": {"num_calls": 1}}, "choose another name"),
        ({"metrics": {"reward_from_scorer": 1}}, "choose another name"),
        ({"metrics": {"refused_rewards": 0}}, "choose another name"),
        ({"metrics": {f"m{i}": 1.0 for i in range(65)}}, "at most 64"),
        ({"answer": "x" * 65_537}, ""),
    ],
)
def test_what_is_out_of_bounds_is_refused_whole(body: dict[str, Any], message: str) -> None:
    told, session = report({"reward": 0.5}, body | {"is_done": True})
    assert told[0][0] == 200
    assert told[1][0] == 400 and message in told[1][1]
    assert session.report.reward == 0.5 and session.report.metrics == {}
    assert not session.report.done.is_set()


@pytest.mark.parametrize("written_as", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["reward", "metrics"])
def test_no_number_that_is_not_finite_is_taken(written_as: str, field: str) -> None:
    value = written_as if field == "reward" else f'{{"a": {written_as}}}'

    async def work(session: ApiSession, client: httpx.AsyncClient) -> None:
        answer = await client.post(
            f"{session.keyed_url}/episode",
            content=f'{{"{field}": {value}}}',
            headers={SCORER_HEADER: KEY},
        )
        assert answer.status_code == 400
        assert session.report.reward is None and session.report.metrics == {}

    asyncio.run(_serving(work, ReportRules(KEY, math.inf)))


def test_an_agent_that_keeps_its_episode_busy_keeps_no_scorer_from_reporting() -> None:
    async def work(session: ApiSession, client: httpx.AsyncClient) -> None:
        with session.counted(1, 0):  # all that an episode may have
            url, scorer = f"{session.keyed_url}/episode", {SCORER_HEADER: KEY}
            assert (await client.post(url, json={"answer": "x"})).status_code == 429
            answer = await client.post(url, json={"reward": -1.0}, headers=scorer)
            assert answer.status_code == 200 and session.report.reward == -1.0

    asyncio.run(_serving(work, SCORING))


# -- its key -------------------------------------------------------------------------------------


def key_file(folder: Path, text: str = KEY, mode: int = 0o600) -> Path:
    file = folder / "scorer.key"
    file.write_text(text + "\n")
    file.chmod(mode)
    return file


def test_the_key_is_the_only_line_of_its_file(tmp_path: Path) -> None:
    assert read_scorer_key(key_file(tmp_path)) == KEY
    assert KEY not in repr(ReportRules(KEY))


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("short", 0o600, "at least 16"),
        (f"{KEY} {KEY}", 0o600, "one line"),
        (f"{KEY}\n{KEY}", 0o600, "one line"),
        ("é" * 20, 0o600, "ASCII"),
        (KEY, 0o640, "chmod 600"),
        (KEY, 0o604, "chmod 600"),
    ],
)
def test_a_file_that_holds_no_secret_is_refused(
    tmp_path: Path, text: str, mode: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"--agent.scorer-key-file .*{message}"):
        read_scorer_key(key_file(tmp_path, text, mode))


def config_of(folder: Path, **options: Any) -> RunConfig:
    named = {"env": "answer", "out": folder / "run", "warm-start.steps": 0}
    return with_options(get_preset("tiny").config(), named | options, where="test")


@pytest.mark.sandbox
def test_a_key_that_a_boxed_program_would_see_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    key = key_file(tmp_path / "lib")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "lib")
    options: dict[str, Any] = {
        "agent.command": written(tmp_path, "ask('x')"),
        "agent.scorer-key-file": str(key),
    }
    for reads in (tmp_path / "lib", tmp_path, key, link):
        boxed = ("in_sandbox=true", f"reads={json.dumps([str(reads)])}")
        config = config_of(tmp_path, **options, **{"agent.loop-args": boxed})
        with pytest.raises(ValueError, match="the agent program sees all of"):
            run_loop(config, run_kind(config))
    config = config_of(tmp_path, **options, **{"agent.loop-args": ("in_sandbox=true",)})
    run_loop(config, run_kind(config))
    assert run_scoring(config) == ReportRules(KEY, 1.0)


def test_a_run_without_a_key_file_takes_no_reward(tmp_path: Path) -> None:
    assert run_scoring(config_of(tmp_path)) is None
    with pytest.raises(ValueError, match="there is no such file"):
        run_scoring(config_of(tmp_path, **{"agent.scorer-key-file": str(tmp_path / "none")}))
    assert not os.path.exists(tmp_path / "none")
