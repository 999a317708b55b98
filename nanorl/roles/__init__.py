"""The roles of a training run: what each process of it does, as actors of nanosched.

A role is a class that knows nothing of where it runs. Inline its objects live in the driver's own
process; on another back end each has a process, or several, of its own.
"""
