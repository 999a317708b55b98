"""A task: one problem, its id and split, and the seeds of whatever is drawn for it.

All of these are functions of content and names alone, by a hash: they are equal on every machine
and in every process, so any part of a run can be repeated without the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from pkgutil import resolve_name
from typing import Any

Message = Mapping[str, Any]
"""One of a chat: `{"role": ..., "content": ...}`, and whatever else the model's template reads."""

HELDOUT_ONE_IN = 4
"""A quarter of all tasks is never trained on."""
TAKE_PICTURES = "nanorl.envs.images:take_pictures"
_NAME_DIGITS = 8  # of a picture's hash, for people


@dataclass(frozen=True)
class Task:
    """One problem. `prompt` is what the model reads, a text or a chat; all else stays on the host.
    A list of texts and `nanorl.Image`s becomes a chat, whose parts name `pictures` by SHA-256.

    `files` (name -> text) are laid into the working directory of every execution; they are visible
    to the program, so they must not hold the answer itself. `data` is whatever else the environment
    or the reward needs; `answer` and `data` are JSON. `agent` names the loop that plays the task,
    empty: the environment's own.
    Without `task_id` and `split` both follow from a hash of the content: equal tasks have equal ids
    on every machine, and one task in four is held out. ValueError names a field that is not JSON.

        Task("What is 17 + 25?", answer="42")
        Task("First guess?", answer=7, data={"most": 20}, split="heldout")
    """

    prompt: str | list[Any]
    answer: Any = None
    _: KW_ONLY
    kind: str = "task"
    files: dict[str, str] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    agent: str = ""
    task_id: str = ""
    split: str = ""
    pictures: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.prompt, list):
            resolve_name(TAKE_PICTURES)(self)
        if not (self.task_id and self.split):
            own = content_id(self.kind, self.prompt, self.answer, self.files, self._extras())
            # The dataclass is frozen for everybody else.
            object.__setattr__(self, "task_id", self.task_id or own)
            object.__setattr__(self, "split", self.split or split_of(own))

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable dict of what every task has; `from_json` makes a plain task of it."""
        return {one.name: getattr(self, one.name) for one in fields(Task) if one.compare}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Task:
        return Task(**data)

    def messages(self) -> list[Message]:
        """The prompt as a chat: a text is what the user says."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return self.prompt

    @property
    def prompt_text(self) -> str:
        """The prompt as one text, for people: a chat has a line for each message."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{m.get('role', '?')}: {words_of(m.get('content'))}" for m in self.prompt)

    @property
    def answer_text(self) -> str:
        """The answer as a text: empty where there is none, JSON where it is no text."""
        return "" if self.answer is None else json_text(self.answer, "answer")

    def _extras(self) -> dict[str, Any]:
        given = {"data": self.data, "agent": self.agent}
        return {name: value for name, value in given.items() if value}


def words_of(content: Any) -> str:
    """Say in words what a message says, for people and for models that read: a picture is
    `[picture 9e1d2c3a]`, the beginning of its hash."""
    if not isinstance(content, list):
        return str(content or "")
    return "\n".join(
        f"[picture {one['sha256'][:_NAME_DIGITS]}]" if "sha256" in one else str(one.get("text", ""))
        for one in content
    )


def content_id(
    kind: str,
    prompt: str | list[Message],
    answer: Any,
    files: Mapping[str, str],
    extras: Mapping[str, Any] | None = None,
) -> str:
    """A stable id: equal content, equal id, on every machine and in every process."""
    parts = [kind, json_text(prompt, "prompt"), json_text(answer, "answer")]
    for name in sorted(files):
        parts += [name, files[name]]
    if extras:
        parts.append(json_text(dict(extras), "data"))  # an odd one: never taken for a file
    text = "".join(f"{len(part)}:{part}" for part in parts)  # lengths: no two lists collide
    content = text.encode(errors="surrogatepass")  # half a character is content too
    return f"{kind}-{hashlib.sha256(content).hexdigest()[:16]}"


def split_of(text: str) -> str:
    """`train` or `heldout`, by the text alone: the same text never falls into both."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0 else "train"


def json_text(value: Any, name: str) -> str:
    """A text as it is, anything else as JSON with sorted keys. ValueError names the field `name`.

    So 7 and "7" are one answer.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Task: field {name!r} is {value!r:.200}, which is not JSON ({error}); use texts, "
            "numbers, lists and objects of them"
        ) from None


def derive_seed(*names: object) -> int:
    """A 63-bit seed from a path of names, e.g. `derive_seed(run_seed, "rollout", step, member)`.

    So any part of a run can be repeated alone, and resuming needs no state of a generator.
    """
    text = "/".join(str(name) for name in names).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def derive_turn_seed(seed: int, turn: int) -> int:
    """The engine seed of one turn: 63 bits, a function of the rollout's seed and the turn alone."""
    digest = hashlib.blake2b(f"{seed}:{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
