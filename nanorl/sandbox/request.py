"""A program and its files as an execution: what every back end accepts, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nanorl.sandbox.base import SandboxSpec
from nanorl.sandbox.execution import Execution
from nanorl.sandbox.protocol import PROGRAM_NAME, pack


def program_execution(
    spec: SandboxSpec,
    code: str,
    files: Mapping[str, str],
    stdin: bytes = b"",
    timeout_s: float | None = None,
) -> Execution:
    """`code` as `program.py` beside `files`; without `timeout_s` the limit is the spec's.

    ValueError for names that are not plain, files that do not fit, and impossible limits.
    """
    limit_s = spec.timeout_s if timeout_s is None else timeout_s
    if not (math.isfinite(limit_s) and limit_s > 0):
        raise ValueError(f"timeout_s={timeout_s} must be a positive number of seconds")
    _check_files(spec, files)
    # The program first, as program.parts_of expects it.
    texts = ((PROGRAM_NAME, code), *files.items())
    payload = pack([(name, text.encode(errors="surrogatepass")) for name, text in texts])
    return Execution(payload, stdin, limit_s, spec.max_output_bytes)


def _check_files(spec: SandboxSpec, files: Mapping[str, str]) -> None:
    for name in files:
        is_plain = name not in ("", ".", "..", PROGRAM_NAME) and not set(name) & {"/", "\0"}
        if not is_plain or len(name.encode(errors="surrogatepass")) > 255:
            raise ValueError(
                f"files: {name!r} must be a plain file name of at most 255 bytes, without "
                f"'/', and other than {PROGRAM_NAME}"
            )
    # A character is up to four bytes, so no text has to be encoded only to be counted.
    if 4 * sum(map(len, files.values())) > 2 * spec.tmp_bytes:
        raise ValueError("files: they may fill half of tmp_bytes at most; raise tmp_bytes")
    if 2 * len(files) > spec.tmp_inodes:
        raise ValueError(f"files: {len(files)} are too many; raise tmp_inodes")
