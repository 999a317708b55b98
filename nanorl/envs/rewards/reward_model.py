"""A reward model: a sequence-classification folder reads the conversation and says a number.

The chat is rendered with that folder's own template, in which a policy cannot spell control tokens.
Rollouts that are scored at the same time are read together, packed without padding, in a thread.
`scripts/train_sft.sh --loss reward_model` trains one from pairs of answers.
Left out: models of several labels, and reward models that are served elsewhere (judge.py asks
addresses).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nanoengine.heads.sequence_classifier import (
    load_sequence_classifier,
    rated_chat,
    score_sequences,
)
from nanoengine.optim import DTYPES
from nanoengine.parallel.device import worker_thread
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.task import Task
from nanorl.types import Rollout


class ModelReward:
    """The score is the model's, times `scale` plus `shift`: raw scores have any size."""

    def __init__(
        self,
        folder: str | Path,
        *,
        scale: float = 1.0,
        shift: float = 0.0,
        dtype: str = "fp32",
        device: str = "cpu",
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: one of {', '.join(DTYPES)}")
        self._model = load_sequence_classifier(folder, DTYPES[dtype], device)
        self._tokenizer = ChatTokenizer.from_folder(folder)
        if self._tokenizer.chat_template is None:
            raise ValueError(f"{folder}: no chat template, so no chat can be written for it")
        self._scale, self._shift = scale, shift
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._reading: asyncio.Task[None] | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def score(self, rollout: Rollout, task: Task, transcript: Transcript) -> Score:
        ids = rated_chat(self._tokenizer, transcript.messages)
        most = self._model.config.max_position_embeddings
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((ids[-most:], future))  # of a longer chat the end says more
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._read_all())
        return Score(self._scale * await future + self._shift)

    def close(self) -> None:
        """End its thread. Closing twice is fine."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()

    async def _read_all(self) -> None:
        """Read what waits, again and again: what comes meanwhile makes the next batch."""
        await asyncio.sleep(0)  # others that are ready to ask do so first
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                scores = await self._read([ids for ids, _ in batch])
            except Exception as error:  # the boundary of the thread: raised to all who wait
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():  # somebody may have stopped waiting
                    future.set_result(score)

    async def _read(self, sequences: Sequence[list[int]]) -> list[float]:
        if self._thread is None:
            device, threads = self._model.device, torch.get_num_threads()
            self._thread = worker_thread("reward model", device, threads)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, score_sequences, self._model, sequences)
