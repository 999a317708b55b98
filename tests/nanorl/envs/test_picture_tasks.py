"""Pictures in a task's own prompt: from programs, files and data sets to spans of a rollout."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agent_doubles import FakeSandbox, exec_result, tiny_tokenizer
from seer import Seer, png, square

import nanorl
from nanoinfer.chat.base import ToolCall, ToolCallError
from nanoinfer.chat.chat import ToolChat
from nanorl.agents.loop import single_turn, tool
from nanorl.agents.sub_agents import SubAgents
from nanorl.envs.actions import COMPACT, ActionFormat, program
from nanorl.envs.base import Services
from nanorl.envs.catalog import load_kind
from nanorl.envs.code import CodeEnv
from nanorl.envs.env_class import EnvClassKind
from nanorl.envs.env_episode import EnvEpisode
from nanorl.envs.remote.wire import WireTask
from nanorl.envs.tasks.readers import read_tasks
from nanorl.envs.tasks.records import TaskFields
from nanorl.envs.tools.python import python
from nanorl.task import Task, content_id
from nanorl.types import InfrastructureError

PNG = png(10)
SHA = hashlib.sha256(PNG).hexdigest()
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer.make(tmp_path_factory.mktemp("seer"))


def picture(level: int) -> dict[str, str]:
    return {"type": "image", "sha256": hashlib.sha256(png(level)).hexdigest()}


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


CHAT: list[Any] = [{"role": "user", "content": [said("Which side?"), picture(10)]}]


# -- tasks -----------------------------------------------------------------------------------------


def test_however_a_picture_is_named_the_task_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    sources: list[Any] = [PNG, URL, tmp_path / "a.png", str(tmp_path / "a.png"), square(10)]
    tasks = [Task(["Which side?", nanorl.Image(one)], answer="left") for one in sources]
    for task in tasks:
        assert task.prompt == CHAT
        assert task.task_id == content_id("task", CHAT, "left", {})
        assert task == tasks[0] and list(task.pictures) == [SHA]
        assert task.pictures[SHA].data() == PNG
        assert task.prompt_text == f"user: Which side?\n[picture {SHA[:8]}]"
    assert tasks[2].pictures[SHA].source == tmp_path / "a.png", "a file stays where it is"
    assert Task(["Which side?", nanorl.Image(png(20))], answer="left").task_id != tasks[0].task_id


def test_a_task_as_json_names_its_pictures_and_travels_with_them() -> None:
    task = Task([{"role": "system", "content": "Look."}, *CHAT[:0], shown(10)], answer=1)
    stored = Task.from_json(json.loads(json.dumps(task.to_json())))
    assert stored == task and not stored.pictures
    assert dict(pickle.loads(pickle.dumps(task)).pictures)[SHA].data() == PNG
    with pytest.raises(ValueError, match="shows pictures, which do not travel to"):
        WireTask.of(task)


def test_a_prompt_of_other_things_is_refused() -> None:
    with pytest.raises(ValueError, match="field 'prompt': 7 is no message; give texts"):
        Task([7])


def shown(level: int) -> dict[str, Any]:
    return {"role": "user", "content": [nanorl.Image(png(level)), "hm"]}


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("nowhere.png", "field 'prompt': the picture nowhere.png does not exist"),
        ("http://a.b/c.png", "addresses are not fetched"),
        ("data:image/png;base64,%%", "base64 text is broken"),
        ("data:image/png,abc", "data URL is not in base64"),
        (b"%PDF-1.7", "PNG, JPEG, WebP and GIF are read"),
        (PNG[:20], "this PNG cannot be read .*within its header"),
        (PNG[:16] + b"\xff" * 8 + PNG[24:], "at most 64,000,000 pixels in all"),
        (PNG + bytes(20_000_000), "at most 20,000,000 are read"),
        (7, "a picture that is 7: give bytes, a path"),
    ],
)
def test_what_is_no_picture_is_refused_when_the_task_is_made(source: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Task(["look", nanorl.Image(source)])


# -- files and data sets ---------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dots").mkdir()
    for level in (10, 20):
        (tmp_path / "dots" / f"{level}.png").write_bytes(png(level))
    return tmp_path


def prompts(source: Any, *fields: str) -> list[Any]:
    mapped = TaskFields.parse(fields) if fields else None
    return [task.prompt for task in read_tasks(source, mapped)]


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def test_a_file_names_pictures_beside_it(folder: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": ["Which side?", {"type": "image", "image": "dots/10.png"}]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": URL}, said("b")]}]},
        {"prompt": user({"type": "image_url", "image_url": {"url": URL}}, said("c"))},
        {"prompt": "<image>or<image>?", "images": ["dots/20.png", "dots/10.png"]},
        {"prompt": "first", "images": "dots/20.png"},
        {"prompt": user({"type": "image"}, said("d")), "images": ["dots/20.png"]},
        {"prompt": "what is <image>?"},
    ]
    lines = [json.dumps({**row, "answer": n}) for n, row in enumerate(rows)]
    (folder / "tasks.jsonl").write_text("\n".join(lines))
    tasks = read_tasks(folder / "tasks.jsonl")
    assert [task.prompt for task in tasks] == [
        user(said("Which side?"), picture(10)),
        user(picture(10), said("b")),
        user(picture(10), said("c")),
        user(picture(20), said("or"), picture(10), said("?")),
        user(picture(20), said("first")),
        user(picture(20), said("d")),
        "what is <image>?",
    ]
    assert [len(task.pictures) for task in tasks] == [1, 1, 1, 2, 1, 1, 0]
    assert {task.split for task in tasks} <= {"train", "heldout"}


def test_columns_of_pictures_as_hugging_face_stores_them(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {
        "question": ["one", "<image> and <image>"],
        "pictures": [[{"bytes": png(10), "path": None}], [{"bytes": png(n)} for n in (20, 10)]],
        "answer": ["a", "b"],
        "level": [1, 2],
    }
    form = datasets.Features(
        question=datasets.Value("string"), pictures=[datasets.Image()],
        answer=datasets.Value("string"), level=datasets.Value("int64"),
    )  # fmt: skip
    data = datasets.Dataset.from_dict(rows, features=form)
    data.save_to_disk(str(folder / "saved"))
    data.to_parquet(str(folder / "t.parquet"))
    for source in (folder / "saved", folder / "t.parquet"):
        tasks = read_tasks(source, TaskFields.parse(["prompt=question", "images=pictures"]))
        assert [task.prompt for task in tasks] == [
            user(picture(10), said("one")),
            user(picture(20), said(" and "), picture(10)),
        ]
        assert [task.data for task in tasks] == [{"level": 1}, {"level": 2}]
        assert tasks[0].pictures[SHA].data() == PNG, "as it came"
    with pytest.raises(ValueError, match="name the column of pictures, --task-fields images=pict"):
        read_tasks(folder / "t.parquet", TaskFields.parse(["prompt=question"]))


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ({"prompt": "<image>", "images": ["dots/10.png", "dots/20.png"]}, "2 pictures for 1 marks"),
        ({"prompt": user({"type": "image"})}, "names no picture"),
        ({"prompt": user({"type": "video"})}, "part of type 'video'"),
        ({"prompt": user(7)}, "7 in a message"),
        ({"prompt": "a", "images": "dots/30.png"}, "30.png does not exist"),
        ({"prompt": "a", "images": "iVBORw0KGgo" * 900}, "begin a text in base64 with data:image"),
        ({"prompt": user({"type": "image", "sha256": "0" * 64})}, "named by its hash alone"),
        ({"prompt": "a", "images": 7}, "'images' is 7, a int; a picture or a list"),
    ],
)
def test_a_record_with_wrong_pictures_is_named(
    folder: Path, row: Mapping[str, Any], wrong: str
) -> None:
    (folder / "tasks.jsonl").write_text(json.dumps({**row, "answer": 1}))
    with pytest.raises(ValueError, match=rf"tasks.jsonl:1: .*{wrong}"):
        read_tasks(folder / "tasks.jsonl")


# -- episodes --------------------------------------------------------------------------------------


class Ask(nanorl.Env):
    """The task's own prompt, then a word."""

    system = "s"

    def step(self, text: str) -> Any:
        return "go on"


def episode(env: Any, tokenizer: Any) -> Any:
    return EnvClassKind(env).open(Services(tokenizer=tokenizer, sandbox=None, timeout_s=5.0))


def test_a_picture_that_changed_after_the_task_was_made_is_refused(
    seer: Seer, folder: Path
) -> None:
    file = folder / "dots" / "10.png"
    file.write_bytes(png(77))
    task = Task(["look", nanorl.Image(file)])
    file.write_bytes(png(78))
    with pytest.raises(ValueError, match="is another than when the task was made"):
        asyncio.run(episode(Ask, seer.tokenizer).reset(task))
    with pytest.raises(ValueError, match="the task shows a picture, and the model reads text"):
        asyncio.run(episode(Ask, tiny_tokenizer()).reset(task))


def test_a_damaged_picture_of_a_task_fails_its_rollouts_by_name(seer: Seer, folder: Path) -> None:
    """Its header is good, so that nobody noticed before."""
    file = folder / "dots" / "cut.png"
    file.write_bytes(png(79)[:-20])
    task = Task(["look", nanorl.Image(file)])
    wrong = rf"the picture .*cut.png of task {task.task_id} cannot be shown: this PNG ends"
    with pytest.raises(InfrastructureError, match=wrong):
        asyncio.run(episode(Ask, seer.tokenizer).reset(task))


def test_a_gymnasium_behind_a_prompt_with_pictures_leaves_them_there(seer: Seer) -> None:
    pytest.importorskip("gymnasium")
    game = load_kind("gymnasium:FrozenLake-v1", {})
    services = Services(tokenizer=seer.tokenizer, sandbox=None, timeout_s=5.0)
    for prompt in (["Like this:", nanorl.Image(png(10))], "Like this:"):
        task = Task(prompt, data={"seed": 1})
        (message,) = asyncio.run(game.open(services).reset(task)).messages
        if isinstance(prompt, str):
            assert message["content"].startswith("Like this:\n")
            continue
        first, picture, observed = message["content"]
        assert (first["text"], picture) == ("Like this:", task.messages()[0]["content"][1])
        assert observed["text"].startswith("\n")


class Runs(ActionFormat):
    """Reads every turn as a program, whatever it says."""

    def read(self, text: str) -> list[ToolCall | ToolCallError]:
        return [program("print(6 * 7)")]


def code_episode(seer: Seer) -> EnvEpisode:
    form = Runs(name="runs", system="Run.", programs=COMPACT.programs, answer=COMPACT.answer)
    sandbox = FakeSandbox([exec_result(stdout=b"42")] * 3)
    services = Services(tokenizer=seer.tokenizer, sandbox=sandbox, timeout_s=5.0)
    chat = ToolChat(parser=form, description=form.system)
    return EnvEpisode(CodeEnv(form), (python,), chat, services)


def both() -> Task:
    return Task(["Is", nanorl.Image(png(10)), "darker than", nanorl.Image(png(20)), "?"], "yes")


@pytest.mark.parametrize("kind", ["one answer", "turns", "code", "sub-agents"])
def test_every_agent_is_shown_the_pictures_of_the_task_and_its_gap_is_zero(
    seer: Seer, kind: str
) -> None:
    env = code_episode(seer) if kind == "code" else episode(Ask, seer.tokenizer)
    loops: dict[str, Any] = {"one answer": single_turn, "sub-agents": SubAgents()}
    rollout = seer.play(env, both(), loops.get(kind, tool))
    assert rollout.num_turns == (1 if kind == "one answer" else 3)
    shas = [part["sha256"] for part in (picture(10), picture(20))]
    assert [span.sha256 for span in rollout.images] == shas
    assert all(span.length == 9 for span in rollout.images)
    first = rollout.turn_spans[0].action_start
    assert all(span.end <= first for span in rollout.images), "in the prompt"
    assert seer.gap(rollout) == 0.0


def test_what_the_policy_says_depends_on_the_pictures_of_the_task(seer: Seer) -> None:
    other = Task(["Is", nanorl.Image(png(10)), "darker than", nanorl.Image(png(90)), "?"], "yes")
    told = [seer.play(episode(Ask, seer.tokenizer), task, single_turn) for task in (both(), other)]
    prompt = told[0].turn_spans[0].action_start
    assert told[0].tokens[:prompt] == told[1].tokens[:prompt], "equal placeholders"
    assert told[0].logps[prompt] != told[1].logps[prompt]
