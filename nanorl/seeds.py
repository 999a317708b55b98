"""Seeds derived by name: any part of a run can be repeated alone, and resume needs no RNG state."""

from __future__ import annotations

import hashlib


def derive_seed(*names: object) -> int:
    """A 63-bit seed from a path of names, e.g. `derive_seed(run_seed, "rollout", step, member)`."""
    text = "/".join(str(name) for name in names).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
