"""Watching a run: its roles, one Prometheus endpoint, alerts."""
