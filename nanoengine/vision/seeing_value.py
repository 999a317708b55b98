"""A critic that sees: tower and decoder of a policy, with one number for the output head."""

from __future__ import annotations

from typing import Any

from nanoengine.heads.value_engine import ValueModel
from nanoengine.vision.seeing_transformer import SeeingTransformer


class SeeingValueModel(ValueModel, SeeingTransformer):
    """A `ValueModel` with a tower of its own, which begins as the policy's and looks at the same
    pictures."""

    def __init__(self, policy: SeeingTransformer, **parts: Any) -> None:
        super().__init__(policy, **parts)
        if policy.sight is not None:
            self.sight = policy.sight.of(self)
