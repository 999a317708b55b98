"""Chooses where the roles of a run live. Whoever runs in one process never loads the rest."""

from __future__ import annotations

from nanorl.distributed.roles.base import Roles
from nanorl.options.parts import Parts


def make_roles(parts: Parts) -> Roles:
    """The roles that `--cluster.backend` asks for. Close them."""
    if parts.config.cluster.backend == "inline":
        # Here: a cluster's driver needs no engine.
        from nanorl.distributed.roles.inline_roles import InlineRoles

        return InlineRoles(parts)
    from nanorl.distributed.roles.cluster import Cluster  # here: most runs need none

    return Cluster(parts)
