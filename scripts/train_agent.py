"""`nanorl train` for those who have not installed the package; `train_agent.sh` calls it after
set-up."""

import sys

from nanorl import cli
from nanorl.commands.train import parse_arguments, train

__all__ = ["main", "parse_arguments", "train"]


def main() -> int:
    return cli.main(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
