"""The page that shows a whole agent learns, and what its sandbox says is never trained on."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "agent_on_a_page", raising=False)
    import agent_on_a_page

    return agent_on_a_page


@pytest.mark.sandbox
def test_the_agent_learns_and_its_engines_agree_to_the_bit(page: ModuleType) -> None:
    history = page.train(steps=36)
    assert history[0]["reward"] < 0.65
    assert sum(step["reward"] for step in history[-4:]) / 4 > 0.85
    assert all(step["gap"] == 0 for step in history)


@pytest.mark.sandbox
def test_a_rollout_is_two_turns_around_what_the_sandbox_said(page: ModuleType) -> None:
    """By hand: a program of the policy's own tokens, its output masked, the answer trained on."""
    with page.SandboxPool(page.SandboxSpec(), num_workers=1) as sandbox:
        env = page.Environment(sandbox)
        task = ("product", 7, 8)
        program = page.ids("print(", "a * b", ")", "<eos>")
        assert env.run(task, program) == page.ids("<out>", 56)
        assert env.run(task, page.ids("print(", "a + b", ")", "<eos>")) == page.ids("<out>", 15)
        assert env.run(task, page.ids("print(", ")", ")", ")")) == page.ids("<out>", "error")
        assert env.reward(task, page.ids(56, "<eos>")) == 1.0
        assert env.reward(task, page.ids(15, "<eos>")) == 0.0
        policy = page.Policy()
        policy.publish()
        rollout = page.play(env, policy, step=0)[0][0]
    first = rollout.loss_mask.index(1)
    seen = rollout.tokens.index(page.ID["<out>"], first)
    assert first == 3 and rollout.loss_mask[seen : seen + 2] == [0, 0]
    assert all(
        (logp != 0.0) == (mask == 1) == (version == 1)
        for logp, mask, version in zip(
            rollout.logps, rollout.loss_mask, rollout.versions, strict=True
        )
    )


def test_the_page_fits_on_a_page() -> None:
    assert len((ROOT / "scripts/agent_on_a_page.py").read_text().splitlines()) <= 150
