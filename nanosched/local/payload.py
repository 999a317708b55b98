"""Objects as they travel: pickle protocol 5, with large buffers in a segment.

`Packer.pack` pickles; whatever exceeds 64 KB in all goes into one segment, which the receiver reads
in place. Arrays of numpy arrive read-only, small ones too. Tensors of torch travel the same way and
arrive as the receiver's own copies, because torch has no read-only tensor.
Left out: tensors that share memory arrive as separate ones; tensors of a gpu go through torch's own
pickle.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from nanosched.local.shared_segments import Hold, Pool

if TYPE_CHECKING:
    import numpy
    import torch

INLINE_BYTES = 1 << 16  # a payload of more than that goes into a segment
ATOMS = frozenset((type(None), bool, int, float, str, bytes))  # nothing special is in them
ALIGNMENT = 64  # of buffers in a segment, so that kernels can use what arrives

Span = tuple[int, int]  # (offset, bytes) in the payload's segment
MakeHandle = Callable[[int, type], Any]

# How the loading process makes a handle; a pickle's functions cannot be given arguments otherwise.
_make_handle: ContextVar[MakeHandle] = ContextVar("make_handle")


class Payload(NamedTuple):
    """One pickled object. `handles` are the actors whose handles are in it."""

    data: bytes | Span
    buffers: tuple[bytes | Span, ...] = ()
    hold: Hold | None = None
    handles: tuple[int, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Its bytes are all there is to it."""
        return self.hold is None and not self.buffers and not self.handles


class Packer:
    """Pickles for one process; its segments come from `pool`."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._table: dict[type, Callable[[Any], Any]] = dict(copyreg.dispatch_table)
        self._handles: list[int] | None = None
        self._has_numpy = self._has_torch = False

    def pack(self, obj: Any) -> Payload:
        """Whatever pickle raises for what it cannot pickle."""
        if type(obj) in ATOMS or _are_atoms(obj):
            data = pickle.dumps(obj, 5)
            if len(data) <= INLINE_BYTES:
                return Payload(data)
        self._learn_types()
        views: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        pickler = pickle.Pickler(file, 5, buffer_callback=views.append)
        pickler.dispatch_table = self._table
        self._handles = []
        try:
            pickler.dump(obj)
            handles = tuple(self._handles)
        finally:
            self._handles = None
        num_bytes = file.tell()
        if not views and num_bytes <= INLINE_BYTES:
            return Payload(file.getvalue(), (), None, handles)
        raws = [view.raw() for view in views]
        if num_bytes + sum(raw.nbytes for raw in raws) <= INLINE_BYTES:
            return Payload(file.getvalue(), tuple(map(bytes, raws)), None, handles)
        spans, hold = self._place([file.getbuffer(), *raws])
        return Payload(spans[0], tuple(spans[1:]), hold, handles)

    def note_handle(self, actor_id: int) -> None:
        """Called by a handle that is being pickled."""
        if self._handles is None:
            raise TypeError("a handle travels as an argument of a call, and not otherwise")
        self._handles.append(actor_id)

    def _place(self, raws: list[memoryview]) -> tuple[list[Span], Hold]:
        spans, end = [], 0
        for raw in raws:
            spans.append((end, raw.nbytes))
            end += -(-raw.nbytes // ALIGNMENT) * ALIGNMENT
        hold = self.pool.take(end)
        memory = memoryview(hold.segment.memory)
        for (start, count), raw in zip(spans, raws, strict=True):
            memory[start : start + count] = raw
        return spans, hold

    def _learn_types(self) -> None:
        """The libraries are imported by who uses them, not for their reducers."""
        if not self._has_numpy and "numpy" in sys.modules:
            self._table[sys.modules["numpy"].ndarray] = _reduce_array
            self._has_numpy = True
        if not self._has_torch and hasattr(sys.modules.get("torch"), "Tensor"):
            self._table[sys.modules["torch"].Tensor] = _reduce_tensor
            self._has_torch = True


def _are_atoms(obj: Any) -> bool:
    """Say whether these are (args, kwargs) of nothing special, as most calls have."""
    if type(obj) is not tuple or len(obj) != 2:
        return False
    args, kwargs = obj
    is_call = type(args) is tuple and type(kwargs) is dict
    return is_call and ATOMS.issuperset(map(type, (*args, *kwargs.values())))


def unpack(payload: Payload, make_handle: MakeHandle | None = None) -> Any:
    """The object. Arrays in it keep the payload's segment as long as they live."""
    if payload.handles and make_handle is not None:
        token = _make_handle.set(make_handle)
        try:
            return _load(payload)
        finally:
            _make_handle.reset(token)
    return _load(payload)


def _load(payload: Payload) -> Any:
    data, buffers, hold, _ = payload
    if hold is None:
        return pickle.loads(data, buffers=buffers)  # type: ignore[arg-type]
    if not buffers:
        start, count = data
        with memoryview(hold.segment.memory) as memory, memory[start : start + count] as view:
            return pickle.loads(view)
    memory = _watched(hold)
    views = [memory[start : start + count] for start, count in (data, *buffers)]  # type: ignore[misc]
    return pickle.loads(views[0], buffers=views[1:])


def _watched(hold: Hold) -> memoryview:
    """A view of the segment; `hold` lives until the last object made of the view is gone.

    Those objects refer to the exporter of the memory, here an array, because of the standard
    library's exporters none that is read-only can be watched.
    """
    import numpy  # here: tasks without arrays need none

    exporter = numpy.frombuffer(hold.segment.memory, dtype=numpy.uint8)
    weakref.finalize(exporter, _let_go, hold).atexit = False
    return memoryview(exporter)  # type: ignore[arg-type]


def _let_go(hold: Hold) -> None:
    """The finalizer, whose end drops the last reference to `hold`."""


def received_handle(actor_id: int, cls: type) -> Any:
    """The handle that a pickled one becomes where it is loaded."""
    return _make_handle.get()(actor_id, cls)


def _reduce_array(array: numpy.ndarray) -> Any:
    """Contiguous, because numpy copies others into the pickle, and they would arrive writable."""
    if array.dtype.hasobject or array.flags.forc:
        return array.__reduce_ex__(5)
    return array.copy(order="C").__reduce_ex__(5)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    import torch  # here: tasks without tensors need none

    is_plain = tensor.layout is torch.strided and not tensor.is_quantized and tensor.numel() > 0
    if tensor.device.type != "cpu" or not is_plain or tensor.is_conj() or tensor.is_neg():
        return tensor.__reduce_ex__(5)
    raw = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    shape = tuple(tensor.shape)
    buffer = pickle.PickleBuffer(raw)  # type: ignore[arg-type]
    return _tensor, (buffer, tensor.dtype, shape, tensor.requires_grad)


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...], needs_grad: bool) -> torch.Tensor:
    import numpy  # here: tasks without arrays need none
    import torch  # here: tasks without tensors need none

    tensor = torch.empty(shape, dtype=dtype)
    numpy.copyto(tensor.flatten().view(torch.uint8).numpy(), numpy.frombuffer(raw, numpy.uint8))
    return tensor.requires_grad_(needs_grad)
