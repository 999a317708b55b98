"""Text for a terminal: what a model or a program wrote, shown without obeying it, and a pager.

Left out: layout; lines are as long as they are, and the terminal breaks them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

from rich.console import Console
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
STYLES = {"task": "bold", "you": "bold", "agent": "cyan", "tool": "yellow"}


def printable(text: str) -> str:
    """`text` without what a terminal would obey: colours, cursor movements, a new title."""
    return _CONTROL.sub("?", text.replace("\r\n", "\n"))


def labelled(role: str, text: str) -> Text:
    """Lines of text after the name of who wrote them."""
    first, *rest = printable(text).strip("\n").split("\n")
    style = STYLES.get(role, "dim")
    lines = [f"{role:<6} {first}", *(f"       {line}" for line in rest)]
    return Text("\n".join(lines), style=style)


def page(text: Text) -> None:
    """Show it in `less` where a person reads it and it is longer than the screen; else print it."""
    console = Console(highlight=False, soft_wrap=True)
    less = shutil.which("less")
    if less is None or not (sys.stdin.isatty() and console.is_terminal):
        console.print(text)
        return
    with console.capture() as captured:
        console.print(text)
    # -R: show colours, -F: leave at once if all fits, -X: do not clear the screen.
    subprocess.run([less, "-RFX"], input=captured.get().encode(), check=False)
