"""The page that shows the whole loop learns, and its two engines agree to the bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_learns_and_its_engines_agree_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "grpo_on_a_page", raising=False)
    import grpo_on_a_page

    history = grpo_on_a_page.train(steps=16)
    assert history[0]["reward"] < 0.6 and history[-1]["reward"] > 0.8
    assert all(step["logp_gap"] == 0 for step in history)
    assert all(step["grad_norm"] > 0 for step in history)


def test_the_page_fits_on_a_page() -> None:
    assert len((ROOT / "scripts/grpo_on_a_page.py").read_text().splitlines()) <= 90
