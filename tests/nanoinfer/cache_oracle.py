"""A model small enough to be its own oracle, for random workloads on the real engine.

The state of a token mixes its id, the policy version and the sum of all states before it; the next
token is a function of the sum of all states. `CacheRunner` keeps states in the engine's blocks and
reads them through the engine's block tables, as attention does. `replay` computes the same without
a cache. Any block that is lost, shared too long, overwritten or stale changes a token.
"""

from collections.abc import Sequence

import numpy as np
import torch

from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoinfer.batch import RunnerOutput, StepInput
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine

VOCAB = 7
_MASK = (1 << 61) - 1


def state(token: int, version: int, before: int) -> int:
    return (before * 6364136223846793005 + token * 1442695040888963407 + version * 977 + 1) & _MASK


def next_token(total: int) -> int:
    return (total >> 7) % VOCAB


def replay(prompt: Sequence[int], versions: Sequence[int]) -> list[int]:
    """The tokens that follow, each sampled by the given version, without any cache."""
    ids = list(prompt)
    for version in versions:
        total = 0
        for token in ids:
            total = (total + state(token, version, total)) & _MASK
        ids.append(next_token(total))
    return ids[len(prompt) :]


class CacheRunner:
    """Stands in for `ModelRunner`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cells = np.zeros((num_blocks, block_size), dtype=object)
        self.version = 0
        self.num_computed = 0

    def sleep(self) -> None:
        """Called by the engine; states are not given away."""

    def wake(self) -> None:
        pass

    def refresh(self) -> None:
        """Called by the engine when weights change; `version` was set before."""

    def run(self, step: StepInput) -> RunnerOutput:
        if step.copies is not None:
            sources, targets = step.copies.numpy().T
            self.cells[targets] = self.cells[sources]
        size = self.cells.shape[1]
        ids, slots = step.ids_T.tolist(), step.slots_T.tolist()
        self.num_computed += len(ids)
        totals = []
        for i, length in enumerate(step.seq_lens):
            lo, hi = step.query_starts[i], step.query_starts[i + 1]
            table = step.block_tables[i].tolist()
            for t in range(lo, hi):
                position = length - (hi - t)
                assert step.positions_T[t] == position
                assert slots[t] == table[position // size] * size + position % size
                before = self._total(table, position)
                cell = (slots[t] // size, slots[t] % size)
                self.cells[cell] = state(ids[t], self.version, before)
                totals.append(self._total(table, position + 1))
        sampled = range(len(totals)) if step.sampled is None else step.sampled.tolist()
        assert len(step.sampling.positions) == len(sampled)
        zeros = [0.0] * len(sampled)
        return RunnerOutput([next_token(totals[t]) for t in sampled], zeros, zeros)

    def _total(self, table: list[int], length: int) -> int:
        return sum(self.cells[table].reshape(-1)[:length].tolist()) & _MASK


def make_engine(**options: object) -> tuple[LLMEngine, CacheRunner]:
    """A real engine around the oracle."""
    shape = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=2,
        intermediate_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        max_position_embeddings=256,
    )
    engine = LLMEngine(Transformer(shape, torch.float32), InferConfig(**options))  # type: ignore[arg-type]
    runner = CacheRunner(engine._blocks.num_blocks, engine.config.block_size)
    engine._runner = runner  # type: ignore[assignment]
    return engine, runner


def run_all(engine: LLMEngine, limit: int = 2000) -> dict:
    """Step to the end, checking invariants at every step."""
    outputs = {}
    for _ in range(limit):
        outputs.update(engine.step())
        engine.check()
        if not engine.num_unfinished:
            return outputs
    raise AssertionError(f"{engine.num_unfinished} requests did not end in {limit} steps")
