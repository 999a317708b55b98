"""nanorl: agents, environments, sandboxes, rewards, algorithms, trainer. Read `types.py` first."""
