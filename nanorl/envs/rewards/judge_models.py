"""Who judges: a model at an OpenAI-compatible address, or one in an engine of our own.

Both answer one prompt with one text. The engine is of this process, or, where a run has several
processes, a role of its own to which a router leads (nanorl/distributed/roles/judge_set.py): tokens
go there and tokens come back, so its replies are the same.
Left out: what is asked and what the text means (judge.py).
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
from nanorl.envs.rewards.judge_costs import JudgeCosts
from nanorl.types import InfrastructureError

if TYPE_CHECKING:
    from nanoinfer.params import Output, SamplingParams

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
        self,
        address: str,
        model: str,
        limits: JudgeLimits,
        api_key_file: str = "",
        costs: JudgeCosts | None = None,
    ) -> None:
        """The key is read from a file, if the address wants one: options are printed."""
        self._costs = costs or JudgeCosts()
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
            text = answer.choices[0].message.content or ""
            self._costs.add(
                prompt_tokens=_number(answer.usage, "prompt_tokens"),
                reply_tokens=_number(answer.usage, "completion_tokens"),
            )
            return text
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


class AnswersTokens(Protocol):
    """An engine, or what leads to engines elsewhere."""

    async def generate(self, ids: list[int], params: SamplingParams) -> Output: ...


@dataclass(frozen=True, kw_only=True)
class JudgeModel:
    """The model of a judge, as another process needs it to make the same engine."""

    folder: Path
    dtype: str = "fp32"
    device: str = "auto"
    """auto (CUDA if there is any), cpu, cuda or cuda:N."""


class FolderJudge:
    """A model in an engine: of this process, or where `ask` says."""

    def __init__(
        self,
        folder: str | Path,
        limits: JudgeLimits,
        dtype: str = "fp32",
        device: str = "auto",
        costs: JudgeCosts | None = None,
    ) -> None:
        """ValueError for a folder without a model, tokenizer or chat template. The weights are
        loaded with `load` or the first question, where nobody else has them."""
        from nanoengine.model.config import ModelConfig  # here: a judge at an address needs none
        from nanoengine.optim import DTYPES  # here: a judge at an address needs no torch
        from nanoengine.text.tokenizer import ChatTokenizer  # nor tokens

        if dtype not in DTYPES:
            raise ValueError(f"dtype={dtype!r}: one of {', '.join(DTYPES)}")
        # Not resolved: links may lead elsewhere on another machine, and names have to be equal.
        self.model = JudgeModel(folder=Path(folder).absolute(), dtype=dtype, device=device)
        ModelConfig.from_folder(self.model.folder)
        self._tokenizer = ChatTokenizer.from_folder(folder)
        if self._tokenizer.chat_template is None:
            raise ValueError(f"{folder}: no chat template, so no question can be written for it")
        self.name = str(Path(folder).resolve())
        self.limits = limits
        self._costs = costs or JudgeCosts()
        self._engine: AnswersTokens | None = None
        self._is_elsewhere = False
        self._thread: ThreadPoolExecutor | None = None

    def ask(self, engine: AnswersTokens) -> None:
        """From now on `engine`, which has this model, answers, and minds `limits.timeout_s`."""
        self._engine, self._is_elsewhere = engine, True

    def load(self) -> None:
        """Make an engine in this process, unless there is one to ask."""
        import torch  # here: a judge at an address needs no torch

        from nanoengine.optim import DTYPES  # here: it imports torch
        from nanoengine.parallel.device import worker_thread  # here: it imports torch
        from nanoinfer.async_engine import AsyncEngine  # here: it imports torch
        from nanoinfer.llm import LLM  # a judge at an address needs no engine

        if self._engine is None:
            model = self.model
            core = LLM(model.folder, dtype=DTYPES[model.dtype], device=model.device).engine
            self._thread = worker_thread("judge", core.model.device, torch.get_num_threads())
            self._engine = AsyncEngine(core, executor=self._thread)

    async def reply(self, prompt: str, attempt: int) -> str:
        from nanoinfer.params import SamplingParams  # here: a judge at an address needs no engine

        self.load()
        assert self._engine is not None, "it was just made"
        ids = self._tokenizer.encode_chat(
            [{"role": "user", "content": prompt}], add_generation_prompt=True
        )
        params = SamplingParams(
            max_tokens=self.limits.max_tokens,
            temperature=_RETRY_TEMPERATURE if attempt else 0.0,
            seed=attempt,
            detokenize=True,
        )
        try:
            # Elsewhere a clock beside the engine does it: a process that died takes its time along.
            async with asyncio.timeout(None if self._is_elsewhere else self.limits.timeout_s):
                output = await self._engine.generate(ids, params)
        except TimeoutError as error:
            raise JudgeFailed(f"{self.name} took longer than {self.limits.timeout_s} s") from error
        except ValueError as error:
            raise JudgeFailed(f"{self.name}: {error}", is_final=True) from error
        self._costs.add(prompt_tokens=len(ids), reply_tokens=len(output.ids))
        return output.text or ""

    def close(self) -> None:
        thread, self._thread, self._engine = self._thread, None, None
        if thread is not None:
            thread.shutdown()


def _number(usage: Any, name: str) -> int:
    """A count of tokens that an address may or may not tell."""
    value = getattr(usage, name, 0)
    return value if isinstance(value, int) else 0


def _require_openai() -> Any:
    try:
        import openai  # here: an extra
    except ImportError as error:
        raise missing("a judge at an address", "openai", extra="judge") from error
    return openai
