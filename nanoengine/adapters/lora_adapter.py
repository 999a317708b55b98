"""LoRA adapters in training: `LoraBase`, a frozen model, and `LoraAdapter`s side by side on it.

    base = LoraBase(load_model(folder), torch.bfloat16)
    poet, coder = (LoraAdapter(base, LoraConfig(rank=16), seed=seed) for seed in (0, 1))
    engine = LoraEngine(poet, EngineConfig(lr=1e-4))     # lora_engine.py; one for each adapter
    engine.train_step(samples, sft_loss, num_loss_tokens)
    poet.save("poet")                                    # for peft

**The scheme: effective weights.** An adapter is not computed beside the base. Once after each
update the model is given W + scale · B·A, formed in fp32 and rounded once to the model's dtype, and
then runs as any model does. Why: rollout and training log-probs must be equal bit for bit, and
x·Wᵀ + (x·Aᵀ)·Bᵀ has other bits than x·(W + B·A)ᵀ, so whoever samples with merged weights may not be
trained with separate ones. Merged, both engines are today's engines: the rollout engine gets
ordinary weights by the ordinary copy, decodes by the fastest path at no cost for the adapter, and
what is exported at the end is the policy that was trained, to the bit.

The price is a frozen copy of the adapted matrices beside their effective form, and that a bf16
model moves only where the change is at least half a step of bf16. A merged adapter of any trainer
has that limit; here training sees it too, since its log-probs are those of the rounded weights.

**An int8 base** (`load_model(folder, dtype, is_int8=True)`; int8.py) takes a byte a weight
and nothing beside it, but its coarse steps would swallow the change. There the adapter is added, as
(x·Aᵀ)·(scale·B)ᵀ in fp32 (low_rank.py), and the rollout engine runs the trainer's own model:
the same lines, hence again the same bits. Embedding, norms and output head keep their dtype.

**The backward pass** never forms the gradient of a weight. With y = x·Wₑᵀ and dW = dyᵀ·x,

    dB = scale · dW·Aᵀ = scale · dyᵀ·(x·Aᵀ)        dA = scale · Bᵀ·dW = scale · (dy·B)ᵀ·x

on the right are products with the rank, not with the width, in fp32: a third of a training step's
arithmetic is gone, and no buffer of the weight's size exists. dx = dy·Wₑ as always. (The rounding
of Wₑ counts as the identity, as that of masters to bf16 does in full training.)

So a trainer in bf16 keeps 4 bytes for each adapted weight, 2 for each other one, and 16 for each
number of A and B, where full training keeps 18 for each weight.

Over int8, dx = (dy·scale)·q by the same product, beside the adapter's part.

Left out: dropout (sampling has none, so log-probs would differ), models that are split over ranks,
experts, output head and embedding.
Next: lora_engine.py; adapters/lora.py for folders.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from kernels.cpp.low_rank_ops import LowRankTable
from kernels.linear import matmul_rows
from kernels.torch.linear import accumulate_weight_grad
from nanoengine.adapters.lora import Adapter, LowRank, adapter_of, choose_targets, write_adapter
from nanoengine.adapters.lora_config import LoraConfig
from nanoengine.adapters.low_rank import AddedChange
from nanoengine.architectures.quantized import Int8Linear
from nanoengine.formats.hf import name_in_folder
from nanoengine.formats.matrices import MatrixRows, adaptable
from nanoengine.model.linear import PackedLinear
from nanoengine.model.transformer import Transformer


class LoraBase:
    """A model whose weights are frozen, and which of its adapters they are merged with now.

    The model is taken over: `activate` writes effective weights into it. One thread at a time."""

    def __init__(self, model: Transformer, dtype: torch.dtype | None = None) -> None:
        """`dtype` is what the weights are converted to; None keeps theirs. `ValueError` for a model
        that is in fp8 or split over ranks, or int8 and packed for another dtype."""
        if model.quantization == "fp8" or model.split.size > 1 or model.experts is not None:
            raise ValueError(
                "model: is in fp8 or split over ranks, and an adapter is merged into whole "
                "matrices; give an adapter a model in one piece"
            )
        self.is_int8 = model.quantization == "int8"
        if self.is_int8 and dtype not in (None, model.dtype):
            raise ValueError(
                f"dtype={dtype}: the model's int8 matrices are packed for {model.dtype}; load it "
                "in the dtype that is wanted"
            )
        self.model = model
        self.places: dict[str, MatrixRows] = adaptable(model)
        self.active: LoraAdapter | None = None
        self._frozen: dict[str, Tensor] = {}  # of the matrices that an adapter has been merged into
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype or parameter.dtype)
        model.repack()

    @torch.no_grad()
    def activate(self, adapter: LoraAdapter | None) -> None:
        """Make the model compute as with `adapter`, whose gradients its backward pass then adds to;
        None: as the base alone. Costs nothing where that is so already."""
        before = self.active
        if before is adapter and (adapter is None or not adapter.is_stale):
            return
        if self.is_int8:
            self._add(before, adapter)
            return
        if before is not None and before is not adapter:
            for matrix in before.matrices:
                matrix.weight.requires_grad_(False)
                del matrix.weight.take_grad  # type: ignore[attr-defined]
            for module in before.targets:
                self.places[module].weight.copy_(self._frozen[module])
        changed = list(before.matrices) if before is not None else []
        self.active = adapter
        if adapter is not None:
            for module, change in adapter.changes().items():
                weight = self.places[module].weight
                frozen = self._frozen.setdefault(module, weight.clone())
                weight.copy_(change.added_to(frozen))
            for matrix, parts in adapter.matrices.items():
                matrix.weight.requires_grad_(True)
                take = partial(_add_gradients, parts)
                matrix.weight.take_grad = take  # type: ignore[attr-defined]
            adapter.is_stale = False
            changed += adapter.matrices
        for matrix in dict.fromkeys(changed):
            matrix.repack()

    def _add(self, before: LoraAdapter | None, adapter: LoraAdapter | None) -> None:
        """`activate` over an int8 base."""
        for matrix in before.matrices if before is not None else ():
            assert isinstance(matrix, Int8Linear), "all matrices that are adapted are int8"
            matrix.change = None
        self.active = adapter
        if adapter is not None:
            for matrix, parts in adapter.matrices.items():
                assert isinstance(matrix, Int8Linear), "all matrices that are adapted are int8"
                matrix.change = _TrainedChange(matrix, parts)
            adapter.is_stale = False
        self.model.num_repacks += 1  # whoever reads this model has to learn of it


@dataclass(frozen=True)
class _Part:
    """The adapter of the rows lo:hi of a matrix."""

    lo: int
    hi: int
    low_RI: nn.Parameter
    high_OR: nn.Parameter
    scale: float


class _TrainedChange:
    """The adapter of one int8 matrix, as its product adds it."""

    def __init__(self, matrix: PackedLinear, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self._is_invariant = matrix.batch_invariant
        changes = [(p.lo, p.hi, LowRank(p.low_RI, p.high_OR, p.scale)) for p in parts]
        self._added = AddedChange.of(matrix, changes)

    def add_to(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """y with the change, the same bits with and without gradients."""
        if torch.is_grad_enabled():
            out: Tensor = _AddedProduct.apply(y_TO, x_TI, self, self._parts[0].low_RI)
            return out
        self._added.add_to(y_TO, x_TI, batch_invariant=self._is_invariant)
        return y_TO

    def sum_of(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        y_TO = y_TO.clone()
        self._added.add_to(y_TO, x_TI, batch_invariant=self._is_invariant)
        return y_TO

    def take_gradient(self, dy_TO: Tensor, x_TI: Tensor, wants_dx: bool) -> Tensor | None:
        """Add the gradients of A and B to theirs; the part of the input's, if it is wanted."""
        wide = self._parts[0].low_RI.dtype
        dx_TI = torch.zeros(x_TI.shape, dtype=wide) if wants_dx else None
        _add_gradients(self._parts, dy_TO, x_TI, dx_TI)
        return None if dx_TI is None else dx_TI.to(x_TI.dtype)

    @property
    def table(self) -> LowRankTable | None:
        return self._added.table

    def tensors(self) -> Iterable[Tensor]:
        return [x.detach() for part in self._parts for x in (part.low_RI, part.high_OR)]

    def merge_into(self, weight_OI: Tensor) -> None:
        """Add scale · B·A to a wide copy of the weight."""
        for part in self._parts:
            change = LowRank(part.low_RI.detach(), part.high_OR.detach(), part.scale)
            weight_OI[part.lo : part.hi] = change.added_to(weight_OI[part.lo : part.hi])


class _AddedProduct(torch.autograd.Function):
    """y + the change; the last argument, one of the adapter's parameters, ties it to them where
    neither y nor x has a gradient, as in the first layer."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        y_TO: Tensor,
        x_TI: Tensor,
        change: _TrainedChange,
        _: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_TI)
        ctx.change = change  # type: ignore[attr-defined]
        return change.sum_of(y_TO, x_TI)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, dy_TO: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        (x_TI,) = ctx.saved_tensors  # type: ignore[attr-defined]
        wants_dx = ctx.needs_input_grad[1]  # type: ignore[attr-defined]
        return dy_TO, ctx.change.take_gradient(dy_TO, x_TI, wants_dx), None, None  # type: ignore[attr-defined]


class LoraAdapter(nn.Module):
    """One adapter over a base: its A and B, fp32 (fp64 over fp64), and nothing else. Parameters are
    named `model.layers.0.self_attn.q_proj.lora_A`.

    A starts as PEFT's does, uniform within 1/√in, from a generator of its own; B is zero, so a new
    adapter is the base."""

    def __init__(self, base: LoraBase, config: LoraConfig, *, seed: int = 0) -> None:
        """`ValueError` for a rank of 0, or a target that the model does not have."""
        super().__init__()
        scale = config.scale
        self.base, self.config = base, config
        self.targets = choose_targets(base.model, config.targets)
        self.matrices: dict[PackedLinear, list[_Part]] = {}
        self.is_stale = True  # the model does not hold the present values
        generator = torch.Generator().manual_seed(seed)
        wide = torch.promote_types(base.model.dtype, torch.float32)
        for module in self.targets:
            place = base.places[module]
            num_out, num_in = place.weight.shape
            low = torch.empty(config.rank, num_in, dtype=wide)
            nn.init.kaiming_uniform_(low, a=math.sqrt(5), generator=generator)
            high = torch.zeros(num_out, config.rank, dtype=wide)
            low_RI, high_OR = (nn.Parameter(x.to(base.model.device)) for x in (low, high))
            home = _home(self, module)
            home.register_parameter("lora_A", low_RI)
            home.register_parameter("lora_B", high_OR)
            part = _Part(place.lo, place.hi, low_RI, high_OR, scale)
            self.matrices.setdefault(place.matrix, []).append(part)

    def activate(self) -> None:
        """Run the model under this adapter from now on (`LoraBase.activate`)."""
        self.base.activate(self)

    def changes(self) -> dict[str, LowRank]:
        """The change that the adapter makes to each module, by the module's name: views of the
        present A and B. An inference engine serves them: `LLMEngine.load_adapter(name,
        adapter.changes())`."""
        found = {}
        for module in self.targets:
            home = self.get_submodule(module)
            low, high = (home.get_parameter(f"lora_{letter}").detach() for letter in "AB")
            found[module] = LowRank(low, high, self.config.scale)
        return found

    @torch.no_grad()
    def load(self, source: str | Path | Adapter) -> None:
        """Take A and B of a folder in PEFT's format, or of `changes`. `ValueError`, with nothing
        changed, unless modules, rank and scale are this adapter's."""
        name = str(source) if isinstance(source, (str, Path)) else "adapter"
        adapter = adapter_of(self.base.model, source, name)
        if set(adapter) != set(self.targets):
            odd = sorted(set(adapter) ^ set(self.targets))
            raise ValueError(
                f"{name}: adapts other modules than targets={self.config.targets}: {odd[0]} is in "
                "one of them alone; make the adapter with its targets"
            )
        mine = self.changes()
        for module, change in adapter.items():
            rank, scale = len(change.low_RI), change.scale
            if rank != self.config.rank or not math.isclose(scale, self.config.scale):
                raise ValueError(
                    f"{name}: {module} has rank {rank} and scale {scale:g}, not "
                    f"{self.config.rank} and {self.config.scale:g}; make the adapter with its rank "
                    "and alpha"
                )
        for module, change in adapter.items():
            mine[module].low_RI.copy_(change.low_RI)
            mine[module].high_OR.copy_(change.high_OR)
        self.is_stale = True

    def save(self, folder: str | Path, base_name: str = "") -> None:
        """Write a folder that `peft.PeftModel.from_pretrained` reads over the base model, which
        `base_name` names for others."""
        kinds = {module.rpartition(".")[2] for module in self.targets}
        alike = {m for m in self.base.places if m.rpartition(".")[2] in kinds}
        shape = self.base.model.config
        named = {name_in_folder(name, shape): one for name, one in self.changes().items()}
        names = sorted(kinds) if alike == set(self.targets) else list(named)
        write_adapter(folder, named, self.config, targets=names, base=base_name)


def _home(root: nn.Module, path: str) -> nn.Module:
    """The empty module at `path` below `root`; makes those that are missing."""
    for name in path.split("."):
        if name not in dict(root.named_children()):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    return root


@torch.no_grad()
def _add_gradients(
    parts: Sequence[_Part], dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None = None
) -> None:
    """The gradients of A and B of one matrix, whose input was x and whose output's gradient is dy:
    into `main_grad` where an optimizer put it, else into `grad`. What the change alone gives to the
    gradient of x is added to `dx`, where that is given."""
    wide = parts[0].low_RI.dtype
    x_TI = x_TI.to(wide)
    for part in parts:
        dy = dy_TO[:, part.lo : part.hi].to(wide)
        low_TR = matmul_rows(x_TI, part.low_RI.t()).mul_(part.scale)
        high_TR = matmul_rows(dy, part.high_OR).mul_(part.scale)
        _add(part.high_OR, matmul_rows(dy.t(), low_TR))
        _add(part.low_RI, matmul_rows(high_TR.t(), x_TI))
        if dx_TI is not None:
            dx_TI += matmul_rows(high_TR, part.low_RI)


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    rest = accumulate_weight_grad(parameter, gradient)
    if rest is not None:
        parameter.grad = rest if parameter.grad is None else parameter.grad.add_(rest)
