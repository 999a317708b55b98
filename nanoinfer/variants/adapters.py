"""LoRA adapters that requests name: several in one batch, over one set of weights.

    x · Wᵀ   for all rows of a step at once, then for each adapter in it, on its own rows,
    y += (x · Aᵀ) · (scale · B)ᵀ      (nanoengine/adapters/low_rank.py)

The rows of either do not depend on the batch, so on a CPU a request has the same bits alone and
beside others. They are not the bits of merged weights: in fp32 the two differ by rounding, in bf16
merged weights are rounded once more. Training merges
(nanoengine/adapters/lora_adapter.py says why); this is for serving.

A step without any such request runs as ever. One with some takes the path of `Transformer.forward`:
the transcript in C++ and CUDA graphs do not know adapters.

A name may be loaded again: that is another version of it. What requests of the old one have sampled
stays theirs, and they go on with the new one, as with new weights of the model. The prefix cache
never mixes adapters or versions: `key` is part of every block's digest.

Several engines over one model each have adapters of their own, also under the same names.
Left out: models split over ranks, adapters of the output head, of embeddings and of experts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

from torch import Tensor

from nanoengine.adapters.lora import Adapter, LowRank, adapter_of
from nanoengine.adapters.low_rank import AddedChange
from nanoengine.formats.matrices import adaptable
from nanoengine.model.linear import PackedLinear
from nanoengine.model.transformer import Transformer

Rows = Mapping[str, Tensor]
"""The rows of a step that belong to each adapter in it, in rising order."""


class _StepRows(threading.local):
    """The rows of the step under way; the matrices of a model share one for each engine over it.
    Each thread has its own: two engines may step at a time."""

    def __init__(self) -> None:
        self.of: Rows = {}


class _MatrixAdapters:
    """The `adapters` that a `PackedLinear` asks after its product: the changes of every engine over
    the model. An engine whose step is not under way has no rows. The changes go with their engine.
    """

    def __init__(self, matrix: PackedLinear) -> None:
        self._matrix = matrix
        self.changes: WeakKeyDictionary[_StepRows, dict[str, AddedChange]] = WeakKeyDictionary()

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """y with the changes of the step's adapters added to their rows, in place."""
        invariant = self._matrix.batch_invariant
        for step, changes in list(self.changes.items()):
            for name, rows in step.of.items():
                change = changes.get(name)
                if change is None:  # this adapter leaves the matrix as it is
                    continue
                if len(rows) == len(y_TO):
                    change.add_to(y_TO, x_TI, batch_invariant=invariant)
                    continue
                y_NO = y_TO.index_select(0, rows)
                change.add_to(y_NO, x_TI.index_select(0, rows), batch_invariant=invariant)
                y_TO.index_copy_(0, rows, y_NO)
        return y_TO


class AdapterPool:
    """The adapters of one engine, by the names that requests give."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._step = _StepRows()
        self._keys: dict[str, bytes] = {}
        self._num_loaded = 0  # ever

    @property
    def names(self) -> list[str]:
        return list(self._keys)

    def check(self, name: str) -> None:
        """`ValueError` for a name that is not loaded; the empty one is the model alone."""
        if name and name not in self._keys:
            loaded = ", ".join(self._keys) or "none"
            raise ValueError(f"adapter={name!r}: is not loaded (loaded: {loaded}); load it first")

    def key(self, name: str) -> bytes:
        """The bytes that tell the cache of this adapter, in its present version, from every other;
        empty for the model alone."""
        return self._keys[name] if name else b""

    def load(self, name: str, source: str | Path | Adapter) -> None:
        """Load a folder in PEFT's format, or what `LoraAdapter.changes` gives, in place of what the
        name stood for. Its numbers are copied. `ValueError` for one that is not of this model, and
        then nothing changes."""
        if not name:
            raise ValueError("adapter name: is empty, which stands for the model alone; give one")
        if self._model.split.size > 1:
            raise ValueError(f"adapter {name!r}: not available with tp > 1; merge it, or set tp=1")
        where = str(source) if isinstance(source, (str, Path)) else f"adapter {name!r}"
        adapter = adapter_of(self._model, source, where)
        places = adaptable(self._model)
        odd = [module for module in adapter if module not in places]
        if odd:
            raise ValueError(
                f"{where}: adapts {odd[0]}; beside the weights only matrices of attention and of "
                "dense MLPs can be adapted; merge it (--lora)"
            )
        self._forget(name)
        parts: dict[PackedLinear, list[tuple[int, int, LowRank]]] = {}
        for module, place in places.items():
            if module in adapter:
                here = (place.lo, place.hi, adapter[module])
                parts.setdefault(place.matrix, []).append(here)
        for matrix, changes in parts.items():
            if not isinstance(matrix.adapters, _MatrixAdapters):
                matrix.adapters = _MatrixAdapters(matrix)
            mine = matrix.adapters.changes.setdefault(self._step, {})
            mine[name] = AddedChange.of(matrix, changes)
        self._num_loaded += 1
        self._keys[name] = f"{name}\0{self._num_loaded}".encode()

    def unload(self, name: str) -> None:
        """`ValueError` for a name that is not loaded."""
        if not name:
            raise ValueError("adapter name: is empty, which stands for the model alone; give one")
        self.check(name)
        self._forget(name)
        del self._keys[name]

    def _forget(self, name: str) -> None:
        for place in adaptable(self._model).values():
            held = place.matrix.adapters
            if not isinstance(held, _MatrixAdapters):
                continue
            mine = held.changes.get(self._step, {})
            mine.pop(name, None)
            if not mine:
                held.changes.pop(self._step, None)
            place.matrix.adapters = held if held.changes else None

    @contextmanager
    def applied(self, rows: Rows) -> Iterator[None]:
        """Inside, the model adds the adapters to these rows of its input."""
        self._step.of = rows
        try:
            yield
        finally:
            self._step.of = {}
