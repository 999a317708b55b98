"""The pictures of a server: kept while their requests run, and afterwards while there is room.

A client sends its pictures again with every call, so what is gone comes again, and a picture that
is still here is neither written nor decoded twice. The files lie in a folder of the server's own,
which is removed with the process.
Left out: pictures that outlive the process.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanoengine.spans import ImageSpan
from nanoengine.vision.picture_store import PictureStore
from nanoengine.vision.processor import PictureProcessor, ProcessedPicture
from nanoengine.vision.seeing_tokenizer import SeeingTokenizer
from nanoengine.vision.sight import Sight
from nanoinfer.http.api_error import ApiError

MAX_FOLDER_BYTES = 1 << 30


class ServedPictures(PictureStore):
    """A picture store of at most `max_folder_bytes`, beside what running requests hold; the files
    that came first go first. Threads may share it."""

    def __init__(
        self, processor: PictureProcessor, max_folder_bytes: int = MAX_FOLDER_BYTES
    ) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="nanoinfer-pictures-")
        super().__init__(self._own.name, processor)
        self._max_folder_bytes = max_folder_bytes
        self._sizes: dict[str, int] = {}  # the oldest first
        self._held: Counter[str] = Counter()
        self._files = threading.Lock()

    def add(self, data: bytes) -> str:
        sha256 = super().add(data)
        with self._files:
            self._sizes.pop(sha256, None)
            self._sizes[sha256] = len(data)
            self._let_go()
        return sha256

    def ready(self, sha256: str) -> ProcessedPicture:
        """As of `PictureStore`; `ValueError` for a picture that is not here any more."""
        try:
            return super().ready(sha256)
        except KeyError:
            raise ValueError(_gone(sha256)) from None

    @contextmanager
    def held(self, images: Sequence[ImageSpan]) -> Iterator[None]:
        """Inside, these pictures stay. ApiError where one has gone since somebody looked: the step
        that finds it missing would be one of all requests."""
        names = [span.sha256 for span in images]
        with self._files:
            self._held.update(names)
        try:
            for sha256 in set(names):
                if not self.holds(sha256):
                    raise ApiError(400, _gone(sha256))
            yield
        finally:
            with self._files:
                self._held.subtract(names)
                self._let_go()

    def _let_go(self) -> None:
        total = sum(self._sizes.values())
        for sha256, size in list(self._sizes.items())[:-1]:
            if total <= self._max_folder_bytes:
                break
            if self._held[sha256] <= 0:
                (self.folder / sha256).unlink(missing_ok=True)
                del self._sizes[sha256]
                total -= size
        self._held += Counter()  # forgets those that nobody holds


def _gone(sha256: str) -> str:
    return (
        f"the picture {sha256[:12]} is not kept (any more); send the conversation with its "
        "pictures again"
    )


def let_see(model: Any, folder: Path) -> SeeingTokenizer:
    """Let a served model see the pictures of its clients; its tokenizer, which keeps them."""
    tokenizer = SeeingTokenizer.from_folder(folder)
    assert isinstance(tokenizer, SeeingTokenizer), "of the class that was asked"
    tokenizer.store = ServedPictures(PictureProcessor.from_folder(folder))
    model.sight = Sight(model, tokenizer.store)
    return tokenizer
