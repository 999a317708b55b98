"""Several LoRA adapters in one batch: each as if alone, and as if merged into the weights."""

import asyncio
import gc
import threading
from pathlib import Path

import pytest
import torch
from tiny_models import save_reference

from nanoengine.adapters.lora import LowRank, merge_lora, write_adapter
from nanoengine.adapters.lora_config import LoraConfig
from nanoengine.formats.hf import hf_views, load_model
from nanoengine.formats.matrices import adaptable
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams

SHAPE = "qwen2-untied-theta"
PROMPT = [5, 17, 99, 3, 140, 7, 23, 5, 61, 88, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21]
NAMES = [f"adapter-{i}" for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_reference(SHAPE, folder)
    return folder


def make_changes(folder: Path, seed: int, size: float = 0.1) -> dict[str, LowRank]:
    """Ranks, scales and the choice of modules differ from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    rank = 1 + seed % 5
    found = {}
    for i, (module, place) in enumerate(adaptable(load_model(folder)).items()):
        if seed % 2 and i % 3 == 0:
            continue
        out, width = place.weight.shape
        low = torch.randn(rank, width, generator=generator) * 0.3
        high = torch.randn(out, rank, generator=generator) * size
        found[module] = LowRank(low, high, 1.0 + seed / 4)
    return found


def make_engine(folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> LLMEngine:
    model = load_model(folder, dtype)
    given = {"num_blocks": 256, "block_size": 4, "eos_ids": ()} | options
    return LLMEngine(model, InferConfig(**given))


def params(name: str = "", **options: object) -> SamplingParams:
    given = {"max_tokens": 12, "seed": 3, "prompt_logps": False} | options
    return SamplingParams(adapter=name, **given)


def with_all(folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> LLMEngine:
    engine = make_engine(folder, dtype, **options)
    for i, name in enumerate(NAMES):
        engine.load_adapter(name, make_changes(folder, i))
    return engine


def bits(output: Output) -> tuple:
    return output.ids, output.logps, output.prompt_logps


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_batch_tokens", [512, 16])
def test_eight_adapters_in_one_batch_have_the_bits_of_each_alone(
    folder: Path, dtype: torch.dtype, max_batch_tokens: int
) -> None:
    prompts = [PROMPT[: 6 + i] for i in range(9)]
    asked = [params(name, temperature=0.8, prompt_logps=True) for name in [*NAMES, ""]]
    sizes = {"max_batch_tokens": max_batch_tokens, "max_num_seqs": 16}
    together = with_all(folder, dtype, **sizes).generate(prompts, asked)
    for name, ids, one, found in zip([*NAMES, ""], prompts, asked, together, strict=True):
        alone = make_engine(folder, dtype)
        if name:
            alone.load_adapter(name, make_changes(folder, NAMES.index(name)))
        assert bits(alone.generate([ids], one)[0]) == bits(found)
    assert len({tuple(output.ids) for output in together}) == 9


def test_an_adapter_beside_the_weights_equals_one_merged_into_them(
    folder: Path, tmp_path: Path
) -> None:
    engine = with_all(folder)
    scored = params(max_tokens=1, prompt_logps=True)
    plain = make_engine(folder).generate([PROMPT], scored)[0].prompt_logps
    for i, name in enumerate(NAMES):
        changes = make_changes(folder, i)
        rank = 1 + i % 5
        config = LoraConfig(rank=rank, alpha=rank * (1.0 + i / 4))
        write_adapter(tmp_path / name, changes, config, targets=list(changes))
        model = load_model(folder)
        merge_lora(model, tmp_path / name)
        merged = LLMEngine(model, InferConfig(num_blocks=64))
        expected = merged.generate([PROMPT], scored)[0].prompt_logps
        found = engine.generate([PROMPT], params(name, max_tokens=1, prompt_logps=True))[0]
        assert found.prompt_logps == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert found.prompt_logps != pytest.approx(plain, abs=1e-2)
        # and a folder is as good as the tensors
        engine.load_adapter("read", tmp_path / name)
        read = engine.generate([PROMPT], params("read", max_tokens=1, prompt_logps=True))[0]
        assert read.prompt_logps == found.prompt_logps


def test_the_prefix_cache_is_of_one_adapter_in_one_version(folder: Path) -> None:
    engine = make_engine(folder)
    engine.load_adapter("a", make_changes(folder, 0))
    engine.load_adapter("b", make_changes(folder, 2))

    def ask(name: str) -> Output:
        return engine.generate([PROMPT], params(name, temperature=0.0))[0]

    first = {name: ask(name) for name in ("", "a", "b")}
    assert [first[name].num_cached_tokens for name in first] == [0, 0, 0]
    for name in first:  # each finds its own again
        again = ask(name)
        assert again.num_cached_tokens > 15 and again.ids == first[name].ids
    engine.load_adapter("a", make_changes(folder, 4))
    renewed = ask("a")
    assert renewed.num_cached_tokens == 0 and renewed.ids != first["a"].ids
    assert ask("b").num_cached_tokens > 15 and ask("").num_cached_tokens > 15
    engine.load_adapter("a", make_changes(folder, 0))
    old = ask("a")  # the same numbers, and yet another version
    assert old.num_cached_tokens == 0 and old.ids == first["a"].ids
    engine.check()


def test_requests_that_start_together_do_not_wait_for_or_share_each_others_blocks(
    folder: Path,
) -> None:
    engine = with_all(folder)
    names = ["", *NAMES[:3], "", *NAMES[:3]]
    together = engine.generate([PROMPT] * 8, [params(n, temperature=0.0) for n in names])
    assert [bits(output) for output in together[:4]] == [bits(output) for output in together[4:]]
    assert all(output.num_cached_tokens == 0 for output in together[:4])
    assert all(output.num_cached_tokens > 15 for output in together[4:])


def test_loading_and_unloading_touch_no_other_request(folder: Path) -> None:
    quiet = make_engine(folder)
    quiet.load_adapter("kept", make_changes(folder, 1))
    asked = [params("kept", max_tokens=30), params(max_tokens=30, seed=8)]
    expected = quiet.generate([PROMPT, PROMPT], asked)
    engine = make_engine(folder)
    engine.load_adapter("kept", make_changes(folder, 1))
    handles = [engine.add(PROMPT, one) for one in asked]
    done: dict[int, Output] = {}
    for i in range(200):
        done |= dict(engine.step())
        if i % 3 == 0:
            engine.load_adapter("other", make_changes(folder, i))
        elif i % 3 == 1:
            engine.unload_adapter("other")
        if len(done) == 2:
            break
    assert [bits(done[handle]) for handle in handles] == [bits(output) for output in expected]
    assert engine.metrics()["num_preemptions"] == 0
    if "other" in engine.adapters:
        engine.unload_adapter("other")
    engine.unload_adapter("kept")
    assert engine.adapters == []
    assert all(place.matrix.adapters is None for place in adaptable(engine.model).values())


def test_a_request_in_flight_goes_on_with_the_new_version(folder: Path) -> None:
    engine = make_engine(folder)
    engine.load_adapter("a", make_changes(folder, 0))
    handle = engine.add(PROMPT, params("a", temperature=0.0))
    for _ in range(4):
        engine.step()
    with pytest.raises(ValueError, match="1 requests in flight use it"):
        engine.unload_adapter("a")
    engine.load_adapter("a", make_changes(folder, 4))
    engine.check()
    taken = list(engine.peek(handle).ids)
    output = None
    while output is None:
        output = dict(engine.step()).get(handle)
    other = make_engine(folder)
    other.load_adapter("b", make_changes(folder, 4))
    rest = other.generate([taken], params("b", temperature=0.0, max_tokens=30))[0]
    count = 12 - (len(taken) - len(PROMPT))
    assert 0 < count < 12 and output.ids[-count:] == rest.ids[:count]


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_prompt_in_flight_is_scored_by_the_new_version_alone(
    folder: Path, num_steps: int
) -> None:
    """Half of it, all of it, or some tokens behind it are computed when the adapter changes."""
    asked = params("a", temperature=0.7, prompt_logps=True, top_logps=3)
    engine = make_engine(folder, max_batch_tokens=12)
    engine.load_adapter("a", make_changes(folder, 0))
    handle = engine.add(PROMPT, asked)
    for _ in range(num_steps):
        engine.step()
    seq = engine.peek(handle)
    assert seq is not None and len(seq.prompt_logps) == min(12 * num_steps, len(PROMPT) - 1)
    engine.load_adapter("a", make_changes(folder, 4))
    output = None
    while output is None:
        output = dict(engine.step()).get(handle)
    fresh = make_engine(folder)
    fresh.load_adapter("a", make_changes(folder, 4))
    expected = fresh.generate([PROMPT], asked)[0]
    assert output.prompt_logps == expected.prompt_logps
    assert output.prompt_top_logps == expected.prompt_top_logps
    assert len(expected.prompt_logps) == len(expected.prompt_top_logps) == len(PROMPT) - 1
    old = make_engine(folder)
    old.load_adapter("a", make_changes(folder, 0))
    assert old.generate([PROMPT], asked)[0].prompt_logps != expected.prompt_logps


def test_new_weights_of_the_model_keep_the_adapters(folder: Path) -> None:
    engine = make_engine(folder)
    engine.load_adapter("a", make_changes(folder, 0))
    asked = params("a", max_tokens=1, prompt_logps=True)
    before = engine.generate([PROMPT], asked)[0]
    state = {name: x.clone() for name, x in hf_views(engine.model).items()}
    state["model.layers.0.mlp.up_proj.weight"] *= 1.5
    engine.update_weights(state.items(), 1)
    after = engine.generate([PROMPT], asked)[0]
    assert after.prompt_logps != before.prompt_logps
    fresh = make_engine(folder)
    fresh.update_weights(state.items(), 1)
    fresh.load_adapter("a", make_changes(folder, 0))
    assert fresh.generate([PROMPT], asked)[0].prompt_logps == after.prompt_logps


def test_what_does_not_fit_is_refused_and_nothing_changes(folder: Path, tmp_path: Path) -> None:
    engine = make_engine(folder)
    good = make_changes(folder, 0)
    engine.load_adapter("a", good)
    expected = bits(engine.generate([PROMPT], params("a"))[0])
    module = "model.layers.0.self_attn.q_proj"
    wrong = LowRank(torch.zeros(2, 48), torch.zeros(47, 2), 1.0)
    head = LowRank(torch.zeros(2, 48), torch.zeros(211, 2), 1.0)
    for name, source, message in (
        ("", good, "adapter name: is empty"),
        ("a", tmp_path, r"adapter_config\.json does not exist"),
        ("a", {"model.layers.9.mlp.up_proj": head}, "model.layers.9.mlp.up_proj"),
        ("a", {module: wrong}, "belongs to another model"),
        ("a", {"lm_head": head}, r"adapts lm_head; beside the weights"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_adapter(name, source)
    with pytest.raises(ValueError, match=r"adapter='b': is not loaded \(loaded: a\)"):
        engine.generate([PROMPT], params("b"))
    with pytest.raises(ValueError, match="adapter='b': is not loaded"):
        engine.unload_adapter("b")
    assert bits(engine.generate([PROMPT], params("a"))[0]) == expected


def test_the_async_engine_loads_between_steps(folder: Path) -> None:
    async def main() -> list[Output]:
        async with AsyncEngine(make_engine(folder)) as client:
            await client.load_adapter("a", make_changes(folder, 0))
            first = asyncio.create_task(client.generate(PROMPT, params("a", max_tokens=40)))
            await client.load_adapter("b", make_changes(folder, 2))
            outputs = [await client.generate(PROMPT, params("b")), await first]
            await client.unload_adapter("b")
            with pytest.raises(ValueError, match="is not loaded"):
                await client.generate(PROMPT, params("b"))
            return outputs

    second, first = asyncio.run(main())
    engine = make_engine(folder)
    engine.load_adapter("a", make_changes(folder, 0))
    engine.load_adapter("b", make_changes(folder, 2))
    assert bits(engine.generate([PROMPT], params("a", max_tokens=40))[0]) == bits(first)
    assert bits(engine.generate([PROMPT], params("b"))[0]) == bits(second)


def test_two_engines_over_one_model_have_adapters_of_their_own(folder: Path) -> None:
    """Also under one name, whichever loads first, and when one of them goes."""
    model = load_model(folder)
    config = InferConfig(num_blocks=256, block_size=4, eos_ids=())
    first, second = (LLMEngine(model, config) for _ in range(2))
    for i in (0, 1):
        expected = with_all(folder).generate([PROMPT], params(NAMES[i]))[0]
        (first, second)[i].load_adapter("a", make_changes(folder, i))
        assert bits((first, second)[i].generate([PROMPT], params("a"))[0]) == bits(expected)
    alone = [with_all(folder).generate([PROMPT], params(NAMES[i]))[0] for i in (0, 1)]
    plain = make_engine(folder).generate([PROMPT], params())[0]
    assert len({tuple(bits(one)[1]) for one in (*alone, plain)}) == 3
    for engine, expected in ((first, alone[0]), (second, alone[1]), (first, alone[0])):
        assert bits(engine.generate([PROMPT], params("a"))[0]) == bits(expected)
        assert bits(engine.generate([PROMPT], params())[0]) == bits(plain)
    # both in the middle of a step's work: their requests by turns
    handles = [engine.add(PROMPT, params("a")) for engine in (first, second)]
    done: list[dict[int, Output]] = [{}, {}]
    while not all(done):
        for found, engine in zip(done, (first, second), strict=True):
            found |= dict(engine.step())
    assert [bits(found[h]) for found, h in zip(done, handles, strict=True)] == list(
        map(bits, alone)
    )
    first.unload_adapter("a")
    assert bits(second.generate([PROMPT], params("a"))[0]) == bits(alone[1])
    first.load_adapter("a", make_changes(folder, 0))
    del second, engine
    gc.collect()
    assert bits(first.generate([PROMPT], params("a"))[0]) == bits(alone[0])
    first.unload_adapter("a")
    assert all(place.matrix.adapters is None for place in adaptable(model).values())


def test_engines_over_one_model_may_step_at_a_time(folder: Path) -> None:
    """The rows of a step are those of its thread: another's are not added to them."""
    model = load_model(folder)
    config = InferConfig(num_blocks=256, block_size=4, eos_ids=())
    engines = [LLMEngine(model, config) for _ in range(2)]
    for i, engine in enumerate(engines):
        engine.load_adapter("a", make_changes(folder, i))
    alone = [bits(engine.generate([PROMPT], params("a"))[0]) for engine in engines]
    inside, outside = threading.Event(), threading.Event()

    def hold() -> None:
        rows = {"a": torch.arange(len(PROMPT))}
        with engines[0]._processor.adapters.applied(rows):
            inside.set()
            outside.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(60)
    try:
        engines[1].load_adapter("b", make_changes(folder, 1))  # nothing of it is cached
        assert bits(engines[1].generate([PROMPT], params("b"))[0]) == alone[1]
    finally:
        outside.set()
        holder.join()
