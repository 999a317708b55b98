"""AdamW of a model with a vision tower, over a mesh.

Ranks share the tower out as they share the rest (parallel/sharded_adamw.py), in a bucket that waits
for the end of a step. What is frozen is in no bucket: every rank with the tower has it whole.
A tower that is trained rests in a step only where no rank's samples have a picture: all ranks
decide that together, those of a pipeline that hold none of it included.
"""

from __future__ import annotations

from nanoengine.parallel.layout import WORLD
from nanoengine.parallel.sharded_adamw import ShardedAdamW
from nanoengine.vision.tower_adamw import TowerAdamW


class ShardedTowerAdamW(TowerAdamW, ShardedAdamW):
    """This rank's share of what `TowerAdamW` owns. All ranks of the mesh call the same methods."""

    def _is_shown(self) -> bool:
        return bool(self.mesh.max_int(WORLD, int(super()._is_shown())))
