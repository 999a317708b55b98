"""The work of bench_vision.py on our side, each piece in a process of its own.

    run_tower       pictures that are ready already, through the tower
    run_rollouts    W-vision: files in, tokens out
    run_step        GRPO steps: generate, train, sync
    run_memory      rollouts whose pictures are weighed

Each takes a folder of smolvlm_folder.py, a dtype and a number of threads.
"""

from __future__ import annotations

import asyncio
import resource
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_infer import Clock
from model_bench import peak
from scored_groups import make_groups
from vision_workload import Workload

import nanorl
from kernels.memory import release_free_memory
from nanoengine.config import EngineConfig
from nanoengine.formats.hf import load_model
from nanoengine.optim import DTYPES
from nanoengine.state.whole_engine import Engine
from nanoengine.vision.seeing_tokenizer import seeing_tokenizer
from nanoengine.vision.sight import Sight
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import SamplingParams
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batch_metrics import logp_gap
from nanorl.batching import build_batch
from nanorl.envs.base import Services
from nanorl.envs.env_class import EnvClassKind
from nanorl.options.engine_config import EngineLimits
from nanorl.types import Rollout

CACHE_BYTES = 256 << 20  # of keys and values: more than all rollouts of a row need


def see(folder: str, dtype: str, threads: int, pictures: str) -> tuple[Any, Any]:
    """The folder's model, which sees the pictures of a store, and the store's tokenizer."""
    torch.set_num_threads(threads)
    model: Any = load_model(folder, DTYPES[dtype])
    tokenizer = seeing_tokenizer(folder, pictures)
    model.sight = Sight(model, tokenizer.store)
    return model, tokenizer


def run_tower(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Pictures that are made ready already, as an engine looks at those of a step."""
    load = Workload.of(folder)
    with tempfile.TemporaryDirectory() as pictures, torch.inference_mode():
        model, tokenizer = see(folder, dtype, threads, pictures)
        spans = []
        for number in range(load.seen):
            sha256 = tokenizer.store.add(load.file(folder, number).read_bytes())
            spans += tokenizer.store.spans(sha256, range(load.picture_tokens))
        seen = model.sight.look(spans[:2])  # warms up
        model.sight.forget()
        with Clock() as clock:
            model.sight.look(spans)
    return {
        **_seconds(clock, threads),
        "pictures_per_s": load.seen / clock.seconds,
        "features": seen.features_TE[0].float().tolist(),
    }


def run_rollouts(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """W-vision: files in, tokens out."""
    load = Workload.of(folder)
    with tempfile.TemporaryDirectory() as pictures:
        model, tokenizer = see(folder, dtype, threads, pictures)
        engine = LLMEngine(model, InferConfig(populate_cache=True, cache_bytes=CACHE_BYTES))
        engine.generate([load.texts()[-1][-1]] * 2, SamplingParams(max_tokens=8, ignore_eos=True))
        contexts: list[list[int]] = [[] for _ in range(load.rollouts)]
        seen: list[tuple[Any, ...]] = [() for _ in contexts]
        texts = load.texts()
        with Clock() as clock:
            for turn in range(load.turns):
                each = []
                for i, context in enumerate(contexts):
                    context += texts[turn][i]
                    data = load.file(folder, turn * load.rollouts + i).read_bytes()
                    seen[i] += picture_spans(tokenizer.store, data, load, len(context))
                    context += load.picture_ids()
                    each.append(
                        SamplingParams(
                            max_tokens=load.turn,
                            ignore_eos=True,
                            seed=1000 * turn + i,
                            images=seen[i],
                        )
                    )
                for i, output in enumerate(engine.generate(contexts, each)):
                    contexts[i] += output.ids
    counted = ("num_steps", "prompt_tokens", "cached_tokens", "computed_tokens")
    metrics = engine.metrics()
    return {
        **_seconds(clock, threads),
        "tokens_per_s": load.num_sampled / clock.seconds,
        "num_looks": model.sight.num_looks,
        **{name: metrics[name] for name in counted},
    }


def picture_spans(store: Any, data: bytes, load: Workload, start: int) -> tuple[Any, ...]:
    """Keep a picture whose `picture_ids` begin at token `start`."""
    first = start + len(load.before_picture)
    return tuple(store.spans(store.add(data), range(first, first + load.picture_tokens)))


def run_step(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Three GRPO steps; the first warms up. As in a run of one process, both engines read the
    trainer's weights and take turns (nanorl/learner.py)."""
    torch.set_num_threads(threads)
    load = Workload.of(folder)
    sizes = {"micro_batch_tokens": 1024, "activation_mb": EngineLimits().activation_mb}
    config: Any = {"dtype": dtype, "lr": 1e-6, "share_prefix": True, **sizes}
    trainer = Engine(load_model(folder, packs=False), EngineConfig(**config))
    rollout_engine = LLMEngine(trainer.model, InferConfig(cache_bytes=64 << 20))
    parts: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as pictures:
        tokenizer = seeing_tokenizer(folder, pictures)
        model: Any = trainer.model
        model.sight = Sight(model, tokenizer.store)
        for step in range(3):
            begin, cpu = time.perf_counter(), time.process_time()
            prompts = [
                encoded(tokenizer, text, load.file(folder, number).read_bytes())
                for number, text in enumerate(load.prompts())
            ]
            params = [
                SamplingParams(
                    max_tokens=load.completion,
                    ignore_eos=True,
                    seed=99 * step + number * load.members + member,
                    images=shown,
                )
                for number, (_, shown) in enumerate(prompts)
                for member in range(load.members)
            ]
            ids, images = zip(*prompts, strict=True)
            asked = [one for one in ids for _ in range(load.members)]
            outputs = rollout_engine.generate(asked, params)
            generated = time.perf_counter()
            groups = make_groups(ids, outputs, images)
            batch = build_batch(groups, AlgorithmSpec(), max_tokens=1024, version=step)
            rollout_engine.sleep()
            trainer.train_step(
                batch.samples, replace(batch.loss_fn, is_exact=True)
            )  # as a run does
            trained = time.perf_counter()
            rollout_engine.adopt_weights(step + 1)
            rollout_engine.wake()
            seconds = time.perf_counter() - begin
            parts.append(
                {
                    "seconds": seconds,
                    "cpu_util": (time.process_time() - cpu) / seconds / threads,
                    "generate_s": generated - begin,
                    "train_s": trained - generated,
                    "sync_s": begin + seconds - trained,
                    "num_looks": model.sight.num_looks,
                    "logp_gap_max": logp_gap(batch.samples, trainer.last_logps)["logp_gap_max"],
                }
            )
    measured = sorted(parts[1:], key=lambda p: p["seconds"])
    return {**measured[len(measured) // 2], **peak()}


def encoded(tokenizer: Any, text: str, data: bytes) -> tuple[list[int], tuple[Any, ...]]:
    """The prompt of a step: a picture and a text, through the model's template."""
    shown = {"type": "image", "sha256": tokenizer.store.add(data)}
    chat = [{"role": "user", "content": [shown, {"type": "text", "text": text}]}]
    ids: list[int] = tokenizer.encode_chat(chat, add_generation_prompt=True)
    return ids, tuple(tokenizer.images_in(ids, chat, 0))


def _seconds(clock: Clock, threads: int) -> dict[str, Any]:
    cpu_util = clock.cpu_s / clock.seconds / threads
    return {"seconds": clock.seconds, "cpu_util": cpu_util, **peak()}


# -- what pictures weigh ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Played:
    """Rollouts whose pictures are weighed."""

    rollouts: int = 32
    turns: int = 10
    width: int = 1024
    height: int = 768

    @classmethod
    def of(cls, load: Workload) -> Played:
        return cls() if load.side == 512 else cls(rollouts=4, turns=3, width=128, height=96)


def run_memory(folder: str, dtype: str, threads: int) -> dict[str, Any]:
    """Bytes by which this process grows from when it has seen two pictures, and those of all."""
    load = Workload.of(folder)
    played = Played.of(load)
    with tempfile.TemporaryDirectory() as pictures:
        model, tokenizer = see(folder, dtype, threads, pictures)
        engine = LLMEngine(model, InferConfig(populate_cache=True, cache_bytes=CACHE_BYTES))
        play = RolloutPlayer(engine, tokenizer, played)
        asyncio.run(play.all(rollouts=2, first=10**6))  # warms up
        before = resident_bytes()
        rollouts = asyncio.run(play.all(rollouts=played.rollouts, first=0))
        growth = resident_bytes() - before
    keys = {span.key for rollout in rollouts for span in rollout.images}
    assert len(keys) == played.rollouts * played.turns, "each turn shows a new picture"
    return {
        "growth_bytes": growth,
        "resized_bytes": len(keys) * 3 * load.side**2,
        "num_pictures": len(keys),
        **peak(),
    }


class Film(nanorl.Env):
    """An environment that shows one picture after the other."""

    def __init__(self, first: int, played: Played) -> None:
        self._number, self._played = first, played

    def reset(self) -> list[Any]:
        return ["What is it?", self._picture()]

    def step(self, text: str) -> list[Any]:
        return ["And now?", self._picture()]

    def _picture(self) -> nanorl.Image:
        rng = np.random.RandomState(self._number)
        colours = rng.randint(0, 256, (12, 16, 3)).astype(np.uint8)
        self._number += 1
        rows, columns = self._played.height // 12, self._played.width // 16
        return nanorl.Image(colours.repeat(rows, 0).repeat(columns, 1))


class RolloutPlayer:
    """Plays rollouts whose environment shows a new picture before each turn."""

    def __init__(self, engine: Any, tokenizer: Any, played: Played) -> None:
        self._engine, self._tokenizer, self._played = engine, tokenizer, played
        # of noise every other token ends a turn: one that is cut would end its rollout
        self._ends = tuple(range(0, engine.model.config.vocab_size, 2))

    async def all(self, rollouts: int, first: int) -> list[Rollout]:
        """All at once; their pictures are numbered from `first` on."""
        async with AsyncEngine(self._engine) as generator:
            turns = self._played.turns
            play = (self._one(generator, first + number * turns) for number in range(rollouts))
            return list(await asyncio.gather(*play))

    async def _one(self, generator: Any, first: int) -> Rollout:
        limits = Limits(max_turns=self._played.turns, max_turn_tokens=64, max_context_tokens=2048)
        agent = Agent(generator=generator, tokenizer=self._tokenizer, limits=limits)
        services = Services(tokenizer=self._tokenizer, sandbox=None, timeout_s=60.0)
        return await agent.play(
            nanorl.Task(f"film {first}"),
            EnvClassKind(Film, {"first": first, "played": self._played}).open(services),
            group_id=str(first),
            rollout_id=str(first),
            sampling=SamplingParams(seed=first, stop_token_ids=self._ends),
        )


def resident_bytes() -> int:
    """Of this process, without what its allocator keeps for later."""
    release_free_memory()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
