"""Who judges: a model at an OpenAI-compatible address, or one in an engine of our own.

Both answer one prompt with one text. Left out: what is asked and what the text means (judge.py).
"""

from __future__ import annotations

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nanoengine.extras import missing
from nanoinfer.http.api_key import read_key
from nanorl.types import InfrastructureError

if TYPE_CHECKING:
    from nanoinfer.async_engine import AsyncEngine

_PASSING = (408, 409, 429)  # HTTP states worth another try, beside 5xx
_BACKOFF_S = 0.5
_RETRY_TEMPERATURE = 0.7  # the first try is greedy; the same again would say the same again


@dataclass(frozen=True, kw_only=True)
class JudgeLimits:
    """The limits of a judgement."""

    max_tries: int = 3
    """Of one question: the address does not answer, or the reply holds no verdict."""
    timeout_s: float = 120.0
    """Of one try."""
    max_tokens: int = 512
    """Of one reply."""
    max_at_once: int = 16
    """Questions under way."""

    def __post_init__(self) -> None:
        for name in ("max_tries", "timeout_s", "max_tokens", "max_at_once"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive and finite")


class JudgeFailed(InfrastructureError):  # noqa: N818 - named as what happened
    """One try failed; `is_final` says that another would fail as well."""

    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class Judge(Protocol):
    """A model that answers prompts."""

    name: str

    async def reply(self, prompt: str, attempt: int) -> str:
        """The judge's reply; `attempt` counts from 0. JudgeFailed where it gives none."""
        ...

    def close(self) -> None: ...


class AddressJudge:
    """A model behind an address such as http://127.0.0.1:8000/v1."""

    def __init__(
        self, address: str, model: str, limits: JudgeLimits, api_key_file: str = ""
    ) -> None:
        """The key is read from a file, if the address wants one: options are printed."""
        if not model:
            raise ValueError(f"address={address}: name the model there, model=...")
        file = Path(api_key_file) if api_key_file else None
        key = read_key(file, flag="--reward-args api_key_file") or "none"
        self.name = f"{address} {model}"
        self._openai = _require_openai()
        self._model, self._limits = model, limits
        self._options: dict[str, Any] = {
            "base_url": address, "api_key": key, "timeout": limits.timeout_s, "max_retries": 0,
        }  # fmt: skip
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def reply(self, prompt: str, attempt: int) -> str:
        if attempt:
            await asyncio.sleep(_BACKOFF_S * 2 ** (attempt - 1))
        if self._loop is not asyncio.get_running_loop():  # connections belong to one loop
            self._loop = asyncio.get_running_loop()
            self._client = self._openai.AsyncOpenAI(**self._options)
        try:
            answer = await self._client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": prompt}],
                max_tokens=self._limits.max_tokens,
                temperature=_RETRY_TEMPERATURE if attempt else 0.0,
                seed=attempt,
            )
            return answer.choices[0].message.content or ""
        except self._openai.APIStatusError as error:
            code = error.status_code
            is_final = code < 500 and code not in _PASSING
            raise JudgeFailed(f"{self.name} answers {code}: {error}", is_final) from error
        except self._openai.OpenAIError as error:
            raise JudgeFailed(f"{self.name}: {error}") from error
        except (AttributeError, IndexError, TypeError, ValueError) as error:  # what it sent is odd
            raise JudgeFailed(f"{self.name} sent no completion: {error}") from error

    def close(self) -> None:
        self._client = self._loop = None


class FolderJudge:
    """A model in an engine of its own, started with the first question."""

    def __init__(
        self, folder: str | Path, limits: JudgeLimits, dtype: str = "fp32", device: str = "auto"
    ) -> None:
        from nanoengine.optim import DTYPES  # here: a judge at an address needs no torch
        from nanoinfer.llm import LLM  # a judge at an address needs no engine

        self.name = str(Path(folder).resolve())
        self._llm = LLM(folder, dtype=DTYPES[dtype], device=device)
        self._limits = limits
        self._engine: AsyncEngine | None = None
        self._thread: ThreadPoolExecutor | None = None

    async def reply(self, prompt: str, attempt: int) -> str:
        from nanoinfer.params import SamplingParams  # here: a judge at an address needs no engine

        tokenizer, engine = self._llm.tokenizer, self._started()
        ids = tokenizer.encode_chat(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )
        params = SamplingParams(
            max_tokens=self._limits.max_tokens,
            temperature=_RETRY_TEMPERATURE if attempt else 0.0,
            seed=attempt,
            detokenize=True,
        )
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                output = await engine.generate(ids, params)
        except TimeoutError as error:
            raise JudgeFailed(f"{self.name} took longer than {self._limits.timeout_s} s") from error
        except ValueError as error:
            raise JudgeFailed(f"{self.name}: {error}", is_final=True) from error
        return output.text or ""

    def close(self) -> None:
        thread, self._thread, self._engine = self._thread, None, None
        if thread is not None:
            thread.shutdown()

    def _started(self) -> AsyncEngine:
        import torch  # here: a judge at an address needs no torch

        from nanoengine.parallel.device import worker_thread  # here: it imports torch
        from nanoinfer.async_engine import AsyncEngine  # here: it imports torch

        if self._engine is None:
            core = self._llm.engine
            self._thread = worker_thread("judge", core.model.device, torch.get_num_threads())
            self._engine = AsyncEngine(core, executor=self._thread)
        return self._engine


def _require_openai() -> Any:
    try:
        import openai  # here: an extra
    except ImportError as error:
        raise missing("a judge at an address", "openai", extra="judge") from error
    return openai
