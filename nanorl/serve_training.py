"""`python -m nanorl.serve_training --model MODEL`, which is `nanorl serve-training`."""

from __future__ import annotations

import sys

from nanorl.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve-training", *sys.argv[1:]]))
