"""Agent programs for tests, of nothing but the standard library, and what plays them."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from pathlib import Path
from typing import Any

from agent_doubles import tiny_tokenizer

from nanoinfer.dialects import all_dialects
from nanoinfer.params import SamplingParams
from nanorl.agents.command import Command
from nanorl.agents.context import Generator
from nanorl.agents.endpoint.endpoint_server import RecordingServer
from nanorl.agents.endpoint.report import ReportRules
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent, AgentLoop
from nanorl.envs.base import Services
from nanorl.envs.catalog import load_kind
from nanorl.envs.http_record.record_access import HttpAccess
from nanorl.task import Task
from nanorl.types import Rollout

TINY = tiny_tokenizer()
SECRET = "the-hidden-answer-7351"
SLEEP = f"{600 + os.getpid() / 1e7:.7f}"
"""How long programs of this process sleep: others on this machine may do so for ten minutes."""
TASK = Task("Say it.", SECRET, files={"src/notes.txt": "a note"}, data={"tests": "hidden tests"})
ASK = """
import json, os, subprocess, sys, time, urllib.request

def ask(text):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
FAMILY = f"""
# a child of the same group, and one that hides in a session of its own
sleeping = [sys.executable, "-c", "import time; time.sleep({SLEEP})"]
child = subprocess.Popen(sleeping)
hider = "import os, subprocess as s, sys; os.setsid(); print(s.Popen(sys.argv[1:], stdout=-3).pid)"
hidden = int(subprocess.run([sys.executable, "-c", hider, *sleeping], stdout=-1).stdout)
with open(PIDS + ".new", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}} {{hidden}}")
os.rename(PIDS + ".new", PIDS)
"""


def written(folder: Path, body: str) -> str:
    """The command of a program with that text behind ASK."""
    path = folder / "program.py"
    path.write_text(f"{ASK}\nPIDS = {str(folder / 'pids')!r}\n{body}")
    return f"python {path}"


async def play(
    loop: AgentLoop,
    generator: Generator,
    task: Task = TASK,
    http: HttpAccess | None = None,
    scoring: ReportRules | None = None,
) -> Rollout:
    """One rollout of an agent behind an API in the environment `answer`."""
    server = RecordingServer(
        all_dialects(TINY), model="policy", max_model_len=2000, scoring=scoring
    )
    agent = Agent(
        generator=generator,
        tokenizer=TINY,
        limits=Limits(max_turn_tokens=100, max_context_tokens=2000),
        loop=loop,
        open_session=server.episode,
        http=http,
    )
    kind = load_kind("answer", {})
    env = kind.open(Services(tokenizer=TINY, sandbox=None, timeout_s=1.0))
    try:
        return await agent.play(
            task, env, group_id="g", rollout_id="r", sampling=SamplingParams(seed=3)
        )
    finally:
        await server.close()


class Silent:
    """An engine that never answers; `is_asked` says that it was."""

    def __init__(self, is_asked: Any) -> None:
        self.is_asked = is_asked

    async def generate(self, ids: list[int], params: SamplingParams) -> Any:
        self.is_asked.set()
        await asyncio.Event().wait()


def wait_until_dead(pids: list[int], limit_s: float = 200.0) -> list[int]:
    """Wait for processes that are somebody else's children; those that live on after that time."""
    living = []
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(limit_s * 1000):
            living.append(pid)
        os.close(descriptor)
    return living


def main() -> None:
    """A driver to be killed: plays a program whose policy never answers."""
    command = Command(command=sys.argv[1], in_sandbox=sys.argv[2] == "True")
    asyncio.run(play(command, Silent(asyncio.Event())))


if __name__ == "__main__":
    main()
