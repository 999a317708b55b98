"""The client's request bodies in JSON. An unknown field is refused: it may change what is meant.

Fields that say what a body is (`type`), or who asks (tags, versions), are accepted and not read.
Left out: several fields of the wire that ask for what this service does not do; where one of them
is set the request is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from nanoengine.config import EngineConfig
from nanoinfer.params import SamplingParams
from nanorl.serving.training_service.service_messages import SampleOptions

MAX_SAMPLES = 1024


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    type: str | None = None


class Anything(BaseModel):
    """The fields that are accepted and dropped: telemetry, the client's version."""


class CreateSession(Body):
    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class NamedSession(Body):
    session_id: str


class LoraBody(Body):
    rank: int = Field(ge=1, le=1024)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class NamedModel(Body):
    model_id: str


class AdamParams(Body):
    model_config = ConfigDict(allow_inf_nan=False)

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def engine_config(self, base: EngineConfig) -> EngineConfig:
        """`base` with these settings of the update. `ValueError` for one that cannot be."""
        return replace(
            base,
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            max_grad_norm=max(self.grad_clip_norm, 0.0),
        )


class OptimStep(Body):
    model_id: str
    seq_id: int
    adam_params: AdamParams


class SaveWeights(Body):
    model_id: str
    seq_id: int
    path: str | None = None
    ttl_seconds: int | None = Field(default=None, ge=1)
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSampler(Body):
    model_id: str
    seq_id: int
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: int | None = Field(default=None, ge=1)
    user_metadata: dict[str, str] | None = None


class LoadWeights(Body):
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = Field(default=None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: None = None


class WeightsInfo(Body):
    tinker_path: str


class CreateSamplingSession(Body):
    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class TextChunk(Body):
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class ModelInput(Body):
    chunks: list[TextChunk]

    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingBody(Body):
    max_tokens: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = Field(default=-1, ge=-1)
    top_p: float = 1.0


class SampleBody(Body):
    sampling_session_id: str
    seq_id: int = Field(ge=0)
    prompt: ModelInput
    sampling_params: SamplingBody
    num_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(default=0, ge=0, le=100)
    topk_sample_logprobs: int = Field(default=0, ge=0, le=100)
    prompt_logprobs_last_n: int | None = Field(default=None, ge=1)
    prompt_alt_tokens_k: Literal[0] = 0
    target_prompt_logprobs: None = None
    record_stability_info: Literal[False] | None = None  # for stable_reinforce, a loss left out
    base_model: None = None
    model_path: None = None

    def options(self) -> SampleOptions:
        return SampleOptions(
            prompt_logps=bool(self.prompt_logprobs),
            last_n=self.prompt_logprobs_last_n,
            top_prompt=self.topk_prompt_logprobs,
            top_sample=self.topk_sample_logprobs,
        )

    def params(self, room: int, seed: int) -> SamplingParams:
        """The engine's parameters. `room` and `seed` are for a client that names none. Log-probs
        are of the model's own distribution, as `forward` gives them, whatever the temperature."""
        asked = self.sampling_params
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop
        texts = [one for one in stop or () if isinstance(one, str)]
        return SamplingParams(
            max_tokens=asked.max_tokens or room,
            temperature=asked.temperature,
            top_k=max(asked.top_k, 0),
            top_p=asked.top_p,
            seed=seed if asked.seed is None else asked.seed,
            n=self.num_samples,
            stop=tuple(texts),
            stop_token_ids=tuple(one for one in stop or () if isinstance(one, int)),
            ignore_eos=stop is not None,
            top_logps=max(self.topk_prompt_logprobs, self.topk_sample_logprobs),
            prompt_logps=bool(self.prompt_logprobs or self.topk_prompt_logprobs),
            logps_mode="raw",
        )


class RetrieveFuture(Body):
    request_id: str
    allow_metadata_only: bool = False


class CancelFuture(Body):
    request_id: str
