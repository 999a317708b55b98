"""`ServedModel`: the engine of a server with its tokenizer, its name and those of its adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nanoengine.spans import ImageSpan
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.http.api_error import ApiError
from nanoinfer.http.http_io import in_proportion
from nanoinfer.server.media import PictureTaker
from nanoinfer.server.prompt_bound import PromptBound

if TYPE_CHECKING:
    from nanoinfer.vision.given_pictures import GivenPictures
    from nanoinfer.vision.picture_reader import PictureReader

T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """The served model, as every route knows it."""

    client: AsyncEngine
    tokenizer: ChatTokenizer
    name: str
    """That clients use."""
    bound: PromptBound
    folder: Path | None = None
    """Where it was read from."""
    pictures: PictureReader | None = None
    """The way in for pictures, of a model that sees."""
    max_images: int = 0
    """Pictures in one request."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.client.engine.room(0)

    def adapter(self, model: str | None) -> str:
        """The adapter that a request's `model` names; empty for the model itself."""
        if model is None or model == self.name:
            return ""
        if model in self.client.engine.adapters:
            return model
        served = ", ".join(repr(name) for name in [self.name, *self.client.engine.adapters])
        raise ApiError(404, f"model {model!r} is not served; this is {served}", "model")

    async def read(self, size: int, read: Callable[[PictureTaker | None], T]) -> T:
        """Return what `read` makes of a body of `size` bytes, with somebody who takes its pictures
        where the model sees. Nobody else waits for a large one."""
        if self.pictures is None:
            return await in_proportion(size, lambda: read(None))
        return await self.pictures.read(read, self._check)

    async def check_images(self, images: Sequence[ImageSpan]) -> None:
        """`ValueError` for spans that a client made up: of pictures that it did not send, or as
        this model does not see them. A model that reads text refuses all, when it is asked."""
        if images and self.pictures is not None:
            await self.pictures.check(images)

    def _check(self, given: GivenPictures) -> None:
        if given.num_pictures > self.max_images:
            raise ApiError(
                400,
                f"{given.num_pictures} pictures in one request: at most {self.max_images}; leave "
                "older ones out",
            )
        if given.num_tokens >= self.max_model_len:
            raise self.bound.error()
