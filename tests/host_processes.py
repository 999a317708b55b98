"""What tests ask about processes of this machine."""

from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether the process lives. A zombie does not: somebody else's parent may be slow to reap it.
    A process that ends while its file is read gives an error of that read."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
