"""Runs every command of README.md's ```bash blocks, in their order, then its ```python blocks.

    python scripts/check_readme.py [--full]

Training runs are made short by options that `SHORT` adds, unless --full is given; `LEFT_OUT` says
why a command is not run at all. A server is started, asked one question, and stopped. Everything
is written below runs/readme-check/ instead of runs/, which is emptied first.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = "runs/readme-check"
SERVER_STARTS_S = 120

# Options that make a command short, and its checkpoints (1.4 GB) few; keys are how commands begin.
_SHORT_RUN = (
    "--warm-start.steps 2 --rl.steps 1 --rl.tasks-per-step 2 --evaluation.num-tasks 4 "
    "--evaluation.num-tasks-untrained 2 --evaluation.num-tasks-no-tool 2 --keep-checkpoints 1"
)
_SHORT_OWN = (
    "--rl.steps 1 --rl.tasks-per-step 2 --rl.group-size 2 --evaluation.num-tasks 2 "
    "--evaluation.num-tasks-untrained 2 --keep-checkpoints 1"
)
SHORT = {"bash scripts/train_agent.sh": _SHORT_RUN, ".venv/bin/nanorl train": _SHORT_OWN}
LEFT_OUT = {
    "bash scripts/test.sh": ".ci/run has just run it",
    "bash scripts/gpu_check.sh": "needs a GPU",
    "bash scripts/bench.sh": "takes an hour and installs the peers",
    ".venv/bin/nanorl status": "asks a run that trains; tests/nanorl/test_monitor_run.py does",
}
SERVER = "bash scripts/serve.sh"


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The lines of all bash blocks, without comments."""
    lines = (line.split(" #")[0].strip() for b in blocks(text, "bash") for line in b.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def programs(text: str) -> list[str]:
    """The Python blocks, which read what the commands wrote below `RUNS`."""
    return [block.replace('"runs/', f'"{RUNS}/') for block in blocks(text, "python")]


def prepare(command: str, *, is_full: bool) -> str:
    """The command as it is run: below `RUNS`, and short."""
    is_training = command.startswith(tuple(SHORT)) and "--help" not in command
    if is_training and "--out" not in command:
        preset = re.search(r"--preset (\w+)", command)
        seed = re.search(r"--seed (\d+)", command)
        name = f"{preset[1] if preset else 'smollm2'}-seed{seed[1] if seed else 0}"
        command += f" --out runs/{name}"
    command = command.replace("runs/", f"{RUNS}/")
    if command.startswith(".venv/bin/nanorl new"):  # it writes into the working folder
        return f"mkdir -p {RUNS} && cd {RUNS} && {ROOT}/{command}"
    if is_full or not is_training or "--resume" in command:
        return command
    extra = next((more for start, more in SHORT.items() if command.startswith(start)), "")
    return f"{command} {extra}".strip()


def run(command: str) -> int:
    if command.startswith(SERVER) and "--help" not in command:
        return run_server(command)
    return subprocess.run(["bash", "-c", command], cwd=ROOT, stdin=subprocess.DEVNULL).returncode


def run_server(command: str) -> int:
    """Start it on a free port, have it say something, stop it with Ctrl-C."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {command} --port 0"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stderr is not None
        try:
            address = find_address(server.stderr)
            print(f"  {address} answers: {ask(address)!r}", flush=True)
        except (AssertionError, OSError) as error:
            print(f"  the server did not answer: {error}", file=sys.stderr)
            return 1
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate()
    return 0


def find_address(log: object) -> str:
    """Where uvicorn says that it listens."""
    end = time.monotonic() + SERVER_STARTS_S
    said = ""
    for line in log:  # type: ignore[attr-defined]
        said += line
        found = re.search(r"http://[\d.]+:\d+", line)
        if found:
            return found[0]
        assert time.monotonic() < end, f"no address within {SERVER_STARTS_S} s:\n{said}"
    raise AssertionError(f"it ended:\n{said}")


def ask(address: str) -> str:
    """The text of a short chat answer."""
    with urllib.request.urlopen(f"{address}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def main() -> int:
    text = (ROOT / "README.md").read_text()
    found = commands(text)
    assert found, "README.md has no bash block"
    shutil.rmtree(ROOT / RUNS, ignore_errors=True)
    for command in found:
        reason = next((why for start, why in LEFT_OUT.items() if command.startswith(start)), None)
        if reason is not None and "--help" not in command:
            print(f"left out ({reason}): {command}", flush=True)
            continue
        command = prepare(command, is_full="--full" in sys.argv)
        print(f"$ {command}", flush=True)
        start = time.monotonic()
        status = run(command)
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
        if status:
            print(f"README.md: `{command}` ended with status {status}", file=sys.stderr)
            return status
    for program in programs(text):
        print(f"$ python\n{program}", flush=True)
        done = subprocess.run([ROOT / ".venv/bin/python", "-c", program], cwd=ROOT)
        if done.returncode:
            print(f"README.md: its program ended with status {done.returncode}", file=sys.stderr)
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
