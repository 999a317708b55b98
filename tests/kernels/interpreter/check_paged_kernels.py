"""Triton's cache write and paged attention, interpreted, against their definitions in fp64.

Unwritten cache rows, block table entries past a sequence and outputs before the launch are NaN or
out of range: a kernel that reads one, even with weight 0, or leaves an output unwritten, fails.
"""

import pytest
import torch
from guard import assert_as_close

from kernels import paged_attention, paged_attention_decode, reshape_and_cache
from kernels.torch.kv_cache import reshape_and_cache_ref
from kernels.torch.paged_attention import paged_attention_ref

FP8 = torch.float8_e4m3fn
LENGTHS = [1, 19, 130, 64]
NUM_BLOCKS = 20
DTYPES = [torch.float32, torch.bfloat16]


def bounds(counts):
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def make_step(heads, dtype, counts, lengths=LENGTHS, block=16, seed=0):
    """(q, k_cache, v_cache, starts, lens, tables) with shuffled blocks."""
    torch.manual_seed(seed)
    h, num_kv, d = heads
    caches = [torch.full((NUM_BLOCKS, block, num_kv, d), torch.nan).to(dtype) for _ in "kv"]
    order = torch.randperm(NUM_BLOCKS).tolist()
    tables = torch.full((len(lengths), -(-max(lengths) // block) + 1), 10**6, dtype=torch.int32)
    for i, n in enumerate(lengths):
        for j in range(-(-n // block)):
            tables[i, j] = order.pop()
        slots = [int(tables[i, t // block]) * block + t % block for t in range(n)]
        slots = torch.tensor(slots, dtype=torch.int64)
        k, v = torch.randn(n, num_kv, d).to(dtype), torch.randn(n, num_kv, d).to(dtype)
        reshape_and_cache_ref(k, v, *caches, slots)
    wide_q = torch.full((sum(counts), h + 1, d), torch.nan).to(dtype)
    q = wide_q[:, :h]
    q.copy_(torch.randn(q.shape))
    return q, *caches, bounds(counts), torch.tensor(lengths, dtype=torch.int32), tables


def definition(step, kind, window=None):
    q, k, v, starts, lens, tables = step
    wide = [x.to(kind) for x in (q, k, v)]
    found = paged_attention_ref(
        *wide, starts, lens, tables.long(), q.shape[2] ** -0.5, window=window
    )
    return found.double()


def assert_as_good_as_plain_torch(ours, step, window=None):
    exact, plain = (definition(step, kind, window) for kind in (torch.float64, step[0].dtype))
    assert_as_close([ours], [plain.to(step[0].dtype)], [exact])


def decode(step, **options):
    q, k, v, _, lens, tables = step
    out = torch.full(q.shape, torch.nan).to(q.dtype)
    limit = options.pop("max_seq_len", int(lens.max()))
    return paged_attention_decode(
        q, k, v, tables, lens, max_seq_len=limit, out=out, backend="triton", **options
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32])
def test_cache_write_skips_negative_slots_and_touches_nothing_else(dtype, block):
    torch.manual_seed(0)
    fused = torch.randn(5, 8, 20).to(dtype)
    k, v = fused[:, :3], fused[:, 4:7]  # strided, as slices of a fused projection are
    slots = torch.tensor([3, 17, -1, 0, 79])
    ours = [torch.full((80 // block + 1, block, 3, 20), torch.nan).to(dtype) for _ in "kv"]
    expected = [c.clone() for c in ours]
    reshape_and_cache(k, v, *ours, slots, backend="triton")
    reshape_and_cache_ref(k, v, *expected, slots)
    for a, e in zip(ours, expected, strict=True):
        assert torch.equal(a.view(torch.uint8), e.view(torch.uint8))


def test_cache_write_in_fp8_divides_by_the_scale_and_saturates():
    torch.manual_seed(0)
    k, v = torch.randn(6, 2, 16).bfloat16(), torch.randn(6, 2, 16).bfloat16()
    k[0, 0, 0] = 1e4
    scales = torch.tensor([0.03]), torch.tensor([0.5])
    slots = torch.tensor([40, 3, 2, 31, 47, 0])
    ours, expected = ([torch.zeros(3, 16, 2, 16).to(FP8) for _ in "kv"] for _ in "oe")
    reshape_and_cache(k, v, *ours, slots, *scales, backend="triton")
    reshape_and_cache(k, v, *expected, slots, *scales, backend="torch")
    for a, e in zip(ours, expected, strict=True):
        assert torch.equal(a.float(), e.float())
    assert ours[0][2, 8, 0, 0].float() == 448.0


@pytest.mark.parametrize(
    ("heads", "block", "dtype", "counts"),
    [
        ((9, 3, 64), 16, torch.float32, [1, 1, 1, 1]),
        ((9, 3, 64), 32, torch.bfloat16, [1, 19, 40, 3]),  # whole, prefix hits, a long context
        ((7, 1, 128), 16, torch.bfloat16, [1, 1, 60, 1]),  # one chunk among decodes
        ((2, 2, 80), 16, torch.bfloat16, [1, 1, 1, 2]),
        ((8, 1, 24), 32, torch.float32, [1, 19, 130, 64]),
        ((4, 1, 64), 16, torch.bfloat16, [1, 5, 70, 1]),
    ],
)
def test_paged_attention(heads, block, dtype, counts):
    step = make_step(heads, dtype, counts, block=block)
    ours = paged_attention(
        *step, max_query_len=max(counts), max_seq_len=130, backend="triton",
        out=torch.full(step[0].shape, torch.nan).to(dtype),
    )  # fmt: skip
    assert_as_good_as_plain_torch(ours, step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_every_group_head_dim_and_block_size(group, head_dim, block, dtype):
    """A mixed step (with a sequence that has no new token, and one that is empty), then a decode
    of the sequences that have a token."""
    heads = (group, 1, head_dim)
    step = make_step(heads, dtype, [1, 0, 7, 0, 1], [1, 20, 40, 0, 33], block)
    ours = paged_attention(*step, max_query_len=7, max_seq_len=40, backend="triton")
    assert_as_good_as_plain_torch(ours, step)
    step = make_step(heads, dtype, [1, 1, 1], [1, 40, 33], block)
    assert_as_good_as_plain_torch(decode(step, split_size=64), step)


@pytest.mark.parametrize(("dtype", "group"), [(torch.bfloat16, 150), (torch.float32, 80)])
def test_heads_of_a_group_that_do_not_fit_one_tile(dtype, group):
    step = make_step((group, 1, 64), dtype, [1, 3, 1], [1, 40, 33])
    ours = paged_attention(*step, max_query_len=3, max_seq_len=40, backend="triton")
    assert_as_good_as_plain_torch(ours, step)
    step = make_step((2 * group, 2, 64), dtype, [1, 1], [40, 33])
    assert_as_good_as_plain_torch(decode(step, split_size=64), step)


@pytest.mark.parametrize("options", [{}, {"num_splits": 3}, {"split_size": 64}])
@pytest.mark.parametrize(
    ("heads", "dtype"), [((9, 3, 64), torch.float32), ((7, 1, 80), torch.bfloat16)]
)
def test_decode_split_over_programs(heads, dtype, options):
    step = make_step(heads, dtype, [1, 1, 1, 1])
    assert_as_good_as_plain_torch(decode(step, **options), step)


def test_a_fixed_split_size_makes_decoding_independent_of_the_batch():
    step = make_step((4, 2, 64), torch.bfloat16, [1, 1, 1, 1])
    together = decode(step, split_size=64, max_seq_len=1000)
    q, k, v, _, lens, tables = step
    for i in range(4):
        alone = (q[i : i + 1], k, v, None, lens[i : i + 1], tables[i : i + 1])
        assert torch.equal(decode(alone, split_size=64)[0], together[i])


def test_a_sequence_divides_its_own_length_whatever_bound_the_host_knows():
    """As in a CUDA graph, whose grid is made for the longest sequence there can be."""
    step = make_step((4, 2, 64), torch.float32, [1, 1, 1, 1])
    tight = decode(step, num_splits=3)
    assert torch.equal(decode(step, num_splits=3, max_seq_len=100_000), tight)
    assert torch.equal(decode(step, num_splits=3, max_seq_len=1), tight)
    assert_as_good_as_plain_torch(decode(step, max_seq_len=100_000), step)


@pytest.mark.parametrize(
    ("window", "heads", "block", "dtype"),
    [
        (1, (2, 1, 64), 16, torch.float32),
        (2, (4, 2, 64), 32, torch.bfloat16),
        (50, (3, 1, 64), 16, torch.bfloat16),
        (64, (7, 1, 80), 16, torch.float32),
        (65, (2, 1, 64), 32, torch.float32),
    ],
)
def test_a_window(window, heads, block, dtype):
    """Short ones leave whole tiles that a query of a program does not see and its first one does;
    and a decode begins in the middle of a context."""
    step = make_step(heads, dtype, [1, 19, 100, 3], block=block)
    ours = paged_attention(
        *step, max_query_len=100, max_seq_len=130, window=window, backend="triton",
        out=torch.full(step[0].shape, torch.nan).to(dtype),
    )  # fmt: skip
    assert_as_good_as_plain_torch(ours, step, window)
    step = make_step(heads, dtype, [1, 1, 1, 1], block=block)
    for options in ({"num_splits": 3}, {"split_size": 16}, {"max_seq_len": 100_000}):
        assert_as_good_as_plain_torch(decode(step, window=window, **options), step, window)


def test_a_window_as_long_as_the_context_is_none():
    dtype = torch.bfloat16
    step = make_step((2, 1, 64), dtype, [1, 19, 100, 3])
    limits = {"max_query_len": 100, "max_seq_len": 130, "backend": "triton"}
    open_ended = paged_attention(*step, **limits)
    assert torch.equal(paged_attention(*step, **limits, window=130), open_ended)
    assert not torch.equal(paged_attention(*step, **limits, window=129), open_ended)
    step = make_step((2, 1, 64), dtype, [1, 1, 1, 1])
    for options in ({"num_splits": 3}, {"split_size": 64}):
        assert torch.equal(decode(step, window=130, **options), decode(step, **options))


def test_what_no_window_holds_is_not_read():
    """But for the tile in which the window begins."""
    step = make_step((2, 1, 64), torch.float32, [1, 1, 1, 1])
    before, tables = decode(step, window=2, num_splits=2), step[5]
    for cache in step[1:3]:
        cache[tables[2, :4].long()] = torch.nan  # keys 0..63 of 130
    assert torch.equal(decode(step, window=2, num_splits=2), before)


def test_a_cache_of_fp8_is_read_with_its_scales():
    step = make_step((4, 2, 64), torch.bfloat16, [1, 1, 3, 1])
    q, k, v, *rest = step
    scales = torch.tensor([0.25]), torch.tensor([4.0])
    low = [(x.float() / s).to(FP8) for x, s in zip((k, v), scales, strict=True)]
    back = [(x.float() * s) for x, s in zip(low, scales, strict=True)]
    limits = {"max_query_len": 3, "max_seq_len": 130, "backend": "triton"}
    ours = paged_attention(q, *low, *rest, k_scale=scales[0], v_scale=scales[1], **limits)
    exact = definition((q, *back, *rest), torch.float64)
    assert torch.allclose(ours.double(), exact, atol=0.03)


def test_an_empty_sequence_gives_zeros():
    q, k, v, _, lens, tables = make_step((2, 1, 64), torch.float32, [1, 1, 1, 1])
    lens[2] = 0
    step = (q, k, v, None, lens, tables)
    for options in ({"num_splits": 1}, {"split_size": 64}):
        assert torch.equal(decode(step, **options)[2], torch.zeros(2, 64))


def test_bad_input_names_the_argument():
    step = make_step((4, 2, 16), torch.float32, [1, 1, 1, 1])
    q, k, v, starts, lens, tables = step
    limits = {"max_query_len": 1, "max_seq_len": 130, "backend": "triton"}
    wrong = tables.clone()
    wrong[2, 3] = NUM_BLOCKS
    for name, call in {
        "block_tables.2, 3.=20": lambda: paged_attention(
            q, k, v, starts, lens, wrong, **limits, debug=True
        ),
        "block_tables.2.: 2 blocks": lambda: decode(
            (q, k, v, None, lens, tables[:, :2]), debug=True
        ),
        "query_start_loc": lambda: paged_attention(q, k, v, starts[:-1], lens, tables, **limits),
        "v_cache": lambda: paged_attention(q, k, v.bfloat16(), starts, lens, tables, **limits),
        "k_cache": lambda: paged_attention(
            q, torch.cat([k, k], 1)[:, ::2], v, starts, lens, tables, **limits
        ),
        "k_scale": lambda: paged_attention(q, k.to(FP8), v.to(FP8), starts, lens, tables, **limits),
        "seq_lens": lambda: decode((q[:3], k, v, None, lens, tables)),
        "split_size=0": lambda: decode(step, split_size=0),
        "window=0": lambda: decode(step, window=0),
        "window=-1": lambda: paged_attention(q, k, v, starts, lens, tables, **limits, window=-1),
        "give one": lambda: decode(step, split_size=64, num_splits=2),
        "out": lambda: paged_attention(q, k, v, starts, lens, tables, **limits, out=q.double()),
        "slot_mapping.1.=320": lambda: reshape_and_cache(
            k[0, :2], v[0, :2], k, v, torch.tensor([0, 320]), backend="triton", debug=True
        ),
        "slot_mapping: torch.float": lambda: reshape_and_cache(
            k[0, :2], v[0, :2], k, v, torch.zeros(2), backend="triton"
        ),
    }.items():
        with pytest.raises(ValueError, match=name):
            call()
