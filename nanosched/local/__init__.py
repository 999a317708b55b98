"""The `local` back end: one process per actor, on one machine, for one user.

    driver ──fork──> fork server ──fork──> worker      (who started whom)
    driver <═══════ socket pair ═══════> worker        (calls and results, one pair per actor)
    worker <═══════ socket pair ═══════> worker        (where a handle travelled)

The driver has no threads: one epoll watches all sockets and processes, and `get`, `wait` or the
running event loop serve it. Reading order: messages.py (what is said), channel.py (how),
segments.py (where large things lie), payload.py (how objects get there), calls.py (the caller's
side), worker.py (the actor's process), forkserver.py (who starts it), backend.py (the driver).
"""
