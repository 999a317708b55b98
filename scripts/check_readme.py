"""Runs the ```bash blocks of README.md in a fresh clone's folder, one after the other.

`bash scripts/test.sh` is left out where CI has just run it (--all runs it too).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def bash_blocks(text: str) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def main() -> int:
    blocks = bash_blocks((ROOT / "README.md").read_text())
    assert blocks, "README.md has no bash block"
    for block in blocks:
        for line in filter(None, (line.split("#")[0].strip() for line in block.splitlines())):
            if line == "bash scripts/test.sh" and "--all" not in sys.argv:
                continue
            print(f"$ {line}", flush=True)
            status = subprocess.run(["bash", "-c", line], cwd=ROOT).returncode
            if status:
                print(f"README.md: `{line}` ended with status {status}", file=sys.stderr)
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
