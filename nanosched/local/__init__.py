"""The `local` back end: one process per actor, on one machine, for one user.

    driver ──fork──> fork server ──fork──> worker      (who started whom)
    driver <═══════ socket pair ═══════> worker        (calls and results, one pair per actor)
    worker <═══════ socket pair ═══════> worker        (where a handle travelled)

The driver has no threads: one epoll watches all sockets and processes, and `get`, `wait` or the
running event loop serve it. Reading order: actor_messages.py (what is said), channel.py (how),
shared_segments.py (where large things lie), payload.py (how objects get there), calls.py (the
caller's side), actor_worker.py (the actor's process), forkserver.py (who starts it),
process_backend.py (the driver).
"""
