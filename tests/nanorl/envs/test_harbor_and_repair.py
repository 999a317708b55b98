"""Environments over a workspace: task directories in the Harbor layout, and repairs."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nanoinfer.chat.base import ToolCall
from nanoinfer.chat.chat import ToolChat
from nanoinfer.chat.hermes import HermesParser
from nanorl.envs.base import Services
from nanorl.envs.catalog import as_kind, load_kind
from nanorl.envs.env import Env
from nanorl.envs.env_episode import EnvEpisode
from nanorl.envs.harbor import Harbor
from nanorl.envs.hooks import tools_of
from nanorl.envs.repair import Repair, draw_repair
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.envs.tasks.harbor_tasks import read_harbor_tasks, read_workplace
from nanorl.sandbox import SandboxPool, SandboxSpec
from nanorl.task import Task
from nanorl.types import InfrastructureError

PARSER = HermesParser()
TEST_SH = """#!/bin/bash
if [ "$(cat hello.txt)" = "Hello, world!" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(SandboxSpec(timeout_s=5.0, warm_sessions=0)) as pool:
        yield pool


def play(
    pool: SandboxPool | None, env: Env, task: Task, calls: Sequence[ToolCall]
) -> tuple[list[Any], Score]:
    """The observations of an episode that makes these calls, one a turn, and its score."""

    async def main() -> tuple[list[Any], Score]:
        services: Any = SimpleNamespace(sandbox=pool, timeout_s=5.0, is_tool_enabled=True)
        tools = tools_of(env)
        assert isinstance(services, SimpleNamespace | Services)
        episode = EnvEpisode(env, tools, ToolChat(parser=PARSER), services)
        try:
            await episode.reset(task)
            seen = [await episode.step(PARSER.write(call)) for call in calls]
            transcript = Transcript(messages=[], text="", answer=seen[-1].answer if seen else "")
            rollout: Any = None
            return seen, await episode.score(rollout, transcript)
        finally:
            await episode.close()

    return asyncio.run(main())


def make_task(root: Path, name: str, files: dict[str, str]) -> Path:
    usual = {
        "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 5.0\n',
        "instruction.md": f"Make hello.txt say Hello, world! ({name})\n",
        "tests/test.sh": TEST_SH,
    }
    for path, text in {**usual, **files}.items():
        if text is not None:
            (root / name / path).parent.mkdir(parents=True, exist_ok=True)
            (root / name / path).write_text(text)
    return root / name


# Harbor.


@pytest.mark.sandbox
def test_a_harbor_task_is_played_and_graded_by_its_script(
    pool: SandboxPool, tmp_path: Path
) -> None:
    dockerfile = (
        "FROM python:3.12-slim\n# the files\nWORKDIR /workspace\nCOPY data/ ./data/\n"
        "COPY run.sh notes*.md /workspace/\nRUN mkdir -p made && \\\n    echo 1 > made/it\n"
    )
    make_task(
        tmp_path,
        "hello",
        {"environment/Dockerfile": dockerfile, "environment/data/d/x.txt": "x",
         "environment/run.sh": "#!/bin/sh\necho ran", "environment/notes-1.md": "n"},
    )  # fmt: skip
    kind: Any = load_kind("harbor", {"path": str(tmp_path)})
    (task,) = Harbor(str(tmp_path)).tasks()
    assert task.prompt == "Make hello.txt say Hello, world! (hello)" and kind.needs_sandbox
    assert task.task_id.startswith("hello-") and task.kind == "harbor/hello"
    look = ToolCall("bash", {"command": "pwd; find . -type f | sort; ./run.sh; ls /tests"})
    right = ToolCall("write", {"path": "hello.txt", "text": "Hello, world!"})
    forge = ToolCall("bash", {"command": "echo 1 > /logs/verifier/reward.txt"})
    seen, score = play(pool, Harbor(""), task, [look, right, ToolCall("submit", {})])
    assert seen[0].observation[0]["content"].count("\n") >= 5, seen[0]
    for part in ("/workspace", "./data/d/x.txt", "./made/it", "./notes-1.md", "ran"):
        assert part in str(seen[0].observation)
    assert seen[2].is_done and score.total == 1.0
    seen, score = play(pool, Harbor(""), task, [forge, ToolCall("submit", {})])
    assert "exit code" in str(seen[0].observation) and score.total == 0.0


@pytest.mark.sandbox
def test_test_functions_grade_where_there_is_no_script(pool: SandboxPool, tmp_path: Path) -> None:
    tests = (
        "from calc import f\ndef test_one(): assert f(1) == 2\ndef test_two(): assert f(2) == 4\n"
    )
    folder = make_task(
        tmp_path, "calc", {"tests/test_calc.py": tests, "environment/calc.py": "def f(x): return 2"}
    )
    (folder / "tests" / "test.sh").unlink()
    (task,) = read_harbor_tasks(tmp_path)
    edit = ToolCall("edit", {"path": "calc.py", "old": "return 2", "new": "return 2 * x"})
    assert play(pool, Harbor(""), task, [])[1].total == 0.5
    assert play(pool, Harbor(""), task, [edit])[1].total == 1.0


@pytest.mark.sandbox
def test_a_set_up_that_fails_is_the_infrastructures_failure(
    pool: SandboxPool, tmp_path: Path
) -> None:
    make_task(tmp_path, "bad", {"environment/Dockerfile": "FROM x\nRUN cat nothing\n"})
    (task,) = read_harbor_tasks(tmp_path)
    with pytest.raises(InfrastructureError, match="RUN cat nothing: cat: nothing"):
        play(pool, Harbor(""), task, [ToolCall("bash", {"command": "ls"})])


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"environment/Dockerfile": "FROM a\nRUN apt-get update && apt-get install -y x\n"},
            r":2: .*apt-get",
        ),
        ({"environment/Dockerfile": "FROM a\nRUN cd /x; pip install y\n"}, "`pip`"),
        ({"environment/Dockerfile": "FROM a\nWORKDIR /opt/x\n"}, "WORKDIR /opt/x; it can be /work"),
        ({"environment/Dockerfile": "FROM a\nCOPY --from=b /x /y\n"}, "--from=b"),
        ({"environment/Dockerfile": "FROM a\nCOPY nothing .\n"}, "nothing is not in"),
        (
            {"environment/Dockerfile": "FROM a\nCOPY f /etc/f\n", "environment/f": ""},
            "file at /etc/f",
        ),
        ({"environment/Dockerfile": "FROM a\nENV TOKEN=1\n"}, "variable TOKEN"),
        ({"environment/Dockerfile": "FROM a\nVOLUME /x\n"}, "VOLUME"),
        ({"environment/docker-compose.yaml": ""}, "several services"),
        ({"task.toml": "[environment]\ngpus = 1\n"}, "a GPU"),
        ({"task.toml": '[environment]\ndocker_image = "a/b:c"\n'}, "image of its own"),
        ({"task.toml": "[[steps]]\nname = 'a'\n"}, "several steps"),
        ({"task.toml": "[[steps\n"}, "task.toml: "),
        ({"instruction.md": None}, "instruction.md is missing"),
        ({"tests/test.sh": None}, r"neither test.sh nor"),
        (
            {"tests/test.sh": None, "tests/test_a.py": "def test_a(): exec(open('a.py').read())"},
            r"tests/test_a.py: line 1: exec would run",
        ),
        ({"tests/test.sh": None, "tests/test_a.py": "def test_a(x): pass"}, r"takes fixtures"),
    ],
)
def test_a_harbor_task_that_needs_more_is_refused(
    tmp_path: Path, files: dict[str, Any], reason: str
) -> None:
    make_task(tmp_path, "it", files)
    for name, text in files.items():
        if text is None:
            (tmp_path / "it" / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match=reason):
        read_harbor_tasks(tmp_path)


def test_ids_follow_from_content_and_not_from_the_place(tmp_path: Path) -> None:
    ids = []
    for place, files in (("a", {}), ("b", {}), ("c", {"environment/x": "1"})):
        make_task(tmp_path / place, "it", files)
        ids.append(read_harbor_tasks(tmp_path / place)[0].task_id)
    assert ids[0] == ids[1] != ids[2]
    assert read_harbor_tasks(tmp_path / "a" / "it")[0].task_id == ids[0]
    with pytest.raises(ValueError, match=r"no folder with a task.toml"):
        read_harbor_tasks(tmp_path)


def test_without_a_dockerfile_the_files_lie_in_app(tmp_path: Path) -> None:
    folder = make_task(tmp_path, "it", {"environment/d/x": "1"})
    workplace = read_workplace(folder)
    assert (workplace.folder, workplace.files) == ("/app", {"d/x": b"1"})


# Repair.


def test_repairs_are_many_and_a_quarter_is_held_out() -> None:
    tasks = {task.task_id: task for n in range(300) if (task := draw_repair(random.Random(n)))}
    heldout = [task for task in tasks.values() if task.split == "heldout"]
    assert len(tasks) >= 295 and 0.15 < len(heldout) / len(tasks) < 0.35
    assert len({task.kind for task in tasks.values()}) >= 6
    assert draw_repair(random.Random(3)) == draw_repair(random.Random(3))
    as_kind(Repair).tasks(0).heldout(4, 1)


def test_every_bug_is_seen_by_a_call_and_the_repaired_module_answers_all() -> None:
    for n in range(40):
        task = draw_repair(random.Random(n))
        ((file, broken),) = task.files.items()
        wrong = []
        for source in (task.data["right"], broken):
            module = ModuleType(file.removesuffix(".py"))
            exec(source, module.__dict__)
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(sys.modules, module.__name__, module)
                wrong.append([case for case in task.data["cases"] if not answers(case)])
        assert wrong[0] == [] and wrong[1] != [], (task, wrong)


def answers(case: dict[str, Any]) -> bool:
    namespace: dict[str, Any] = {}
    try:
        exec(case["code"], namespace)
    except Exception:
        return False
    return json.dumps(namespace["result"]) == json.dumps(case["expected"])


@pytest.mark.sandbox
def test_only_a_repair_pays(pool: SandboxPool) -> None:
    task = draw_repair(random.Random(5))
    ((name, broken),) = task.files.items()
    equal = "\nclass E:\n    def __eq__(self, other): return True\n" + "".join(
        f"def {line[4:].partition('(')[0]}(*a): return E()\n"
        for line in broken.splitlines()
        if line.startswith("def ")
    )
    submit = ToolCall("submit", {})
    for source, reward in (
        (task.data["right"], 1.0),
        (broken, 0.0),
        ("import os\nos._exit(0)", 0.0),
        (broken + equal, 0.0),
    ):
        call = ToolCall("write", {"path": name, "text": source})
        seen, score = play(pool, Repair(), task, [call, submit])
        assert seen[-1].is_done and score.total == reward, (source, score)


def test_a_workspace_without_a_sandbox_is_refused() -> None:
    with pytest.raises(InfrastructureError, match="a workspace needs a sandbox"):
        play(None, Repair(), draw_repair(random.Random(0)), [ToolCall("bash", {"command": "ls"})])
