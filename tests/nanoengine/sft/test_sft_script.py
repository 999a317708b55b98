"""SFT on chats: what is masked, the order of samples, and the program end to end."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from host_processes import signal_group
from waiting import eventually, wait_until

from nanoengine.formats.hf import hf_views, load_model
from nanoengine.sft import sft_run
from nanoengine.sft.chats import Order, chat_sample, read_chats
from nanoengine.state.checkpoint import list_checkpoints
from nanoengine.stop_signals import Interrupted
from nanoengine.text.tokenizer import ChatTokenizer

ROOT = Path(__file__).resolve().parents[3]
CHATS = [
    [("user", f"say {word}"), ("assistant", word), ("user", "again"), ("assistant", f"{word} {n}")]
    for n, word in enumerate(("one", "two", "tree", "house", "river", "stone", "cloud", "bird"))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a tokenizer and a chat template."""
    from nanorl.envs.tasks.tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    lines = [
        json.dumps({"messages": [{"role": role, "content": text} for role, text in chat]})
        for chat in CHATS
    ]
    path.write_text("\n".join(lines) + "\n\n")
    return path


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"scripts/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_only_what_the_assistant_wrote_is_trained_on(folder: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(folder)
    messages = [{"role": role, "content": text} for role, text in CHATS[2]]
    sample = chat_sample(tokenizer, messages)
    runs: list[list[int]] = []
    for t, token in enumerate(sample.tokens):
        if sample.loss_mask[t]:
            if not sample.loss_mask[t - 1]:
                runs.append([])
            runs[-1].append(token)
    assert [tokenizer.decode(run, skip_special=True) for run in runs] == ["tree", "tree 2"]
    assert all(run[-1] in tokenizer.eos_ids for run in runs)
    whole = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert sample.tokens == whole


def test_lines_that_are_no_chat_are_named(folder: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(folder)
    file = tmp_path / "bad.jsonl"
    for line, message in (
        ('{"messages": "hello"}', 'line 1: expected an object with a list under "messages"'),
        ("{", "line 1: Expecting property name"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1: no message of role 'assist"),
    ):
        file.write_text(line + "\n")
        with pytest.raises(ValueError, match=message):
            read_chats(file, tokenizer, 100)
    with pytest.raises(ValueError, match="no such file"):
        read_chats(tmp_path / "none", tokenizer, 100)


def test_long_chats_are_left_out_and_counted(folder: Path, chats: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(folder)
    samples, num_long = read_chats(chats, tokenizer, 1000)
    assert (len(samples), num_long) == (8, 0)
    limit = sorted(len(sample.tokens) for sample in samples)[4]
    kept, num_long = read_chats(chats, tokenizer, limit)
    assert len(kept) + num_long == 8 and num_long > 0
    with pytest.raises(ValueError, match="no chat of at most 3 tokens"):
        read_chats(chats, tokenizer, 3)


def test_every_epoch_has_every_sample_once_and_resuming_goes_on() -> None:
    order = Order(7, seed=1)
    taken = order.take(10) + order.take(4)
    assert sorted(taken[:7]) == sorted(taken[7:]) == list(range(7))
    assert taken[:7] != taken[7:]
    assert Order(7, seed=1, taken=10).take(4) == taken[10:]


def arguments(folder: Path, chats: Path, out: Path, *more: str) -> list[str]:
    fixed = ["--data", str(chats), "--model", str(folder), "--steps", "4", "--batch-size", "4"]
    return [*fixed, "--out", str(out), "--save-every", "2", "--lr", "1e-3", *more]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return hf_views(load_model(out / "model"))


def half_way(out: Path, target: Path) -> None:
    """The run as it was after two steps."""
    shutil.copytree(out, target, ignore=shutil.ignore_patterns("model", "latest", "*04"))


@pytest.mark.xdist_group("gloo")
def test_a_run_trains_resumes_bit_equal_and_also_split_over_processes(
    folder: Path, chats: Path, tmp_path: Path
) -> None:
    train_sft = script("train_sft")
    one = tmp_path / "one"
    config = train_sft.parse(arguments(folder, chats, one, "--peak-flops", "1e10"))
    sft_run.SftRun(config).train()
    rows = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert {"loss", "lr", "tokens_per_s", "mfu", "peak_rss_bytes", "num_tokens"} <= rows[0].keys()
    expected = weights(one)
    with pytest.raises(ValueError, match="already holds a run"):
        sft_run.SftRun(config)

    half_way(one, tmp_path / "again")
    resumed = train_sft.parse(["--resume", "--out", str(tmp_path / "again")])
    sft_run.SftRun(resumed).train()
    found = weights(tmp_path / "again")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    again = [json.loads(x) for x in (tmp_path / "again/metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in again] == [row["loss"] for row in rows]
    with pytest.raises(ValueError, match=r"--resume: lr=0.5 differs from the run's 0.001"):
        train_sft.parse(["--resume", "--out", str(one), "--lr", "0.5"])

    half_way(one, tmp_path / "split")
    layout = ["--pp", "2", "--schedule", "zb_h1", "--zero", "1", "--micro-batch-tokens", "64"]
    program = str(ROOT / "scripts/train_sft.py")
    done = subprocess.run(
        [sys.executable, program, "--resume", "--out", str(tmp_path / "split"), *layout],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = weights(tmp_path / "split")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def test_two_ctrl_c_in_a_step_lose_nothing_and_a_second_process_is_refused(
    folder: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_sft = script("train_sft")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    sft_run.SftRun(train_sft.parse(arguments(folder, chats, whole, "--save-every", "9"))).train()

    run = sft_run.SftRun(train_sft.parse(arguments(folder, chats, stopped, "--save-every", "9")))
    step = run.engine.train_step

    def interrupted_step(*args: object) -> dict[str, float]:
        result: dict[str, float] = step(*args)
        if run.engine.version == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            with pytest.raises(ValueError, match=rf"in use by another process .pid {os.getpid()}."):
                sft_run.SftRun(train_sft.parse(["--resume", "--out", str(stopped)]))
        return result

    monkeypatch.setattr(run.engine, "train_step", interrupted_step)
    with pytest.raises(Interrupted):
        run.train()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not (stopped / "model").exists()
    assert [path.name for path in list_checkpoints(stopped / "checkpoints")] == ["step_00000002"]
    sft_run.SftRun(train_sft.parse(["--resume", "--out", str(stopped)])).train()
    expected, found = weights(whole), weights(stopped)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    losses = [
        [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (whole, stopped)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def start_ranks(folder: Path, chats: Path, out: Path) -> subprocess.Popen[str]:
    """The program on two processes, in a session of its own, with more steps than it will take;
    returns once it has taken one."""
    command = [sys.executable, str(ROOT / "scripts/train_sft.py")]
    more = ["--steps", "100000", "--save-every", "100000", "--dp", "2", "--device", "cpu"]
    program = subprocess.Popen(
        [*command, *arguments(folder, chats, out, *more)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = out / "metrics.jsonl"
    wait_until(
        lambda: metrics.exists() and metrics.read_text().count("\n"),
        limit_s=120,
        alive=lambda: program.poll() is None,
    )
    return program


def processes_of(session: int) -> dict[int, int]:
    """The parent of each living process of the session."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, fields = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found[pid] = int(fields[1])
    return found


def nobody_is_left(session: int) -> bool:
    return eventually(lambda: not processes_of(session))


def test_a_layout_that_the_model_refuses_is_told_once_and_starts_no_process(
    folder: Path,
    chats: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_sft = script("train_sft")
    monkeypatch.setattr(train_sft.asyncio, "run", None)
    monkeypatch.delenv("RANK", raising=False)
    for options, message in (
        (("--ep", "2"), "ep=2: the model has no experts to split; use dp=2"),
        (("--pp", "2", "--zero", "3"), "zero=3 with pp > 1"),
        (("--tp", "2", "--model", "/nowhere"), "/nowhere"),
    ):
        given = arguments(folder, chats, tmp_path / "run", *options)
        monkeypatch.setattr(sys, "argv", ["train_sft.py", *given])
        assert train_sft.main() == 2
        errors = capsys.readouterr().err
        assert errors.count("error:") == 1 and message in errors
    assert not list(tmp_path.iterdir())


@pytest.mark.xdist_group("gloo")
def test_a_killed_process_ends_the_run_with_one_error_and_leaves_no_other(
    folder: Path, chats: Path, tmp_path: Path
) -> None:
    program = start_ranks(folder, chats, tmp_path / "run")
    parents = processes_of(program.pid)
    # The program's child is the server that forks the ranks.
    ranks = sorted(pid for pid, parent in parents.items() if parents.get(parent) == program.pid)
    assert len(ranks) == 2, parents
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = program.communicate(timeout=120)
    assert program.returncode == 2
    assert errors.count("error:") == 1 and "Traceback" not in errors, errors
    assert "rank 1" in errors and "signal 9" in errors and "--resume --out" in errors, errors
    assert nobody_is_left(program.pid)


@pytest.mark.xdist_group("gloo")
def test_signals_to_all_of_several_processes_save_once_and_end_them(
    folder: Path, chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    program = start_ranks(folder, chats, out)
    # A terminal tells every process, and so does whoever ends a job.
    signal_group(program.pid, signal.SIGINT, signal.SIGTERM)
    _, errors = program.communicate(timeout=120)
    assert program.returncode == 130, errors
    assert errors.count("stopping after this step") == 1 and "Traceback" not in errors, errors
    assert (
        f"stopped and saved; go on with: bash scripts/train_sft.sh --resume --out {out}" in errors
    )
    assert len(list_checkpoints(out / "checkpoints")) == 1 and not (out / "model").exists()
    assert nobody_is_left(program.pid)


def test_bad_options_leave_nothing_on_the_disk(folder: Path, chats: Path, tmp_path: Path) -> None:
    train_sft = script("train_sft")
    for bad in (("--model", "/nowhere"), ("--data", "/nowhere"), ("--max-tokens", "2")):
        config = train_sft.parse(arguments(folder, chats, tmp_path / "runs" / "one", *bad))
        with pytest.raises(ValueError, match=r"no such|no chat of at most 2 tokens"):
            sft_run.SftRun(config)
        assert not list(tmp_path.iterdir())
