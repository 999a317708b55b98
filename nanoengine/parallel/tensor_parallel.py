"""Tensor parallelism: each rank holds some heads, some MLP columns and some of the vocabulary.

    column: W is cut by output rows.  y_r = x · W_rᵀ          x is needed whole by every rank
    row:    W is cut by input columns. y  = Σ_r x_r · W_rᵀ    the sum is an all-reduce

A layer is two such pairs: qkv (column) then out (row); gate_up (column) then down (row). Forward
that is one all-reduce a pair, after the row matrix (`leave`); backward one, of the gradient of x
before the column matrix (`enter`). With `sequence_parallel` the rows between pairs (norms,
residual stream) are cut over the ranks too: the all-reduce becomes a reduce-scatter there and an
all-gather here, the same bytes, and the activations between pairs take 1/tp of the memory.

The embedding and the output head are cut by vocabulary. Log-probs need three numbers a token from
each rank (maximum, sum of exponentials, the target's logit), never the logits of another rank.

Left out: overlapping these collectives with matrix products (async TP), heads that do not divide.
Shapes: T tokens, E hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import linear, linear_topk, pack_weight
from kernels.linear import InputRecipe, add_weight_grad, linear_rows, matmul_rows, pack_columns
from kernels.torch.linear import accumulate_weight_grad
from nanoengine.architectures.family_layer import FamilyLayer
from nanoengine.model.config import ModelConfig
from nanoengine.model.layers import DecoderLayer
from nanoengine.model.linear import LogprobOptions, OutputHead, PackedLinear, TensorSplit, embed
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.parameter_record import Slice, mark_partial, mark_slice, record_of

_CHUNK_ELEMENTS = 256 * 49152  # logits of a rank held at a time: 50 MB in fp32


class TensorParallel(TensorSplit):
    """The `split` of a Transformer over the mesh's tp axis."""

    def __init__(self, mesh: Mesh, *, sequence_parallel: bool = False) -> None:
        self.mesh = mesh
        self.size, self.rank = mesh.size("tp"), mesh.rank("tp")
        self.sequence_parallel = sequence_parallel

    @classmethod
    def of(
        cls, mesh: Mesh, config: ModelConfig, *, sequence_parallel: bool = False
    ) -> TensorParallel | None:
        """The split for a model of this shape; None where the mesh has one tp rank."""
        check_heads(config, mesh.size("tp"))
        return None if mesh.size("tp") == 1 else cls(mesh, sequence_parallel=sequence_parallel)

    def mark(self, module: nn.Module) -> None:
        if isinstance(module, DecoderLayer):
            self._mark_layer(module)
        elif isinstance(module, Transformer):
            vocab = module.config.vocab_size
            for table in (module.embedding, module.head):
                if table is not None and self.size > 1:
                    record_of(table).slice = Slice(0, vocab, (self.run(vocab),))
            if self.sequence_parallel:
                mark_partial(module.norm)

    def _mark_layer(self, layer: DecoderLayer) -> None:
        fused = (layer.q_width, layer.kv_width, layer.kv_width)
        for parameter in (layer.qkv.weight, layer.qkv.bias):
            mark_slice(parameter, 0, fused, self)
        mark_slice(layer.out.weight, 1, (layer.q_width,), self)
        mark_slice(layer.sinks, 0, (layer.q_width // layer.head_dim,), self)
        if not isinstance(layer, FamilyLayer) or layer.moe is None:
            mlp = layer.down.weight.shape[1]
            mark_slice(layer.gate_up.weight, 0, (mlp, mlp), self)
            mark_slice(layer.down.weight, 1, (mlp,), self)
        if isinstance(layer, FamilyLayer) and layer.family.qk_norm == "width":
            mark_slice(layer.q_norm, 0, (layer.q_width,), self)
            mark_slice(layer.k_norm, 0, (layer.kv_width,), self)
        else:
            for norm in (layer.q_norm, layer.k_norm):  # shared by heads, which are on many ranks
                mark_partial(norm)
        if self.sequence_parallel:
            norms = ("input_norm", "attention_norm", "post_norm", "mlp_norm")
            for parameter in (*(getattr(layer, name, None) for name in norms), layer.out.bias):
                mark_partial(parameter)

    def run(self, whole: int) -> tuple[int, int]:
        """Cut as evenly as can be; the first ranks hold one more where it does not divide."""
        return even_run(whole, self.size, self.rank)

    def enter(self, x: Tensor, num_rows: int) -> Tensor:
        if self.sequence_parallel:
            out: Tensor = _GatherRows.apply(x, self.mesh, num_rows)
        else:
            out = _Enter.apply(x, self.mesh)
        return out

    def leave(self, x: Tensor) -> Tensor:
        function: Any = _ScatterRows if self.sequence_parallel else _Leave
        out: Tensor = function.apply(x, self.mesh)
        return out

    def multiply_rows(
        self, matrix: PackedLinear, x: Tensor, recipe: InputRecipe | None = None
    ) -> Tensor:
        product = linear(
            x,
            matrix.weight,
            packed=matrix.packed,
            recipe=recipe,
            batch_invariant=matrix.batch_invariant,
        )
        out = self.leave(product)
        return out if matrix.bias is None else out + matrix.bias  # once, not on every rank

    def embed(self, ids_T: Tensor, weight_VE: Tensor, vocab_size: int) -> Tensor:
        """Each rank looks up the tokens of its own range; the others add zero."""
        lo, hi = self.run(vocab_size)
        is_mine_T1 = ((ids_T >= lo) & (ids_T < hi)).unsqueeze(1)
        found_TE = embed((ids_T - lo).clamp(0, hi - lo - 1), weight_VE)
        return self.leave(found_TE * is_mine_T1.to(found_TE.dtype))

    @torch.no_grad()
    def gather_columns(self, x: Tensor, whole: int) -> Tensor:
        return gather_slice(self.mesh, x, Slice(x.dim() - 1, whole, (self.run(whole),)))

    def logprobs(
        self, hidden_PE: Tensor, head: OutputHead, ids_P: Tensor, options: LogprobOptions
    ) -> tuple[Tensor, Tensor | None]:
        """As `Split.logprobs`; the gradient is taken in the backward pass in any case."""
        scored = vocab_parallel_logprob(
            hidden_PE,
            head.weight_VE,
            ids_P,
            self,
            head.vocab_size,
            temperature=options.temperature,
            return_entropy=options.entropy,
            packed=head.packed,
            logits_dtype=head.dtype,
        )
        return scored if isinstance(scored, tuple) else (scored, None)

    def likeliest(
        self, hidden_PE: Tensor, head: OutputHead, k: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """The k likeliest of each rank, and of those the k likeliest."""
        first, end = self.run(head.vocab_size)
        ids_PK, _ = linear_topk(
            hidden_PE,
            head.weight_VE,
            min(k, end - first),
            packed=head.packed,
            logits_dtype=head.dtype,
        )
        most = min(k, -(-head.vocab_size // self.size))
        ids_PK = F.pad(ids_PK + first, (0, most - ids_PK.shape[1]), value=first)
        found = ids_PK.new_empty(self.size, *ids_PK.shape)
        self.mesh.all_gather("tp", found, ids_PK.contiguous())
        ids_PM = found.movedim(0, 1).flatten(1)
        logp_PM, _ = self.logprobs(hidden_PE, head, ids_PM, LogprobOptions(temperature))
        ranked_PM = logp_PM.masked_fill(_comes_again(ids_PM), -torch.inf)
        place_PK = ranked_PM.topk(k).indices
        return ids_PM.gather(1, place_PK), logp_PM.gather(1, place_PK)


def _comes_again(ids_PM: Tensor) -> Tensor:
    """True for an id that stands in its row before, too."""
    order = ids_PM.argsort(dim=1, stable=True)
    ordered = ids_PM.gather(1, order)
    is_same = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0))
    return torch.zeros_like(is_same).scatter(1, order, is_same)


def check_heads(config: ModelConfig, size: int) -> None:
    """`ValueError` unless a model of this shape can be split over `size` tensor-parallel ranks."""
    names = ["num_heads", "num_kv_heads", "intermediate_size"]
    names += ["moe_intermediate_size"] if config.num_experts else []
    for name in names:
        if getattr(config, name) % size:
            raise ValueError(
                f"tp={size}: must divide {name}={getattr(config, name)}; choose another layout"
            )
    if config.vocab_size < size:
        raise ValueError(f"tp={size}: must be at most vocab_size={config.vocab_size}")


@torch.no_grad()
def gather_slice(mesh: Mesh, part: Tensor, where: Slice) -> Tensor:
    """The whole tensor from the ranks' parts, on all of them. Where there are several runs, each is
    a matrix's that is split evenly."""
    size = mesh.size("tp")
    if len(where.runs) > 1:
        matrices = [
            gather_slice(mesh, view, replace(run, whole=size * view.shape[where.dim]))
            for view, run in where.single_runs(part)
        ]
        return torch.cat(matrices, where.dim)
    shares = [hi - lo for lo, hi in (even_run(where.whole, size, r) for r in range(size))]
    moved = part.movedim(where.dim, 0)
    padded = moved.new_zeros(max(shares), *moved.shape[1:])
    padded[: len(moved)] = moved
    out = padded.new_empty(size, *padded.shape)
    mesh.all_gather("tp", out, padded)
    rows = torch.cat([out[r][:share] for r, share in enumerate(shares)])
    return rows.movedim(0, where.dim).contiguous()


def even_run(whole: int, num_parts: int, part: int) -> tuple[int, int]:
    base, extra = divmod(whole, num_parts)
    lo = part * base + min(part, extra)
    return lo, lo + base + (part < extra)


class _Enter(torch.autograd.Function):
    """Identity; the gradient is the sum over the ranks, each of which used x for its columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        total = dx.clone(memory_format=torch.contiguous_format)
        ctx.mesh.all_reduce("tp", total)
        return total, None


class _Leave(torch.autograd.Function):
    """The sum over the ranks; its gradient goes to every term."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        mesh.all_reduce("tp", total)
        return total

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


class _GatherRows(torch.autograd.Function):
    """All rows from the ranks' shares. Shares are equal; rows past `num_rows` are padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, num_rows: int) -> Tensor:
        ctx.mesh = mesh
        return _gather(x, mesh)[:num_rows]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(dx, ctx.mesh), None, None


class _ScatterRows(torch.autograd.Function):
    """This rank's share of the rows of the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh, ctx.num_rows = mesh, x.shape[0]
        return _scatter(x, mesh)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return _gather(dx, ctx.mesh)[: ctx.num_rows], None


def _gather(x: Tensor, mesh: Mesh) -> Tensor:
    out = x.new_empty(mesh.size("tp") * x.shape[0], *x.shape[1:])
    mesh.all_gather("tp", out, x)
    return out


def _scatter(x: Tensor, mesh: Mesh) -> Tensor:
    share = -(-x.shape[0] // mesh.size("tp"))
    padded = F.pad(x, (0, 0, 0, share * mesh.size("tp") - x.shape[0]))
    out = x.new_empty(share, *x.shape[1:])
    mesh.reduce_scatter("tp", out, padded)
    return out


class _Logprob(torch.autograd.Function):
    """The op of kernels/linear_logprob.py, with the vocabulary cut over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TE: Tensor,
        weight_VE: Tensor,
        ids_T: Tensor,
        packed: Tensor | None,
        options: tuple[Mesh, int, float, bool, torch.dtype],
    ) -> tuple[Tensor, Tensor]:
        mesh, first, temperature, wants_entropy, dtype = options
        head = weight_VE.to(dtype)
        packed = pack_weight(head) if packed is None else packed
        wide = torch.promote_types(dtype, torch.float32)
        ids_TM = ids_T if ids_T.dim() == 2 else ids_T.unsqueeze(1)
        logp_TM = torch.zeros(ids_TM.shape, dtype=wide, device=hidden_TE.device)
        stats_2T = torch.zeros(2, hidden_TE.shape[0], dtype=wide, device=hidden_TE.device)
        for rows in _chunks(hidden_TE, weight_VE):
            z = linear_rows(hidden_TE[rows].to(dtype), head, None, packed).to(wide) / temperature
            top_C = z.amax(-1)
            mesh.all_reduce("tp", top_C, "max")
            e = (z - top_C.unsqueeze(1)).exp()
            sums = [e.sum(-1, keepdim=True), _own_logits(z, ids_TM[rows], first)]
            if wants_entropy:
                sums.append((e * z).sum(-1, keepdim=True))
            sums_CS = torch.cat(sums, 1)
            mesh.all_reduce("tp", sums_CS)
            lse = top_C + sums_CS[:, 0].log()
            logp_TM[rows] = sums_CS[:, 1 : 1 + ids_TM.shape[1]] - lse.unsqueeze(1)
            stats_2T[0, rows] = lse
            if wants_entropy:
                stats_2T[1, rows] = lse - sums_CS[:, -1] / sums_CS[:, 0]  # -Σ p log p
        lse_T, entropy_T = stats_2T.unbind()
        ctx.save_for_backward(hidden_TE, weight_VE, ids_TM, lse_T, entropy_T)
        ctx.packed, ctx.options = packed, options
        ctx.set_materialize_grads(False)
        return logp_TM.view(ids_T.shape), entropy_T.clone()

    @staticmethod
    def backward(
        ctx: Any, dlogp_T: Tensor | None, dentropy_T: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        """dz = Σ dlogp · (onehot − p) − dentropy · p · (logp + entropy), on this rank's columns.
        dhidden is this rank's term; the sum over the ranks happens where hidden entered."""
        hidden_TE, weight_VE, ids_TM, lse_T, entropy_T = ctx.saved_tensors
        dlogp_TM = None if dlogp_T is None else dlogp_T.reshape(ids_TM.shape)
        _, first, temperature, _, dtype = ctx.options
        head = weight_VE.to(dtype)
        dhidden = torch.zeros_like(hidden_TE)
        dweight = torch.zeros(weight_VE.shape, dtype=lse_T.dtype, device=lse_T.device)
        columns = pack_columns(head)
        for rows in _chunks(hidden_TE, weight_VE):
            h = hidden_TE[rows].to(dtype)
            logp = linear_rows(h, head, None, ctx.packed).to(lse_T.dtype) / temperature
            logp -= lse_T[rows].unsqueeze(1)
            dz = torch.zeros_like(logp)
            if dentropy_T is not None:
                slope = logp + entropy_T[rows].unsqueeze(1)
                dz -= slope.mul_(logp.exp()).mul_(dentropy_T[rows].unsqueeze(1))
            if dlogp_TM is not None:
                dz -= logp.exp_().mul_(dlogp_TM[rows].sum(1, keepdim=True))
                _add_at_own(dz, ids_TM[rows], first, dlogp_TM[rows])
            dlogits = dz.div_(temperature).to(dtype)
            dhidden[rows] = matmul_rows(dlogits, head, columns).to(dhidden.dtype)
            add_weight_grad(dweight, dlogits, h)
        return dhidden, accumulate_weight_grad(weight_VE, dweight), None, None, None


def _chunks(hidden_TE: Tensor, weight_VE: Tensor) -> list[slice]:
    step = max(64, _CHUNK_ELEMENTS // weight_VE.shape[0])
    return [slice(lo, lo + step) for lo in range(0, hidden_TE.shape[0], step)]


def _own_logits(z_CV: Tensor, ids_CM: Tensor, first: int) -> Tensor:
    """The targets' entries where they are in this rank's columns, else 0."""
    local = ids_CM - first
    is_mine = (local >= 0) & (local < z_CV.shape[1])
    return torch.where(is_mine, z_CV.gather(1, local.clamp(0, z_CV.shape[1] - 1)), 0.0)


def _add_at_own(dz_CV: Tensor, ids_CM: Tensor, first: int, values_CM: Tensor) -> None:
    local = ids_CM - first
    is_mine = (local >= 0) & (local < dz_CV.shape[1])
    index = local.clamp(0, dz_CV.shape[1] - 1)
    dz_CV.scatter_add_(1, index, torch.where(is_mine, values_CM, 0.0).to(dz_CV.dtype))


def vocab_parallel_logprob(
    hidden_TE: Tensor,
    weight_VE: Tensor,
    ids_T: Tensor,
    split: TensorParallel,
    vocab_size: int,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    packed: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`kernels.linear_logprob` where `weight_VE` is this rank's part of the vocabulary: logp [T]
    (and entropy [T]) over all of it, the same on every rank; of ids [T, M], logp [T, M]."""
    options = (
        split.mesh,
        split.run(vocab_size)[0],
        temperature if temperature > 0 else 1.0,
        return_entropy,
        logits_dtype if logits_dtype is not None else hidden_TE.dtype,
    )
    logp_T, entropy_T = _Logprob.apply(hidden_TE, weight_VE, ids_T, packed, options)
    return (logp_T, entropy_T) if return_entropy else logp_T
