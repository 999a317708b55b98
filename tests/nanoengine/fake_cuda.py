"""A GPU that is not there: tensors with a shape and a device, no values, and a watch on every copy.

    with fake_gpu() as gpu:
        model = Transformer(config, device="cuda:0")    # CudaTensors
        gpu.take()                                      # what crossed between host and device

PyTorch's own `FakeTensorMode` cannot take a gradient here: a build without CUDA has no device guard
for autograd to ask for. So a `CudaTensor` is a meta tensor to autograd and a tensor of `cuda:N` to
whoever asks it. Tensors of the CPU stay real, with their values, as on a machine with a GPU.

What is checked is what a GPU would refuse, and a little more: an op or a kernel launch whose
tensors lie on different devices raises `WrongDevice`, and so does indexing by a tensor of the CPU,
which PyTorch allows at the price of a hidden copy. Triton kernels are not run. What crosses is
noted in `copies`, with the line of ours that did it; a value that arrives on the host is made up:
1, or `made_up` where a test says so.

Left out: values, streams, whatever the memory allocator would say.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from triton.runtime.jit import KernelInterface

from nanoengine.model.config import ModelConfig

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kernels", "nanoengine", "nanoinfer", "nanorl", "scripts")
MEMORY = 80 << 30
SHAPE = ModelConfig(
    model_type="qwen3",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    rope_theta=1e6,
    qk_norm=True,
    tie_word_embeddings=True,
    eos_ids=(2,),
)


class WrongDevice(AssertionError):  # noqa: N818 (the name of the event)
    """Tensors of different devices meet."""


@dataclass(frozen=True)
class Copy:
    """One crossing between host and device."""

    kind: str  # "upload", "download" or "sync": a shape that the host waits for
    op: str
    num_bytes: int
    is_async: bool  # from pinned memory, and not waited for
    where: str  # file:line of ours


class CudaTensor(Tensor):
    """A shape on a GPU."""

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> CudaTensor:
        made: CudaTensor = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device="meta",
        )
        made.gpu = device
        return made

    gpu: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.gpu

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        return False

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, x: CudaTensor) -> None:
        Tensor.data.__set__(self, x)  # type: ignore[attr-defined]
        self.gpu = x.gpu

    def data_ptr(self) -> int:
        """Its own, and aligned, as all that the allocator gives."""
        return id(self) * 16

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CudaTensor({tuple(self.shape)}, {self.dtype}, {self.gpu})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise WrongDevice(f"{func}: a GPU's tensor outlived its FakeCuda")

    __torch_function__ = torch._C._disabled_torch_function_impl


def _meta(x: Any) -> Any:
    if isinstance(x, CudaTensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    if isinstance(x, Tensor):
        return x.to("meta")  # a CPU's scalar, which a kernel takes as a number
    if isinstance(x, torch.device):
        return torch.device("meta")
    return x


_CROSSING = (aten._to_copy.default, aten.copy_.default, aten.set_.source_Storage)
_SHAPED_BY_VALUES = {  # the shapes they would have of distinct values, none of them 0
    aten.nonzero.default: lambda x: (torch.zeros(x.numel(), x.dim(), dtype=torch.int64),),
    aten._unique2.default: lambda x: tuple(
        torch.zeros(x.numel(), dtype=dtype) for dtype in (x.dtype, torch.int64, torch.int64)
    ),
}


def _ones(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=dtype)


class FakeCuda(TorchDispatchMode):
    """The watch of the thread that enters it (another thread may enter the same one); `fake_gpu`
    makes the rest of a machine with `num_gpus` GPUs of 80 GiB."""

    def __init__(
        self, made_up: Callable[[torch.Size, torch.dtype], Tensor] = _ones, num_gpus: int = 1
    ) -> None:
        super().__init__()
        self.copies: list[Copy] = []
        self.grids: list[tuple[str, tuple[int, ...]]] = []  # (kernel, grid) of every launch
        self.made_up = made_up
        self.num_gpus = num_gpus
        self._current = 0
        self.entered: list[torch.device] = []  # GPUs that threads made their current one
        self._pinned: list[Tensor] = []  # kept, so that no other tensor gets their memory

    # -- what a test asks ------------------------------------------------------------------------

    def take(self) -> list[Copy]:
        """The crossings since the last call."""
        taken, self.copies = self.copies, []
        return taken

    def exchange(self, device: int | torch.device) -> int:
        """Make a GPU the current one; returns which was."""
        before = self._current
        index = device.index if isinstance(device, torch.device) else device
        self._current = before if index < 0 else index
        return before

    def enter_device(self, device: torch.device) -> None:
        self.entered.append(device)
        self.exchange(device)

    # -- kernels ---------------------------------------------------------------------------------

    @property
    def launches(self) -> Counter[str]:
        """How often each kernel was started."""
        return Counter(name for name, _ in self.grids)

    def launcher(self, kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            name = getattr(kernel, "fn", kernel)
            while not hasattr(name, "__name__"):  # an autotuner around it
                name = name.fn
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            device = self._check_alike(f"kernel {name.__name__}", tensors, allows_scalars=False)
            if device != torch.device("cuda", self._current):
                where = f"kernel {name.__name__} at {_line_of_ours()}"
                raise WrongDevice(f"{where}: tensors on {device}, launched on GPU {self._current}")
            self.grids.append((name.__name__, grid(kwargs) if callable(grid) else tuple(grid)))

        return launch

    # -- ops -------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat, _ = tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        target = kwargs.get("device")
        target = None if target is None else torch.device(target)
        if target is not None and target.type == "meta":  # autograd makes zeros for a gradient
            target = kwargs["device"] = torch.device("cuda", self._current)
        is_cuda = any(isinstance(x, CudaTensor) for x in tensors)
        if not is_cuda and (target is None or target.type != "cuda"):
            return self._on_host(func, args, kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        if func in _CROSSING:
            return self._cross(func, args, kwargs, target)
        if func is aten._local_scalar_dense.default:
            self._note("download", func, args[0].element_size(), False)
            return self.made_up(torch.Size(()), args[0].dtype).item()
        device = self._check_alike(str(func), tensors) if tensors else _indexed(target)
        if func in _SHAPED_BY_VALUES:
            self._note("sync", func, 8, False)
            found = _SHAPED_BY_VALUES[func](args[0])
            found = tuple(CudaTensor(x.to("meta"), device) for x in found)
            return found[0] if len(found) == 1 else found
        kwargs.pop("pin_memory", None)
        out = func(*tree_map(_meta, args), **tree_map(_meta, kwargs))
        changed = _changed(func, args, kwargs)
        if changed is not None:
            return changed
        # A view counts its versions with its base, which may be older than the inference mode.
        is_inference = args[0].is_inference() if func.is_view else torch.is_inference_mode_enabled()
        with torch.inference_mode(is_inference):
            return tree_map(lambda x: CudaTensor(x, device) if isinstance(x, Tensor) else x, out)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_pinned = kwargs.pop("pin_memory", False)
        out = func(*args, **kwargs)
        if is_pinned:
            self._pinned.append(out)
        return out

    def _cross(self, func: Any, args: Any, kwargs: Any, target: torch.device | None) -> Any:
        """Copies between devices, which ops of one device are not."""
        into, source = (None, args[0]) if func is aten._to_copy.default else args[:2]
        target = into.device if into is not None else target or source.device
        non_blocking = kwargs.get("non_blocking") or (into is not None and args[2:] == (True,))
        size = source.numel() * source.element_size()
        if target.type == "cuda" and source.device.type == "cpu":
            address = source.untyped_storage().data_ptr()
            is_pinned = any(address == x.untyped_storage().data_ptr() for x in self._pinned)
            self._note("upload", func, size, bool(non_blocking and is_pinned))
        elif target.type == "cpu":
            self._note("download", func, size, False)
            dtype = kwargs.get("dtype") or (source if into is None else into).dtype
            made = self.made_up(source.shape, dtype)
            return made if into is None else into.copy_(made)
        elif target != source.device and _indexed(target) != source.device:
            raise WrongDevice(f"{func} at {_line_of_ours()}: {source.device} to {target}")
        if into is not None:
            torch.broadcast_shapes(source.shape, into.shape)
            return into
        kwargs = {name: x for name, x in kwargs.items() if name not in ("device", "non_blocking")}
        return CudaTensor(func(_as_meta(source), device="meta", **kwargs), _indexed(target))

    def _check_alike(
        self, what: str, tensors: list[Tensor], *, allows_scalars: bool = True
    ) -> torch.device:
        """The device of all. Ops of PyTorch take the CPU's scalars for numbers."""
        devices = {
            x.device
            for x in tensors
            if isinstance(x, CudaTensor) or x.dim() > 0 or not allows_scalars
        }
        if len(devices) > 1:
            shapes = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
            raise WrongDevice(f"{what} at {_line_of_ours()}: {shapes}")
        return devices.pop() if devices else torch.device("cpu")

    def _note(self, kind: str, func: Any, num_bytes: int, is_async: bool) -> None:
        self.copies.append(Copy(kind, str(func), num_bytes, is_async, _line_of_ours()))


def _in_two_steps(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` goes to the device without an op that a mode sees; so make, then copy."""

    def made(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        x = make(data, **kwargs)
        return x if device is None else x.to(_indexed(torch.device(device)))

    return made


@contextmanager
def fake_gpu(**options: Any) -> Iterator[FakeCuda]:
    """A machine with a GPU, as far as this thread can tell; options are FakeCuda's."""
    gpu = FakeCuda(**options)
    cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: gpu.num_gpus,
        "mem_get_info": lambda _=None: (MEMORY, MEMORY),
        "get_device_properties": lambda _=None: SimpleNamespace(total_memory=MEMORY),
        "set_device": gpu.enter_device,
        "_exchange_device": gpu.exchange,
        "_maybe_exchange_device": gpu.exchange,
    }
    with ExitStack() as stack:
        for name, stand_in in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        for name in ("tensor", "as_tensor"):
            stand_in = _in_two_steps(getattr(torch, name))
            stack.enter_context(mock.patch.object(torch, name, stand_in))
        launch = lambda kernel, grid: gpu.launcher(kernel, grid)  # noqa: E731 (a method's place)
        stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", launch))
        yield stack.enter_context(gpu)


def _as_meta(x: Tensor) -> Tensor:
    found: Tensor = _meta(x)
    return found


def _indexed(device: torch.device | None) -> torch.device:
    assert device is not None, "an op without tensors names its device"
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _changed(func: Any, args: Any, kwargs: Any) -> Any:
    """What an op in place, or with `out`, gives back: the very tensor that it was given."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(kwargs[argument.name] if argument.name in kwargs else args[i])
    if not found:
        return None
    return found[0] if len(found) == 1 else tuple(found)


def _line_of_ours() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"
