"""The policy role: a rank of the training engine, and the engine that its ranks are together."""


class TrainerLost(RuntimeError):  # noqa: N818 (named as what happened)
    """A process of the trainer died; its weights since the newest checkpoint are gone."""
