"""Environments: what answers an action. Read `base.py` first."""
