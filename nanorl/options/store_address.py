"""`StoreAddress`: where the rollouts of a run are kept, in one line.

    runs/tiny-seed0/rollouts.sqlite                        a SQLite file
    sqlite:///data/rollouts.sqlite?blobs=s3://bucket/x     one whose contents lie in a bucket
    postgresql://user@host/database?run=tiny-seed0         a schema of a PostgreSQL database

`run` names the schema, so that many runs share a database and do not meet. `blobs` is any address
of fsspec; contents of `blob_bytes` (default 0: all) and more go there. A password is in none of
them: PostgreSQL's is taken from PGPASSWORD or ~/.pgpass, a bucket's from its own settings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

TRAINING_FILE, EVALUATIONS_FILE = "rollouts.sqlite", "evaluations.sqlite"
RL_EVALUATIONS_FILE = "evaluations-rl.sqlite"
"""Of evaluations while RL goes on: rollouts by the number of steps that were done."""
"""In a run's folder: those of RL, unless they are elsewhere, and those of its evaluations."""
OPTIONS = ("run", "blobs", "blob_bytes")
SECRETS = ("password", "passfile", "sslpassword", "secret", "token", "key")
POSTGRES = ("postgresql", "postgres")
_RUN = re.compile(r"[a-z0-9_.-]{1,63}", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class StoreAddress:
    """An address, taken apart."""

    path: Path | None = None
    """Of the SQLite file; None: PostgreSQL."""
    server: str = ""
    """What libpq is given."""
    run: str = ""
    """The schema of the run; empty: SQLite."""
    blobs: str = ""
    """Where large contents lie; empty: in the database."""
    blob_bytes: int = 0
    """Contents of so many bytes and more lie there."""

    @classmethod
    def parse(cls, address: str | Path) -> StoreAddress:
        """ValueError says what is wrong with it, and never repeats a password."""
        if isinstance(address, Path) or "://" not in address.partition("?")[0]:
            return cls._of_file(str(address))
        shown = without_password(address)
        parts = urlsplit(address)
        options = dict(parse_qsl(parts.query))
        _require_no_secret(address, shown)
        _require_no_secret(options.get("blobs", ""), shown)
        own = {name: options.pop(name) for name in OPTIONS if name in options}
        blobs, blob_bytes = own.get("blobs", ""), _bytes(own, shown)
        if parts.scheme == "sqlite":
            if parts.netloc or options or not parts.path.strip("/"):
                raise ValueError(f"{shown}: write sqlite:///FOLDER/FILE?blobs=ADDRESS")
            return cls(path=Path(unquote(parts.path)), blobs=blobs, blob_bytes=blob_bytes)
        if parts.scheme not in POSTGRES:
            raise ValueError(f"{shown}: a store is a file, sqlite:///FILE or postgresql://SERVER")
        query = f"?{urlencode(options)}" if options else ""
        server = f"postgresql://{parts.netloc}{parts.path}{query}"
        run = own.get("run", "")
        if _RUN.fullmatch(run) is None:
            raise ValueError(
                f"{shown}: say which run it is, ?run=NAME: at most 63 letters, digits, _, - and ."
            )
        return cls(server=server, run=run, blobs=blobs, blob_bytes=blob_bytes)

    @classmethod
    def _of_file(cls, address: str) -> StoreAddress:
        return cls(path=Path(address))


def training_store(folder: Path, store: str) -> str:
    """The address at which the run in `folder`, whose option `store` is, keeps the rollouts of RL.
    ValueError if none was stored yet."""
    file = folder / TRAINING_FILE
    if store:
        from nanorl.options.trust import require  # here: a store knows nothing of options

        require({"store": store}, folder, ["store"])
    if not store and not file.is_file():
        raise ValueError(f"{folder}: has no {TRAINING_FILE} yet: no rollout of it was stored")
    return store or str(file)


def without_password(address: str) -> str:
    """The address as it may be shown."""
    hidden = re.sub(r"(//[^/@?:]*:)[^/@]*@", r"\1***@", address)
    names = "|".join(SECRETS)
    return re.sub(rf"(?i)((?:[?&]|%26|%3F)[a-z_]*(?:{names})=)[^&]*", r"\1***", hidden)


def _require_no_secret(address: str, shown: str) -> None:
    if without_password(address) != address:
        raise ValueError(
            f"{shown}: holds a password, which would be saved with the run: leave it out, and put "
            "it into PGPASSWORD or ~/.pgpass (a bucket's: into that service's own settings)"
        )


def _bytes(options: dict[str, str], shown: str) -> int:
    text = options.get("blob_bytes", "0")
    if not text.isdecimal() or ("blob_bytes" in options and "blobs" not in options):
        raise ValueError(f"{shown}: blob_bytes={text}: a number of bytes, beside blobs=ADDRESS")
    return int(text)
