"""Weight updates: complete or not at all; versions, caches and requests in flight."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import make_reference, save_reference

from nanoengine.formats.hf import export_state, load_model, load_state
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams

SHAPE = "llama-gqa-tied"
PROMPT = [(7 * i) % 200 + 3 for i in range(40)]
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("old")
    save_reference(SHAPE, path)
    return path


def make(folder: Path) -> LLMEngine:
    return LLMEngine(load_model(folder), InferConfig(num_blocks=100), version=3)


def new_state(seed: int = 1) -> dict[str, torch.Tensor]:
    state = dict(make_reference(SHAPE, seed).state_dict())
    del state["lm_head.weight"]
    return state


def served(state: dict[str, torch.Tensor], folder: Path) -> LLMEngine:
    """An engine that never had other weights than `state`."""
    engine = make(folder)
    engine.update_weights(iter(state.items()), 0)
    return engine


def test_new_weights_are_served_and_no_old_cache_is_used(folder: Path) -> None:
    engine = make(folder)
    old = engine.generate([PROMPT], GREEDY)[0]
    engine.update_weights(iter(new_state().items()), 4)
    new = engine.generate([PROMPT], GREEDY)[0]
    expected = served(new_state(), folder).generate([PROMPT], GREEDY)[0]
    assert new.num_cached_tokens == 0
    assert (new.ids, new.logps) == (expected.ids, expected.logps)
    assert new.ids != old.ids
    assert old.versions == [3] * 16 and new.versions == [4] * 16


def test_a_request_in_flight_keeps_its_tokens_and_goes_on_with_the_new_weights(
    folder: Path,
) -> None:
    engine = make(folder)
    alone = engine.generate([PROMPT], GREEDY)[0]
    handle = engine.add(PROMPT, GREEDY)
    for _ in range(6):
        assert not engine.step()
    engine.pause()
    assert engine.step() == []
    engine.update_weights(iter(new_state().items()), 4)
    engine.check()
    engine.resume()
    finished = {}
    while not finished:
        finished = dict(engine.step())
    output = finished[handle]
    assert output.versions == [3] * 6 + [4] * 10
    assert output.ids[:6] == alone.ids[:6] and output.logps[:6] == alone.logps[:6]
    rest = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
    fresh = served(new_state(), folder).generate([PROMPT + output.ids[:6]], rest)[0]
    assert (output.ids[6:], output.logps[6:]) == (fresh.ids, fresh.logps)


def wrong_states() -> dict[str, tuple[dict[str, torch.Tensor], str]]:
    name = "model.layers.1.mlp.up_proj.weight"
    missing = new_state()
    del missing[name]
    extra = new_state() | {"model.layers.9.mlp.up_proj.weight": torch.zeros(2)}
    shape = new_state() | {name: torch.zeros(3, 3)}
    broken = new_state()
    broken[name] = broken[name].clone()
    broken[name][0, 0] = torch.nan
    infinite = new_state() | {"model.norm.weight": torch.full((48,), torch.inf)}
    return {
        "missing": (missing, "up_proj"),
        "extra": (extra, r"layers\.9"),
        "shape": (shape, r"\(3, 3\)"),
        "nan": (broken, "NaN"),
        "infinite": (infinite, "infinity"),
    }


@pytest.mark.parametrize("kind", ["missing", "extra", "shape", "nan", "infinite"])
def test_a_wrong_update_is_refused_and_the_old_version_serves_on(folder: Path, kind: str) -> None:
    engine = make(folder)
    before = engine.generate([PROMPT], GREEDY)[0]
    state, message = wrong_states()[kind]
    with pytest.raises(ValueError, match=message):
        engine.update_weights(iter(state.items()), 4)
    after = engine.generate([PROMPT], GREEDY)[0]
    assert (after.ids, after.logps, after.versions) == (before.ids, before.logps, before.versions)
    assert engine.version == 3


def test_weights_changed_by_their_owner_are_served_after_an_update_from_themselves(
    folder: Path,
) -> None:
    engine = make(folder)
    engine.generate([PROMPT], GREEDY)
    with torch.no_grad():
        engine.model.norm.mul_(-1.0)
    engine.update_weights(export_state(engine.model), 4)
    output = engine.generate([PROMPT], GREEDY)[0]
    fresh = LLMEngine(engine.model, InferConfig(num_blocks=100)).generate([PROMPT], GREEDY)[0]
    assert (output.ids, output.logps) == (fresh.ids, fresh.logps)


def test_two_engines_serve_different_weights_in_one_process(folder: Path) -> None:
    old, new = make(folder), served(new_state(), folder)
    alone = (old.generate([PROMPT], GREEDY)[0].ids, new.generate([PROMPT], GREEDY)[0].ids)
    handles = (old.add(PROMPT, GREEDY), new.add(PROMPT, GREEDY))
    outputs: list[dict] = [{}, {}]
    while not (outputs[0] and outputs[1]):
        for i, engine in enumerate((old, new)):
            outputs[i].update(engine.step())
    assert (outputs[0][handles[0]].ids, outputs[1][handles[1]].ids) == alone


@pytest.mark.parametrize("how", ["from outside", "from itself"])
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8", "kv_calibration_ids": (3, 4)}])
def test_weights_that_change_during_sleep_are_served_after_it(
    folder: Path, how: str, options: dict[str, Any]
) -> None:
    config = InferConfig(num_blocks=100, **options)
    engine = LLMEngine(load_model(folder), config, version=3)
    engine.generate([PROMPT], GREEDY)
    handle = engine.add(PROMPT, GREEDY)
    for _ in range(4):
        engine.step()
    engine.sleep()
    if how == "from outside":
        engine.update_weights(iter(new_state().items()), 4)
    else:
        load_state(engine.model, iter(new_state().items()))
        engine.update_weights(export_state(engine.model), 4)
    assert engine.version == 4 and engine.is_asleep and engine.step() == []
    engine.wake()
    engine.check()
    finished: dict[int, Output] = {}
    while not finished:
        finished = dict(engine.step())
    assert finished[handle].versions == [3] * 4 + [4] * 12
    fresh = LLMEngine(load_model(folder), config)
    fresh.update_weights(iter(new_state().items()), 0)
    prompts = [PROMPT[::-1], PROMPT]
    new, expected = engine.generate(prompts, GREEDY), fresh.generate(prompts, GREEDY)
    assert new[0].num_cached_tokens == 0 and new[0].versions == [4] * 16
    assert [(o.ids, o.logps) for o in new] == [(o.ids, o.logps) for o in expected]


def test_a_wrong_update_during_sleep_leaves_the_old_weights(folder: Path) -> None:
    engine = make(folder)
    before = engine.generate([PROMPT], GREEDY)[0]
    engine.sleep()
    with pytest.raises(ValueError, match="up_proj"):
        engine.update_weights(iter(wrong_states()["missing"][0].items()), 4)
    engine.wake()
    after = engine.generate([PROMPT], GREEDY)[0]
    assert (after.ids, after.logps, after.versions) == (before.ids, before.logps, before.versions)


def test_a_prompt_is_scored_by_one_version_of_the_weights(folder: Path) -> None:
    """The update comes after the whole prompt was scored, while the answer is sampled."""
    scored = dataclasses.replace(GREEDY, prompt_logps=True)
    engine = make(folder)
    handle = engine.add(PROMPT, scored)
    for _ in range(6):
        engine.step()
    engine.update_weights(iter(new_state().items()), 4)
    finished: dict[int, Output] = {}
    while not finished:
        finished = dict(engine.step())
    output = finished[handle]
    assert output.versions == [3] * 6 + [4] * 10
    expected = served(new_state(), folder).generate([PROMPT], scored)[0]
    assert output.prompt_logps == expected.prompt_logps
