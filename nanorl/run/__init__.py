"""A whole run: its phases, what watches them, and the papers in its folder. Start at run.py."""
