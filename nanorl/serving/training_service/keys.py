"""The keys of a service's clients: a file with a line for each, or one that is made for its user.

    alice:tml-7f3a...        # a client with a name
    tml-91bc...              # the one without

Keys are compared in constant time, and no error says one. A key that is made lies beside the
checkpoints, readable for its user alone, and is taken again by the next service there.
Left out: keys that change while a service runs.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from nanoinfer.http.api_key import is_one_of, read_key_file

PREFIX = "tml-"
"""Of every key: Tinker's client sends no other."""
OWN_FILE = "api_key.txt"
_NAME = re.compile(r"[\w-]{1,64}", re.ASCII)


class ClientKeys:
    """Tells whose a key is. The client without a name is ''."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """`keys` by the names of their clients."""
        self._keys = dict(keys)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._keys)

    def client_of(self, given: str) -> str | None:
        """The name of the client with that key, None if it is nobody's. Every key is compared."""
        found = [name for name, key in self._keys.items() if is_one_of([given], [key])]
        return found[0] if found else None

    @classmethod
    def read(cls, file: Path) -> ClientKeys:
        """The keys of a file. `ValueError` with the line that is none."""
        found: dict[str, str] = {}
        text = read_key_file(file, "--api-key-file")
        for number, line in enumerate(text.splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            try:
                name, key = _client_and_key(line)
                if name in found:
                    raise ValueError(f"{name!r} is there already; name each client once")
                if key in found.values():
                    raise ValueError("it is the key of another client; give each its own")
            except ValueError as error:
                raise ValueError(f"--api-key-file {file}: line {number}: {error}") from None
            found[name] = key
        if not found:
            raise ValueError(f"--api-key-file {file}: has no key; write NAME:{PREFIX}... on a line")
        return cls(found)

    @classmethod
    def of_user(cls, folder: Path) -> ClientKeys:
        """The key of a folder's user, made where there is none yet. `ValueError` for a file that
        another user may have written, or may read."""
        file = folder / OWN_FILE
        if not file.exists():
            _make(file)
        with file.open("rb") as opened:  # what is asked about is what is read
            facts, text = os.fstat(opened.fileno()), opened.read(1024).decode("ascii", "replace")
        is_ours = facts.st_uid == os.geteuid() and not stat.S_IMODE(facts.st_mode) & 0o077
        if not is_ours or not _is_key(text.strip()):
            raise ValueError(
                f"{file}: must be a key that you alone can read, as the service makes it; delete it"
            )
        return cls({"": text.strip()})


def _client_and_key(line: str) -> tuple[str, str]:
    name, colon, key = ("", "", line) if line.startswith(PREFIX) else line.partition(":")
    if not _is_key(key if colon else line):
        raise ValueError(
            f"must be NAME:KEY, where KEY begins with {PREFIX} and is of plain characters"
        )
    if name and not _NAME.fullmatch(name):
        raise ValueError("NAME must be of letters, digits, '_' and '-', 64 at most")
    return name, key


def _is_key(text: str) -> bool:
    return text.startswith(PREFIX) and text.isascii() and text.isprintable() and " " not in text


def _make(file: Path) -> None:
    """Write a new key, whole or not at all; of two services that begin together, one does."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    # The mode counts at creation only: a file that exists would keep its own.
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "w", encoding="ascii") as opened:
        opened.write(f"{PREFIX}{secrets.token_urlsafe(32)}\n")
    try:
        os.link(draft, file)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
