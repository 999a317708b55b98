"""Pictures that a program leaves in its folder out/: what is shown of them, and what is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from seer import Seer, png

import nanorl
from nanoinfer.chat.base import ToolCall, ToolCallError
from nanoinfer.chat.fenced import FencedParser
from nanorl.envs.base import Services
from nanorl.envs.env_class import EnvClassKind
from nanorl.envs.tools.base import Shown, ToolContext
from nanorl.envs.tools.python_pictures import MAX_PIXELS, PythonPictures
from nanorl.options.run_kind import run_kind
from nanorl.run.parse import parse_arguments
from nanorl.sandbox import SandboxPool, SandboxSpec
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout

pytestmark = pytest.mark.sandbox
PNG, OTHER = png(10), png(20)
DRAW = f"open('out/b.png', 'wb').write({PNG!r})\nopen('out/a.png', 'wb').write({OTHER!r})\nprint(5)"


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(SandboxSpec(timeout_s=60.0, warm_sessions=0)) as pool:
        yield pool


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer.make(tmp_path_factory.mktemp("seer"))


def ran(pool: SandboxPool, *codes: str, max_images: int = 4) -> list[str | Shown]:
    tool = PythonPictures(max_images=max_images)
    task = Task("p", files={"data.txt": "17"})

    async def main() -> list[str | Shown]:
        context = ToolContext(task=task, sandbox=pool, timeout_s=60)
        return [await tool.run(context, {"code": code}) for code in codes]

    return asyncio.run(main())


def test_pictures_come_by_name_behind_what_was_printed(pool: SandboxPool) -> None:
    code = DRAW + "\nopen('out/c.txt', 'w').write('')\nprint(open('data.txt').read())"
    (shown,) = ran(pool, code)
    assert isinstance(shown, Shown) and shown.text == "5\n17"
    assert [one.data() for one in shown.pictures] == [OTHER, PNG]


def test_a_program_without_pictures_is_answered_as_ever_and_leaves_nothing(
    pool: SandboxPool,
) -> None:
    said = ran(pool, DRAW, "import os\nprint(os.listdir('out'))", "1 / 0", "import os; os._exit(3)")
    assert said[1:] == ["['.keep']", "line 1: ZeroDivisionError: division by zero", "exit code 3"]


HOSTILE = {
    "import os; os.symlink('/etc/passwd', 'out/a.png')": "out/a.png is a link",
    "import os; os.rmdir if 0 else None; os.mkdir('d'); os.symlink('../d', 'out/a.png')": "a link",
    "import os; os.mkfifo('out/a.png')": "no regular file",
    "import os; os.mkdir('out/a.png')": "it is a folder",
    "open('out/a.png', 'wb').write(b'x' * 9)": "PNG, JPEG, WebP and GIF are read",
    "open('out/a.png', 'wb').write(b'GIF89a' + bytes(9))": "sides must be 1",
    "open('out/a.png', 'wb').write(b'GIF89a' + bytes([1, 0, 1, 0]))": "is a GIF file; save a PNG",
    f"d = {PNG!r}; open('out/a.png', 'wb').write(d[:16] + bytes([0, 0, 8, 0]) * 2 + d[24:])": (
        f"2048x2048 pixels, more than {MAX_PIXELS:,}"
    ),
    "open('out/a.png', 'wb').write(bytes(5_000_000))": "larger than 4000000 bytes",
    "open(b'out/\\xff.png', 'wb').write(b'')": "codec can't decode",
    "open('out/\\n.png', 'w').write('')": "cannot be printed",
    "import os; os.chmod('out', 0)": "",
}


@pytest.mark.parametrize("code", HOSTILE)
def test_what_cannot_be_shown_is_said_in_a_line(pool: SandboxPool, code: str) -> None:
    said = ran(pool, code + "\nprint('done')")[0]
    assert isinstance(said, str) and said.startswith("done")
    assert HOSTILE[code] in said
    assert len(said.splitlines()) == (2 if HOSTILE[code] else 1)


def test_a_folder_that_is_a_link_is_empty(pool: SandboxPool) -> None:
    code = "import os, shutil; shutil.rmtree('out'); os.mkdir('x'); os.symlink('x', 'out')"
    write = f"open('x/a.png', 'wb').write({PNG!r})"
    assert ran(pool, f"{code}\n{write}") == ["(no output)"]


def test_no_more_than_so_many_are_shown(pool: SandboxPool) -> None:
    code = f"for n in range(9): open(f'out/{{n}}.png', 'wb').write({PNG!r})"
    (shown,) = ran(pool, code, max_images=2)
    assert isinstance(shown, Shown) and len(shown.pictures) == 2
    assert shown.text == "(no output)\n(7 more pictures in out/ are not shown)"
    with pytest.raises(ValueError, match="max_images=0"):
        PythonPictures(max_images=0)


def test_the_code_environment_takes_it_by_an_option() -> None:
    kind: Any = run_kind(parse_arguments(["--tool.max-images", "3"]))
    assert kind.tool == PythonPictures(max_images=3)
    told = kind.chat(None).description
    assert told.startswith("Solve with Python.") and told.endswith("in out/ are shown to you.")
    with pytest.raises(ValueError, match=r"--tool.max-images 3: is of the environment code, and"):
        run_kind(parse_arguments(["--env", "guess", "--tool.max-images", "3"]))


def test_without_sessions_the_machine_is_to_blame() -> None:
    context = ToolContext(task=Task("p"))
    with pytest.raises(InfrastructureError, match="a sandbox with sessions"):
        asyncio.run(PythonPictures().run(context, {"code": "1"}))


class Draws(FencedParser):
    """Reads every turn as a program that draws, whatever it says."""

    def read(self, text: str) -> list[ToolCall | ToolCallError]:
        return [ToolCall("python", {"code": Draw.code})]


class Draw(nanorl.Env):
    tools = (PythonPictures(max_images=2),)
    parser: Any = Draws()
    code = DRAW


def played(seer: Seer, pool: SandboxPool, code: str, monkeypatch: Any) -> Rollout:
    monkeypatch.setattr(Draw, "code", code)
    services = Services(tokenizer=seer.tokenizer, sandbox=pool, timeout_s=60.0)
    return seer.play(EnvClassKind(Draw).open(services), Task("draw"), max_turns=2)


def test_a_rollout_with_drawn_pictures_has_no_gap(
    seer: Seer, pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = played(seer, pool, DRAW, monkeypatch)
    assert rollout.num_turns == 2 and rollout.metrics["num_made_images"] == 4.0
    first, second = rollout.images
    assert rollout.turn_spans[0].action_end < first.start < second.start
    assert second.end <= rollout.turn_spans[0].observation_end
    text = seer.tokenizer.decode(rollout.tokens[rollout.turn_spans[0].action_end : first.start])
    assert "5" in text, "behind the tool's text"
    assert seer.gap(rollout) == 0.0


def test_a_broken_picture_ends_no_rollout(
    seer: Seer, pool: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its header is whole: that it cannot be decoded shows when the store takes it."""
    broken = PNG[:60] + b"????" + PNG[64:]
    code = f"open('out/a.png', 'wb').write({broken!r})"
    rollout = played(seer, pool, code, monkeypatch)
    assert rollout.num_turns == 2 and not rollout.images
    span = rollout.turn_spans[0]
    said = seer.tokenizer.decode(rollout.tokens[span.action_end : span.observation_end])
    assert "(a picture is not shown: this PNG" in said
