"""Alarms: findings about a run from its own numbers, said while it runs."""
