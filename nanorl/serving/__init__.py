"""Serves clients elsewhere: env_server.py plays an environment for them, training_service trains by
remote calls."""
