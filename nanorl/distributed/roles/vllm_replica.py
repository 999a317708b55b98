"""`VllmReplica`: a vLLM server as a replica of a run.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out       # and --api-key, if you like

Tokens go through `/inference/v1/generate` (`--enable-scale-out`), weights through the routes of the
developers' mode: `/pause`, `reload_weights` of `/collective_rpc`, `/reset_prefix_cache`,
`/update_weight_version`, `/resume`. A reload that misses a tensor is a line in vLLM's log and a
success to its client, so the known case is refused here and the measured gap tells of others
(`check_gap`). The routes answer whoever reaches the port, with or without a key:
keep it on the loopback or behind a firewall. As of vLLM 0.32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, cast

from nanoinfer.params import Grammar, Output, SamplingParams
from nanorl.distributed.roles.http_replica import ServerRefusedError
from nanorl.distributed.roles.outside_replica import (
    OutsideReplica,
    finished,
    is_untouched,
    shared_params,
    version_of,
)

_GENERATE = "/inference/v1/generate"
_START = "start it as `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out`"


@dataclass(frozen=True, kw_only=True)
class VllmReplica(OutsideReplica):
    """The address of a vLLM server."""

    engine: ClassVar[str] = "vLLM"
    _modes: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What the server said of how it reports log-probs, asked once: it cannot change."""

    async def generate(
        self, ids: list[int], params: SamplingParams, name: str, sampled: Output | None
    ) -> Output:
        """As of `OutsideReplica`."""
        await self._check_mode(params)
        return await super().generate(ids, params, name, sampled)

    async def ready(self, temperature: float) -> None:
        """As of `HttpReplica`."""
        await self.heartbeat()
        await self._check_mode(SamplingParams(temperature=temperature))

    async def sleep(self) -> None:
        await self._call("/sleep?level=1", {})

    async def wake(self) -> None:
        await self._call("/wake_up", {})

    async def _part(self, ids: list[int], params: SamplingParams, name: str) -> Output:
        body = {"request_id": name, "token_ids": ids, "sampling_params": _written(params)}
        (choice,) = (await self._call(_GENERATE, body))["choices"]
        tokens = choice["token_ids"] or []
        content = (choice["logprobs"] or {}).get("content") or []
        versions = [
            version_of(span["version"], self.url)
            for span in choice["weight_versions"] or []
            for _ in range(span["start"], span["end"])
        ]
        top = [_likeliest(entry["top_logprobs"], params.top_logps) for entry in content]
        return finished(
            tokens,
            [float(entry["logprob"]) for entry in content],
            versions,
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
            top_logps=top if params.top_logps else [],
        )

    async def _pause(self) -> None:
        await self._call("/pause?mode=abort", {})

    async def _load(self, folder: str, version: str) -> None:
        device = (await self._config())["device_config"]["device"]
        if device == "cpu" and _is_tied(Path(folder)):
            raise RuntimeError(
                "vLLM on a CPU packs a copy of the output matrix and keeps it when weights are "
                "reloaded that are tied to the embedding; train a model whose config.json says "
                "tie_word_embeddings: false, or serve on a GPU"
            )
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        await self._call("/collective_rpc", reload)
        await self._call("/reset_prefix_cache", {})
        await self._call("/update_weight_version", {"new_version": version})

    async def _go_on(self) -> None:
        await self._call("/resume", {})

    async def _version(self) -> str:
        try:
            await self._call(_GENERATE, {})
        except ServerRefusedError as error:
            if error.status == 404:
                raise ValueError(f"{error}: it has no route for tokens; {_START}") from None
            if error.status in (401, 403):
                raise
        try:
            return str((await self._call("/weight_info", {}, "GET"))["weight_version"])
        except ServerRefusedError as error:
            raise ValueError(f"{error}: it has no routes for weights; {_START}") from None

    async def _check_mode(self, params: SamplingParams) -> None:
        """ValueError where the log-probs that the server reports are not those of training: by
        default those of temperature 1, and else those of what is left after every truncation."""
        if params.temperature in (0, 1) and is_untouched(params):
            return
        is_raw = await self._reports_raw()
        if params.temperature in (0, 1) and is_raw:
            return
        if is_untouched(params) and not is_raw:
            return
        needed = "raw" if params.temperature in (0, 1) else "processed"
        more = "" if is_untouched(params) else ", and penalties and truncation left out"
        raise ValueError(
            f"{self.url}: with temperature {params.temperature:g} log-probs as training needs them "
            f"take a vLLM that was started with --logprobs-mode {needed}_logprobs"
            f"{more if needed == 'processed' else ''}"
        )

    async def _reports_raw(self) -> bool:
        if not self._modes:
            self._modes["is"] = (await self._config())["model_config"]["logprobs_mode"]
        return self._modes["is"].startswith("raw")

    async def _config(self) -> dict[str, Any]:
        info = await self._call("/server_info?config_format=json", {}, "GET")
        return cast("dict[str, Any]", info["vllm_config"])


def _is_tied(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text()).get("tie_word_embeddings"))


def _likeliest(entries: list[dict[str, Any]], num: int) -> list[tuple[int, float]]:
    """The first of what is reported is the token that was drawn, however unlikely."""
    pairs = [(_token(one), float(one["logprob"])) for one in entries]
    return sorted(pairs, key=lambda pair: -pair[1])[:num]


def _token(entry: dict[str, Any]) -> int:
    """Older ones write the id as a text, `token_id:50`."""
    found = entry.get("token_id", entry.get("token"))
    return int(str(found).rpartition(":")[2])


def _written(params: SamplingParams) -> dict[str, Any]:
    said = shared_params(params)
    if params.top_k == 0:
        said["top_k"] = 0
    said |= {
        "max_tokens": params.max_tokens,
        "seed": params.seed,
        "logprobs": params.top_logps + 1 if params.top_logps else 0,
        "detokenize": bool(params.stop),
    }
    if params.logit_bias:
        said["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if params.allowed_token_ids is not None:
        said["allowed_token_ids"] = list(params.allowed_token_ids)
    if params.grammar is not None:
        said["structured_outputs"] = _grammar(params.grammar)
    return said


def _grammar(grammar: Grammar) -> dict[str, Any]:
    if grammar.kind == "choice":
        return {"choice": list(grammar.choices)}
    return {
        {"json_schema": "json", "regex": "regex", "lark": "grammar"}[grammar.kind]: grammar.value
    }
