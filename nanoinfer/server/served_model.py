"""`ServedModel`: the engine of a server with its tokenizer, its name and those of its adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.http.api_error import ApiError
from nanoinfer.server.prompt_bound import PromptBound


@dataclass(frozen=True)
class ServedModel:
    """The served model, as every route knows it."""

    client: AsyncEngine
    tokenizer: ChatTokenizer
    name: str
    """That clients use."""
    bound: PromptBound
    folder: Path | None = None
    """Where it was read from."""

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self.client.engine.room(0)

    def adapter(self, model: str | None) -> str:
        """The adapter that a request's `model` names; empty for the model itself."""
        if model is None or model == self.name:
            return ""
        if model in self.client.engine.adapters:
            return model
        served = ", ".join(repr(name) for name in [self.name, *self.client.engine.adapters])
        raise ApiError(404, f"model {model!r} is not served; this is {served}", "model")
