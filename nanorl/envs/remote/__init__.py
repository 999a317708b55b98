"""Environments in another process or on another machine: the server, its client, what they say.

Read wire.py (the messages), client.py (the environment of a run at an address) and env_server.py.
"""
