"""API keys: the files that hold them, the headers that carry them, how they are compared.

A key is sent as OpenAI's clients do (`Authorization: Bearer KEY`), as Anthropic's (`x-api-key:
KEY`), or as a password, whatever the name (`http://any:KEY@host:port`): clients that know of no key
take such an address.
Left out: users, quotas, keys that expire.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

LOG = logging.getLogger("nanoinfer.http")


def is_one_of(given: Iterable[str], keys: Iterable[str]) -> bool:
    """Compared in a time that does not tell how much of a key is right. An empty one opens
    nothing."""
    known = [_raw(key) for key in keys if key]
    return any([hmac.compare_digest(_raw(one), key) for one in given for key in known])


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def given_keys(headers: Mapping[str, str]) -> Iterator[str]:
    """The keys that a request sends, in each of the ways that clients know."""
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        yield value.strip()
    # A browser that was once given a password sends it with the requests of other pages too.
    if kind.lower() == "basic" and not is_foreign_page(headers):
        yield _password(value)
    yield headers.get("x-api-key", "").strip()


def is_foreign_page(headers: Mapping[str, str]) -> bool:
    """True for a request of a web page that another server, or nobody, has sent. A page of a name
    that was made to lead here is not foreign by this rule: its host is refused as such."""
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def _password(value: str) -> str:
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def read_key(file: Path | None, *, flag: str = "--api-key-file") -> str | None:
    """The key that clients must send: the only line of `file`. `ValueError` if it is not one."""
    if file is None:
        return None
    key = read_key_file(file, flag).strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{flag} {file}: the API key must be one line of ASCII text, not empty")
    return key


def read_key_file(file: Path, flag: str) -> str:
    """The text of a file of keys. `ValueError` if it cannot be read. A warning is logged where
    other users of the machine can read it: they have the keys as well."""
    file = file.expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        mode = file.stat().st_mode
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{flag} {file}: cannot be read ({error})") from None
    if mode & 0o044:
        LOG.warning("%s %s: other users can read this key; chmod 600 it", flag, file)
    return text
