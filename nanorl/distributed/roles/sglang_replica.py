"""`SglangReplica`: an SGLang server as a replica of a run.

    python -m sglang.launch_server --model-path MODEL          # and --api-key, if you like

Tokens go through `/generate` with `input_ids`, weights through `/pause_generation`,
`/update_weights_from_disk` and `/continue_generation`, as slime's and verl's own clients ask.
Held to bodies in the form of SGLang's source; no server of it was run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from nanoinfer.params import Output, SamplingParams
from nanorl.distributed.roles.http_replica import ServerRefusedError
from nanorl.distributed.roles.outside_replica import (
    OutsideReplica,
    finished,
    is_untouched,
    shared_params,
    version_of,
)


@dataclass(frozen=True, kw_only=True)
class SglangReplica(OutsideReplica):
    """The address of an SGLang server."""

    engine: ClassVar[str] = "SGLang"

    async def ready(self, temperature: float) -> None:
        """As of `HttpReplica`."""
        await self.heartbeat()

    async def sleep(self) -> None:
        await self._call("/release_memory_occupation", {})

    async def wake(self) -> None:
        await self._call("/resume_memory_occupation", {})

    async def _part(self, ids: list[int], params: SamplingParams, name: str) -> Output:
        body = {
            "rid": name,
            "input_ids": ids,
            "sampling_params": _written(params),
            "return_logprob": True,
            "top_logprobs_num": params.top_logps,
        }
        told = (await self._call("/generate", body))["meta_info"]
        drawn = told.get("output_token_logprobs") or []
        end = told["finish_reason"]
        top = told.get("output_top_logprobs") or []
        version = version_of(told.get("weight_version"), self.url) if drawn else 0
        return finished(
            [int(entry[1]) for entry in drawn],
            [float(entry[0]) for entry in drawn],
            [version] * len(drawn),
            finish_reason=end["type"],
            stop_reason=end.get("matched"),
            num_cached_tokens=told.get("cached_tokens") or 0,
            top_logps=[[(int(one[1]), float(one[0])) for one in row] for row in top]
            if params.top_logps
            else [],
        )

    async def _pause(self) -> None:
        await self._call("/pause_generation", {"mode": "abort"})

    async def _load(self, folder: str, version: str) -> None:
        body = {"model_path": folder, "flush_cache": True, "weight_version": version}
        told = await self._call("/update_weights_from_disk", body)
        if not told["success"]:
            raise RuntimeError(str(told["message"]))

    async def _go_on(self) -> None:
        await self._call("/continue_generation", {})

    async def _version(self) -> str:
        try:
            told = await self._call("/get_model_info", {}, "GET")
        except ServerRefusedError as error:
            if error.status in (401, 403):
                raise
            raise ValueError(f"{error}: this is no SGLang server") from None
        return str(told.get("weight_version"))

    def _check(self, params: SamplingParams) -> None:
        """Its log-probs are of the tempered distribution, so nothing else may be drawn from."""
        super()._check(params)
        if not is_untouched(params):
            raise ValueError(
                f"{self.url}: SGLang as a replica takes no penalties, biases, grammars or "
                "truncation (top_k, top_p, min_p): its log-probs would not be those of training"
            )


def _written(params: SamplingParams) -> dict[str, Any]:
    return {
        **shared_params(params),
        "max_new_tokens": params.max_tokens,
        "sampling_seed": params.seed,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
