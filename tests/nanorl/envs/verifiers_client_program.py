"""Run by the Python that has verifiers: its train client asks twice, and prints tokens.

python -P verifiers_client_program.py BASE_URL MODEL TOKENIZER_FOLDER      (key: TEST_API_KEY)
"""

import asyncio
import json
import sys
from typing import Any

from verifiers.v1.clients import resolve_client
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.errors import ProviderError
from verifiers.v1.types import SamplingConfig


async def main(base_url: str, model: str, folder: str) -> dict[str, Any]:
    config = TrainClientConfig(
        base_url=base_url, api_key_var="TEST_API_KEY", renderer_model_name=folder
    )
    client = resolve_client(config)
    # The field is sent where a renderer goes on from an earlier turn.
    sampling = SamplingConfig(max_tokens=9, temperature=1.0, routed_experts_prompt_start=2)

    async def ask(text: str) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        return await client.get_response(ChatDialect(), body, sampling, "session-1")

    try:
        response = await ask("hello")
        try:
            await ask("hello " * 500)
            refusal = ""
        except ProviderError as error:
            refusal = f"{error.status_code} {error}"
    finally:
        await client.close()
    tokens = response.tokens
    return {
        "prompt_ids": tokens.prompt_ids,
        "completion_ids": tokens.completion_ids,
        "logprobs": tokens.completion_logprobs,
        "finish_reason": response.finish_reason,
        "refusal": refusal,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(*sys.argv[1:]))))
