"""What `tinker://` paths stand for: folders below one root, written whole or not at all.

    tinker://RUN/weights/NAME           ROOT/RUN/weights/NAME           state to train on from
    tinker://RUN/sampler_weights/NAME   ROOT/RUN/sampler_weights/NAME   a Hugging Face folder

That root is a client's own: the service's for the client without a name, ROOT/@NAME for another,
where no path of anybody else's leads. A run is a model's id. Each folder has a `checkpoint.json`
that says what it is. A path with any other form, `..` among them, is refused, and nothing outside
of the root is read or written.
Left out: publishing, access tokens, archives to download (the folders are there to be copied).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from nanoengine.formats.hf import replace_folder
from nanoengine.tensor_file import CheckpointError

Kind = Literal["weights", "sampler_weights"]
_PATH = re.compile(
    r"tinker://([\w:-]{1,128})/(weights|sampler_weights)/([\w-][\w.-]{0,127})", re.ASCII
)
_RECORD = "checkpoint.json"
_TYPES = {"weights": "training", "sampler_weights": "sampler"}


@dataclass(frozen=True)
class TinkerPath:
    """A path that is well formed. `TinkerPath.parse("tinker://RUN/weights/0001")`."""

    run: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        """`ValueError` for anything that is not one."""
        match = _PATH.fullmatch(text)
        if match is None:
            raise ValueError(
                f"path {text!r}: must be tinker://RUN/weights/NAME or "
                "tinker://RUN/sampler_weights/NAME, NAME of letters, digits, '.', '_' and '-'"
            )
        run, kind, name = match.groups()
        return cls(run, "weights" if kind == "weights" else "sampler_weights", name)

    def __str__(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """The facts of a checkpoint, and what its owner wrote on it. Times are seconds since 1970."""

    base_model: str
    lora: dict[str, Any] | None = None
    """The options of the adapter; None: all parameters."""
    created: float = field(default_factory=time.time)
    expires: float | None = None
    user_metadata: dict[str, str] | None = None


class CheckpointStore:
    """The checkpoints of one client, of services that ran one after the other."""

    def __init__(self, root: Path) -> None:
        self.root = make_root(root)

    def folder(self, path: TinkerPath) -> Path:
        """The folder of a path, whether it is there or not. `ValueError` if a link leads out."""
        folder = self.root / path.run / path.kind / path.name
        if not folder.resolve().is_relative_to(self.root):
            raise ValueError(f"path {path}: leads out of the service's folder")
        return folder

    def save(
        self, path: TinkerPath, record: Record, write: Callable[[Path], None], *, overwrite: bool
    ) -> None:
        """`write` fills a folder that then is the checkpoint. `ValueError` if there is one already
        and it may not be replaced."""
        self._drop_expired(path)
        folder = self.folder(path)
        if folder.exists() and not overwrite:
            raise ValueError(f"path {path}: exists already; choose another name, or overwrite")
        folder.parent.mkdir(parents=True, exist_ok=True)

        def fill(draft: Path) -> None:
            shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
            draft.mkdir()
            write(draft)
            text = json.dumps(asdict(record), indent=2) + "\n"
            (draft / _RECORD).write_text(text, encoding="utf-8")
            if folder.exists():  # not before the new one is whole: a kill must leave one of them
                _set_aside(folder)

        replace_folder(folder, fill)
        shutil.rmtree(_aside(folder), ignore_errors=True)

    def find(self, path: TinkerPath) -> tuple[Path, Record]:
        """The folder of a checkpoint and what it is of. `CheckpointError` if there is none."""
        self._drop_expired(path)
        folder = self.folder(path)
        try:
            record = Record(**json.loads((folder / _RECORD).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise CheckpointError(f"path {path}: there is no such checkpoint") from None
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"path {path}: {_RECORD} is damaged ({error})") from None
        return folder, record

    def paths(self, run: str | None = None) -> Iterator[TinkerPath]:
        """All checkpoints, or those of a run, oldest names first."""
        for file in sorted(self.root.glob(f"*/*/*/{_RECORD}")):
            owner, kind, name = file.parent.relative_to(self.root).parts
            text = f"tinker://{owner}/{kind}/{name}"
            if kind in get_args(Kind) and (run is None or owner == run) and _PATH.fullmatch(text):
                yield TinkerPath.parse(text)

    def describe(self, path: TinkerPath) -> dict[str, Any]:
        """A checkpoint as the client reads it in a list."""
        folder, record = self.find(path)
        return {
            "checkpoint_id": f"{path.kind}/{path.name}",
            "checkpoint_type": _TYPES[path.kind],
            "time": _iso(record.created),
            "tinker_path": str(path),
            "size_bytes": sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()),
            "user_metadata": record.user_metadata,
            "expires_at": None if record.expires is None else _iso(record.expires),
        }

    def list(self, run: str | None = None) -> list[dict[str, Any]]:
        found = []
        for path in list(self.paths(run)):
            try:
                found.append(self.describe(path))
            except (CheckpointError, FileNotFoundError):  # expired, damaged, or deleted meanwhile
                continue
        return found

    def delete(self, path: TinkerPath) -> None:
        """`CheckpointError` if there is none. It goes at once: renamed first, then removed."""
        folder, _ = self.find(path)
        _set_aside(folder)
        shutil.rmtree(_aside(folder), ignore_errors=True)

    def _drop_expired(self, path: TinkerPath) -> None:
        file = self.folder(path) / _RECORD
        try:
            expires = json.loads(file.read_text(encoding="utf-8")).get("expires")
        except (OSError, ValueError, AttributeError):
            return
        if isinstance(expires, int | float) and expires < time.time():
            shutil.rmtree(file.parent, ignore_errors=True)


def make_root(root: Path) -> Path:
    """The folder, made if it is not there: other users of the machine cannot look into it."""
    place = root.expanduser().resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    place.mkdir(mode=0o700, exist_ok=True)
    return place


def client_folder(root: Path, client: str) -> Path:
    """The folder in which the checkpoints of a client lie: no RUN begins with its sign, the "@"."""
    return root / f"@{client}" if client else root


def _aside(folder: Path) -> Path:
    """The place where a checkpoint waits to be removed; no path leads there."""
    return folder.with_name(f".gone-{os.getpid()}-{folder.name}")


def _set_aside(folder: Path) -> None:
    shutil.rmtree(_aside(folder), ignore_errors=True)
    os.rename(folder, _aside(folder))


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
