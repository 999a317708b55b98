"""How a rollout is driven: token bookkeeping, tool calls and the loops. Read `tokens.py` first."""
