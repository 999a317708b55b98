"""`Control`: what the owner of the weights does with a server, by whatever route it is asked.

Weights and adapters are read from folders below `weights_root` alone: a path that leads out of it,
by `..` or by a link, is refused, and so is a folder whose files are links that lead out.
Left out: weights that do not come from a folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from kernels.transport.checksum import checksum
from nanoengine.formats.hf import read_state
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.engine import LLMEngine
from nanoinfer.http.api_error import ApiError, user_errors
from nanoinfer.server.completions import Completions
from nanoinfer.server.served_model import ServedModel

PauseMode = Literal["keep", "abort", "wait"]


class Control:
    """The actions. Each takes effect between two steps of the engine."""

    def __init__(
        self, model: ServedModel, completions: Completions, weights_root: Path | None
    ) -> None:
        self._model, self._completions, self._root = model, completions, weights_root
        self._tag: tuple[int, str] | None = None  # of a version that came with a name

    @property
    def client(self) -> AsyncEngine:
        return self._model.client

    @property
    def weight_version(self) -> str:
        """The version as clients of other engines know it: the name that it came with, if any."""
        version = self.client.version
        return self._tag[1] if self._tag and self._tag[0] == version else str(version)

    def state(self) -> dict[str, object]:
        """The version that is served, and whether the server is paused, asleep or drained."""
        engine = self.client.engine
        return {
            "version": engine.version,
            "is_paused": engine.is_paused,
            "is_asleep": engine.is_asleep,
            "is_drained": self._completions.is_drained,
        }

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop. Requests in flight stay where they are, answer what they have ("abort"), or are
        answered first ("wait")."""
        await self.client.pause(waits=mode == "wait")
        if mode == "abort":
            await self.client.abort()

    async def resume(self) -> None:
        """Go on, after a drain too."""
        self._completions.is_drained = False
        await self.client.resume()

    async def flush_cache(self) -> int:
        """Forget the cached prompts, where no request is in flight; how many are, otherwise."""
        return await self.client.run_between_steps(LLMEngine.flush_cache)

    async def load_weights(
        self, path: str, version: int | str | None, checksums: Mapping[str, int] | None = None
    ) -> None:
        """Serve the weights of a folder. A version that is no number is the next one's name."""
        folder = self.folder(path)
        is_number = isinstance(version, int) or (version is not None and version.isdecimal())
        number = int(version) if is_number and version is not None else self.client.version + 1
        with user_errors():
            state = verified(read_state(folder), checksums)
            await self.client.update_weights(state, number)
        if version is not None and not is_number:
            self._tag = (number, str(version))

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve the adapter of a folder under `name`, in the place of one that has it."""
        if name == self._model.name:
            raise ApiError(400, f"lora_name: {name!r} is the model's; choose another", "lora_name")
        folder = self.folder(path)
        with user_errors():
            await self.client.load_adapter(name, folder)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        if name not in self.client.engine.adapters:
            raise ApiError(404, f"lora_name: no adapter is called {name!r}", "lora_name")
        with user_errors():
            await self.client.unload_adapter(name)

    def folder(self, path: str) -> Path:
        """A folder below `weights_root`. ApiError 403 for any other."""
        if self._root is None:
            raise ApiError(403, "this server was started without --weights-root")
        root = self._root.resolve()
        try:
            folder = (root / path).resolve()
            inside = [folder, *(one.resolve() for one in _entries(folder))]
        except (OSError, ValueError, RuntimeError) as error:  # loops of links, a NUL
            raise ApiError(400, f"path: {path!r} cannot be read ({error})", "path") from None
        if not all(one.is_relative_to(root) for one in inside):
            raise ApiError(403, f"path: {path!r} is not below the server's --weights-root", "path")
        return folder


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def verified(
    state: Iterable[tuple[str, Tensor]], checksums: Mapping[str, int] | None
) -> Iterator[tuple[str, Tensor]]:
    """Hand on all of `state`. `ValueError` for a tensor that is not what its checksum says, or has
    none; without any checksums nothing is verified."""
    for name, tensor in state:
        if checksums is not None and checksums.get(name) != checksum(tensor):
            what = "is not what was written" if name in checksums else "is not among the checksums"
            raise ValueError(f"tensor {name!r} {what}; nothing was loaded")
        yield name, tensor
