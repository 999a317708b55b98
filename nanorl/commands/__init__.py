"""The verbs of the console command `nanorl`, one file each (nanorl/cli.py lists them)."""
