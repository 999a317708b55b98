"""Uploads a run's trained model, or its adapter, with its card to the Hugging Face hub.

The client is the package huggingface_hub, with its own settings: the token of `hf auth login` or
HF_TOKEN, and HF_ENDPOINT. Everything that can be refused is refused before anything is sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoengine.command_line import program
from nanoengine.extras import missing
from nanorl.observability.report.summary import read_summary
from nanorl.options.run_config import RunConfig
from nanorl.run.cards.model_card import ADAPTER, CARD, MODEL, write_cards
from nanorl.run.cards.model_source import model_source
from nanorl.run.saved_models import find_models, read_run

_REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_WEIGHTS = {MODEL: "*.safetensors", ADAPTER: "adapter_model.safetensors"}


@dataclass(frozen=True, kw_only=True)
class HubUpload:
    """A folder that is whole, and the repository that it goes to."""

    folder: Path
    repo: str
    is_private: bool

    @classmethod
    def of_run(
        cls, run: Path, repo: str, *, is_adapter: bool = False, is_private: bool = False
    ) -> HubUpload:
        """The upload of a run's model, or of its adapter. ValueError for what is missing."""
        if not _REPO.fullmatch(repo):
            raise ValueError(
                f"push: {repo!r} is no repository of the hub; give OWNER/NAME, such as me/my-agent"
            )
        config = read_run(run)
        name = ADAPTER if is_adapter else MODEL
        folder = run / name
        if not any(folder.glob(_WEIGHTS[name])):
            raise ValueError(f"push: {folder} has no weights; {_why_missing(config, is_adapter)}")
        if not (folder / CARD).is_file():
            _write_missing_cards(config)
        return cls(folder=folder, repo=repo, is_private=is_private)

    @property
    def num_bytes(self) -> int:
        """The size of what is sent."""
        return sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())

    def send(self) -> str:
        """Make the repository if there is none, and upload the folder as one commit. Returns its
        address. ValueError says why the hub did not take it."""
        api = _client()
        try:
            address = api.create_repo(self.repo, private=self.is_private, exist_ok=True)
            api.upload_folder(
                repo_id=self.repo,
                folder_path=self.folder,
                commit_message=f"{self.folder.parent.absolute().name}, trained with nanorl",
            )
        except Exception as error:  # the library's errors share no base class
            raise ValueError(
                f"push: the hub did not take {self.repo}: {_reason(error)}. {_remedy(error)}"
            ) from error
        return str(address)


def _client() -> Any:
    """The hub's own client, with a token. ValueError where either is missing."""
    try:
        from huggingface_hub import HfApi, get_token  # here: an extra
    except ModuleNotFoundError as error:
        raise missing("push", error.name, extra="hub") from None
    if get_token() is None:
        raise ValueError(
            "push: the hub wants to know who you are; run `hf auth login` once, or set HF_TOKEN to "
            "a token with the right to write"
        )
    return HfApi()


def _why_missing(config: RunConfig, is_adapter: bool) -> str:
    if is_adapter and not config.lora.rank:
        return "this run trained no adapter (--lora.rank 0); leave --adapter out"
    go_on = f"{program()} train --resume --out {config.run_dir}"
    return f"the run has not come to its end; go on with: {go_on}"


def _write_missing_cards(config: RunConfig) -> None:
    """The card of a run of an older version, which wrote none."""
    file = config.run_dir / "summary.json"
    if not file.is_file():
        raise ValueError(
            f"push: there is no {file}, which the model card is made of; "
            f"go on with: {program()} train --resume --out {config.run_dir}"
        )
    base = find_models(str(config.run_dir)).base()
    write_cards(config, read_summary(file), model_source(config, base))


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _reason(error: Exception) -> str:
    """The first line that says something."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _remedy(error: Exception) -> str:
    if _status(error) == 401:
        return "The token is not valid: run `hf auth login` again"
    if _status(error) == 403:
        return "The token may not write there: make one that can, or name a repository of yours"
    return "Look at your connection (HF_ENDPOINT names another hub), then run the same again"
