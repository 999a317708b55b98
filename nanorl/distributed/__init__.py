"""Places the roles of a run: roles (objects of this process, or processes on many machines),
weights (how new ones reach engines elsewhere), and warm_start.py (what a teacher plays there)."""
