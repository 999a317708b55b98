"""Log-probability (and entropy) of given tokens under softmax(hidden · weightᵀ / temperature).

A tokens x vocabulary tensor is never held: tokens go in chunks, and the backward pass computes
each chunk's logits again, rewrites them in place to their gradient, and adds the weight's
gradient into one fp32 buffer (`weight.main_grad` where there is one). A caller who can tell the
gradient by the log-probs beforehand saves that second product: `expected_grad`. With
z = h · Wᵀ / τ, p = softmax(z), H the entropy, and g, e the gradients by logp and H:

    logp = z_t − log Σ exp z            H = log Σ exp z − Σ p · z
    dz = g · (1_t − p) − e · p · (log p + H)

Of several tokens at one place the terms by g add up; the logits are computed once for all of them.
`linear_topk` finds the likeliest tokens of every place, from the same chunks.

On a GPU the chunk's logits are one cuBLAS matmul into a buffer that all chunks share, and a Triton
kernel reads them once (`triton/linear_logprob.py`).

The arithmetic on logits that exist is one pass of C++ on a CPU (`cpp/logits.h`), as is their
gradient, else `softmax_parts`; the sampler uses the same, so a rollout's log-prob and the trainer's
are the same bits.

Source of the chunking: the memory-efficient cross-entropy of Liger and of Apple's CCE.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_floating,
    check_integers,
    check_tensors,
    check_triton_dtype,
    use_native,
    use_triton,
)
from kernels.cpp import ops as cpp_ops
from kernels.cpp.build import NATIVE_DTYPES
from kernels.linear import (
    add_weight_grad,
    linear_rows,
    matmul_rows,
    multiply_batch_invariant,
    pack_columns,
    pack_weight,
)

_CHUNK_ELEMENTS = 256 * 49152  # logits held at a time: 50 MB in fp32
_TILE_ELEMENTS = 8 * 49152
_VOCAB_TILE = 4096
_GPU_CHUNK = 2048  # tokens: enough rows for a full-speed matmul, 0.6 GB of bf16 logits at V = 152k
_GPU_VOCAB_TILE = 32768  # rows of the weight's gradient a product: 0.25 GB at H = 4096


@dataclass(frozen=True)
class _Options:
    temperature: float
    chunk_size: int
    dtype: torch.dtype
    wants_entropy: bool
    on_triton: bool
    is_native: bool
    batch_invariant: bool  # and on Triton


class SoftmaxParts(NamedTuple):
    """The softmax of each row, in fp32 (fp64): p = weights / Σ weights = exp(z − lse)."""

    z: Tensor  # [rows, V] tempered logits
    weights: Tensor  # [rows, V] exp(z − max z)
    lse: Tensor  # [rows] log Σ exp z


def softmax_parts(logits_BV: Tensor, temperature: float = 1.0) -> SoftmaxParts:
    """The softmax of logits / temperature, row by row: what both engines take log-probs from."""
    z = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    if temperature != 1.0:
        z = z / temperature
    highest = z.amax(-1, keepdim=True)
    weights = (z - highest).exp_()
    if z.shape[0] == 1:  # one long row would be split between threads; two rows are not
        total = weights.repeat(2, 1).sum(-1)[:1]
    else:
        total = weights.sum(-1)
    return SoftmaxParts(z, weights, total.log_().add_(highest.squeeze(1)))


def logits_logprob(
    logits_BV: Tensor,
    token_ids_B: Tensor,
    temperature: float = 1.0,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """fp32 log-prob of each row's token under softmax(logits / temperature); 0 means 1."""
    temperature = _valid_temperature(temperature)
    if token_ids_B.shape != logits_BV.shape[:1]:
        raise ValueError(
            f"token_ids: shape {tuple(token_ids_B.shape)} must be one id for each of the "
            f"{logits_BV.shape[0]} rows of logits"
        )
    check_tensors(logits_BV, "logits", False, token_ids=token_ids_B)
    check_integers(token_ids=token_ids_B)
    if token_ids_B.device.type == "cpu":
        _check_ids(token_ids_B, logits_BV.shape[1])
    if use_native(backend, logits_BV):
        return cpp_ops.score(logits_BV, token_ids_B.long(), temperature, False)[0]
    if use_triton(backend, logits_BV):  # the kernel of `linear_logprob`, so its bits
        from kernels.triton import linear_logprob as triton_ops

        check_triton_dtype("logits", logits_BV.dtype)
        logits_BV = logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()
        return triton_ops.stats(logits_BV, token_ids_B.contiguous(), temperature)[0]
    parts = softmax_parts(logits_BV, temperature)
    return parts.z.gather(1, token_ids_B.unsqueeze(1)).squeeze(1) - parts.lse


def linear_logprob_ref(
    hidden_TD: Tensor, weight_VD: Tensor, token_ids_T: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """logp and entropy with the whole T x V tensor, by autograd alone."""
    logits = hidden_TD @ weight_VD.t()
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logp_TV = torch.log_softmax(z, -1)
    entropy = -(logp_TV.exp() * logp_TV).sum(-1)
    return logp_TV.gather(1, token_ids_T.unsqueeze(1)).squeeze(1), entropy


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, token_ids, packed, expected, options):
        head = weight.to(options.dtype)
        packed = pack_weight(head) if packed is None else packed
        parts = []
        chunks = _ChunkLogits(hidden, head, packed, options)
        ctx.sums = None
        if expected is not None and any(ctx.needs_input_grad):
            ctx.sums = _Gradients(hidden, weight, head, options, ctx.needs_input_grad[1])
        for lo in range(0, hidden.shape[0], options.chunk_size):
            rows = slice(lo, lo + options.chunk_size)
            h = hidden[rows].to(options.dtype)
            logits = chunks.multiply(h)
            parts.append(_chunk_stats(logits, token_ids[rows], options))
            if ctx.sums is not None:  # while the logits are there
                lse = parts[-1][1]
                dlogits = _chunk_gradient(
                    logits, token_ids[rows], lse, None, expected[rows], None, options
                )
                ctx.sums.add(rows, dlogits, h)
                del dlogits
            del logits  # before the next ones are there
        if ctx.sums is not None:
            ctx.sums.rest()
        if parts:
            logp, lse, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        else:
            wide = torch.promote_types(options.dtype, torch.float32)
            lse = entropy = torch.zeros(0, dtype=wide, device=hidden.device)
            logp = lse.new_zeros(token_ids.shape)
        ctx.save_for_backward(hidden, weight, token_ids, lse, entropy, expected)
        ctx.packed, ctx.options = packed, options
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx, dlogp, dentropy):
        hidden, weight, token_ids, lse, entropy, expected = ctx.saved_tensors
        options = ctx.options
        head = weight.to(options.dtype)
        sums, ctx.sums = ctx.sums, None  # a second backward pass starts from nothing
        if sums is None:
            sums = _Gradients(hidden, weight, head, options, ctx.needs_input_grad[1])
        else:  # what the forward pass has not added yet: nothing, where it expected the truth
            dlogp = -expected if dlogp is None else dlogp - expected
        chunks = _ChunkLogits(hidden, head, ctx.packed, options)
        for lo in range(0, hidden.shape[0], options.chunk_size):
            rows = slice(lo, lo + options.chunk_size)
            by_logp, by_entropy = (None if g is None else g[rows] for g in (dlogp, dentropy))
            if expected is not None and (by_logp is None or not by_logp.any()):
                continue
            h = hidden[rows].to(options.dtype)
            h_rows = entropy[rows] if options.wants_entropy else None
            logits = chunks.multiply(h)
            dlogits = _chunk_gradient(
                logits, token_ids[rows], lse[rows], h_rows, by_logp, by_entropy, options
            )
            sums.add(rows, dlogits, h)
            del logits, dlogits
        return sums.dhidden, sums.of_weight(), None, None, None, None


class _Gradients:
    """The sums by the hidden states, and by the weight where `needs_weight`: in its `main_grad` if
    it has one, else in a buffer."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, head: Tensor, options: _Options, needs_weight: bool
    ) -> None:
        self.dhidden = torch.zeros_like(hidden)
        self._weight, self._head = weight, head
        self._columns: Tensor | None = None
        self._dweight: Tensor | None = None  # of a frozen head: its size would be for nothing
        if needs_weight:
            wide = torch.promote_types(options.dtype, torch.float32)
            main_grad = getattr(weight, "main_grad", None)
            self._is_main = isinstance(main_grad, Tensor)
            self._dweight = main_grad if self._is_main else torch.zeros_like(weight, dtype=wide)

    def add(self, rows: slice, dlogits_CV: Tensor, hidden_CD: Tensor) -> None:
        """Add what a chunk's gradient by its logits gives."""
        if self._columns is None:
            self._columns = pack_columns(self._head)
        self.dhidden[rows] += matmul_rows(dlogits_CV, self._head, self._columns)
        if self._dweight is not None:
            _add_weight_gradient(self._dweight, dlogits_CV, hidden_CD)

    def rest(self) -> None:
        """Nothing is expected to be added: drop what only `add` reads."""
        self._columns = None

    def of_weight(self) -> Tensor | None:
        """The weight's gradient for autograd; None where `main_grad` took it."""
        if self._dweight is None or self._is_main:
            return None
        return self._dweight.to(self._weight.dtype)


class _ChunkLogits:
    """Logits of one chunk after the other; on Triton in one buffer, overwritten by the next."""

    def __init__(
        self, hidden: Tensor, head: Tensor, packed: Tensor | None, options: _Options
    ) -> None:
        self.head, self.packed = head, packed
        self.batch_invariant = options.batch_invariant
        self.buffer: Tensor | None = None
        if options.on_triton:
            from kernels.triton import linear_logprob as triton_ops

            rows = min(options.chunk_size, hidden.shape[0])
            self.buffer = triton_ops.logits_buffer(rows, head)

    def multiply(self, hidden_CD: Tensor) -> Tensor:
        if self.buffer is None:
            return linear_rows(hidden_CD, self.head, None, self.packed)
        out = self.buffer[: hidden_CD.shape[0]]
        if self.batch_invariant:
            return multiply_batch_invariant(hidden_CD, self.head.t(), out)
        return torch.mm(hidden_CD, self.head.t(), out=out)


def _chunk_stats(logits: Tensor, ids_CM: Tensor, options: _Options) -> tuple[Tensor, ...]:
    """logp [C, M], logsumexp and (empty unless wanted) entropy of a chunk's rows."""
    logp, lse, entropy = _first_stats(logits, ids_CM[:, 0], options)
    logp_CM = logp.unsqueeze(1)
    if ids_CM.shape[1] > 1:
        z = logits.gather(1, ids_CM[:, 1:]).to(logp.dtype) / options.temperature
        logp_CM = torch.cat([logp_CM, _less(z, lse)], 1)
    return logp_CM, lse, entropy


def _less(z_CM: Tensor, lse: Tensor) -> Tensor:
    """z − logsumexp, which a GPU keeps as two terms."""
    for term in lse.unbind(1) if lse.dim() == 2 else (lse,):
        z_CM = z_CM - term.unsqueeze(1)
    return z_CM


def _first_stats(logits: Tensor, token_ids: Tensor, options: _Options) -> tuple[Tensor, ...]:
    """The same of one token for each row: the bits that the sampler's log-prob has."""
    token_ids = token_ids.contiguous()
    if options.on_triton:
        from kernels.triton import linear_logprob as triton_ops

        return triton_ops.stats(logits, token_ids, options.temperature)
    if options.is_native:
        return cpp_ops.score(logits, token_ids, options.temperature, options.wants_entropy)
    parts = []
    for tile in _row_tiles(logits):
        z, _, lse = softmax_parts(logits[tile], options.temperature)
        logp = z.gather(1, token_ids[tile].unsqueeze(1)).squeeze(1) - lse
        parts.append((logp, lse, _entropy(z, lse) if options.wants_entropy else lse[:0]))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def _chunk_gradient(logits, token_ids, lse, entropy, dlogp, dentropy, options) -> Tensor:
    if options.on_triton:
        return _triton_gradient(logits, token_ids, lse, entropy, dlogp, dentropy, options)
    if options.is_native:
        cpp_ops.differentiate_scores_(
            logits, token_ids, options.temperature, lse, entropy, dlogp, dentropy
        )
        return logits
    for tile in _row_tiles(logits):
        z = logits[tile].to(lse.dtype)
        if options.temperature != 1.0:
            z.div_(options.temperature)
        parts = [None if x is None else x[tile] for x in (dlogp, dentropy, entropy)]
        dz = _dlogits(z, lse[tile], token_ids[tile], *parts)
        if options.temperature != 1.0:
            dz.div_(options.temperature)
        logits[tile] = dz
    return logits


def _triton_gradient(logits, token_ids, lse, entropy, dlogp, dentropy, options) -> Tensor:
    from kernels.triton import linear_logprob as triton_ops

    is_one = token_ids.shape[1] == 1
    first = token_ids[:, 0].contiguous() if is_one else torch.full_like(token_ids[:, 0], -1)
    total = None if dlogp is None else dlogp.sum(1)
    dz = triton_ops.rewrite_to_gradient(
        logits, first, lse, entropy, total, dentropy, options.temperature
    )
    if dlogp is not None and not is_one:  # the kernel knows one token a row, or none: -1
        dz.scatter_add_(1, token_ids, (dlogp / options.temperature).to(dz.dtype))
    return dz


def _row_tiles(logits: Tensor) -> list[slice]:
    """Runs of rows whose fp32 intermediates stay in the processor's cache."""
    num_rows, step = logits.shape[0], logits.shape[0]
    if logits.device.type == "cpu":
        step = max(1, _TILE_ELEMENTS // logits.shape[1])
    return [slice(lo, lo + step) for lo in range(0, num_rows, step)]


def _add_weight_gradient(dweight_VD: Tensor, dlogits_CV: Tensor, hidden_CD: Tensor) -> None:
    """dweight += dlogitsᵀ · hidden, by runs of the vocabulary to keep the product small."""
    step = _VOCAB_TILE if dweight_VD.device.type == "cpu" else _GPU_VOCAB_TILE
    for dweight, dlogits in zip(dweight_VD.split(step), dlogits_CV.split(step, 1), strict=True):
        add_weight_grad(dweight, dlogits, hidden_CD)


def _entropy(z: Tensor, lse: Tensor) -> Tensor:
    logp = z - lse.unsqueeze(1)
    return -(logp.exp().mul_(logp)).sum(-1)


def _dlogits(z, lse, token_ids, dlogp, dentropy, entropy) -> Tensor:
    """Gradient by the tempered logits: Σ dlogp · (onehot − p) − dentropy · p · (logp + entropy)."""
    logp = z.sub_(lse.unsqueeze(1))
    if dentropy is None:
        scale = -dlogp.sum(1, keepdim=True)
        dz = logp.exp_().mul_(scale)
    else:
        scale = -dentropy.unsqueeze(1)
        slope = (logp + entropy.unsqueeze(1)).mul_(scale)
        if dlogp is not None:
            slope.sub_(dlogp.sum(1, keepdim=True))
        dz = logp.exp_().mul_(slope)
    if dlogp is not None:
        dz.scatter_add_(1, token_ids, dlogp.to(dz.dtype))
    return dz


def linear_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    token_ids_T: Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    chunk_size: int | None = None,
    packed: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    expected_grad: Tensor | None = None,
    batch_invariant: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """fp32 logp [T] of `token_ids`, and with `return_entropy` also the entropy [T], in nats.
    `token_ids` [T, M] are several for each row, and so are the log-probs, [T, M].

    `temperature` 0 (greedy) means 1. `logits_dtype` is the dtype of the matmul, hidden's unless
    given (fp32 for an exact head over a bf16 model); `packed` is `pack_weight` of the weight in
    that dtype. `chunk_size` is tokens a chunk. `batch_invariant`: see `linear`.

    `expected_grad` [T] is what the backward pass will bring as the gradient by logp: that of the
    hidden states and of the weight is then taken while the logits are there (and `main_grad`
    grows with the forward pass). Where it brings something else the difference is added, so that a
    wrong guess costs time, not truth. For one token a row and no entropy.
    """
    temperature = _valid_temperature(temperature)
    _check(hidden_TD, weight_VD, token_ids_T)
    if expected_grad is not None:
        _check_expected(expected_grad, token_ids_T, return_entropy)
    dtype = logits_dtype if logits_dtype is not None else hidden_TD.dtype
    options = _options(hidden_TD, weight_VD, temperature, chunk_size, dtype, backend)
    options = replace(
        options,
        wants_entropy=return_entropy,
        batch_invariant=batch_invariant and options.on_triton,
    )
    ids_TM = token_ids_T.long()
    if is_one := ids_TM.dim() == 1:
        ids_TM = ids_TM.unsqueeze(1)
    expected = None if expected_grad is None else expected_grad.detach().unsqueeze(1)
    logp, entropy = _LinearLogprob.apply(hidden_TD, weight_VD, ids_TM, packed, expected, options)
    logp = logp.squeeze(1) if is_one else logp
    return (logp, entropy) if return_entropy else logp


@torch.no_grad()
def linear_topk(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    packed: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of every row under softmax(hidden · weightᵀ / temperature), likeliest
    first: (ids int64 [T, k], fp32 log-probs [T, k], nats). Without a gradient; options as in
    `linear_logprob`. ValueError for a k that is not in 1 .. V."""
    temperature, vocab = _valid_temperature(temperature), weight_VD.shape[0]
    if not 1 <= k <= vocab:
        raise ValueError(f"k={k}: must be from 1 to the vocabulary's {vocab}")
    _check(hidden_TD, weight_VD, hidden_TD.new_zeros(len(hidden_TD), dtype=torch.int64))
    dtype = logits_dtype if logits_dtype is not None else hidden_TD.dtype
    options = _options(hidden_TD, weight_VD, temperature, None, dtype, backend)
    head = weight_VD.to(dtype)
    packed = pack_weight(head) if packed is None else packed
    chunks = _ChunkLogits(hidden_TD, head, packed, options)
    wide = torch.promote_types(dtype, torch.float32)
    ids_TK = torch.zeros(len(hidden_TD), k, dtype=torch.int64, device=hidden_TD.device)
    logp_TK = torch.zeros(len(hidden_TD), k, dtype=wide, device=hidden_TD.device)
    for lo in range(0, len(hidden_TD), options.chunk_size):
        rows = slice(lo, lo + options.chunk_size)
        logits = chunks.multiply(hidden_TD[rows].to(dtype))
        ids_TK[rows] = logits.topk(k).indices
        logp_TK[rows] = _chunk_stats(logits, ids_TK[rows], options)[0]
    return ids_TK, logp_TK


def _options(
    hidden: Tensor,
    weight: Tensor,
    temperature: float,
    chunk_size: int | None,
    dtype: torch.dtype,
    backend: Backend,
) -> _Options:
    """Where the arithmetic runs, and on how many tokens at a time."""
    on_triton = use_triton(backend, hidden, has_cpp=True)
    fitting = _GPU_CHUNK if on_triton else max(64, _CHUNK_ELEMENTS // weight.shape[0])
    chunk = fitting if chunk_size is None else chunk_size
    if chunk < 1:
        raise ValueError(f"chunk_size={chunk_size}: must be at least 1 token")
    if on_triton:
        check_triton_dtype("logits_dtype", dtype)
    refusal = None
    if dtype not in NATIVE_DTYPES:
        refusal = f"logits_dtype {dtype} must be float32 or bfloat16"
    is_native = use_native(backend, hidden, refusal=refusal)
    return _Options(temperature, chunk, dtype, False, on_triton, is_native, False)


def _valid_temperature(temperature: float) -> float:
    if temperature < 0:
        raise ValueError(f"temperature={temperature}: must be 0 (greedy, scored at 1) or more")
    return temperature if temperature > 0 else 1.0


def _check_expected(expected: Tensor, token_ids: Tensor, wants_entropy: bool) -> None:
    if token_ids.dim() != 1 or wants_entropy:
        raise ValueError("expected_grad: of one token a row and without entropy; leave it out")
    if expected.shape != token_ids.shape:
        raise ValueError(
            f"expected_grad: shape {tuple(expected.shape)} must be one number for each of the "
            f"{len(token_ids)} tokens"
        )


def _check(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden: shape {tuple(hidden.shape)} must be [tokens, {weight.shape[-1]}] to match "
            f"weight {tuple(weight.shape)}"
        )
    is_fitting = token_ids.dim() in (1, 2) and len(token_ids) == len(hidden)
    if not is_fitting or 0 in token_ids.shape[1:]:
        raise ValueError(
            f"token_ids: shape {tuple(token_ids.shape)} must be one id for each of the "
            f"{hidden.shape[0]} rows of hidden, or [rows, M]"
        )
    check_tensors(hidden, "hidden", False, weight=weight, token_ids=token_ids)
    check_floating(weight=weight)
    check_integers(token_ids=token_ids)
    if token_ids.device.type == "cpu":
        _check_ids(token_ids, weight.shape[0])


def _check_ids(token_ids: Tensor, vocab_size: int) -> None:
    if not token_ids.numel():
        return
    low, high = (int(x) for x in token_ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token_ids: {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
        )
