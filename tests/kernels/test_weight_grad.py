"""On a GPU a weight's gradient reaches its fp32 buffer without being rounded to bf16 on the way.

No GPU is needed: fake tensors of a GPU note which products are taken, and of what dtype.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import linear, swiglu
from kernels.linear import InputRecipe, weight_grad
from kernels.linear_logprob import _add_weight_gradient
from kernels.torch.linear import add_wide, finish_weight_grads

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
        _add_weight_gradient(weight.main_grad, dlogits, hidden)

    assert written_by(step) == {torch.float32}


def test_rounding_on_the_way_would_be_seen():
    def step(weight, dy, x):
        add_wide(weight.main_grad, dy.t() @ x)

    assert written_by(step) == {torch.bfloat16, torch.float32}


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
