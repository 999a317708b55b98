"""linear_logprob: equals log_softmax, bit-equal to the sampler's, never tokens x vocabulary."""

import pytest
import torch
from largest_tensor import LargestTensor

from kernels import linear, linear_logprob, logits_logprob, pack_weight
from kernels.linear_logprob import ChunkLogits
from kernels.torch.linear_logprob import linear_logprob_ref

pytestmark = pytest.mark.usefixtures("cpu_path")


def inputs(dtype, num_tokens=70, width=48, vocab=97):
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, width, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, width, dtype=torch.float64).to(dtype) * 0.3
    return hidden, weight, torch.randint(0, vocab, (num_tokens,))


def run(op, hidden, weight, dtype, with_entropy):
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    logp, entropy = op(*leaves)
    slope = torch.linspace(-1, 1, logp.shape[0], dtype=logp.dtype)
    loss = (logp * slope).sum() + ((entropy * slope.flip(0)).sum() if with_entropy else 0)
    return [logp, entropy, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_are_as_good_as_plain_torch(dtype, temperature, with_entropy):
    hidden, weight, ids = inputs(dtype)

    def ours(h, w):
        return linear_logprob(
            h, w, ids, temperature=temperature, return_entropy=True, chunk_size=32
        )

    def plain(h, w):
        return linear_logprob_ref(h, w, ids, temperature)

    exact = run(plain, hidden, weight, torch.float64, with_entropy)
    naive = run(plain, hidden, weight, dtype, with_entropy)
    for a, n, e in zip(run(ours, hidden, weight, dtype, with_entropy), naive, exact, strict=True):
        floor = 1e-11 if dtype == torch.float64 else 1e-7
        assert (a.double() - e).abs().max() <= 2 * (n.double() - e).abs().max() + floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_sampler_and_trainer_score_a_token_with_the_same_bits(dtype, num_threads, temperature):
    before = torch.get_num_threads()
    hidden, weight, ids = inputs(dtype, num_tokens=40, width=64, vocab=49152)
    packed = pack_weight(weight)
    torch.set_num_threads(1)
    trained = linear_logprob(hidden, weight, ids, temperature=temperature, chunk_size=33)
    torch.set_num_threads(num_threads)
    try:
        for lo, hi in ((0, 1), (39, 40), (3, 5), (10, 17), (0, 40)):
            logits = linear(hidden[lo:hi], weight, None, packed)
            sampled = logits_logprob(logits, ids[lo:hi], temperature)
            assert sampled.dtype == torch.float32
            assert torch.equal(sampled, trained[lo:hi]), (lo, hi)
        for chunk in (1, 7, 40):
            again = linear_logprob(hidden, weight, ids, temperature=temperature, chunk_size=chunk)
            assert torch.equal(again, trained), chunk
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("return_entropy", [False, True])
def test_tokens_by_vocabulary_never_exists(return_entropy):
    hidden, weight, ids = inputs(torch.float32, num_tokens=512, width=16, vocab=1000)
    hidden.requires_grad_()
    weight.requires_grad_()
    with LargestTensor() as seen:
        out = linear_logprob(hidden, weight, ids, return_entropy=return_entropy, chunk_size=64)
        sum(x.sum() for x in (out if return_entropy else (out,))).backward()
    assert seen.numel == 64 * 1000
    with LargestTensor() as seen:
        linear_logprob_ref(hidden, weight, ids)[0].sum().backward()
    assert seen.numel == 512 * 1000, "the probe sees the plain path's tensor"


def test_main_grad_takes_the_weight_gradient():
    hidden, weight, ids = inputs(torch.float32)
    hidden.requires_grad_()
    expected = run(lambda h, w: linear_logprob_ref(h, w, ids), hidden, weight, torch.float64, False)
    weight.requires_grad_()
    weight.main_grad = torch.ones_like(weight)
    logp = linear_logprob(hidden, weight, ids, chunk_size=16)
    (logp * torch.linspace(-1, 1, 70)).sum().backward()
    assert weight.grad is None
    assert torch.allclose(weight.main_grad - 1, expected[3].float(), atol=1e-5)


def test_a_bf16_model_can_have_an_fp32_head():
    hidden, weight, ids = inputs(torch.bfloat16)
    exact, _ = linear_logprob_ref(hidden.double(), weight.double(), ids)
    wide = linear_logprob(hidden, weight, ids, logits_dtype=torch.float32)
    narrow = linear_logprob(hidden, weight, ids)
    assert (wide - exact).abs().max() < 1e-5 < (narrow - exact).abs().max()


def test_no_tokens_is_no_error():
    hidden, weight, ids = inputs(torch.float32, num_tokens=0)
    assert linear_logprob(hidden, weight, ids).shape == (0,)


@pytest.mark.parametrize(
    "change, name",
    [
        ({"temperature": -1.0}, "temperature"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"token_ids_T": torch.zeros(3, dtype=torch.long)}, "token_ids"),
        ({"token_ids_T": torch.full((70,), 97)}, "token_ids"),
        ({"hidden_TD": torch.zeros(70, 5)}, "hidden"),
    ],
)
def test_bad_input_names_the_argument(change, name):
    hidden, weight, ids = inputs(torch.float32)
    arguments = {"hidden_TD": hidden, "weight_VD": weight, "token_ids_T": ids, **change}
    with pytest.raises(ValueError, match=name):
        linear_logprob(**arguments)


def test_logits_and_ids_that_do_not_fit_are_refused():
    logits = torch.zeros(3, 5)
    for ids, message in (
        ([0, 1], "3 rows of logits"),
        ([0, 1, 5], "5 is outside"),
        ([0, -1, 0], "-1"),
    ):
        with pytest.raises(ValueError, match=f"token_ids.*{message}"):
            logits_logprob(logits, torch.tensor(ids))


def test_log_probs_of_no_rows_have_the_dtype_of_those_of_some():
    """Ranks of a ring gather them; one of them may have no row that counts."""
    for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        hidden, weight = torch.zeros(0, 8, dtype=dtype), torch.zeros(11, 8, dtype=dtype)
        ids = torch.zeros(0, dtype=torch.int64)
        found = linear_logprob(hidden, weight, ids, return_entropy=True)
        assert [values.dtype for values in found] == [wide, wide]


class ProductsCounter:
    """How many chunks of logits the head multiplied."""

    def __init__(self, monkeypatch):
        self.count, real = 0, ChunkLogits.multiply

        def multiply(chunks, hidden_CD):
            self.count += 1
            return real(chunks, hidden_CD)

        monkeypatch.setattr(ChunkLogits, "multiply", multiply)


def gradients_of(slope, expected, dtype, *, has_main_grad=False, is_frozen=False, seed_grad=0.0):
    """[dhidden, dweight] of Σ logp · slope; `main_grad` starts from `seed_grad`."""
    hidden, weight, ids = (x.clone() for x in inputs(dtype))
    hidden.requires_grad_()
    weight.requires_grad_(not is_frozen)
    if has_main_grad:
        wide = torch.promote_types(dtype, torch.float32)
        weight.main_grad = torch.full_like(weight, seed_grad, dtype=wide)
    logp = linear_logprob(
        hidden, weight, ids, temperature=0.7, chunk_size=32, expected_grad=expected
    )
    (logp * slope).sum().backward()
    return [hidden.grad, weight.main_grad if has_main_grad else weight.grad]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"has_main_grad": True, "seed_grad": 0.5}])
def test_a_gradient_that_is_told_beforehand_has_the_same_bits_and_takes_one_product_less(
    dtype, options, monkeypatch
):
    wide = torch.promote_types(dtype, torch.float32)
    slope = torch.linspace(-1, 1, 70, dtype=wide)
    counter = ProductsCounter(monkeypatch)
    plain = gradients_of(slope, None, dtype, **options)
    assert counter.count == 2 * 3  # 70 tokens in chunks of 32, forward and backward
    told = gradients_of(slope, slope.clone(), dtype, **options)
    assert counter.count == 3 * 3
    for a, b in zip(plain, told, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_wrong_guess_of_the_gradient_costs_time_not_truth(dtype, monkeypatch):
    wide = torch.promote_types(dtype, torch.float32)
    slope = torch.linspace(-1, 1, 70, dtype=wide)
    exact = gradients_of(slope.double(), None, torch.float64)
    plain = gradients_of(slope, None, dtype)
    right_but_for_a_chunk = slope.clone()
    right_but_for_a_chunk[40] += 2.0
    counter = ProductsCounter(monkeypatch)
    for guess, chunks in ((right_but_for_a_chunk, 1), (torch.zeros_like(slope), 3), (-slope, 3)):
        counter.count = 0
        for is_main in (False, True):
            found = gradients_of(slope, guess, dtype, has_main_grad=is_main)
            for f, p, e in zip(found, plain, exact, strict=True):
                error = (f.double() - e).abs().max()
                floor = 1e-6 * e.abs().max() if dtype == torch.float32 else 1e-11
                assert error <= 4 * (p.double() - e).abs().max() + floor
        assert counter.count == 2 * (3 + chunks)


def test_a_frozen_head_and_a_second_backward_pass_know_what_was_told():
    slope = torch.linspace(-1, 1, 70)
    plain = gradients_of(slope, None, torch.float32, is_frozen=True)
    told = gradients_of(slope, slope, torch.float32, is_frozen=True)
    assert torch.equal(plain[0], told[0])
    assert told[1] is None
    hidden, weight, ids = inputs(torch.float32)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    loss = (linear_logprob(hidden, weight, ids, expected_grad=slope) * slope).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(2 * loss, leaves)
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(b, 2 * a)


def test_a_gradient_cannot_be_told_for_what_the_head_does_not_take_it_of():
    hidden, weight, ids = inputs(torch.float32)
    with pytest.raises(ValueError, match=r"expected_grad: shape .* each of the 70 tokens"):
        linear_logprob(hidden, weight, ids, expected_grad=torch.zeros(69))
    with pytest.raises(ValueError, match="without entropy"):
        linear_logprob(hidden, weight, ids, expected_grad=torch.zeros(70), return_entropy=True)
    with pytest.raises(ValueError, match="one token a row"):
        linear_logprob(hidden, weight, ids.unsqueeze(1), expected_grad=torch.zeros(70))
