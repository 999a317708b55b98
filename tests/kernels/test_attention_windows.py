"""Sliding windows on a CPU: a query at position p sees keys j with p - w < j <= p.

Against a masked softmax in fp64, with gradients; and the same bits in training, in a tree, in
prefill, in a chunk and in decoding, with any company and any number of threads.
"""

import math
import random
from functools import partial

import pytest
import torch
from native_cases import bounds, shuffled_cache, split_qkv, threads

from kernels import (
    flash_attn_varlen,
    make_paged_plan,
    make_varlen_plan,
    paged_attention,
    paged_attention_decode,
    tree_attention,
)
from nanoengine.model.attention import PackedContext, SharedPrefixContext

pytestmark = pytest.mark.usefixtures("cpu_path")

WINDOWS = [1, 2, 5, 16, 64, 127, 128, 129, 1000]
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(16, 2, 1), (40, 1, 3), (64, 2, 4)]  # head_dim, key heads, group
LENGTHS = [1, 300, 17, 128, 129, 2]
LONGEST = max(LENGTHS)
SEGMENTS, PREFIX_OF = [150, 5, 133, 1, 40], [-1, 0, 0, 2, 2]


def masked_softmax(q_QHD, k_KKD, v_KKD, window):
    """The definition in the tensors' dtype; the queries are a sequence's last."""
    num_queries, num_keys = len(q_QHD), len(k_KKD)
    group = q_QHD.shape[1] // k_KKD.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k_KKD, v_KKD))
    position, key = torch.arange(num_keys - num_queries, num_keys)[:, None], torch.arange(num_keys)
    seen = (position - window < key) & (key <= position)
    scores = torch.einsum("qhd,khd->hqk", q_QHD, k) * q_QHD.shape[2] ** -0.5
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), -1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def rows_of_branches(lengths, prefix_of):
    """Of each segment the rows of its ancestors and its own."""
    cu, rows = bounds(lengths), []
    for segment, parent in enumerate(prefix_of):
        own = list(range(cu[segment], cu[segment + 1]))
        rows.append((rows[parent] if parent >= 0 else []) + own)
    return rows


def by_branch(q, k, v, lengths, prefix_of, window):
    """The definition, of every segment over its own copy of its keys."""
    parts = []
    for length, rows in zip(lengths, rows_of_branches(lengths, prefix_of), strict=True):
        parts.append(masked_softmax(q[rows[-length:]], k[rows], v[rows], window))
    return torch.cat(parts)


def train(q, k, v, lengths, window, **options):
    cu, longest = bounds(lengths), max(lengths)
    return flash_attn_varlen(q, k, v, cu, cu, longest, longest, window=window, **options)


def with_gradients(op, qkv, dtype, slope=None):
    leaves = [x.to(dtype).requires_grad_() for x in qkv]
    out = op(*leaves)
    if slope is None:
        slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    slope = slope.to(qkv[0].dtype).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope)]


def assert_as_good_as_plain_torch(ours, naive, exact, window):
    """o, dq, dk, dv. With a window of 1 all weights are 1, so dq and dk are 0: ours are what is
    left of a difference of products as large as dv's."""
    dtype = ours[0].dtype
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}[dtype]
    for name, a, n, e in zip(("o", "dq", "dk", "dv"), ours, naive, exact, strict=True):
        error, most = ((x.double() - e).norm().item() for x in (a, n))
        is_zero = window == 1 and name in ("dq", "dk")
        floor = rounding * exact[3].norm().item() if is_zero else 0.0
        assert error <= 2 * most + floor, (name, error, most)


def check_against_definition(ours, plain, num_tokens, shape, dtype, window):
    torch.manual_seed(window)
    head_dim, num_kv, group = shape
    qkv = split_qkv(num_tokens, num_kv, group, head_dim, dtype)
    exact = with_gradients(plain, qkv, torch.float64)
    naive = with_gradients(plain, qkv, dtype)
    found = with_gradients(ours, qkv, dtype)
    assert_as_good_as_plain_torch(found, naive, exact, window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_output_and_gradients_are_those_of_a_masked_softmax(dtype, window):
    shape = SHAPES[WINDOWS.index(window) % 3]
    alone = [-1] * len(LENGTHS)
    check_against_definition(
        lambda q, k, v: train(q, k, v, LENGTHS, window),
        lambda q, k, v: by_branch(q, k, v, LENGTHS, alone, window),
        *(sum(LENGTHS), shape, dtype, window),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 40, 128, 180, 1000])
def test_a_trees_output_and_gradients_are_those_of_its_branches(dtype, window):
    """Windows that end in the segment, reach into its parent, and reach through it."""
    plan = make_varlen_plan(bounds(SEGMENTS), PREFIX_OF)
    check_against_definition(
        lambda q, k, v: tree_attention(q, k, v, plan, window=window),
        lambda q, k, v: by_branch(q, k, v, SEGMENTS, PREFIX_OF, window),
        *(sum(SEGMENTS), SHAPES[window % 3], dtype, window),
    )


@pytest.mark.parametrize("window", [1, 2, 3, 8])
def test_gradients_of_a_window_are_finite_differences(window):
    """Of fp64, which PyTorch computes on either path."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(7, heads, 2, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)
    )
    tree = make_varlen_plan([0, 3, 5, 7], [-1, 0, 0])
    gradcheck = partial(torch.autograd.gradcheck, inputs=(q, k, v), fast_mode=True)
    assert gradcheck(lambda *x: train(*x, [5, 2], window))
    assert gradcheck(lambda *x: tree_attention(*x, tree, window=window))


def make_caches(k, v, lengths, block_size=16, order="runs"):
    """Blocks that no sequence has are NaN; what is behind a sequence in its last block is finite,
    as in an engine: PyTorch reads it, with weight 0."""
    *caches, tables = shuffled_cache(k, v, lengths, block_size, order)
    used = tables[tables >= 0]
    for cache in caches:
        cache[used] = cache[used].nan_to_num(3.0)
    return *caches, tables


def serve(q, caches, cuts, window, plan=None):
    """(o, its rows) of one step of runs (sequence, lo, hi) of queries, each over the keys up to
    its own end."""
    starts = bounds(LENGTHS)
    rows = torch.cat([torch.arange(starts[i] + lo, starts[i] + hi) for i, lo, hi in cuts])
    counts, lens = [hi - lo for _, lo, hi in cuts], [hi for _, _, hi in cuts]
    step = (bounds(counts), lens, caches[2][[i for i, _, _ in cuts]])
    limits = {"max_query_len": max(counts), "max_seq_len": max(lens)}
    return paged_attention(q[rows], *caches[:2], *step, **limits, window=window, plan=plan), rows


def decodes():
    return [(i, p, p + 1) for i, n in enumerate(LENGTHS) for p in range(n)]


def chunks(rng, most):
    """Every sequence cut at random."""
    cuts = []
    for i, n in enumerate(LENGTHS):
        places = sorted(rng.sample(range(1, n), min(n - 1, rng.randint(1, most))))
        cuts += [(i, lo, hi) for lo, hi in zip([0, *places], [*places, n], strict=True)]
    return cuts


def whole():
    return [(i, 0, n) for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_paged_attention_is_a_masked_softmax(dtype, window):
    """Prefill, chunks and decodes in one step, over a cache whose blocks are no divisor of 128."""
    head_dim, num_kv, group = SHAPES[(WINDOWS.index(window) + 1) % 3]
    torch.manual_seed(window)
    q, k, v = split_qkv(sum(LENGTHS), num_kv, group, head_dim, dtype)
    cuts = [(0, 0, 1), (1, 140, 300), (1, 299, 300), (2, 0, 17), (3, 5, 128), (4, 128, 129)]
    found, _ = serve(q, make_caches(k, v, LENGTHS, 12), cuts, window)
    starts, exact, naive = bounds(LENGTHS), [], []
    for i, lo, hi in cuts:
        run, keys = slice(starts[i] + lo, starts[i] + hi), slice(starts[i], starts[i] + hi)
        parts = q[run], k[keys], v[keys]
        naive.append(masked_softmax(*parts, window))
        exact.append(masked_softmax(*(x.double() for x in parts), window))
    error, most = ((torch.cat(x).double() - torch.cat(exact)).norm() for x in ([found], naive))
    assert error <= (1.0 if dtype == torch.bfloat16 else 2.0) * most


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_query_has_the_bits_of_training_however_it_is_served(window, dtype):
    head_dim, num_kv, group = SHAPES[(WINDOWS.index(window) + 2) % 3]
    rng = random.Random(window)
    torch.manual_seed(window)
    q, k, v = split_qkv(sum(LENGTHS), num_kv, group, head_dim, dtype)
    trained = train(q, k, v, LENGTHS, window)
    for caches in (
        make_caches(k, v, LENGTHS, rng.choice([3, 16]), "heads first"),
        make_caches(k, v, LENGTHS, rng.choice([16, 32])),
    ):
        for cuts in (whole(), decodes(), chunks(rng, 6)):
            out, rows = serve(q, caches, cuts, window)
            assert torch.equal(out, trained[rows]), cuts[:9]
    lens, tables = [hi for _, _, hi in decodes()], caches[2][[i for i, _, _ in decodes()]]
    out = paged_attention_decode(q, *caches[:2], tables, lens, max_seq_len=LONGEST, window=window)
    assert torch.equal(out, trained)
    for num_threads in (1, 2, 2):  # any company
        cuts = rng.sample(chunks(rng, 3), 2) + rng.sample(decodes(), 3)
        with threads(num_threads):
            out, rows = serve(q, caches, cuts, window)
        assert torch.equal(out, trained[rows]), (cuts, num_threads)
    starts = bounds(LENGTHS)
    for i, n in enumerate(LENGTHS):
        run = slice(starts[i], starts[i] + n)
        with threads(1 + i % 2):
            assert torch.equal(train(q[run], k[run], v[run], [n], window), trained[run]), n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_tree_has_the_bits_of_its_branches_alone(window, dtype):
    head_dim, num_kv, group = SHAPES[WINDOWS.index(window) % 3]
    torch.manual_seed(window)
    q, k, v = split_qkv(sum(SEGMENTS), num_kv, group, head_dim, dtype)
    tree = tree_attention(q, k, v, make_varlen_plan(bounds(SEGMENTS), PREFIX_OF), window=window)
    for length, rows in zip(SEGMENTS, rows_of_branches(SEGMENTS, PREFIX_OF), strict=True):
        alone = train(q[rows], k[rows], v[rows], [len(rows)], window)
        assert torch.equal(tree[rows[-length:]], alone[-length:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_window_as_long_as_the_sequence_is_none(dtype):
    """In one plan, so a layer's window is not another's."""
    torch.manual_seed(0)
    q, k, v = split_qkv(sum(LENGTHS), 2, 3, 32, dtype)
    plan = make_varlen_plan(bounds(LENGTHS))
    tree = make_varlen_plan([0, 300, 400, len(q)], [-1, 0, 1])
    caches = make_caches(k, v, LENGTHS)
    step = (bounds(LENGTHS), LENGTHS, caches[2])
    paged = make_paged_plan(*step, cache=caches[1], num_heads=6, dtype=dtype)

    def packed(window):
        return with_gradients(lambda *x: train(*x, LENGTHS, window, plan=plan), (q, k, v), dtype)

    def of_tree(window):
        return with_gradients(lambda *x: tree_attention(*x, tree, window=window), (q, k, v), dtype)

    def of_cache(window):
        return [serve(q, caches, whole(), window, paged)[0]]

    for op, longest in ((packed, LONGEST), (of_tree, len(q)), (of_cache, LONGEST)):
        short, open_ended = op(7), op(None)
        for window in (longest, longest + 1, 10**6):
            same = zip(op(window), open_ended, strict=True)
            assert all(torch.equal(a, b) for a, b in same), (op.__name__, window)
        assert not torch.equal(short[0], open_ended[0])
        assert not torch.equal(op(longest - 1)[0], open_ended[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 16, 129])
def test_a_key_changes_the_queries_whose_windows_hold_it_and_no_others(window, dtype):
    torch.manual_seed(0)
    length, key = 300, 141
    q, k, v = split_qkv(length, 2, 2, 32, dtype)
    before = train(q, k, v, [length], window)
    k[key], v[key] = k[key] / 2, -1e4
    changed = (train(q, k, v, [length], window) != before).flatten(1).all(1)
    assert changed.nonzero().flatten().tolist() == list(range(key, min(length, key + window)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 16, 129])
@pytest.mark.parametrize("num_queries", [1, 3, 100])
def test_what_no_window_holds_changes_no_bit_of_a_step(window, num_queries, dtype):
    """Keys and values as far from the others as a finite number can be."""
    torch.manual_seed(0)
    q, k, v = split_qkv(sum(LENGTHS), 2, 2, 32, dtype)
    unseen = 300 - num_queries + 1 - window
    found = []
    for far in (1.0, 1e30, -1e30):
        k[1 : 1 + unseen], v[1 : 1 + unseen] = far, far
        caches = make_caches(k, v, LENGTHS)
        found.append(serve(q, caches, [(1, 300 - num_queries, 300)], window)[0])
    assert found[0].isfinite().all() and unseen > 0
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])
    k[1 + unseen], v[1 + unseen] = 2.0, 2.0  # the first key that is seen
    caches = make_caches(k, v, LENGTHS)
    assert not torch.equal(serve(q, caches, [(1, 300 - num_queries, 300)], window)[0], found[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 16, 129])
def test_keys_outside_the_windows_of_a_loss_have_a_gradient_of_zero(window, dtype):
    torch.manual_seed(0)
    qkv = split_qkv(300, 2, 2, 32, dtype)
    slope = torch.zeros(300, 4, 32)
    slope[200:210] = torch.randn(10, 4, 32)
    _, dq, dk, dv = with_gradients(lambda *x: train(*x, [300], window), qkv, dtype, slope)
    first = 200 - window + 1
    for grad, lo in ((dq, 200), (dk, first), (dv, first)):
        assert not grad[:lo].any() and not grad[210:].any()
        assert grad is not dv or grad[lo:210].flatten(1).any(1).all()
    # the loss of one branch, whose window reaches into the prompt and not to its beginning
    tree = make_varlen_plan([0, 200, 210, 300], [-1, 0, 0])
    _, _, dk, dv = with_gradients(
        lambda *x: tree_attention(*x, tree, window=window), qkv, dtype, slope
    )
    assert not dk[:first].any() and not dv[:first].any() and not dv[210:].any()
    assert dv[first:210].flatten(1).any(1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_contexts_hand_on_the_scale_and_the_window(dtype):
    q, k, v = split_qkv(60, 1, 2, 16, dtype)
    cu, options = [0, 20, 60], {"softmax_scale": 0.3, "window": 7}
    packed = PackedContext(torch.tensor(cu, dtype=torch.int32), 40)
    expected = flash_attn_varlen(q, k, v, cu, cu, 40, 40, **options)
    assert torch.equal(packed.attend(0, q, k, v, scale=0.3, window=7), expected)
    tree = SharedPrefixContext(cu, [-1, 0]).attend(0, q, k, v, scale=0.3, window=7)
    alone = flash_attn_varlen(q, k, v, [0, 60], [0, 60], 60, 60, **options)
    assert torch.equal(tree, alone)
    for window in (None, 6):
        assert not torch.equal(packed.attend(0, q, k, v, scale=0.3, window=window), expected)
    assert not torch.equal(packed.attend(0, q, k, v, window=7), expected)


def test_a_window_below_one_is_refused_by_its_name():
    torch.manual_seed(0)
    q, k, v = split_qkv(4, 1, 2, 8, torch.float32)
    caches = make_caches(k, v, [4])
    limits = {"max_query_len": 4, "max_seq_len": 4}
    plan, tree = make_varlen_plan([0, 4]), make_varlen_plan([0, 2, 4], [-1, 0])
    for window in (0, -3):
        for call in (
            lambda w: train(q, k, v, [4], w),
            lambda w: train(q, k, v, [4], w, plan=plan),
            lambda w: tree_attention(q, k, v, tree, window=w),
            lambda w: paged_attention(q, *caches[:2], [0, 4], [4], caches[2], **limits, window=w),
            lambda w: paged_attention_decode(
                q[:1], *caches[:2], caches[2], [4], max_seq_len=4, window=w
            ),
        ):
            with pytest.raises(ValueError, match=f"window={window}: must be at least 1"):
                call(window)
    with pytest.raises(ValueError, match=r"window=3: .* causal=True"):
        train(q, k, v, [4], 3, causal=False)
