"""Environments of `verifiers`, played by its own code in a Python of its own, and its train client.

Those that need it are skipped where scripts/install_verifiers.sh has not been run.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_text
from agent_doubles import ScriptedGenerator, tiny_tokenizer
from waiting import until, wait_until

from nanoengine.formats.hf import save_model
from nanoengine.model.transformer import Transformer
from nanoinfer.dialects import all_dialects
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.endpoint.endpoint_server import RecordingServer
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.limits import Limits
from nanorl.cli import main
from nanorl.envs import verifiers_process, verifiers_worker
from nanorl.envs.catalog import load_kind
from nanorl.envs.verifiers import OWN_PYTHON, find_environment
from nanorl.envs.verifiers_process import VerifiersProcess
from nanorl.observability.store import RolloutStore
from nanorl.options.agent_kit import AgentKit
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig
from nanorl.options.run_kind import num_env_workers
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout, Status

pytestmark = pytest.mark.xdist_group("heavy")
HERE = Path(__file__).parent
WORD_RELAY = HERE / "verifiers_envs" / "word_relay"
WORDS = ("harbour", "meadow", "lantern", "copper", "willow", "granite", "feather", "orchard")
TALKS = {"taskset": {"has_tools": False}}
"""A renderer of no known model has no form for tools."""
needs_verifiers = pytest.mark.skipif(
    not OWN_PYTHON.exists(), reason="needs verifiers: bash scripts/install_verifiers.sh"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for the schema of a tool."""
    folder = tmp_path_factory.mktemp("model")
    shape = replace(tiny_text.make_model().config, max_position_embeddings=4096)
    made = Transformer(shape)
    made.init_weights(0, std=0.4)
    save_model(made, folder)
    tiny_text.make_tokenizer().save(folder)
    return folder


def marked_processes() -> list[str]:
    """The processes that any worker of an environment has started and that live."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"{verifiers_process.MARK}=".encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@needs_verifiers
@pytest.mark.parametrize("client", ["eval", "train"])
def test_an_unchanged_environment_trains_through_verifiers_own_client(
    client: str, model: Path, tmp_path: Path
) -> None:
    config = {} if client == "eval" else TALKS
    options = f"""train --preset tiny --model {model} --dtype fp32 --threads 1 --rl.steps 3
        --rl.tasks-per-step 2 --rl.group-size 2 --agent.max-context-tokens 2000
        --agent.max-turn-tokens 256 --agent.max-turns 4 --evaluation.num-tasks 1
        --evaluation.num-tasks-untrained 0 --evaluation.num-tasks-no-tool 0
        --engine.max-num-seqs 4 --engine.cache-mb 32 --out {tmp_path / "run"} --env verifiers
        --env-args env={WORD_RELAY} client={client}""".split()
    main([*options, f"config={json.dumps(config)}"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    steps = [row for row in rows if "logp_gap_max" in row]
    assert len(steps) == 3
    assert [step["logp_gap_max"] for step in steps] == [0.0] * 3
    assert all(step["logp_gap_tokens"] > 0 for step in steps)
    with RolloutStore(tmp_path / "run" / "rollouts.sqlite") as store:
        played = store.query()
    finished = [one for one in played if "reward/letters" in one.metrics]
    assert len(finished) >= 6 and all(one.status != Status.FAILED for one in played)
    for rollout in finished:
        check_rubric(rollout)
    has_called = [rollout.metrics["reward/looked"] > 0 for rollout in finished]
    assert any(has_called) == (client == "eval")
    assert not marked_processes(), "nothing is left over"


def check_rubric(rollout: Rollout) -> None:
    """The reward is the rubric's, worked out here from the tokens that the engine sampled."""
    tokenizer = tiny_text.make_tokenizer()
    last = rollout.turn_spans[-1]
    ids = rollout.tokens[last.action_start : last.action_end]
    said = tokenizer.decode([token for token in ids if token not in tokenizer.eos_ids])
    shares = [sum(one in word for one in said) / max(len(said), 1) for word in WORDS]
    letters, looked = rollout.metrics["reward/letters"], rollout.metrics["reward/looked"]
    assert min(abs(letters - share) for share in shares) < 1e-6
    assert looked == 0.5 * (rollout.metrics["num_calls"] == 3)
    assert rollout.reward == pytest.approx(letters + looked)
    assert rollout.metrics["num_said"] == len(said)


class Dice:
    """Samples letters; `before` is called before every answer."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.before = before

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        self.before()
        made = tiny_text.make_tokenizer()
        said = [*made.encode("abc" * params.max_tokens)[: params.max_tokens - 1]]
        sampled = [*said[:5], min(made.eos_ids)]
        logps = [-1.0] * len(sampled)
        return Output(ids=sampled, logps=logps, versions=[0] * len(sampled), finish_reason="stop")


def run_config(**env_args: Any) -> RunConfig:
    config = get_preset("tiny").config()
    given = {"env": str(WORD_RELAY), "config": TALKS} | env_args
    pairs = tuple(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in given.items()
    )
    agent = replace(config.agent, max_context_tokens=2000, max_turn_tokens=64, max_turns=4)
    return replace(config, env="verifiers", env_args=pairs, agent=agent)


@needs_verifiers
def test_episodes_of_a_worker_that_dies_fail_and_those_that_a_limit_ends_are_unanswered(
    model: Path,
) -> None:
    async def play(kit: AgentKit, generator: Any) -> Rollout:
        task = kit.kind.tasks(0).batch(0, 1)[0]
        names = {"group_id": "g", "rollout_id": "r"}
        return await kit.play(task, generator, sampling=SamplingParams(seed=1), **names)

    async def work() -> None:
        kit = AgentKit(run_config(), model)
        killed: list[int] = []

        def kill_worker() -> None:
            if not killed:
                process = kit.kind._shared.process._life._process  # type: ignore[attr-defined]
                killed.append(process.pid)
                process.kill()

        try:
            lost = await play(kit, Dice(kill_worker))
            assert lost.status == Status.FAILED and "exit code -9" in lost.error
            again = await play(kit, Dice())
            assert again.status == Status.FINISHED and again.num_turns == 2
            assert again.metrics["reward/letters"] == again.reward
            limits = replace(kit.config.agent, max_turns=1)
            kit.make_agent = partial(kit.make_agent, limits=limits)
            cut = await play(kit, Dice())
            assert (cut.status, cut.reward) == (Status.TRUNCATED_CONTEXT, 0.0), "our own limit"
            assert cut.num_turns == 1 and cut.num_action_tokens > 0
        finally:
            await kit.close_loop()
            kit.close()

    asyncio.run(work())
    wait_until(lambda: not marked_processes(), told=marked_processes)  # killed, and on their way


def asked_in(task: Task) -> tuple[str, str]:
    return task.prompt_text, task.data["row"]["word"]


@needs_verifiers
@pytest.mark.parametrize("num_tasks", [pytest.param(0, marks=pytest.mark.rare), 80])
def test_tasks_are_the_rows_of_the_taskset_and_equal_ones_are_in_one_split(num_tasks: int) -> None:
    taskset = {"num_tasks": num_tasks, "num_different": 40}
    kind = load_kind("verifiers", {"env": str(WORD_RELAY), "config": {"taskset": taskset}})
    try:
        if not num_tasks:
            with pytest.raises(ValueError, match="word_relay: its taskset has no row"):
                kind.tasks(0)
            return
        trained, held_out = kind.tasks(0).tasks, kind.tasks(0).heldout_tasks  # type: ignore[attr-defined]
    finally:
        kind.close()
    numbers = sorted(task.data["row"]["idx"] for task in (*trained, *held_out))
    assert numbers == list(range(num_tasks)), "every row, once"
    asked = [{asked_in(task) for task in tasks} for tasks in (trained, held_out)]
    assert all(asked) and not asked[0] & asked[1]
    assert len(asked[0] | asked[1]) == 40


@needs_verifiers
@pytest.mark.rare
def test_what_verifiers_cannot_play_here_is_refused_with_its_reason() -> None:
    def tasks(**spec: Any) -> None:
        given: dict[str, Any] = {"env": "word_relay", "config": {}, "folders": [str(WORD_RELAY)]}
        process = VerifiersProcess(str(OWN_PYTHON), **(given | spec))
        try:
            process.tasks(1)
        finally:
            process.close()

    with pytest.raises(ValueError, match="taskset='words': must be an object"):
        tasks(config={"taskset": "words"})
    with pytest.raises(ValueError, match=r"'no_such_env' not found.*install what is"):
        tasks(env="no_such_env", folders=[])
    with pytest.raises(ValueError, match="'bash', which runs what the model writes; say where"):
        tasks(config={"agent": {"harness": {"id": "bash"}}})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "name an environment"),
        ({"env": "x", "client": "chat"}, "choose from eval, train"),
        ({"env": "x", "renderer": {"name": "qwen3"}}, "is of client=train"),
        ({"env": "x", "config": "fast"}, "must be a JSON object"),
        ({"env": "x", "max_tasks": 0}, "must be a positive whole number"),
        ({"env": "x", "max_tasks": "many"}, "must be a positive whole number"),
        ({"env": "x", "timeout_s": "long"}, "must be positive seconds"),
        ({"env": "x", "timeout_s": 0}, "must be positive seconds"),
        ({"env": 5}, "env=5: must be a text"),
        ({"env": "./nowhere"}, "no environment is there"),
        ({"env": "owner/my-env"}, "without a path: env=my-env"),
        ({"env": "x", "colour": 1}, "colour"),
    ],
)
def test_wrong_arguments_are_refused_up_front(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_kind("verifiers", arguments)


def test_an_environment_is_an_installed_name_or_a_folder() -> None:
    assert find_environment("my-env") == ("my-env", [])
    for path in (WORD_RELAY, WORD_RELAY / "word_relay"):
        assert find_environment(str(path)) == ("word_relay", [str(WORD_RELAY)])
    assert num_env_workers(run_config()) == 0, "its code is in a process of its own already"


def fake_python(folder: Path, body: str) -> str:
    """A program that is started as the Python of an environment and does what `body` says."""
    script = folder / "python"
    lines = ["import json, os, subprocess, sys, time", "sys.stdin.readline()", body]
    script.write_text(f"#!{sys.executable}\n" + "\n".join(lines))
    script.chmod(0o755)
    return str(script)


READY = 'print(json.dumps({"ready": {}}), flush=True)'
CHILD = 'subprocess.Popen(["sleep", "600"], start_new_session=True)'
FAULTS = {
    "dies": (f'{READY}\nsys.stdin.readline(); sys.exit("no luck")', "exit code 1. no luck"),
    "hangs": (f"{READY}\n{CHILD}\ntime.sleep(600)", "took longer than .*timeout_s=0.2"),
    "floods": (f'{READY}\n{CHILD}\nwhile True: print("x" * 4096)', "nobody can read"),
    "is silent": ("os.close(1); time.sleep(600)", "exit code"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_with_a_fault_is_ended_with_all_that_it_started(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault != "dies":  # it may take its time for that, and to say why
        monkeypatch.setattr(verifiers_process, "LETTING_GO_S", 0.2)
    body, message = FAULTS[fault]
    python = fake_python(tmp_path, body)
    process = VerifiersProcess(python, env="any", config={}, folders=[])

    async def play() -> None:
        await process.play({}, {}, timeout_s=0.2 if fault == "hangs" else 200.0)

    with pytest.raises(InfrastructureError, match=message):
        asyncio.run(play())
    process.close()
    wait_until(lambda: not marked_processes(), told=marked_processes)  # killed, and on their way


@pytest.mark.parametrize("is_closed", [False, True], ids=["is out of time", "is closed"])
def test_a_worker_that_reads_nothing_more_is_ended_though_somebody_writes_to_it(
    is_closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers_process, "LETTING_GO_S", 0.2)
    python = fake_python(tmp_path, f"{READY}\ntime.sleep(600)")
    process = VerifiersProcess(python, env="any", config={}, folders=[])

    async def play() -> None:
        limit_s = 1000.0 if is_closed else 0.5
        row = {"text": "x" * (1 << 20)}
        long = asyncio.ensure_future(process.play(row, {}, timeout_s=limit_s))
        await until(lambda: process._life)
        life: Any = process._life
        try:
            async with asyncio.timeout(60.0):
                if is_closed:
                    await until(life._writing.locked)
                    await asyncio.to_thread(process.close)
                await long
        finally:
            life._process.kill()  # nothing would end the thread that writes to it, else

    with pytest.raises(InfrastructureError, match="it was closed" if is_closed else "took longer"):
        asyncio.run(play())
    process.close()
    wait_until(lambda: not marked_processes(), told=marked_processes)  # killed, and on their way


def test_an_episode_that_ended_while_the_loop_stood_still_was_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = 'print(json.dumps({"id": 1, "result": {"reward": 1.0}}), flush=True)'
    body = f"{READY}\nsys.stdin.readline()\n{result}\nsys.stdin.read()"
    process = VerifiersProcess(fake_python(tmp_path, body), env="any", config={}, folders=[])

    async def play() -> dict[str, Any]:
        loop = asyncio.get_running_loop()

        def wait_late(future: Future[Any]) -> asyncio.Future[Any]:
            def stand_still() -> None:
                wait_until(future.done)
                now_s = loop.time()
                monkeypatch.setattr(loop, "time", lambda: now_s + 1e6)

            loop.call_soon(stand_still)
            return asyncio.wrap_future(future)

        late = SimpleNamespace(**vars(asyncio) | {"wrap_future": wait_late})
        monkeypatch.setattr(verifiers_process, "asyncio", late)
        return await process.play({}, {}, timeout_s=1000.0)

    try:
        assert asyncio.run(play()) == {"reward": 1.0}
    finally:
        process.close()


def test_a_process_that_is_still_being_started_is_killed_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who starts one is told so while the kernel has not yet given it its environment."""
    command, marked = ["sleep", "600"], {**os.environ, verifiers_process.MARK: "of-a-test"}
    for _ in range(100):
        started = subprocess.Popen(command, env=marked)
        monkeypatch.setattr(verifiers_worker, "_pids", lambda pid=started.pid: [pid])
        verifiers_worker.kill_marked("of-a-test")
        try:
            assert started.poll() == -signal.SIGKILL
        finally:
            started.kill()
            started.wait()


def test_the_last_words_of_a_worker_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads them is another thread than the one that sees its end."""
    read_log = verifiers_process._Life._read_log

    def late(life: verifiers_process._Life) -> None:
        time.sleep(0.5)
        read_log(life)

    monkeypatch.setattr(verifiers_process._Life, "_read_log", late)
    python = fake_python(tmp_path, FAULTS["dies"][0])
    process = VerifiersProcess(python, env="any", config={}, folders=[])
    with pytest.raises(InfrastructureError, match=FAULTS["dies"][1]):
        asyncio.run(process.play({}, {}, timeout_s=200.0))
    process.close()


def test_a_worker_whose_log_overflows_answers_all_the_same(tmp_path: Path) -> None:
    result = 'print(json.dumps({"id": 1, "result": {"reward": 1.0}}), flush=True)'
    flood = 'sys.stderr.write("x" * 50_000_000)'
    body = f"{READY}\nsys.stdin.readline()\n{flood}\n{result}\nsys.stdin.read()"
    process = VerifiersProcess(fake_python(tmp_path, body), env="any", config={}, folders=[])
    assert asyncio.run(process.play({}, {}, timeout_s=200.0)) == {"reward": 1.0}
    process.close()
    wait_until(lambda: not marked_processes(), told=marked_processes)  # killed, and on their way


def test_a_python_without_verifiers_says_how_to_get_one(tmp_path: Path) -> None:
    # -S: without the packages of this one
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    process = VerifiersProcess(str(script), env="any", config={}, folders=[])
    with pytest.raises(ValueError, match="run bash scripts/install_verifiers"):
        process.tasks(1)
    with pytest.raises(ValueError, match="no/such/python"):
        VerifiersProcess("no/such/python", env="any", config={}, folders=[]).tasks(1)


def fake_verifiers(folder: Path, body: str, version: str = "0.4.0") -> None:
    """A package in `folder` that the worker takes for verifiers; importing it runs `body`."""
    (folder / "verifiers").mkdir()
    (folder / "verifiers" / "v1.py").write_text(f"import subprocess, time\n{body}\n")
    (folder / f"verifiers-{version}.dist-info").mkdir()
    about = f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n"
    (folder / f"verifiers-{version}.dist-info" / "METADATA").write_text(about)


@pytest.mark.parametrize(
    ("body", "version", "message"),
    [
        ("", "0.1.14", "verifiers 0.1.14; 0.4 or newer"),
        ("import no_such_package", "0.4.0", "no_such_package'; install .*scripts/install_v"),
        ('raise RuntimeError(subprocess.check_output(["cat"]))', "0.4.0", "RuntimeError: b''"),
        ('print("{}", flush=True); raise RuntimeError("unheard")', "0.4.0", "RuntimeError: unhe"),
    ],
    ids=["is too old", "misses a package", "reads standard input", "prints"],
)
def test_a_worker_keeps_its_requests_and_answers_from_the_environment(
    body: str, version: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers_process, "START_S", 200.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fake_verifiers(tmp_path, body, version)
    process = VerifiersProcess(sys.executable, env="any", config={}, folders=[])
    with pytest.raises(ValueError, match=message):
        process.tasks(1)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_worker_that_hangs_ends_with_its_parent(sent: signal.Signals, tmp_path: Path) -> None:
    fake_verifiers(tmp_path, f"{CHILD}\ntime.sleep(600)")
    program = """
        import sys
        from nanorl.envs.verifiers_process import VerifiersProcess
        VerifiersProcess(sys.executable, env="any", config={}, folders=[]).tasks(1)
    """
    path = os.pathsep.join([str(tmp_path), str(HERE.parents[1])])
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until(lambda: any("sleep" in one for one in marked_processes()), 200.0)
    finally:
        parent.send_signal(sent)
    parent.wait(200.0)
    wait_until(lambda: not marked_processes(), told=marked_processes)


@needs_verifiers
def test_the_train_client_has_the_tokens_that_were_recorded(tmp_path: Path) -> None:
    """It sends what our reader of requests did not know, and reads max_model_len."""
    tokenizer = tiny_tokenizer()
    tokenizer.save(tmp_path)
    generator = ScriptedGenerator(tokenizer, ["well ab"])
    limits = Limits(max_turns=8, max_turn_tokens=50, max_context_tokens=4000)
    recording = Recording(generator, tokenizer, limits=limits, sampling=SamplingParams(seed=5))

    async def ask() -> dict[str, Any]:
        server = RecordingServer(all_dialects(tokenizer), model="tiny", max_model_len=512)
        try:
            async with server.episode(recording) as session:
                program = await asyncio.create_subprocess_exec(
                    str(OWN_PYTHON), "-P", str(HERE / "verifiers_client_program.py"),
                    session.openai_url, "tiny", str(tmp_path),
                    env={**os.environ, "TEST_API_KEY": session.key}, stdout=subprocess.PIPE,
                )  # fmt: skip
                said, _ = await program.communicate()
                return json.loads(said)
        finally:
            await server.close()

    said = asyncio.run(ask())
    (sequence,) = recording.tree.sequences()
    assert said["prompt_ids"] + said["completion_ids"] == sequence.tokens
    assert tokenizer.decode(said["prompt_ids"]) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert said["logprobs"] == sequence.logps[len(said["prompt_ids"]) :]
    assert said["finish_reason"] == "stop" and generator.calls[0][1].max_tokens == 9
    assert said["refusal"].startswith("400 Prompt length") and "(512)" in said["refusal"]
    assert recording.num_answers == 1, "the prompt that was too long never came"
