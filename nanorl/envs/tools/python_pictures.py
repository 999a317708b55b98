"""`python` for a model that sees: what a program prints, and the pictures that it leaves in `out/`.

    tools = [nanorl.PythonPictures(max_images=2)]

A program draws what it wants to look at: PNG files in the folder out/ of where it runs. They come
behind its text, by name. What cannot be shown is said in a line, and costs nobody the rollout:
links, files that are too large, or broken, and those beyond `max_images`.
Every call has a sandbox of its own, kept until its files were read (nanorl/sandbox/session.py).
Left out: other formats, which would have to be decoded outside of the sandbox; pictures of
`python_session`, which stay in its folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanorl.bounds import check_number
from nanorl.envs.images import MadeImage
from nanorl.envs.tools.base import Shown, ToolContext, tool_schema
from nanorl.envs.tools.python import PythonTool
from nanorl.envs.tools.result_text import describe
from nanorl.sandbox.base import ExecResult, SandboxFailure, SandboxUnavailable, WorkspaceSandbox
from nanorl.sandbox.session import Session
from nanorl.types import InfrastructureError

FOLDER = "out"
HINT = f"PNG files that your programs save in {FOLDER}/ are shown to you."
"""For system messages."""
MAX_BYTES = 4_000_000
MAX_PIXELS = 4_000_000
"""The limits of a picture that a program made: a policy may make one in every call."""
_LIST = f"""
import os
if not os.path.islink({FOLDER!r}) and os.path.isdir({FOLDER!r}):
    for one in sorted(os.listdir({FOLDER!r})):
        if one.lower().endswith(".png"):
            print(os.fsencode(one).hex(), int(os.path.islink(os.path.join({FOLDER!r}, one))))
"""
_LIST_S = 10.0


@dataclass(frozen=True)
class PythonPictures(PythonTool):
    """The tool `python`, which shows up to `max_images` pictures of a program. `ValueError` for a
    number that is none."""

    max_images: int = 4

    def __post_init__(self) -> None:
        check_number("PythonPictures: max_images=", self.max_images, 1, 64)

    @property
    def schema(self) -> dict[str, Any]:
        code = {"type": "string", "description": "The whole program."}
        about = (
            "Run a Python program in a fresh process and read what it prints; PNG pictures that it "
            f"saves in {FOLDER}/ are shown (at most {self.max_images})."
        )
        return tool_schema(self.name, about, {"code": code})

    async def run(self, context: ToolContext, arguments: Mapping[str, Any]) -> str | Shown:
        """As `PythonTool.run`, with pictures where the program left some."""
        code = self.checked(arguments)
        if not isinstance(context.sandbox, WorkspaceSandbox):
            raise InfrastructureError(
                "the tool python needs a sandbox with sessions: give the ToolContext one "
                "(nanorl.sandbox)"
            )
        files = {f"{FOLDER}/.keep": "", **context.task.files}  # so that the folder is there
        try:
            async with await context.sandbox.open_session(files) as session:
                result: ExecResult = await session.run(code, context.timeout_s)
                pictures, notes = await self._found(session)
        except (SandboxFailure, SandboxUnavailable) as error:
            raise InfrastructureError(f"the sandbox failed: {error}") from error
        context.metrics[f"num_exec_{result.status}"] += 1
        context.metrics["num_made_images"] += len(pictures)
        text = "\n".join([describe(result), *notes])
        return Shown(text, pictures) if pictures else text

    async def _found(self, session: Session) -> tuple[list[MadeImage], list[str]]:
        """The pictures of the folder, and what is said about those that are not shown."""
        listed = await session.run(_LIST, _LIST_S)
        entries = [line.split() for line in listed.stdout.decode("ascii", "replace").splitlines()]
        pictures: list[MadeImage] = []
        notes: list[str] = []
        for place, entry in enumerate(entries):
            if len(pictures) + len(notes) == self.max_images:
                notes.append(f"({len(entries) - place} more pictures in {FOLDER}/ are not shown)")
                break
            try:
                pictures.append(await _picture(session, *entry))
            except (ValueError, TypeError) as error:  # WorkspaceError is one
                notes.append(f"(a picture in {FOLDER}/ is not shown: {error})")
        return pictures, notes


async def _picture(session: Session, name: str, is_link: str) -> MadeImage:
    """One that may be shown. `ValueError` says why it is not, in words for the model."""
    from nanoengine.vision.picture_header import picture_header  # here: text needs none of it

    path = f"{FOLDER}/{bytes.fromhex(name).decode()}"
    if not path.isprintable():
        raise ValueError("its name has characters that cannot be printed")
    if is_link != "0":
        raise ValueError(f"{path} is a link")
    data = await session.read(path, MAX_BYTES)
    kind, width, height = picture_header(data)
    if kind != "PNG":
        raise ValueError(f"{path} is a {kind} file; save a PNG")
    if width * height > MAX_PIXELS:
        raise ValueError(f"{path} has {width}x{height} pixels, more than {MAX_PIXELS:,}")
    return MadeImage(data)
