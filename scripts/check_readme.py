"""Runs every command of README.md's ```bash blocks, in their order, then its ```python blocks.

    python scripts/check_readme.py [--full]

Training runs are made short by options that `SHORT` adds, unless --full is given; `LEFT_OUT` says
why a command is not run at all. After `source .venv/bin/activate` the commands find what that
environment has, and not before. A server's page is asked for once. Everything is written below
runs/readme-check/ instead of runs/, which is emptied first.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = "runs/readme-check"
ACTIVATE = "source .venv/bin/activate"

# Options that make a command short, and its checkpoints (1.4 GB) few; keys are how commands begin.
_SHORT_RUN = (
    "--warm-start.steps 2 --rl.steps 1 --rl.tasks-per-step 2 --evaluation.num-tasks 4 "
    "--evaluation.num-tasks-untrained 2 --evaluation.num-tasks-no-tool 2 --keep-checkpoints 1"
)
_SHORT_OWN = (
    "--rl.steps 1 --rl.tasks-per-step 2 --rl.group-size 2 --evaluation.num-tasks 2 "
    "--evaluation.num-tasks-untrained 2 --keep-checkpoints 1"
)
SHORT = {"bash scripts/train_agent.sh": _SHORT_RUN, "nanorl train": _SHORT_OWN}
LEFT_OUT = {
    "git clone": "this is the clone",
    "bash scripts/test.sh": ".ci/run has just run it",
}
SERVERS = ("nanorl view", "nanorl serve")


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
    if command.startswith("nanorl new"):  # it writes into the working folder
        return f"mkdir -p {RUNS} && cd {RUNS} && {command}"
    if is_full or not is_training or "--resume" in command:
        return command
    extra = next((more for start, more in SHORT.items() if command.startswith(start)), "")
    return f"{command} {extra}".strip()


def run(command: str, *, is_active: bool) -> int:
    """Its exit status; `is_active`: what .venv has is on the PATH."""
    path = f"{ROOT}/.venv/bin:{os.environ['PATH']}" if is_active else os.environ["PATH"]
    env = os.environ | {"PATH": path}
    if command.startswith(SERVERS):
        return run_server(command, env)
    words = ["bash", "-c", command]
    return subprocess.run(words, cwd=ROOT, stdin=subprocess.DEVNULL, env=env).returncode


def run_server(command: str, env: dict[str, str]) -> int:
    """Start it on a free port, ask for its first page, stop it with Ctrl-C."""
    with subprocess.Popen(
        ["bash", "-c", f"exec {command} --port 0"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env | {"PYTHONUNBUFFERED": "1"},
    ) as server:
        assert server.stdout is not None
        found: list[str] = []
        for line in server.stdout:  # ends where the server does
            if found := re.findall(r"http://[\d.]+:\d+[^\s,]*", line):
                break
        status = urllib.request.urlopen(found[0], timeout=60).status if found else 0
        print(f"  {found[0] if found else 'no address'} answers with status {status}", flush=True)
        server.send_signal(signal.SIGINT)
        server.communicate()
    return 0 if status == 200 else 1


def main() -> int:
    text = (ROOT / "README.md").read_text()
    found = commands(text)
    assert found, "README.md has no bash block"
    shutil.rmtree(ROOT / RUNS, ignore_errors=True)
    is_active = False
    for command in found:
        is_active = is_active or command == ACTIVATE
        reason = next((why for start, why in LEFT_OUT.items() if command.startswith(start)), None)
        if reason is not None and "--help" not in command:
            print(f"left out ({reason}): {command}", flush=True)
            continue
        command = prepare(command, is_full="--full" in sys.argv)
        print(f"$ {command}", flush=True)
        start = time.monotonic()
        status = run(command, is_active=is_active)
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
