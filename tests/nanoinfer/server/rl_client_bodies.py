"""What the client code of other RL stacks sends to an engine: routes and field names as they stand
there; values are ours. Each row names the project and its file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sent:
    """One request of a client."""

    source: str
    method: str
    path: str
    body: Any = None
    status: int = 200


SLIME = "THUDM/slime slime/backends/sglang_utils/sglang_engine.py"
SLIME_ABORT = "THUDM/slime slime/backends/sglang_utils/server_control.py"
VERL = "volcengine/verl verl/workers/rollout/sglang_rollout/http_server_engine.py"
SKYRL = "NovaSky-AI/SkyRL skyrl_train/inference_engines/remote_inference_engine.py"
PRIME = "PrimeIntellect-ai/prime-rl src/prime_rl/utils/client.py"
VLLM = "vllm-project/vllm vllm/entrypoints/serve/dev/rlhf/api_router.py"

CONTROL = [
    Sent(SLIME, "POST", "/pause_generation", {}),
    Sent(SLIME_ABORT, "POST", "/abort_request", {"abort_all": True}),
    Sent(SLIME, "GET", "/flush_cache"),
    Sent(SLIME, "POST", "/release_memory_occupation", {}),
    Sent(SLIME, "POST", "/resume_memory_occupation", {"tags": ["weights"]}),
    Sent(SLIME, "POST", "/resume_memory_occupation", {"tags": ["kv_cache"]}),
    Sent(SLIME, "POST", "/continue_generation", {}),
    Sent(
        SLIME, "POST", "/init_weights_update_group",
        {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2,
         "group_name": "slime", "backend": "nccl"},
        501,
    ),
    Sent(
        SLIME, "POST", "/update_weights_from_distributed",
        {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[1]], "group_name": "slime",
         "flush_cache": False, "weight_version": "1"},
        501,
    ),
    Sent(
        SLIME, "POST", "/update_weights_from_tensor",
        {"serialized_named_tensors": ["eA=="], "load_format": None, "flush_cache": False},
        501,
    ),
    Sent(VERL, "POST", "/release_memory_occupation", {"tags": ["kv_cache", "weights"]}),
    Sent(VERL, "POST", "/resume_memory_occupation", {"tags": None}),
    Sent(VERL, "POST", "/abort_request", {"rid": "one", "abort_all": False}),
    Sent(VERL, "POST", "/abort_request", {"rid": "", "abort_all": True}),
    Sent(SKYRL, "POST", "/sleep", {"level": 1}),
    Sent(SKYRL, "POST", "/wake_up", {"tags": ["weights"]}),
    Sent(SKYRL, "POST", "/wake_up", {"tags": ["kv_cache"]}),
    Sent(SKYRL, "POST", "/reset_prefix_cache"),
    Sent(SKYRL, "POST", "/flush_cache"),
    Sent(
        SKYRL, "POST", "/init_weight_update_communicator",
        {"master_addr": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 2},
        501,
    ),
    Sent(SKYRL, "POST", "/destroy_weights_update_group", None, 501),
    Sent(PRIME, "POST", "/pause?mode=keep&clear_cache=false"),
    Sent(PRIME, "POST", "/resume"),
    Sent(PRIME, "POST", "/init_broadcaster", {"host": "10.0.0.1", "port": 29501}, 501),
    Sent(VLLM, "POST", "/pause?mode=abort"),
    Sent(VLLM, "POST", "/pause?mode=wait"),
    Sent(VLLM, "POST", "/pause?mode=never", None, 400),
    Sent(VLLM, "POST", "/abort_requests", {"request_ids": ["one"]}),
    Sent(VLLM, "POST", "/abort_requests", {}),
    Sent(VLLM, "POST", "/resume"),
    Sent(VLLM, "POST", "/update_weights", {"update_info": {"names": []}}, 400),
    Sent(VLLM, "POST", "/init_weight_transfer_engine", {"init_info": {}}, 501),
]  # fmt: skip

QUESTIONS = [
    Sent(SLIME, "GET", "/health_generate"),
    Sent(SLIME, "GET", "/get_server_info"),
    Sent(SLIME, "GET", "/get_weight_version"),
    Sent(SLIME_ABORT, "GET", "/v1/loads?include=core,disagg,queues"),
    Sent(PRIME, "GET", "/health"),
    Sent(PRIME, "GET", "/v1/models"),
    Sent(VLLM, "GET", "/is_paused"),
    Sent(VLLM, "GET", "/get_world_size?include_dp=true"),
    Sent(VLLM, "GET", "/version"),
    Sent(VLLM, "GET", "/server_info?config_format=json"),
]

SLIME_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 6,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
    "sampling_seed": 7,
}
"""Of THUDM/slime slime/rollout/sglang_rollout.py."""
