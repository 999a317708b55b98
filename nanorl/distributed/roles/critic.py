"""A critic with its checkpoints, which lie beside the policy's."""

from __future__ import annotations

from pathlib import Path

from nanorl.scorers.value_critic import Critic


class SavedCritic(Critic):
    """Writes and reads its own folder of a run."""

    def save(self, path: Path) -> str:
        """Write a checkpoint under `path`; returns its name there."""
        folder = self.engine.save(path)
        assert folder is not None, "it is not saved in the background"
        return folder.name

    def load(self, path: Path) -> None:
        """Go back to the checkpoint `path`."""
        self.engine.load(path)
