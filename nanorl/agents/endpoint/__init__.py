"""Recording endpoints: agents that only know an API, trained on the tokens that the engine sampled.

    recording.py  the calls of one episode, joined by their tokens
    endpoint_server.py     the HTTP server: a key for each episode

Clients speak the dialects of nanoinfer/dialects. Imported only by runs whose agent is a program of
its own.
"""
