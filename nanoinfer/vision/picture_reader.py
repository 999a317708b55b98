"""`PictureReader`: bodies with pictures become what they mean, and no other request waits for that.

    reader = PictureReader(store)
    call = await reader.read(lambda taker: dialect.read(body, taker), check)

A body is read in a thread, which costs time in proportion to its bytes. `check` is then told what
pictures it has and may refuse them, before one is decoded. Decoding may take a second for a small
file, so pictures are decoded in a thread, one at a time and in turns with those of other requests:
whoever sends many waits for them alone.

Left out: a process that stays for the pictures of other formats than PNG (decoder_process.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from nanoengine.spans import ImageSpan
from nanoengine.vision.picture_store import PictureStore
from nanoengine.vision.span_checks import check_types
from nanoinfer.cancellation import to_the_end
from nanoinfer.vision.given_pictures import GivenPictures

T = TypeVar("T")


class PictureReader:
    """Reads bodies for a model that sees. It belongs to one event loop."""

    def __init__(self, store: PictureStore) -> None:
        self.store = store
        self._turns = asyncio.Semaphore(1)

    async def read(
        self,
        read: Callable[[GivenPictures], T],
        check: Callable[[GivenPictures], None],
    ) -> T:
        """Return what `read` makes of a body. ApiError, as `read` and `check` raise it; one for a
        picture that cannot be decoded names its part, as `read` names parts."""
        given = GivenPictures(self.store)
        made = await _in_thread(partial(read, given))
        check(given)
        for sha256 in given.files:
            async with self._turns:
                await _in_thread(partial(given.keep, sha256))
        if given.faults:
            made = await _in_thread(partial(read, given))
        return made

    async def check(self, images: Sequence[ImageSpan]) -> None:
        """`ValueError` for spans that a client made up: of pictures that nobody sent, or as this
        model does not see them."""
        await _in_thread(partial(self._check, images))

    def _check(self, images: Sequence[ImageSpan]) -> None:
        check_types(images)
        for span in images:
            try:
                places = [span.start] * self.store.ready(span.sha256).num_tokens
                known = self.store.spans(span.sha256, places)  # as if each part of it began there
            except KeyError as error:
                raise ValueError(f"images: {error.args[0]}") from None
            if span not in known:
                raise ValueError(
                    f"images: the picture {span.sha256[:12]} at token {span.start} is another one "
                    f"here; its span is {known[0]}"
                )


async def _in_thread(work: Callable[[], T]) -> T:
    return await to_the_end(asyncio.to_thread(work))
