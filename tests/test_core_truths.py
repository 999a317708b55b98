"""The central sentences of the documents, held to what a trace of a step sees.

tests/test_core_page.py holds docs/core.md to the files that run. Here it is the claims that a
reader takes away: one model for both engines of a process on a CPU, weights that are adopted and
not copied, and products of our own C++ in both engines.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from core_steps import (  # noqa: E402
    Entered,
    trace_decode,
    trace_grpo,
)

from nanorl.distributed.roles.inline_roles import InlineRoles  # noqa: E402
from nanorl.envs.tasks.tiny_model import build_tiny_model  # noqa: E402
from nanorl.options import agent_kit  # noqa: E402
from nanorl.options.parts import Parts  # noqa: E402
from nanorl.options.presets import (  # noqa: E402
    PRESETS,
    get_preset,
)


def said(file: str, *sentences: str) -> None:
    """Fail unless the document or docstring says so, wherever its lines break."""
    text = " ".join((ROOT / file).read_text("utf-8").split())
    for sentence in sentences:
        assert sentence in text, f"{file} no longer says {sentence!r}: is it still held here?"


@pytest.fixture(params=sorted(PRESETS))
def roles(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[InlineRoles]:
    """The roles of a run of each preset on a CPU, over a model that nobody has to download."""
    folder = build_tiny_model(tmp_path / "model", seed=0)
    with mock.patch.object(agent_kit, "run_sandbox"):
        config = replace(
            get_preset(request.param).config(),
            **{"out": tmp_path / "run", "device": "cpu", "threads": 1, "model": str(folder)},
        )
        found = InlineRoles(Parts(config))
        try:
            yield found
        finally:
            found.close()


def functions(entered: Entered) -> set[str]:
    return {f"{file}: {name}" for file, names in entered.items() for name in names}


def test_both_engines_of_a_cpu_read_one_model_and_weights_are_adopted(roles: InlineRoles) -> None:
    said("docs/tour.md", "one model, read by both", "so nothing is copied")
    said("docs/tour.md", "`nanorl/learner.py: SharedWeights.publish` has the rollout engine adopt")
    said("docs/core.md", "the trainer has written into the model that both engines read")
    assert roles.rollout_engine.model is roles.engine.model
    entered = functions(trace_grpo(roles))
    assert "nanorl/learner.py: SharedWeights.publish" in entered
    assert "nanoinfer/engine_core.py: EngineCore.adopt_weights" in entered
    assert not [one for one in entered if re.search(r"\.(update_weights|export_state)$", one)]
    assert not [one for one in entered if one.startswith("nanorl/distributed/weights/")]


def test_both_engines_multiply_by_the_native_product_and_no_other(
    native: None, roles: InlineRoles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward; backward, oneDNN may take products that no forward pass has to agree with."""
    said("kernels/linear.py", "C++ (`cpp/linear.h`), wherever there is a compiler")
    said("kernels/linear.py", "oneDNN's inner product where there is none")

    def foreign(*_: Any, **__: Any) -> None:
        raise AssertionError("a product of PyTorch's in a forward pass")

    monkeypatch.setattr(torch.nn.functional, "linear", foreign)
    for entered in (functions(trace_decode(roles)), functions(trace_grpo(roles))):
        assert [one for one in entered if re.fullmatch(r"kernels/cpp/\w+\.py: linear", one)]
        assert not [one for one in entered if one.endswith("onednn.py: linear")]


def test_without_a_compiler_onednn_multiplies(no_native: None, roles: InlineRoles) -> None:
    """The trace can tell: what the test above denies is seen where it is so."""
    entered = functions(trace_grpo(roles))
    assert not [one for one in entered if re.fullmatch(r"kernels/cpp/\w+\.py: linear", one)]
    if torch.backends.mkldnn.is_available():
        assert [one for one in entered if one.endswith("onednn.py: linear")]
