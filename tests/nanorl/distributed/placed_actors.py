"""An actor that says which devices it was given (test_placement.py)."""

from __future__ import annotations

import os


class Placed:
    """Stands for any role."""

    def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]
