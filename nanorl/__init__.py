"""nanorl: agents, environments, sandboxes, rewards, algorithms and the trainer. Read `types.py` first."""
