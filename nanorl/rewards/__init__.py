"""Rewards: scored on the host, outside the sandbox, from what the policy answered."""
