"""`python -m nanorl`: the console command where no folder of scripts is on the path."""

import sys

from nanorl.cli import main

if __name__ == "__main__":
    sys.exit(main())
