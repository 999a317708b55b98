"""The training engine as programs have it: a step (engine.py), and all that happens around steps.

    engine = Engine(model, EngineConfig(lr=1e-5))
    logps, entropies = engine.forward_logprobs(samples, entropy=True)
    engine.save("run", {"epoch": 2})

Left out: what is written and how (engine_state.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, overload

import torch
from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.engine import StepEngine
from nanoengine.heads.top_tokens import likeliest
from nanoengine.packing import Sample, TopTokens, collect_all
from nanoengine.state.kept_adamw import AdamW

_STATE = "nanoengine.state.engine_state:EngineState"
_AVERAGE = "nanoengine.state.weight_average:WeightAverage"


class Engine(StepEngine):
    """Trains `model`, which it converts to `config.dtype` in place, tells log-probs, and keeps,
    parks and exports what it has. `version` counts updates."""

    optimizer: AdamW
    average: Any = None
    """A `state.weight_average.WeightAverage`, where one is kept."""

    def restart(self, config: EngineConfig) -> None:
        """Another phase of training on the same weights: its own schedule, version 0, no momentum
        (see `AdamW.restart`)."""
        if config.dtype != self.config.dtype:
            raise ValueError(
                f"dtype={config.dtype!r}: this engine computes in {self.config.dtype}, and a phase "
                "keeps the dtype; make another engine"
            )
        if config.zero != self.config.zero:
            raise ValueError(
                f"zero={config.zero}: the state of this engine is cut for zero={self.config.zero}, "
                "and a phase keeps it; make another engine"
            )
        self.config = config
        self.version = 0
        self.optimizer.restart(config)

    # -- log-probs ---------------------------------------------------------------------------

    @overload
    def forward_logprobs(
        self,
        samples: Sequence[Sample],
        *,
        temperature: float = 1.0,
        entropy: Literal[False] = False,
        only_masked: bool = False,
    ) -> list[Tensor]: ...

    @overload
    def forward_logprobs(
        self,
        samples: Sequence[Sample],
        *,
        temperature: float = 1.0,
        entropy: Literal[True],
        only_masked: bool = False,
    ) -> tuple[list[Tensor], list[Tensor]]: ...

    @torch.no_grad()
    def forward_logprobs(
        self,
        samples: Sequence[Sample],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        only_masked: bool = False,
    ) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
        """For each sample its logps (and entropies), one for each token: entry t is of tokens[t]
        given the tokens before it, entry 0 is 0. `only_masked` leaves 0 where loss_mask is 0.
        """
        logps, entropies = self._score(samples, temperature, entropy, only_masked)
        return (logps, entropies) if entropy else logps

    def forward_entropies(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """For each sample the entropy (nats) at each of its tokens, of what it could have been; 0
        where loss_mask is 0."""
        return self._score(samples, temperature, entropy=True, only_masked=True)[1]

    @torch.no_grad()
    def _score(
        self, samples: Sequence[Sample], temperature: float, entropy: bool, only_masked: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs and, if asked for, entropies of each sample's tokens."""
        micros = self._passes(samples)
        with self._kernels():
            scored = [
                self._scorer.logprobs(micro, temperature, entropy=entropy, only_masked=only_masked)
                for micro in micros
            ]
        self.optimizer.release()
        logps = collect_all(samples, micros, [one.logp_T for one in scored])
        if not entropy:
            return logps, []
        entropies = [one.entropy_T for one in scored if one.entropy_T is not None]
        return logps, collect_all(samples, micros, entropies)

    @torch.no_grad()
    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        """For each sample the k likeliest tokens, likeliest first, in place of each token whose
        loss mask is not 0, and their log-probs."""
        micros = self._passes(samples)
        with self._kernels():
            found = likeliest(self._scorer, samples, micros, k, temperature)
        self.optimizer.release()
        return found

    # -- an average of the weights -------------------------------------------------------------

    def keep_average(self, rate: float) -> None:
        """Average the weights over the steps from now on; a checkpoint has the average with it. One
        that is kept already goes on, at this rate."""
        if self.average is None:
            self.average = resolve_name(_AVERAGE)(self.optimizer, rate)
            # Of this engine alone: the update of those without an average is StepEngine's own.
            self.update = self._update_both  # type: ignore[method-assign]
        self.average.rate = rate

    def _update_both(self) -> dict[str, float]:
        """As `StepEngine.update`; the average follows."""
        told = super().update()
        self.average.follow()
        return told

    def average_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """`forward_logprobs` of the averaged weights."""
        with self._averaged():
            return self.forward_logprobs(samples, temperature=temperature)

    def average_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        """`forward_top` of the averaged weights."""
        with self._averaged():
            return self.forward_top(samples, k, temperature=temperature)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Inside, the models hold the averaged weights."""
        assert self.average is not None, "keep_average comes first"
        try:
            with self.average.in_place():
                self._refresh()
                yield
        finally:
            self._refresh()

    @cached_property
    def state(self) -> Any:
        """The part of the engine that is saved, loaded and exported: a
        `state.engine_state.EngineState`."""
        return resolve_name(_STATE)(self)

    def export_state(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each Hugging Face tensor once, whole; views where `dtype` is the model's own. All ranks
        must run through the iterator."""
        yield from self.state.export(dtype)

    def fingerprints(self) -> dict[str, str]:
        """A fingerprint of each tensor that `export_state` gives, by name; equal weights have equal
        ones."""
        found: dict[str, str] = self.state.fingerprints()
        return found

    def load_weights(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights (strictly, by Hugging Face name); the moments stay."""
        self.state.load_weights(state)
        self._refresh()

    def offload(self, folder: Path | str | None = None) -> None:
        """Park the optimizer's memory until `reload` (`AdamW.offload`). The weights stay usable."""
        self.optimizer.offload(folder)

    def reload(self) -> None:
        self.optimizer.reload()

    def save(
        self,
        path: Path | str,
        cursor: Mapping[str, Any] | None = None,
        *,
        in_background: bool = False,
    ) -> Path | None:
        """Write a checkpoint under `path` and return its folder (see `EngineState.save`)."""
        folder: Path | None = self.state.save(path, cursor, in_background=in_background)
        return folder

    def wait_saved(self) -> Path | None:
        """Wait until the last background save is complete; raises its CheckpointError."""
        folder: Path | None = self.state.wait_saved()
        return folder

    def load(self, path: Path | str) -> dict[str, Any]:
        """Take over a checkpoint, or the latest under a root, and return what `save` was given as
        `cursor`. On CheckpointError nothing has changed (see `EngineState.load`)."""
        cursor: dict[str, Any] = self.state.load(path)
        self._refresh()
        return cursor
