"""Chooses where the roles of a run live. Whoever runs in one process never loads the rest."""

from __future__ import annotations

from nanorl.roles.base import Roles
from nanorl.run.parts import Parts


def make_roles(parts: Parts) -> Roles:
    """The roles that `--cluster.backend` asks for. Close them."""
    if parts.config.cluster.backend == "inline":
        from nanorl.roles.inline import InlineRoles

        return InlineRoles(parts)
    from nanorl.roles.cluster import Cluster

    return Cluster(parts)
