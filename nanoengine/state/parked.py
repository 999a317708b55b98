"""The optimizer's buffers, out of memory while somebody else needs it.

Left out: the weights, which stay usable.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from nanoengine.optim import FlatAdamW
from nanoengine.state.tensor_file import read_tensor, tensor_bytes


class Parked:
    """Flat buffers of an optimizer whose storage is empty while their bytes lie elsewhere: from a
    GPU in host memory, from a CPU in a temporary file in `folder`. Views stay valid. Gradients come
    back without their values."""

    def __init__(self, optimizer: FlatAdamW, folder: Path | str | None) -> None:
        buffers = [optimizer.exp_avg, optimizer.exp_avg_sq]
        for state in optimizer.states:
            buffers += [state.master] if state.is_apart else []
            buffers += [] if state.remainder is None else [state.remainder]
        gradients = {id(t): t for b in optimizer.buckets for t in (b.grad, b.grad_shard)}
        scratch = [t for t in gradients.values() if t.untyped_storage().nbytes()]
        self._buffers, self._scratch = buffers, scratch
        self._host = []
        self._file = None
        if buffers[0].device.type == "cpu":
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (lives until restore)
            for buffer in buffers:
                self._file.writelines(tensor_bytes(buffer))
            self._file.seek(0)
        else:
            self._host = [buffer.cpu() for buffer in buffers]
        self._sizes = [buffer.untyped_storage().nbytes() for buffer in (*buffers, *scratch)]
        for buffer in (*buffers, *scratch):
            buffer.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Bring every buffer back to where its views expect it."""
        for buffer, size in zip((*self._buffers, *self._scratch), self._sizes, strict=True):
            buffer.untyped_storage().resize_(size)
        for buffer, source in zip(self._buffers, self._host, strict=False):
            buffer.copy_(source)
        if self._file is not None:
            with self._file as file:
                for buffer in self._buffers:
                    read_tensor(file, buffer)
