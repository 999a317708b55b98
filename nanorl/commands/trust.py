"""`nanorl trust RUN`: allow what a run's folder names, after looking at it.

A run of one's own needs no such word: what its user named to start it is known. A folder from
elsewhere may name any code; until it is trusted it can be viewed and exported, not played.
Left out: taking the word back, for which ~/.local/state/nanorl/named is deleted.
"""

from __future__ import annotations

from pathlib import Path

import tyro


def trust(run: tyro.conf.Positional[Path], /) -> None:
    """Allow the code, programs and addresses that a run's folder names.

    Args:
        run: The folder of a run, or of an evaluation.
    """
    from nanorl.options.trust import remember, unknown  # here: the help is faster without
    from nanorl.run.saved_models import named_options  # here: it imports torch

    options = named_options(run)
    found = unknown(options)
    remember(options)
    if unknown(options):
        raise ValueError("trust: ~/.local/state/nanorl cannot be written; set XDG_STATE_HOME")
    print("\n".join(found) if found else f"{run}: names nothing that is not known")
