"""`--log`: what a run measures goes to experiment trackers too. Start at sending.py."""
