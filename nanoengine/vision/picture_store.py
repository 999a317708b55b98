"""Pictures by the SHA-256 of their files: kept once in a folder, and made ready for a model once.

    store = PictureStore("runs/a/pictures", PictureProcessor.from_folder(model))
    sha256 = store.add(png)                      # the file lies there as it came
    store.ready(sha256).num_tokens               # resized as the model takes it
    store.spans(sha256, starts)                  # one, or one for each tile
    store.values(span)                           # what the tower is given

Every process of a run that shares the folder finds a picture by its hash, so that what travels
between them is a name of 64 characters. Files are never changed, and a half-written one has no
name.
Left out: removing files, and machines without a common folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanoengine.spans import ImageSpan
from nanoengine.vision.picture_files import picture_file
from nanoengine.vision.pictures import read_picture
from nanoengine.vision.png import write_png
from nanoengine.vision.processor import PictureProcessor, ProcessedPicture

_READY_BYTES = 256 << 20
_GREY = 128


class PictureStore:
    """A folder of pictures and the processor of a model. At most `max_bytes` of pictures are kept
    ready in memory, the latest ones. Threads may share it."""

    def __init__(
        self, folder: str | Path, processor: PictureProcessor, max_bytes: int = _READY_BYTES
    ) -> None:
        self.folder, self.processor = Path(folder), processor
        self.num_read = 0
        """Files that were read and resized."""
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._ready: OrderedDict[str, ProcessedPicture] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # one at a time; who wants a ready one does not wait
        self._fingerprint = processor.fingerprint

    def add(self, data: bytes) -> str:
        """Keep a file; its SHA-256. `ValueError` for bytes that are no picture which the model can
        be shown, and nothing is kept."""
        sha256 = hashlib.sha256(data).hexdigest()
        if self.holds(sha256):
            return sha256
        with self._reading:
            self._make_ready(sha256, data)
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as new:
                new.write(data)
            os.replace(name, self.folder / sha256)
        except BaseException:  # whole or not at all, and a Ctrl-C is raised once more
            Path(name).unlink(missing_ok=True)
            raise
        return sha256

    def holds(self, sha256: str) -> bool:
        """Say whether the file lies there."""
        return (self.folder / sha256).is_file()

    def data(self, sha256: str) -> bytes:
        """The file as it came. `KeyError` names a picture that is not there, or is damaged."""
        return picture_file(self.folder, sha256)

    def ready(self, sha256: str) -> ProcessedPicture:
        """The picture as the model takes it. `KeyError` as of `data`."""
        found = self._found(sha256)
        if found is not None:
            return found
        with self._reading:
            return self._found(sha256) or self._make_ready(sha256, self.data(sha256))

    def key(self, sha256: str, part: int = 0) -> str:
        """Equal for equal rows: it covers the picture, how its pixels are made, and which of its
        parts it is."""
        which = f"/{part}" if part else ""
        return hashlib.sha256(f"{sha256}/{self._fingerprint}{which}".encode()).hexdigest()[:32]

    def grey(self, sha256: str) -> str:
        """The SHA-256 of a grey picture as large as that one, which is kept as well."""
        height, width, _ = read_picture(self.data(sha256)).shape
        return self.add(write_png(np.full((height, width, 3), _GREY, np.uint8)))

    def values(self, span: ImageSpan) -> Tensor:
        """The numbers that the tower is given for a span: fp32 [patches, numbers of a patch].
        `KeyError` for a picture that is not there, or was made ready in another way."""
        ready = self.ready(span.sha256)
        for part in range(len(ready.pixels)):
            if span.key == self.key(span.sha256, part):
                pixels = ready.pixels[part : part + 1]
                return torch.from_numpy(self.processor.pixel_values(pixels))
        raise KeyError(
            f"the picture {span.sha256[:12]} is made ready in another way than for that span: it "
            "is of another model, or of another version"
        )

    def spans(self, sha256: str, places: Sequence[int]) -> list[ImageSpan]:
        """The spans of a picture whose placeholders are at `places`, as many as it has tokens: one
        for each of its parts, between which other tokens may stand."""
        ready = self.ready(sha256)
        length = ready.num_tokens // len(ready.pixels)
        return [
            ImageSpan(
                start=places[part * length],
                length=length,
                key=self.key(sha256, part),
                grid=ready.patches,
                sha256=sha256,
            )
            for part in range(len(ready.pixels))
        ]

    def _found(self, sha256: str) -> ProcessedPicture | None:
        with self._lock:
            found = self._ready.get(sha256)
            if found is not None:
                self._ready.move_to_end(sha256)
            return found

    def _make_ready(self, sha256: str, data: bytes) -> ProcessedPicture:
        ready = self.processor.process(read_picture(data))
        self.num_read += 1
        with self._lock:
            before = self._ready.pop(sha256, None)  # of a file that was removed, and came again
            self._num_bytes -= 0 if before is None else before.pixels.nbytes
            self._ready[sha256] = ready
            self._num_bytes += ready.pixels.nbytes
            while self._num_bytes > self._max_bytes and len(self._ready) > 1:
                self._num_bytes -= self._ready.popitem(last=False)[1].pixels.nbytes
        return ready
