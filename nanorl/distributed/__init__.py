"""Places the roles of a run: roles (objects of this process, or processes on many machines) and
weights (how new ones reach engines elsewhere)."""
