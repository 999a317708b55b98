"""On a GPU a weight's gradient reaches its fp32 buffer without being rounded to bf16 on the way.

No GPU is needed: fake tensors of a GPU note which products are taken, and of what dtype.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import linear, swiglu
from kernels.linear import (
    InputRecipe,
    accumulate_weight_grad,
    add_wide,
    finish_weight_grads,
    weight_grad,
)
from kernels.linear_logprob import _add_weight_gradient

TOKENS, NUM_IN, NUM_OUT = 6, 8, 10


class Written(TorchDispatchMode):
    """The dtype of every tensor of the weight's shape that an operation wrote."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == (NUM_OUT, NUM_IN):
            self.dtypes.add(out.dtype)
        return out


def written_by(step):
    with FakeTensorMode(), torch.device("cuda:0"):
        dy = torch.empty(TOKENS, NUM_OUT, dtype=torch.bfloat16)
        x = torch.empty(TOKENS, NUM_IN, dtype=torch.bfloat16)
        weight = torch.empty(NUM_OUT, NUM_IN, dtype=torch.bfloat16)
        weight.main_grad = torch.empty(NUM_OUT, NUM_IN)
        with Written() as written:
            step(weight, dy, x)
        return written.dtypes


def test_a_linear_layers_gradient_is_added_in_fp32():
    def step(weight, dy, x):
        assert weight_grad(weight, dy, x) is None

    assert written_by(step) == {torch.float32}


def test_a_gradient_computed_late_is_added_in_fp32():
    assert written_by(lambda w, dy, x: finish_weight_grads([(w, dy, x)])) == {torch.float32}


def test_the_output_heads_gradient_is_added_in_fp32():
    def step(weight, dlogits, hidden):
        _add_weight_gradient(weight.main_grad, dlogits, hidden, False)

    assert written_by(step) == {torch.float32}


def test_rounding_on_the_way_would_be_seen():
    def step(weight, dy, x):
        add_wide(weight.main_grad, dy.t() @ x)

    assert written_by(step) == {torch.bfloat16, torch.float32}


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [0, 1, 37, 2500])  # 2500: several chunks of a sum
def test_the_first_to_add_to_an_empty_gradient_writes_it_whatever_it_held(dtype, rows):
    torch.manual_seed(0)
    dy, x = torch.randn(2, rows, 70).to(dtype), torch.randn(2, rows, 50).to(dtype)
    weight, other = torch.zeros(2, 70, 50, dtype=dtype).unbind(0)
    weight.main_grad, other.main_grad = torch.full((70, 50), torch.nan), torch.zeros(70, 50)
    weight.is_grad_empty = True
    for n in range(2):
        assert weight_grad(weight, dy[n], x[n]) is None and weight_grad(other, dy[n], x[n]) is None
    assert torch.equal(weight.main_grad, other.main_grad)


def test_who_adds_by_other_ways_finds_zeros():
    weight = torch.zeros(3, 2)
    weight.main_grad, weight.is_grad_empty = torch.full((3, 2), torch.nan), True
    for n in (1, 2):
        assert accumulate_weight_grad(weight, torch.ones(3, 2)) is None
        assert torch.equal(weight.main_grad, torch.full((3, 2), float(n)))


@pytest.mark.usefixtures("cpu_path")
def test_a_product_with_a_recipe_has_the_same_gradients_and_does_not_keep_its_input():
    torch.manual_seed(0)
    weight = torch.randn(NUM_OUT, NUM_IN).bfloat16().requires_grad_()
    gate_up = torch.randn(TOKENS, 2 * NUM_IN).bfloat16().requires_grad_()
    found, inputs = [], []
    for recipe in (None, InputRecipe(swiglu, (gate_up,))):
        kept = set()

        def keep(tensor, kept=kept):
            kept.add(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            x = swiglu(gate_up)
            y = linear(x, weight, recipe=recipe)
        inputs.append(x.data_ptr() in kept)
        y.square().sum().backward()
        found.append((y.detach(), weight.grad, gate_up.grad))
        weight.grad = gate_up.grad = None
    assert inputs == [True, False]
    assert all(map(torch.equal, *found))
