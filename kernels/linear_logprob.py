"""Log-probability (and entropy) of given tokens under softmax(hidden · weightᵀ / temperature).

A tokens x vocabulary tensor is never held: tokens go in chunks, and the backward pass computes
each chunk's logits again, rewrites them in place to their gradient, and adds the weight's
gradient into one fp32 buffer (`weight.main_grad` where there is one). A caller who can tell the
gradient by the log-probs beforehand saves that second product: `expected_grad`. With
z = h · Wᵀ / τ, p = softmax(z), H the entropy, and g, e the gradients by logp and H:

    logp = z_t − log Σ exp z            H = log Σ exp z − Σ p · z
    dz = g · (1_t − p) − e · p · (log p + H)

Of several tokens at one place the terms by g add up; the logits are computed once for all of them.

On a GPU the chunk's logits are one cuBLAS matmul into a buffer that all chunks share, and a Triton
kernel reads them once (`triton/linear_logprob.py`).

The arithmetic on a chunk's logits is one pass of C++ on a CPU (`cpp/logits.h`), as is their
gradient, else PyTorch's (`torch/linear_logprob.py`, with `linear_logprob_ref`); the sampler uses
the same (`logits/logprob.py`), so a rollout's log-prob and the trainer's are the same bits.

Left out: the likeliest tokens of every place, from the same chunks (`logits/topk.py`).

Source of the chunking: the memory-efficient cross-entropy of Liger and of Apple's CCE.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    Path,
    check_floating,
    check_integers,
    check_tensors,
    check_triton_dtype,
    chosen,
    resolve,
    use_native,
    use_triton,
)
from kernels.cpp import ops as cpp_ops
from kernels.cpp.ops import NATIVE_DTYPES
from kernels.linear import (
    BATCH_INVARIANT,
    add_weight_grad,
    linear_rows,
    matmul_rows,
    pack_columns,
    pack_weight,
)

_CHUNK_ELEMENTS = 256 * 49152  # logits held at a time: 50 MB in fp32
_VOCAB_TILE = 4096
_GPU_CHUNK = 2048  # tokens: enough rows for a full-speed matmul, 0.6 GB of bf16 logits at V = 152k
_GPU_VOCAB_TILE = 32768  # rows of the weight's gradient a product: 0.25 GB at H = 4096

# (log-prob of one id a row, log-sum-exp, entropy) of (logits, ids, temperature, wants_entropy)
_STATS = {
    "triton": "kernels.gpu.linear_logprob:stats",
    "torch": "kernels.torch.linear_logprob:stats",
}
_GRADIENT = {
    "triton": "kernels.gpu.linear_logprob:gradient",
    "torch": "kernels.torch.linear_logprob:gradient",
}
_LOGITS_BUFFER = "kernels.triton.linear_logprob:logits_buffer"


@dataclass(frozen=True)
class _Options:
    temperature: float
    chunk_size: int
    dtype: torch.dtype
    wants_entropy: bool
    path: Path
    batch_invariant: bool  # and on Triton

    @property
    def on_triton(self) -> bool:
        return self.path == "triton"


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, token_ids, packed, expected, options):
        head = weight.to(options.dtype)
        packed = pack_weight(head) if packed is None else packed
        parts = []
        chunks = ChunkLogits(hidden, head, packed, options)
        ctx.sums = None
        if expected is not None and any(ctx.needs_input_grad):
            ctx.sums = HeadGradients(hidden, weight, head, options, ctx.needs_input_grad[1])
        for lo in range(0, hidden.shape[0], options.chunk_size):
            rows = slice(lo, lo + options.chunk_size)
            h = hidden[rows].to(options.dtype)
            logits = chunks.multiply(h)
            parts.append(chunk_stats(logits, token_ids[rows], options))
            if ctx.sums is not None:  # while the logits are there
                lse = parts[-1][1]
                dlogits = chunk_gradient(
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
            sums = HeadGradients(hidden, weight, head, options, ctx.needs_input_grad[1])
        else:  # what the forward pass has not added yet: nothing, where it expected the truth
            dlogp = -expected if dlogp is None else dlogp - expected
        chunks = ChunkLogits(hidden, head, ctx.packed, options)
        for lo in range(0, hidden.shape[0], options.chunk_size):
            rows = slice(lo, lo + options.chunk_size)
            by_logp, by_entropy = (None if g is None else g[rows] for g in (dlogp, dentropy))
            if expected is not None and (by_logp is None or not by_logp.any()):
                continue
            h = hidden[rows].to(options.dtype)
            h_rows = entropy[rows] if options.wants_entropy else None
            logits = chunks.multiply(h)
            dlogits = chunk_gradient(
                logits, token_ids[rows], lse[rows], h_rows, by_logp, by_entropy, options
            )
            sums.add(rows, dlogits, h)
            del logits, dlogits
        return sums.dhidden, sums.of_weight(), None, None, None, None


class HeadGradients:
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


class ChunkLogits:
    """Logits of one chunk after the other; on Triton in one buffer, overwritten by the next."""

    def __init__(
        self, hidden: Tensor, head: Tensor, packed: Tensor | None, options: _Options
    ) -> None:
        self.head, self.packed = head, packed
        self.batch_invariant = options.batch_invariant
        self.buffer: Tensor | None = None
        if options.on_triton:
            rows = min(options.chunk_size, hidden.shape[0])
            self.buffer = resolve(_LOGITS_BUFFER)(rows, head)

    def multiply(self, hidden_CD: Tensor) -> Tensor:
        if self.buffer is None:
            return linear_rows(hidden_CD, self.head, None, self.packed)
        out = self.buffer[: hidden_CD.shape[0]]
        if self.batch_invariant:
            return resolve(BATCH_INVARIANT)(hidden_CD, self.head.t(), out)
        return torch.mm(hidden_CD, self.head.t(), out=out)


def chunk_stats(logits: Tensor, ids_CM: Tensor, options: _Options) -> tuple[Tensor, ...]:
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
    if options.path == "cpp":
        return cpp_ops.score(logits, token_ids, options.temperature, options.wants_entropy)
    return resolve(_STATS[options.path])(
        logits, token_ids, options.temperature, options.wants_entropy
    )


def chunk_gradient(logits, token_ids, lse, entropy, dlogp, dentropy, options) -> Tensor:
    """The gradient by the logits, in their memory: they are read for the last time."""
    arguments = (logits, token_ids, options.temperature, lse, entropy, dlogp, dentropy)
    if options.path == "cpp":
        cpp_ops.differentiate_scores_(*arguments)
        return logits
    return resolve(_GRADIENT[options.path])(*arguments)


def _add_weight_gradient(dweight_VD: Tensor, dlogits_CV: Tensor, hidden_CD: Tensor) -> None:
    """dweight += dlogitsᵀ · hidden, by runs of the vocabulary to keep the product small."""
    step = _VOCAB_TILE if dweight_VD.device.type == "cpu" else _GPU_VOCAB_TILE
    for dweight, dlogits in zip(dweight_VD.split(step), dlogits_CV.split(step, 1), strict=True):
        add_weight_grad(dweight, dlogits, hidden_CD)


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
    temperature = valid_temperature(temperature)
    check_head(hidden_TD, weight_VD, token_ids_T)
    if expected_grad is not None:
        _check_expected(expected_grad, token_ids_T, return_entropy)
    dtype = logits_dtype if logits_dtype is not None else hidden_TD.dtype
    options = score_options(hidden_TD, weight_VD, temperature, chunk_size, dtype, backend)
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


def score_options(
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
    return _Options(temperature, chunk, dtype, False, chosen(on_triton, is_native), False)


def valid_temperature(temperature: float) -> float:
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


def check_head(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> None:
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
        check_ids(token_ids, weight.shape[0])


def check_ids(token_ids: Tensor, vocab_size: int) -> None:
    """Raises for an id outside the vocabulary. Reads the ids, so ask on a CPU only."""
    if not token_ids.numel():
        return
    low, high = (int(x) for x in token_ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token_ids: {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
        )
