"""On a machine without a C++ compiler both engines run on PyTorch's ops, and what they promise each
other holds there too: the tests of `test_engine_exactness.py` over that path."""

from pathlib import Path

import pytest
import test_engine_exactness as exactness
import torch
from tiny_models import save_reference

from nanoengine.formats.hf import load_model
from nanoengine.model.transformer import Transformer

pytestmark = [pytest.mark.usefixtures("no_native"), pytest.mark.sweep]


@pytest.fixture(params=exactness.DTYPES, ids=("fp32", "bf16"))
def model(no_native: None, tmp_path: Path, request: pytest.FixtureRequest) -> Transformer:
    """Loaded where there is no C++: a weight's packed form is part of the path."""
    save_reference("llama-gqa-tied", tmp_path)
    return load_model(tmp_path, request.param)


def test_scheduling_does_not_change_a_bit(model: Transformer) -> None:
    exactness.test_batching_chunking_caching_preemption_and_drafts_do_not_change_a_bit(model)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_rollout_logps_equal_the_training_forward_pass(
    model: Transformer, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    try:
        exactness.test_rollout_logps_equal_the_training_forward_pass_bit_for_bit(model)
    finally:
        torch.set_num_threads(1)


def test_rollout_logps_of_layers_with_windows_equal_the_training_forward_pass(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exactness.test_rollout_logps_of_layers_with_windows_equal_the_training_forward_pass(
        model, monkeypatch
    )


def test_a_multi_turn_rollout_has_the_trainers_logps(model: Transformer) -> None:
    exactness.test_a_multi_turn_rollout_from_the_cache_has_the_trainers_logps(model)


@pytest.mark.parametrize("dtype", exactness.DTYPES, ids=("fp32", "bf16"))
@pytest.mark.parametrize(
    "shape", ["smollm3-window", "granite", "olmo3-yarn", "phi3", "gemma3", "gpt-oss"]
)
def test_rollout_logps_of_families_equal_the_training_forward_pass(
    no_native: None, shape: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    exactness.test_rollout_logps_of_every_family_equal_the_training_forward_pass_bit_for_bit(
        shape, dtype, tmp_path
    )
