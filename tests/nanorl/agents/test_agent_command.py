"""Programs as agents: what they are given, how they answer, and that they end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agent_programs
import pytest
from agent_doubles import EOS, ScriptedGenerator
from agent_programs import (
    FAMILY,
    SECRET,
    SLEEP,
    TASK,
    TINY,
    Silent,
    play,
    wait_until_dead,
    written,
)
from waiting import eventually, until

from nanorl.agents import agent_program
from nanorl.agents.agent_program import ProgramResult
from nanorl.agents.command import Command
from nanorl.agents.endpoint.endpoint_server import ApiSession
from nanorl.agents.loops import load_loop
from nanorl.options.agent_config import AgentConfig
from nanorl.task import Task
from nanorl.types import Rollout, Status

pytestmark = pytest.mark.sandbox  # they count the host's processes
BOTH = pytest.mark.parametrize("in_sandbox", [False, True], ids=["plain", "sandboxed"])


def rollout_of(
    folder: Path,
    body: str,
    said: list[str],
    task: Task = TASK,
    kind: type[Command] = Command,
    **options: Any,
) -> Rollout:
    command = kind(command=written(folder, body), **options)
    return asyncio.run(play(command, ScriptedGenerator(TINY, list(said)), task))


class LimitedOnceAnswered(Command):
    """Its limit begins with the first answer: on a busy machine a program may start slowly."""

    async def run(self, told: Any, session: ApiSession, http: Any) -> ProgramResult:
        limit = asyncio.timeout(None)

        async def begin() -> None:
            await until(lambda: session.recording.num_answers, 200.0)
            limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s)

        def timeout(limit_s: float) -> asyncio.Timeout:
            return limit if limit_s == self.timeout_s else asyncio.timeout(limit_s)

        clocks = SimpleNamespace(**vars(asyncio) | {"timeout": timeout})
        beginning = asyncio.ensure_future(begin())
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(agent_program, "asyncio", clocks)
                return await super().run(told, session, http)
        finally:
            beginning.cancel()


@BOTH
def test_what_a_program_prints_last_is_its_answer(tmp_path: Path, in_sandbox: bool) -> None:
    body = "print('thinking'); print(ask('Say it.')); print()"
    rollout = rollout_of(tmp_path, body, [SECRET], in_sandbox=in_sandbox)
    assert (rollout.status, rollout.reward) == (Status.FINISHED, 1.0)
    sampled = [one for one, mask in zip(rollout.tokens, rollout.loss_mask, strict=True) if mask]
    assert sampled == [*TINY.encode(SECRET), EOS]


@BOTH
def test_an_answer_file_counts_for_more(tmp_path: Path, in_sandbox: bool) -> None:
    body = "open('answer.txt', 'w').write(ask('Say it.') + '\\n'); print('done')"
    rollout = rollout_of(tmp_path, body, [SECRET], in_sandbox=in_sandbox)
    assert rollout.reward == 1.0


def test_an_answer_file_that_leads_elsewhere_is_none(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    body = f"ask('x'); os.symlink({str(secret)!r}, 'answer.txt'); print('no')"
    assert rollout_of(tmp_path, body, ["x"]).reward == 0.0


TELLS = """
ask("x")
found = {"environment": dict(os.environ), "folder": os.getcwd(), "files": {}}
for folder, _, names in os.walk("."):
    for name in names:
        found["files"][os.path.join(folder, name)] = open(os.path.join(folder, name)).read()
with open("answer.txt", "w") as file:
    json.dump(found, file)
"""


@BOTH
@pytest.mark.parametrize("with_data", [False, True])
def test_a_program_is_told_its_task_but_never_the_answer(
    tmp_path: Path, in_sandbox: bool, with_data: bool
) -> None:
    answers: list[str] = []

    class Overheard(Command):
        async def __call__(self, episode: Any) -> None:
            await super().__call__(episode)
            answers.append(episode.answer)

    command = Overheard(
        command=written(tmp_path, TELLS), in_sandbox=in_sandbox, with_data=with_data
    )
    rollout = asyncio.run(play(command, ScriptedGenerator(TINY, ["x"])))
    assert rollout.status is Status.FINISHED
    assert SECRET not in answers[0]
    assert ("hidden tests" in answers[0]) == with_data
    found = json.loads(answers[0])
    told = json.loads(found["environment"]["NANORL_TASK"])
    assert told["prompt"] == "Say it."
    assert told["messages"] == [{"role": "user", "content": "Say it."}]
    assert told["files"] == {"src/notes.txt": "a note"}
    assert json.loads(found["files"].pop("./task.json")) == told
    assert found["files"] == {"./src/notes.txt": "a note"}
    environment = found["environment"]
    assert environment["OPENAI_BASE_URL"] == environment["ANTHROPIC_BASE_URL"] + "/v1"
    assert environment["OPENAI_API_KEY"] == environment["ANTHROPIC_API_KEY"] != ""
    assert not Path(found["folder"]).exists()  # it is gone with the program


def test_a_program_that_fails_after_a_call_is_scored_as_it_stands(tmp_path: Path) -> None:
    rollout = rollout_of(tmp_path, "print(ask('x')); sys.exit(3)", [SECRET])
    assert (rollout.status, rollout.reward) == (Status.FINISHED, 0.0)
    assert rollout.metrics["agent_failed"] == rollout.metrics["agent_exited"] == 1.0
    assert rollout.num_action_tokens == len(TINY.encode(SECRET)) + 1


def test_one_that_fails_before_a_call_is_played_again(tmp_path: Path) -> None:
    rollout = rollout_of(tmp_path, "import no_such_module", [])
    assert rollout.status is Status.FAILED
    assert "No module named 'no_such_module'" in rollout.error
    assert "exit code 1" in rollout.error
    rollout = rollout_of(tmp_path, "print('hello')", [])
    assert rollout.status is Status.FAILED
    assert "No call of it" in rollout.error and "hello" in rollout.error


@BOTH
def test_at_its_time_limit_it_ends_with_all_that_it_started(
    tmp_path: Path, in_sandbox: bool
) -> None:
    elsewhere = "PIDS = '/tmp/pids'\n" if in_sandbox else ""
    body = elsewhere + FAMILY + "ask('x'); time.sleep(600)"
    options: dict[str, Any] = {"kind": LimitedOnceAnswered, "timeout_s": 1.0}
    rollout = rollout_of(tmp_path, body, [SECRET], in_sandbox=in_sandbox, **options)
    assert rollout.metrics["agent_timeout"] == 1.0
    assert eventually(lambda: not sleepers())
    if not in_sandbox:
        assert wait_until_dead([int(pid) for pid in (tmp_path / "pids").read_text().split()]) == []


@BOTH
def test_a_cancelled_rollout_ends_it(tmp_path: Path, in_sandbox: bool) -> None:
    async def cancelled() -> None:
        is_asked = asyncio.Event()
        body = f"subprocess.Popen(['sleep', '{SLEEP}'], start_new_session=True); ask('x')"
        command = Command(command=written(tmp_path, body), in_sandbox=in_sandbox)
        playing = asyncio.ensure_future(play(command, Silent(is_asked)))
        await is_asked.wait()
        await until(lambda: len(sleepers()) == 1)  # Popen returns while the kernel starts it
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(cancelled())
    assert eventually(lambda: not sleepers())


@BOTH
def test_a_killed_driver_takes_it_along(tmp_path: Path, in_sandbox: bool) -> None:
    alone = f"subprocess.Popen(['sleep', '{SLEEP}']); ask('x')"
    body = alone if in_sandbox else FAMILY + "ask('x')"
    root = Path(__file__).parents[3]
    main = Path(agent_programs.__file__)
    driver = subprocess.Popen(
        [sys.executable, main, written(tmp_path, body), str(in_sandbox)],
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    started = started_by(driver)
    driver.kill()
    driver.wait()
    assert wait_until_dead(started) == []


def started_by(driver: subprocess.Popen[bytes]) -> list[int]:
    """The sleeping processes of a driver's program, once there are some, and all above them."""
    while driver.poll() is None:
        new = sorted(sleepers())
        if new:
            found = set(new)
            for pid in new:
                while (pid := parent_of(pid)) not in (driver.pid, os.getpid(), 1, 0):
                    found.add(pid)
            return sorted(found)
    raise AssertionError("the driver has ended")


def parent_of(pid: int) -> int:
    """0 where it has ended: the one that starts the hidden process is soon gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def sleepers() -> set[int]:
    """The processes that programs of these tests have left asleep."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()  # empty where it has ended
            except OSError:
                continue
            if SLEEP.encode() in command.rstrip(b"\0").rpartition(b"\0")[2]:
                found.add(int(entry.name))
    return found


@BOTH
def test_a_flood_of_output_ends_it(tmp_path: Path, in_sandbox: bool) -> None:
    body = "ask('x')\nwhile True: print('flood' * 2000)"
    rollout = rollout_of(tmp_path, body, ["x"], in_sandbox=in_sandbox)
    assert (rollout.status, rollout.metrics["agent_output"]) == (Status.FINISHED, 1.0)


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ("while True:\n    try: os.fork()\n    except OSError: pass", "timeout memory"),
        ("held = [bytearray(b'x' * (8 << 20)) for _ in range(64)]; time.sleep(600)", "memory"),
        ("import signal\nfor n in (2, 15): signal.signal(n, 1)\ntime.sleep(600)", "timeout"),
        ("os.kill(1, 9); os.kill(1, 15); time.sleep(600)", "ended"),
        (
            "file = open('big', 'wb', 0)\nwhile True:\n"
            "    try: file.write(bytes(1 << 20))\n    except OSError: pass",
            "memory",
        ),
    ],
    ids=["fork bomb", "memory", "hang", "kills its guard", "fills the disk"],
)
def test_hostile_programs_end_in_the_sandbox(tmp_path: Path, body: str, reasons: str) -> None:
    options: dict[str, Any] = {"in_sandbox": True, "memory_mb": 192}
    if "timeout" in reasons:
        options |= {"kind": LimitedOnceAnswered, "timeout_s": 3.0}
    child = f"subprocess.Popen(['sleep', '{SLEEP}'], start_new_session=True)"
    rollout = rollout_of(tmp_path, f"ask('x')\n{child}\n{body}", [SECRET], **options)
    assert rollout.status is Status.FINISHED
    assert rollout.reward == 0.0 and rollout.metrics["agent_failed"] == 1.0
    assert any(f"agent_{reason}" in rollout.metrics for reason in reasons.split())
    assert eventually(lambda: not sleepers())


def test_a_program_that_kills_its_guard_still_ends(tmp_path: Path) -> None:
    kept = "p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1)\n"
    body = kept + "ask('x'); os.kill(os.getppid(), 9); time.sleep(600)"
    rollout = rollout_of(tmp_path, body, ["x"])
    assert (rollout.status, rollout.metrics["agent_failed"]) == (Status.FINISHED, 1.0)


PROBE = """
import socket
def attempt(what):
    try:
        return str(what())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def write(path):
    with open(path, "w") as file:
        file.write("x")
    return "written"
first = ask("x")
found = {
    "other port": attempt(lambda: socket.create_connection(("127.0.0.1", OTHER), 2)),
    "outside": attempt(lambda: socket.create_connection(("8.8.8.8", 53), 2)),
    "abstract": attempt(lambda: socket.socket(socket.AF_UNIX).connect(ABSTRACT)),
    "vsock": attempt(lambda: socket.socket(socket.AF_VSOCK)),
    "packet": attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    "secret": attempt(lambda: open(SECRET_FILE).read()),
    "its folder": attempt(lambda: os.listdir(os.path.dirname(SECRET_FILE))),
    "code": attempt(lambda: write(__file__)),
    "python": attempt(lambda: write(os.path.join(sys.prefix, "planted"))),
    "tmp": attempt(lambda: write("/tmp/own")),
    "processes": sorted(int(one) for one in os.listdir("/proc") if one.isdigit()),
    "interfaces": [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]],
    "package": __import__("openai").__name__,
}
with open("answer.txt", "w") as file:
    json.dump(found, file)
"""


def test_a_sandboxed_program_reaches_the_endpoint_and_nothing_else(tmp_path: Path) -> None:
    answers: list[str] = []

    class Overheard(Command):
        async def __call__(self, episode: Any) -> None:
            await super().__call__(episode)
            answers.append(episode.answer)

    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    abstract = f"\0nanorl-test-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as other, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(abstract)
        unix.listen()
        other.setblocking(False)
        names = {
            "OTHER": other.getsockname()[1],
            "SECRET_FILE": str(secret),
            "ABSTRACT": abstract,
        }
        body = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + PROBE
        command = Overheard(command=written(tmp_path, body), in_sandbox=True)
        rollout = asyncio.run(play(command, ScriptedGenerator(TINY, ["x"])))
        assert rollout.status is Status.FINISHED, rollout.error
        with pytest.raises(BlockingIOError):
            other.accept()
    found = json.loads(answers[0])
    assert found["other port"].startswith("ConnectionRefusedError")
    assert "Network is unreachable" in found["outside"]
    assert found["abstract"].startswith("ConnectionRefusedError")
    for name in ("vsock", "packet"):
        assert "Error" in found[name], found[name]
    assert found["secret"].startswith("FileNotFoundError")
    assert found["its folder"] == "['program.py']"
    assert "Read-only file system" in found["code"] and "Read-only" in found["python"]
    assert found["tmp"] == "written" and not Path("/tmp/own").exists()
    assert found["interfaces"] == ["lo"]
    assert len(found["processes"]) == 2  # its guard and itself
    assert found["package"] == "openai"


def test_a_sandboxed_program_sees_what_reads_names(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "own.py").write_text(f"word = {SECRET!r}")
    body = f"sys.path.append({str(tmp_path / 'lib')!r}); ask('x'); import own; print(own.word)"
    reads = [str(tmp_path / "lib")]
    assert rollout_of(tmp_path, body, ["x"], in_sandbox=True, reads=reads).reward == 1.0
    assert rollout_of(tmp_path, body, ["x"], in_sandbox=True).metrics["agent_failed"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "say what to run"),
        ({"command": "no-such-program x"}, "no executable 'no-such-program'"),
        ({"command": "python no_such_agent.py"}, "no file 'no_such_agent.py'"),
        ({"command": "python 'x"}, "No closing quotation"),
        ({"command": "python -V", "timeout_s": 0}, "timeout_s=0"),
        ({"command": "python -V", "reads": "lib"}, "write a list of paths"),
        ({"command": "python -V", "reads": ["no/such"]}, "there is no 'no/such'"),
        ({"command": "python -V", "in_sandbox": "yes"}, "must be true or false"),
        ({"command": "python -V", "sandbox": True}, "the options of command are"),
    ],
)
def test_bad_options_are_refused_before_any_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_loop("command", options)


def test_a_command_goes_with_the_loop_command_alone() -> None:
    with pytest.raises(ValueError, match="only --agent command runs a program"):
        AgentConfig(command="python x.py", loop="tool")


def test_files_that_lead_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    task = Task("x", "y", files={"../x": "text"})
    with pytest.raises(ValueError, match="outside of the working folder"):
        rollout_of(tmp_path, "ask('x')", ["x"], task)


def test_a_task_too_long_for_a_variable_is_in_its_file_alone(tmp_path: Path) -> None:
    body = "ask('x')\nassert 'NANORL_TASK' not in os.environ\nprint(len(open('task.json').read()))"
    task = Task("x", "40", files={"long.txt": "y" * 200_000})
    rollout = rollout_of(tmp_path, body, ["x"], task)
    assert "agent_failed" not in rollout.metrics
