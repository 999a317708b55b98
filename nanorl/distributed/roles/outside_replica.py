"""A replica that is another project's inference server: vLLM or SGLang, tokens in and tokens out.

    --rollout.addresses vllm+http://127.0.0.1:8000 sglang+http://127.0.0.1:30000

It samples with kernels of its own, so its log-probs are not those of the trainer: the run measures
the gap on what it trains on, as in every run, and the ratio of the losses starts from what the
engine said. Tokens whose distribution it cannot report whole are refused, never guessed.
New weights come from the folders of the transport `disk`. Meanwhile its requests are aborted; what
they have is kept, and they go on under the new weights from a prefill of their own, so no token is
sampled from a cache of older weights. Every token has the version by the engine's own account.

What is one engine's own is in vllm_replica.py and sglang_replica.py.
Left out: weights over NCCL or shared memory, adapters, prompt log-probs, draining.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from http import HTTPStatus
from time import perf_counter
from typing import Any, ClassVar

from nanoinfer.options.outputs import joined
from nanoinfer.options.param_checks import is_edited
from nanoinfer.params import Output, SamplingParams
from nanorl.distributed.roles.http_replica import ELSEWHERE, HttpReplica, ServerRefusedError
from nanorl.distributed.weights.disk import DiskOffer
from nanorl.distributed.weights.offer import (
    BaseVersionMissing,
    Offer,
    WeightReceiver,
    WeightsRefused,
)

MAX_MEAN_GAP = 0.5  # in bf16 of other kernels a few thousandths; of unrelated weights, several
_MOST_SEED = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class OutsideReplica(HttpReplica, ABC):
    """The part that both engines have in common."""

    note: ClassVar[str] = (
        "its log-probs are not the trainer's: the gap is measured (logp_gap_max and logp_gap_mean "
        "of summary.json), and the losses weigh each token by the ratio to what it said"
    )
    gone: ClassVar[frozenset[int]] = ELSEWHERE | {HTTPStatus.SERVICE_UNAVAILABLE}

    async def generate(
        self, ids: list[int], params: SamplingParams, name: str, sampled: Output | None
    ) -> Output:
        """See `ReplicaClient`. What an update of the weights cut short goes on under the new ones.
        ValueError for what this engine cannot do or not report."""
        self._check(params)
        whole = sampled
        while whole is None or whole.finish_reason == "abort":
            so_far = [] if whole is None else whole.ids
            room = params.max_tokens - len(so_far)
            # Its generator begins anew with each request, so each part has a seed of its own.
            rest = replace(params, max_tokens=room, seed=(params.seed + len(so_far)) & _MOST_SEED)
            part = await self._part(ids + so_far, rest, f"{name}-{len(so_far)}")
            whole = part if whole is None else joined(whole, part)
            if len(whole.ids) >= params.max_tokens and whole.finish_reason == "abort":
                return replace(whole, finish_reason="length")
        return whole

    async def load_weights(self, receiver: WeightReceiver, offer: Offer) -> float:
        """As of `Replica`; the offer must be of a folder that the server can read."""
        start = perf_counter()
        if not isinstance(offer, DiskOffer):
            raise WeightsRefused(
                f"{self.url}: {self.engine} takes weights from a folder; choose the transport "
                f"disk, not {type(offer).__name__}"
            )
        if offer.base_version is not None:
            raise BaseVersionMissing(f"{self.url}: {self.engine} takes whole versions")
        try:
            await self._pause()
            try:
                await self._load(offer.folder, str(offer.version))
            finally:
                await self._go_on()
        except (ServerRefusedError, RuntimeError) as error:
            raise WeightsRefused(f"{self.url}: {error}") from error
        return perf_counter() - start

    async def drain(self) -> None:
        raise RuntimeError(f"{self.url}: {self.engine} has no drain; it is simply left")

    async def heartbeat(self) -> dict[str, float]:
        """The version of its weights, once it has some of this run."""
        label = await self._version()
        return {"version": float(label)} if label.isdecimal() else {}

    # -- an engine's own -------------------------------------------------------------------------

    @abstractmethod
    async def _part(self, ids: list[int], params: SamplingParams, name: str) -> Output: ...

    @abstractmethod
    async def _pause(self) -> None:
        """Abort what is under way, and take up nothing more."""
        ...

    @abstractmethod
    async def _load(self, folder: str, version: str) -> None: ...

    @abstractmethod
    async def _go_on(self) -> None: ...

    @abstractmethod
    async def _version(self) -> str:
        """The label of the weights. ValueError where the server lacks a route that is needed."""
        ...

    def _check(self, params: SamplingParams) -> None:
        """ValueError for what no request to an outside engine may have."""
        asked = {
            "prompt_logps": params.prompt_logps,
            "adapter": bool(params.adapter),
            "images": bool(params.images),
            "n": params.n != 1,
            "detokenize": params.detokenize,
            "logps_mode": params.logps_mode == "raw" and params.temperature not in (0, 1),
        }
        if wrong := [name for name, is_asked in asked.items() if is_asked]:
            raise ValueError(
                f"{self.url}: {self.engine} as a replica has no {', '.join(wrong)}; leave it out"
            )


def check_gap(mean: float) -> None:
    """RuntimeError where log-probs of a step were, in the mean, `mean` nats from the trainer's and
    that is more than other kernels explain: some server has other weights than it says."""
    if mean > MAX_MEAN_GAP:
        raise RuntimeError(
            f"an engine at --rollout.addresses said log-probs that are {mean:.3g} nats from the "
            f"trainer's in the mean (at most {MAX_MEAN_GAP:g} is the work of other kernels): it "
            "has not loaded the weights that it was given, or serves another model. Look at its "
            "log, then go on with --resume"
        )


def finished(ids: list[int], logps: list[float], versions: list[int], **end: Any) -> Output:
    """An output of an engine that reports one distribution."""
    if not len(ids) == len(logps) == len(versions):
        raise RuntimeError(
            f"an engine answered {len(ids)} tokens, {len(logps)} log-probs, "
            f"{len(versions)} versions"
        )
    if end.get("finish_reason") == "stop" and end.get("stop_reason") is None and ids:
        end["stop_reason"] = ids[-1]  # the token that ends a turn, which both report as None
    return Output(ids=ids, logps=logps, versions=versions, **end)


def version_of(label: object, url: str) -> int:
    """The version behind an engine's label. RuntimeError where somebody else has put it there."""
    if isinstance(label, str) and label.isdecimal():
        return int(label)
    raise RuntimeError(
        f"{url}: its weights are labelled {label!r}, which is no version of this run: they were "
        "loaded by somebody else"
    )


def is_untouched(params: SamplingParams) -> bool:
    """Say whether tokens are drawn from the tempered distribution itself."""
    is_cut = params.top_k != 0 or params.top_p != 1 or params.min_p != 0
    return not (is_cut or is_edited(params))


def shared_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that both engines call the same."""
    return {
        "temperature": params.temperature,
        "top_k": params.top_k or -1,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
    }
