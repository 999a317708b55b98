"""`nanorl view`: every rollout of one or several runs in a browser, while they go on and after.

In reading order: stored.py (a store that another process may be writing), runs.py (the folder of a
run), documents.py (a rollout as JSON), pages.py (lists, tasks, changes), overview.py (curves and
rates), viewer_server.py (HTTP); static/ is the page. Left out: writing anything into a run.
"""
