"""What tests ask about processes of this machine, and tell them."""

import os
import signal
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process lives. A zombie does not: somebody else's parent may be slow to reap it.
    A process that ends while its file is read gives an error of that read."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def signal_group(leader: int, *numbers: signal.Signals) -> None:
    """Send them to all processes of a group. The leader stands still until all are sent: it would
    else end at the first of them before a late second one."""
    os.kill(leader, signal.SIGSTOP)
    try:
        for number in numbers:
            os.killpg(leader, number)
    finally:
        os.kill(leader, signal.SIGCONT)
