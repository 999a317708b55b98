"""Gradients in C++ (attention over sequences and trees, norms, SwiGLU, rotation, log-probs) against
fp64: fp32 within 1e-5, bf16 no further away than PyTorch's path. Their bits depend neither on the
threads nor, row by row and tree by tree, on what else is in the batch."""

import pytest
import torch
from native_cases import DTYPES, bounds, threads

from kernels import (
    add_rms_norm,
    apply_rope,
    flash_attn_varlen,
    linear_logprob,
    make_varlen_plan,
    qk_norm_rope,
    rms_norm,
    swiglu,
    tree_attention,
)
from kernels.torch.attention import flash_attn_varlen_ref
from kernels.torch.linear_logprob import linear_logprob_ref
from kernels.torch.rms_norm import rms_norm_ref
from kernels.torch.rope import apply_rope_ref, qk_norm_rope_ref
from kernels.torch.swiglu import swiglu_ref

pytestmark = pytest.mark.usefixtures("native")

SHAPES = [(16, 2, 1), (64, 2, 3), (40, 1, 7), (128, 1, 2), (7, 1, 5), (80, 2, 2)]  # D, K, group
SEQUENCES = ([1, 2, 15, 16, 17, 63, 64, 65, 130, 200], [-1] * 10)
TREES = ([70, 5, 0, 33, 1, 40, 150, 66], [-1, 0, -1, 0, 3, -1, 3, 5])


def gradients(function, inputs, upstream):
    """The gradients of a function's results, weighted by `upstream`, by its inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    results = function(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(
        results, [w.to(y.dtype) for w, y in zip(upstream, results, strict=True)]
    )
    return [x.grad for x in leaves]


def distance(ours, exact):
    return float((ours.double() - exact).norm() / exact.norm())


def assert_near_fp64(function, reference, inputs, upstream):
    """`function(*inputs, backend)` beside `reference(*inputs)`."""
    exact = gradients(reference, [x.double() for x in inputs], upstream)
    native, torchs = (
        gradients(lambda *xs, backend=backend: function(*xs, backend), inputs, upstream)
        for backend in ("cpp", "torch")
    )
    for ours, other, wanted in zip(native, torchs, exact, strict=True):
        assert ours.dtype == inputs[0].dtype and ours.isfinite().all()
        if ours.dtype == torch.bfloat16:
            assert distance(ours, wanted) <= 1.02 * distance(other, wanted)
        else:
            limit = 1e-5 * wanted.abs().max()
            assert (ours.double() - wanted).abs().max() <= limit


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


# -- attention -------------------------------------------------------------------------------------


def attention_case(lengths, shape, dtype):
    head_dim, num_kv, group = shape
    torch.manual_seed(head_dim)
    heads = (num_kv * group, num_kv, num_kv, num_kv * group)
    return [draw(sum(lengths), n, head_dim, dtype=dtype) for n in heads]


def paths_of(lengths, prefix_of):
    """The rows that the queries of each segment see, its own last."""
    cu, paths = bounds(lengths), []
    for segment, parent in enumerate(prefix_of):
        own = list(range(cu[segment], cu[segment + 1]))
        paths.append((paths[parent] if parent >= 0 else []) + own)
    return paths


def attend64(q, k, v, lengths, prefix_of, window):
    outs, cu = [], bounds(lengths)
    for segment, rows in enumerate(paths_of(lengths, prefix_of)):
        n = lengths[segment]
        own, both = q[cu[segment] : cu[segment + 1]], ([0, n], [0, len(rows)])
        scale = q.shape[2] ** -0.5
        outs.append(flash_attn_varlen_ref(own, k[rows], v[rows], *both, scale, window=window)[0])
    return torch.cat(outs)


def attend_gradients(case, lengths, prefix_of, window=None, backend="cpp"):
    *qkv, do = case
    plan = make_varlen_plan(bounds(lengths), prefix_of)
    return gradients(
        lambda *xs: tree_attention(*xs, plan, window=window, backend=backend), qkv, [do]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [SEQUENCES, TREES], ids=["sequences", "trees"])
@pytest.mark.parametrize("window", [None, 33, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_of_attention_is_fp64s(dtype, shape, window, batch):
    *qkv, do = attention_case(batch[0], shape, dtype)
    plan = make_varlen_plan(bounds(batch[0]), batch[1])
    assert_near_fp64(
        lambda q, k, v, backend: tree_attention(q, k, v, plan, window=window, backend=backend),
        lambda q, k, v: attend64(q, k, v, *batch, window),
        qkv,
        [do],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("shape", [(64, 2, 3), (40, 1, 7)])
def test_a_sequence_alone_has_the_gradient_it_has_among_others(dtype, num_threads, window, shape):
    lengths, prefix_of = SEQUENCES
    case = attention_case(lengths, shape, dtype)
    together = attend_gradients(case, lengths, prefix_of, window)
    with threads(num_threads):
        again = attend_gradients(case, lengths, prefix_of, window)
        assert all(torch.equal(a, b) for a, b in zip(again, together, strict=True))
        for lo, n in zip(bounds(lengths), lengths, strict=False):
            rows = slice(lo, lo + n)
            alone = attend_gradients([x[rows] for x in case], [n], [-1], window)
            assert all(torch.equal(a, b[rows]) for a, b in zip(alone, together, strict=True))


def test_segments_that_share_keys_are_one_task():
    """Two threads would race for the gradient of the keys."""
    found = make_varlen_plan(bounds(TREES[0]), TREES[1]).span_trees
    assert found.trees.tolist() == [0, 5, 6, 8]
    starts = bounds(TREES[0])
    assert found.spans[:, 0].tolist() == [starts[i] for i in (0, 1, 3, 4, 6, 2, 5, 7)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 50])
def test_a_tree_alone_has_the_gradient_it_has_among_others(dtype, num_threads, window):
    lengths, prefix_of = TREES
    case = attention_case(lengths, (64, 2, 3), dtype)
    together = attend_gradients(case, lengths, prefix_of, window)
    cu, root_of = bounds(lengths), []
    for segment, parent in enumerate(prefix_of):
        root_of.append(segment if parent < 0 else root_of[parent])
    with threads(num_threads):
        again = attend_gradients(case, lengths, prefix_of, window)
        assert all(torch.equal(a, b) for a, b in zip(again, together, strict=True))
        for root in set(root_of):
            members = [s for s in range(len(lengths)) if root_of[s] == root]
            rows = [t for s in members for t in range(cu[s], cu[s + 1])]
            parents = [members.index(prefix_of[s]) if s != root else -1 for s in members]
            counts = [lengths[s] for s in members]
            alone = attend_gradients([x[rows] for x in case], counts, parents, window)
            assert all(torch.equal(a, b[rows]) for a, b in zip(alone, together, strict=True))


def test_with_a_window_of_one_the_scores_have_no_gradient():
    """A query's weight on its own key is 1 whatever the score."""
    case = attention_case([40], (16, 1, 2), torch.float32)
    dq, dk, dv = attend_gradients(case, [40], [-1], window=1)
    assert dq.abs().max() < 1e-5 and dk.abs().max() < 1e-5
    assert torch.allclose(dv[:, 0], case[3].sum(1), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_views_are_those_of_copies(dtype):
    """A layer hands over parts of one product, and autograd a gradient of any layout."""
    q, k, v, do = attention_case([30, 50], (32, 2, 2), dtype)
    fused = torch.cat([q, k, v], 1)
    views = fused.split([4, 2, 2], 1)
    plan = make_varlen_plan([0, 30, 80])
    lay_apart = torch.cat([do, do], 2)[:, :, :32]
    found = gradients(lambda x: tree_attention(*x.split([4, 2, 2], 1), plan), [fused], [lay_apart])
    wanted = gradients(lambda *xs: tree_attention(*xs, plan), views, [do])
    assert torch.equal(found[0], torch.cat(wanted, 1))
    packed = gradients(
        lambda *xs: flash_attn_varlen(*xs, [0, 30, 80], [0, 30, 80], 50, 50), views, [do]
    )
    assert all(torch.equal(a, b) for a, b in zip(packed, wanted, strict=True))


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 7, 16, 40, 100, 576])
def test_the_gradients_of_norms_are_fp64s(dtype, width):
    torch.manual_seed(width)
    x, residual = (draw(70, width, dtype=dtype) * 3 for _ in range(2))
    weight, *up = draw(width, dtype=dtype), *(draw(70, width, dtype=dtype) for _ in range(2))
    assert_near_fp64(
        lambda x, w, backend: rms_norm(x, w, 1e-5, backend=backend),
        lambda x, w: rms_norm_ref(x, w, 1e-5),
        [x, weight],
        up[:1],
    )
    total = (residual + x).double()  # the definition has no rounding between sum and norm
    exact = gradients(lambda s, w: (rms_norm_ref(s, w, 1e-5), s), [total, weight.double()], up)
    found = gradients(lambda *xs: add_rms_norm(*xs, 1e-5), [x, residual, weight], up)
    limit = 2.0**-8 if dtype == torch.bfloat16 else 0.0
    for ours, wanted in zip(found, [exact[0], *exact], strict=True):
        off = (ours.double() - wanted).abs() - limit * wanted.abs()
        assert off.max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 16, 40, 100, 1536])
def test_the_gradient_of_swiglu_is_fp64s(dtype, width):
    torch.manual_seed(width)
    gate_up = draw(9, 2 * width, dtype=dtype) * 4
    up = draw(9, width, dtype=dtype)
    run = lambda x, backend: swiglu(x, backend=backend)  # noqa: E731
    assert_near_fp64(run, swiglu_ref, [gate_up], [up])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 40, 64, 128])
def test_the_gradients_of_head_norms_and_rotation_are_fp64s(dtype, head_dim):
    torch.manual_seed(head_dim)
    q, k = draw(37, 6, head_dim, dtype=dtype), draw(37, 2, head_dim, dtype=dtype)
    weights = [draw(head_dim, dtype=dtype) for _ in range(2)]
    angle = torch.randn(37, head_dim // 2)
    tables, places = (angle.cos(), angle.sin()), torch.arange(37)
    up = [draw(37, 6, head_dim, dtype=dtype), draw(37, 2, head_dim, dtype=dtype)]
    wide = [x.double() for x in tables]
    assert_near_fp64(
        lambda q, k, a, b, backend: qk_norm_rope(q, k, a, b, *tables, None, backend=backend),
        lambda q, k, a, b: qk_norm_rope_ref(q, k, a, b, *wide, places, 1e-6),
        [q, k, *weights],
        up,
    )
    assert_near_fp64(
        lambda q, k, backend: apply_rope(q, k, *tables, None, backend=backend),
        lambda q, k: apply_rope_ref(q, k, *wide, places),
        [q, k],
        up,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_split_product_have_the_gradients_of_copies(dtype):
    fused, weight = draw(45, 5, 40, dtype=dtype), draw(40, dtype=dtype)
    up = draw(45, 3, 40, dtype=dtype)
    found = gradients(lambda x, w: rms_norm(x[:, :3], w), [fused, weight], [up])
    wanted = gradients(rms_norm, [fused[:, :3], weight], [up])
    assert torch.equal(found[0][:, :3], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_gradients_of_rows_have_the_same_bits_in_any_batch_and_on_any_threads(dtype, num_threads):
    torch.manual_seed(0)
    rows, width = 700, 96  # enough to be shared among threads
    x, up = draw(rows, width, dtype=dtype), draw(rows, width, dtype=dtype)
    wide, weight = draw(rows, 2 * width, dtype=dtype), draw(width, dtype=dtype)
    picked = slice(101, 333)
    whole = gradients(rms_norm, [x, weight], [up]), gradients(swiglu, [wide], [up])
    with threads(num_threads):
        again = gradients(rms_norm, [x, weight], [up])
        assert all(torch.equal(a, b) for a, b in zip(again, whole[0], strict=True))
        assert torch.equal(gradients(swiglu, [wide], [up])[0], whole[1][0])
        part = gradients(rms_norm, [x[picked], weight], [up[picked]])[0]
        assert torch.equal(part, whole[0][0][picked])
        part = gradients(swiglu, [wide[picked]], [up[picked]])[0]
        assert torch.equal(part, whole[1][0][picked])


# -- log-probs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("has_entropy", [False, True])
def test_the_gradient_of_log_probs_and_entropy_is_fp64s(dtype, temperature, has_entropy):
    torch.manual_seed(1)
    hidden, weight = draw(90, 24, dtype=dtype), draw(1003, 24, dtype=dtype)
    ids, up = torch.randint(0, 1003, (90,)), [draw(90), draw(90)]

    def run(hidden, weight, backend):
        return linear_logprob(
            hidden, weight, ids, temperature=temperature, return_entropy=has_entropy,
            chunk_size=40, backend=backend,
        )  # fmt: skip

    def run64(hidden, weight):
        both = linear_logprob_ref(hidden, weight, ids, temperature)
        return both if has_entropy else both[0]

    assert_near_fp64(run, run64, [hidden, weight], up if has_entropy else up[:1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_come_twice_at_one_place_are_counted_twice(dtype):
    torch.manual_seed(2)
    hidden, weight = draw(8, 24, dtype=dtype), draw(203, 24, dtype=dtype)
    ids = torch.randint(0, 203, (8, 5))
    ids[:, 3] = ids[:, 1]

    def run64(hidden, weight):
        return torch.log_softmax(hidden @ weight.t(), -1).gather(1, ids)

    run = lambda h, w, backend: linear_logprob(h, w, ids, backend=backend)  # noqa: E731
    assert_near_fp64(run, run64, [hidden, weight], [draw(8, 5)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_gradient_of_log_probs_depends_on_neither_company_nor_threads(dtype, num_threads):
    torch.manual_seed(3)
    hidden, weight = draw(60, 24, dtype=dtype), draw(1003, 24, dtype=dtype)
    ids, up = torch.randint(0, 1003, (60,)), [draw(60), draw(60)]

    def run(rows):
        return gradients(
            lambda h: linear_logprob(h, weight, ids[rows], return_entropy=True),
            [hidden[rows]],
            [u[rows] for u in up],
        )[0]

    together = run(slice(0, 60))
    with threads(num_threads):
        assert torch.equal(run(slice(0, 60)), together)
        for rows in (slice(0, 33), slice(5, 60)):
            assert torch.equal(run(rows), together[rows])
