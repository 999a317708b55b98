"""`nanorl train` for those who have not installed the package; `train_agent.sh` calls it after
set-up."""

import sys

from nanorl.commands.train import main, parse_arguments, train

__all__ = ["main", "parse_arguments", "train"]

if __name__ == "__main__":
    sys.exit(main())
